"""Sends and receives of NumPy arrays that run in the compiled core, as requests of the public kind.

The core starts and ends them without Python. Here is what it leaves: waits that take long, those
for several, of asyncio and of other threads, and what is said when something goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import request as requests
from pycoll.context import ANY, P2P, Incoming, Status
from pycoll.dtypes import TABLE
from pycoll.engine import raise_error
from pycoll.errors import Error
from pycoll.late import Late
from pycoll.request import Request
from pycoll.task import Call
from pycoll.transports._core import Messages, wait_all
from pycoll.transports._core import Request as Core
from pycoll.transports.base import Operation
from pycoll.transports.core import REFUSED

if TYPE_CHECKING:
    from pycoll import arguments, p2p
    from pycoll.core_context import CoreContext
    from pycoll.group import Group
else:
    arguments, p2p = Late("pycoll.arguments"), Late("pycoll.p2p")

SEND, SSEND, RECV = range(3)
"""Kinds of requests, numbered as in _core/request_type.c."""

_NAMES = ("isend", "issend", "irecv")


def _name(number: int) -> str:
    return str(number) if number >= 0 else "ANY"


class Owner(NamedTuple):
    """The communicator of a request.

    Attributes:
        group: its ranks.
        op_timeout: the default deadline, seconds.
    """

    group: Group
    op_timeout: float


class CoreTask(Operation):
    """A request of the core's, for those who wait for it in Python.

    Attributes:
        call: what it is.
        watchers: called when it is done, under the engine's lock.
        unfit: as of `task.Started`.
    """

    __slots__ = ("call", "request", "unfit", "watchers")

    def __init__(self, request: CoreRequest, call: Call) -> None:
        super().__init__()
        self.request = request
        self.call = call
        self.unfit: Exception | None = None
        self.watchers: dict[Callable[[Any], None], None] = {}

    @property
    def committed(self) -> bool:
        kind = self.request._description[0]
        return kind != RECV and not self.request.done and not self.request._stop()

    def awaited(self) -> Collection[int]:
        context = self.call.context
        peer = self.request._description[2]
        if peer != ANY:
            return (context.members[peer],)
        return [rank for rank in context.members if rank != context.me]

    def ended(self) -> None:
        """Hear that it is done."""
        self.finish(self.request._error())

    def finish(self, error: BaseException | None = None) -> None:
        if self.done:
            return
        super().finish(error)
        watchers, self.watchers = self.watchers, {}
        for watcher in list(watchers):
            watcher(self)

    def cancel(self) -> None:
        super().cancel()
        self.request._give_up()


class CoreRequest(Core, Request[Any]):
    """A send or a receive under way in the core."""

    _made: CoreTask | None = None

    @property
    def _group(self) -> Group:  # type: ignore[override]
        group: Group = self._owner.group
        return group

    @property
    def _op_timeout(self) -> float:  # type: ignore[override]
        seconds: float = self._owner.op_timeout
        return seconds

    @property
    def _call(self) -> Call:
        kind, code, peer, tag, shape = self._description
        if kind == RECV:
            text = f"irecv(source={_name(peer)}, tag={_name(tag)})"
        else:
            dtype = next(dtype for dtype in TABLE if dtype.code == code)
            text = f"{_NAMES[kind]}({dtype}{list(shape)}, dest={peer}, tag={tag})"
        return Call(text, -1, self._group.context)

    @property
    def _task(self) -> CoreTask:  # type: ignore[override]
        if self._made is None:
            made = CoreTask(self, self._call)
            if not self._watch():
                made.ended()
            # Another thread may have made one meanwhile, and wait for that.
            task: CoreTask = vars(self).setdefault("_made", made)
            return task
        return self._made

    def _started(self) -> CoreTask:  # type: ignore[override]
        return self._task

    def _ended(self) -> None:
        """Hear that it is done, in the order of all that happens."""
        self._task.ended()

    def _wait(self, timeout: float | None = None) -> Any:
        seconds = self._seconds(timeout)
        if not self.done:
            task = self._task
            if not task.done:
                self._group.engine.wait(task, task.call, seconds)
        return self.result

    def cancel(self) -> bool:
        """Withdraw a receive; see `pycoll.Request.cancel`."""
        if self._description[0] != RECV:
            raise TypeError(f"only a receive can be cancelled, not {self._task.call}")
        return bool(self._withdraw())

    def _failed(self) -> None:
        """Raise why it has no result."""
        if not self.done:
            raise Error(f"{self._task.call} is not done yet; wait() for it")
        self._collected = True
        engine = self._group.engine
        if engine.closed is None and not engine.is_inside():
            with engine.locked():  # whoever has ended it may be about to say why
                error = self._error()
        else:
            error = self._error()
        if error is not None:
            raise_error(error)

    def _error(self) -> BaseException | None:
        """Return why it has failed; None: it has not."""
        if self._cancelled:
            return Error(f"{self._call} was cancelled")
        status = self._status
        if status == 0:
            return None
        if status == REFUSED:
            return self._refusal()
        context = self._group.context
        error = context.broken
        if error is None:
            error = context.gone.get(status - 1)
        engine: Any = self._group.engine
        return error or engine.transport.error_of(status)

    def _refusal(self) -> BaseException:
        """Return why its message does not fit."""
        if self._message is None:
            return MemoryError()
        source, nbytes, header = self._message
        _, _, tag, form = P2P.unpack_from(header)
        arrival: Any = SimpleNamespace(nbytes=nbytes)
        incoming = Incoming(arrival, source, tag, form, header[P2P.size :], 0)
        out = arguments.fillable_out(self._array)
        assert out is not None
        try:
            p2p.check_fits(self._group, incoming, out)
        except Error as exc:
            return exc
        return Error("a message was refused that fits")


requests.in_core = wait_all


def methods(
    group: Group, context: CoreContext, slow: dict[str, Callable[..., Any]], op_timeout: float
) -> tuple[Messages, dict[str, Any]]:
    """Return the core's methods for messages of a communicator, by name, and their object.

    Args:
        group: its ranks.
        context: what matches there.
        slow: the methods to which goes what the core does not do, and `finish`, which waits for a
            send that takes long.
        op_timeout: its default deadline, seconds.
    """
    names = ("send", "ssend", "recv", "isend", "issend", "irecv")
    functions = [slow[name] for name in (*names, "finish")]
    owner = Owner(group, op_timeout)
    messages = Messages(context.core, group.members, owner, CoreRequest, Status, functions)
    return messages, {name: getattr(messages, name) for name in names}
