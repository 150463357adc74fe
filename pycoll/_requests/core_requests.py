"""Sends and receives of NumPy arrays that run in the compiled core, as requests of the public kind.

The core starts and ends them without Python. Here is what it leaves: waits that take long, those
for several, of asyncio and of other threads, and what is said when something goes wrong.
"""

from __future__ import annotations

import array as stdlib_array
import functools
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pycoll._transports._core as _core
from pycoll._arrays import conversion, objects
from pycoll._calls import arguments, message_steps
from pycoll._requests import core_several
from pycoll._requests import request as requests
from pycoll._requests.core_started import CoreStarted, InCore, Owner, waiting
from pycoll._requests.request import R, Request
from pycoll._runtime.envelope import ANY, P2P, Incoming, Status
from pycoll._runtime.scratch import new_bytes
from pycoll._runtime.task import Call, Started
from pycoll._support.foreign_names import OF_REQUESTS
from pycoll._support.lazy_import import LazyModule
from pycoll._support.public_edge import edge, edges
from pycoll._transports._core import (
    REQUEST_RECV,
    STATUS_REFUSED,
    Messages,
    take,
    use_objects,
    wait_all,
)
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll import _dtypes as dtypes
    from pycoll._calls.group import Group
    from pycoll._runtime.context import Context
    from pycoll._transports._core import Receive
else:
    dtypes = LazyModule("pycoll._dtypes")

NAMES = (
    *("send", "ssend", "bsend", "recv", "isend", "issend", "irecv"),
    *("sendrecv", "isendrecv", "probe", "iprobe"),
)
"""Methods that the core has."""

_NAMES = ("isend", "issend", "irecv", "probe")

_OBJECTS = frozenset(
    [type(None), bool, int, float, complex, str, bytes, bytearray, dict, list, tuple]
)
"""Types whose values are no arrays, known without a look at the value."""

_OF_ARRAYS = ("__dlpack__", "__cuda_array_interface__")


def _name(number: int) -> str:
    return str(number) if number >= 0 else "ANY"


class CoreRequest(_core.Request, CoreStarted, shown_as="Request"):
    """A send or a receive under way in the core."""

    @property
    def is_well(self) -> bool:
        """Whether it has ended, and not failed."""
        return bool(self.done and self._status == 0 and not self._cancelled)

    @property
    def _has_failed(self) -> bool:
        return self.done and not self.is_well

    @property
    def _call(self) -> Call:
        kind, code, peer, tag, shape = self._description
        if kind >= REQUEST_RECV:
            text = f"{_NAMES[kind]}(source={_name(peer)}, tag={_name(tag)})"
        elif self._sent_type is not None:
            text = f"{_NAMES[kind]}({self._sent_type.__name__}, dest={peer}, tag={tag})"
        else:
            dtype = next(dtype for dtype in dtypes.TABLE if dtype.code == code)
            text = f"{_NAMES[kind]}({dtype}{list(shape)}, dest={peer}, tag={tag})"
        return Call(text, -1, self._group.context)

    def _is_committed(self) -> bool:
        return self._description[0] < REQUEST_RECV and not self.done and not self._stop()

    def _waits_for(self) -> Collection[int]:
        context = self._group.context
        peer = self._description[2]
        if peer != ANY:
            return (context.members[peer],)
        return [rank for rank in context.members if rank != context.me]

    def _ended(self) -> None:
        """Called when it holds a message or is done; ends are told in the order they came in."""
        self._go_on()
        if self.done and self._made is not None:
            self._made.finish(self._error())

    def _take_over(self, handle: Receive | None, place: int) -> None:
        """Go on with a message that the core can make no value of.

        Args:
            handle: the receive that holds it now; None: it is still in the queue.
            place: of this request among the receives.
        """
        engine = self._group.engine
        if engine.is_held():  # an event has said that it holds a message
            self._receive(handle, place)
        else:
            with engine.locked():
                self._receive(handle, place)

    def _receive(self, handle: Receive | None, place: int) -> None:
        group, call = self._group, self._task.call
        context: Any = group.context
        _, _, peer, tag, _ = self._description
        match = None
        if handle is not None:
            match = context.adopt(handle, peer if peer == ANY else group.members[peer], tag)
        out = arguments.fillable_out(self._array)
        gpu = conversion.here() if out is None and self._gpu is None else self._gpu
        steps = message_steps.receive(group, peer, tag, out, self._filled, gpu, place, match)
        self._by_python = group.engine.start(call, steps, self._conclude, collective=False)
        if self._by_python.done:
            self._received(self._by_python)
        else:
            self._by_python.watchers[self._received] = None

    @staticmethod
    def _conclude(result: Any) -> tuple[Any, tuple[()]]:
        return result, ()

    def _received(self, task: Started) -> None:
        self._settle(task.result, task.error is not None)

    def cancel(self) -> bool:
        """Withdraw a receive; see `pycoll.Request.cancel`."""
        if self._description[0] < REQUEST_RECV:
            return super().cancel()
        self._check_open()
        return bool(self._withdraw())

    def _error(self) -> BaseException | None:
        """Return why it has failed; None: it has not."""
        if self._cancelled:
            return Error(f"{self._call} was cancelled")
        status = self._status
        if status == 0:
            return None
        if status == STATUS_REFUSED:
            return self._refusal()
        if self._by_python is not None:
            return self._by_python.error
        context = self._group.context
        error = context.broken
        if error is None:
            error = context.gone.get(status - 1)
        engine: Any = self._group.engine
        return error or engine.transport.error_of(status)

    def _incoming(self) -> Incoming:
        """Return the message that was refused or found, to be looked at."""
        assert self._message is not None
        source, nbytes, header = self._message
        _, _, tag, form = P2P.unpack_from(header)
        arrival: Any = SimpleNamespace(nbytes=nbytes)
        return Incoming(arrival, source, tag, form, header[P2P.size :], 0)

    def _found(self) -> Status:
        """Return the Status of a message that a probe has found, and that says how long it is."""
        status = Status()
        message_steps.fill_status(self._group, status, self._incoming())
        return status

    def _refusal(self) -> BaseException:
        """Return why its message does not fit."""
        if self._message is None:
            return MemoryError()
        incoming = self._incoming()
        out = arguments.fillable_out(self._array)
        assert out is not None
        try:
            message_steps.check_fits(self._group, incoming, out)
        except Error as exc:
            return exc
        return Error("a message was refused that fits")


@edges
class Both(_core.Both, InCore, shown_as="Request"):
    """A receive and a send of the core's as one request, an isendrecv.

    Here is what the core leaves of it: as for `CoreRequest`.
    """

    _receives = _cancelled = False
    _made: Started | None = None

    @property
    def _has_failed(self) -> bool:
        return self.done and not (self._received.is_well and self._sent.is_well)

    @property
    def _group(self) -> Group:  # type: ignore[override]
        group: Group = self._received._group
        return group

    @property
    def _task(self) -> Started:  # type: ignore[override]
        """What waits for both, for all that is done in Python: made when it is first needed.

        It takes the engine's lock.
        """
        made = self._made
        if made is not None:
            return made
        received, sent, engine = self._received, self._sent, self._group.engine
        call = self._call
        with engine.locked():
            if self._made is None:
                self._made = engine.start(
                    call,
                    message_steps.finish_both(received._task, sent._task),
                    lambda _: (received.result, ()),
                    collective=False,
                )
            return self._made

    @property
    def _call(self) -> Call:
        _, _, dest, tag, _ = self._sent._description
        source = _name(self._received._description[2])
        text = f"isendrecv(dest={dest}, source={source}, tag={tag})"
        return Call(text, -1, self._group.context)

    def _calls(self) -> list[tuple[Call, Collection[int]]]:
        parts = self._received, self._sent
        return [(self._call, part._waits_for()) for part in parts if not part.done]

    @waiting
    def _wait(self, timeout: float | None = None) -> Any:
        return Request.wait(self, timeout)

    def _is_over(self) -> bool:
        """Return whether all is over, now that one has failed: the other one is given up."""
        return self._group.engine.look_at(self._task)

    @edge
    def _failed(self) -> None:
        """Raise why it has no result."""
        self._collected = self._is_over()
        Request.result.__get__(self)


@edges
class PersistentRequest(
    _core.Persistent, Request[R], foreign=OF_REQUESTS, shown_as="PersistentRequest"
):
    """A call that can be started again and again; made by `Communicator.persistent`.

    Each `start` looks at the arguments anew: arrays are read and filled again, objects pickled.
    """

    if TYPE_CHECKING:  # the core's

        def start(self) -> Self: ...

        def wait(self, timeout: float | None = None) -> R: ...

    def __init__(
        self,
        group: Group,
        receives: bool,
        begin: Callable[..., Request[R]],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._group = group
        self._receives = receives
        self._begin = functools.partial(begin, *args, **keywords)
        self._bind(begin, args, keywords)

    def _start(self) -> PersistentRequest[R]:
        """Start the call where the last one may be under way, or was not the core's."""
        last = self._in_core
        if last is not None and not last.done:
            raise Error(f"{last._started().call} is still under way: wait() for it first")
        self._in_core = self._begin()
        return self

    def _calls(self) -> list[tuple[Call, Collection[int]]]:
        return self._in_core._calls() if self._in_core is not None else []

    def _last(self) -> Request[R]:
        last: Request[R] | None = self._in_core
        if last is None:
            self._started()  # raises that it was not started
        assert last is not None
        return last

    @waiting
    def _wait(self, timeout: float | None = None) -> Any:
        """Wait for a call that is not the core's."""
        return self._last().wait(timeout)

    def test(self) -> bool:
        """Return whether the call is done; see `pycoll.Request.test`."""
        return self._last().test()

    @property
    def done(self) -> bool:
        """Whether the call is done; see `pycoll.Request.done`."""
        return self._last().done

    @property
    def result(self) -> R:
        """What the call returns; see `pycoll.Request.result`."""
        return self._last().result

    def cancel(self) -> bool:
        """Withdraw a receive; see `pycoll.Request.cancel`."""
        return self._last().cancel()

    @property
    def _has_failed(self) -> bool:
        return self._last()._has_failed

    @property
    def _task(self) -> Started | None:  # type: ignore[override]
        return self._in_core._started() if self._in_core is not None else None

    @property
    def _cancelled(self) -> bool:  # type: ignore[override]
        return self._in_core is not None and self._in_core.cancelled

    @property
    def _collected(self) -> bool:
        return self._in_core is not None and self._in_core._collected

    @_collected.setter
    def _collected(self, whether: bool) -> None:
        self._last()._collected = whether

    def _state_for(self, core: Any) -> int:
        return 0  # it may be started again

    def _claim(self) -> bool:
        return self._last()._claim()


requests.in_core = wait_all
requests.take_in_core = take
requests.wait_in_core = core_several.wait


def _dump(x: Any) -> list[memoryview] | None:
    """Return the parts of a pickled object; None: it is, or may be, an array."""
    kind = type(x)
    if kind not in _OBJECTS and (
        isinstance(x, memoryview | stdlib_array.array)
        or any(hasattr(kind, name) for name in _OF_ARRAYS)
        or conversion.wrap(x) is not None
    ):
        return None
    return objects.dump(x)


def _here() -> int | None:
    return conversion.here()


_VALUES = _dump, new_bytes, _here
use_objects(_dump, objects.dump, new_bytes)


def messages_of(
    group: Group,
    context: Context,
    slow: Callable[[str], Callable[..., Any]],
) -> Messages:
    """Return the core's messages of a communicator; `NAMES` are their methods.

    Args:
        group: its ranks.
        context: what matches there.
        slow: returns the method of a name, to which goes what the core does not do; of "finish"
            what waits for a request that takes long, of "finish_both" for a receive and a send;
            they return the result.
    """
    owner = Owner(group)
    return Messages(context.core, group.members, owner, CoreRequest, Both, Status, _VALUES, slow)
