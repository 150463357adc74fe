"""The communicator: checks arguments once, picks an algorithm, and runs the call.

Everything a user can get wrong alone is found here, before anything is sent: such a call does not
count, and may be repeated. What ranks get wrong together is found by the calls themselves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

from pycoll._calls import subgroups
from pycoll._calls.calls import Calls, resumed, sign_uneven
from pycoll._calls.group import Group
from pycoll._calls.numbering import KINDS
from pycoll._calls.prepared import Prepared
from pycoll._calls.shared_memory import BY_MESSAGES
from pycoll._requests.matched import Message
from pycoll._requests.nonblocking import NonBlocking, Persistent
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, Status
from pycoll._runtime.task import Call, CallSteps, caller
from pycoll._support.foreign_names import OF_COMMUNICATORS, Hinting
from pycoll._support.lazy_import import LazyModule
from pycoll._support.public_edge import edges
from pycoll._transports.base import Operation
from pycoll.errors import Error, MismatchError, OperationTimeout

if TYPE_CHECKING:
    import numpy as np

    from pycoll import _grid as grids
    from pycoll._arrays.types import A, D, MaybeNone, Reducer, T
    from pycoll._calls import arguments, explain, p2p
    from pycoll._calls.explain import Explanation
    from pycoll._grid import Grid
    from pycoll._requests.core_requests import CoreRequest
    from pycoll._runtime import shared_arrays
else:  # a program that only calls barrier() imports no NumPy
    arguments, grids = LazyModule("pycoll._calls.arguments"), LazyModule("pycoll._grid")
    explain, p2p = LazyModule("pycoll._calls.explain"), LazyModule("pycoll._calls.p2p")
    shared_arrays = LazyModule("pycoll._runtime.shared_arrays")


class World:
    """What all communicators of a process share: its engine, its place, its defaults."""

    def __init__(
        self,
        engine: Engine,
        local_rank: int,
        local_size: int,
        node: int,
        op_timeout: float,
    ) -> None:
        self.engine = engine
        self.local_rank = local_rank
        self.local_size = local_size
        self.node = node
        self.op_timeout = op_timeout


_IN_CORE = {
    "finish": "_finish_in_core",
    "finish_both": "_finish_both_in_core",
}
"""Methods that only the core calls, by what it calls them."""


@edges
class Communicator(NonBlocking, Hinting, foreign=OF_COMMUNICATORS, prefix="comm."):
    """A group of ranks that communicate with each other and with nobody else.

    Arrays are NumPy arrays, memoryviews, array.array, PyTorch tensors, JAX arrays and everything
    else with DLPack or the CUDA array interface, on an NVIDIA GPU too; results come as the kind
    that was passed in, where it is. Everything else travels as a pickled object. In every
    collective all ranks make the same call; where one splits or stacks, the leading axis is the
    rank axis.

    Every blocking method takes `timeout`, seconds; None: the default of `pycoll.init`, math.inf:
    none. An array passed in may be changed as soon as the method returns.

    Every collective and `send`, `recv` and `sendrecv` have a twin with an ``i`` in front of the
    name, which starts the call and returns a `Request`; the arguments are the same, without
    timeout.

    Raises, from every method: PeerFailed (a rank it needs has ended), OperationTimeout,
    MismatchError (ranks made different calls), and TypeError or ValueError for wrong arguments,
    before anything is sent.

    Attributes:
        rank: this process's rank, 0 to size - 1.
        size: number of ranks.
        local_rank, local_size: the same among the job's ranks on this host.
        node: number of this host, from 0.
        members: the ranks that it has, as ranks of the world, in the order of ranks here.
        name: what messages call it.
    """

    def __init__(self, world: World, group: Group) -> None:
        self._world = world
        self._group = group
        self._op_timeout = world.op_timeout
        self._calls = Calls(group, blocking=True)
        self._nonblocking_calls = Calls(group, blocking=False)
        self._makings = subgroups.Makings()
        self._closed = False
        self._short: dict[str, Any] = {}
        self._short = self._short_way()
        self.__dict__.update(self._short)

    def _short_way(self) -> dict[str, Any]:
        """Return the core's methods, which stand before those of this class and call them.

        They do the common case, NumPy arrays, themselves.
        """
        group = self._group
        methods = self._methods_in_core()
        if group.native is not None:
            # In shared memory, or by messages if the call says so; what the user has ruled out goes
            # by messages.
            names = [name for name in KINDS if group.in_core(name)]
            slow = [(name, methods[name]) for name in names]
            if group.in_core("reduce_scatter"):
                slow.append(("reduce_scatterv", self._in_python("reduce_scatterv")))
            methods |= group.native.methods(slow)
            methods |= group.native.uneven_methods(self._in_python, self._resume, sign_uneven)
        for twin in ("all_reduce", "iall_reduce"):
            methods[twin.replace("_", "")] = methods[twin]
        return methods

    def _methods_in_core(self) -> dict[str, Any]:
        from pycoll._requests import core_collectives, core_requests

        group, slow, op_timeout = self._group, self._in_python, self._op_timeout
        context: Any = group.context
        messages = core_requests.messages_of(group, context, slow, op_timeout)
        messages.usable = True
        calls = self._nonblocking_calls, self._calls
        collectives = core_collectives.collectives_of(group, context, calls, slow, op_timeout)
        # A wait in the core knows no deadline, and takes a tenth of a second at most.
        collectives.usable = op_timeout >= 1.0
        with group.engine.locked():
            context.messages, context.collectives = messages, collectives
        methods = {name: getattr(messages, name) for name in core_requests.NAMES}
        names = core_collectives.NONBLOCKING + KINDS
        return methods | {name: getattr(collectives, name) for name in names}

    def _in_python(self, name: str) -> Callable[..., Any]:
        """Return the method of this class to which the core leaves a call that it does not do."""
        name = _IN_CORE.get(name, name)
        method: Callable[..., Any] = getattr(type(self), name).__get__(self)
        return method

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def local_rank(self) -> int:
        """This process's rank among the job's ranks on this host."""
        return self._world.local_rank

    @property
    def local_size(self) -> int:
        """Number of the job's ranks on this host."""
        return self._world.local_size

    @property
    def node(self) -> int:
        """Number of this host, counted from 0."""
        return self._world.node

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks, as ranks of the world, in the order of ranks here."""
        return self._group.members

    @property
    def name(self) -> str:
        """What messages call it: "world", or as it was named when it was made."""
        return self._group.name

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator cannot be pickled: take what you need of it, as comm.rank")

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<pycoll.Communicator rank {self.rank} of {self.size}{state}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.close()
        except MismatchError:
            if exc_info[0] is None:  # else that one is the cause
                raise

    # --- collectives -----------------------------------------------------------------------

    @overload
    def broadcast(
        self, x: None, root: int = 0, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Any: ...
    @overload
    def broadcast(
        self,
        x: T | None,
        root: int = 0,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T: ...
    def broadcast(
        self, x: Any, root: int = 0, *, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        """Return the root's `x` on every rank.

        Args:
            x: on the root the value: an array or an object. Elsewhere None, or a writable array of
                the same dtype and shape, which is filled and returned.
            root: rank whose value it is.
            algorithm: see `pycoll.algorithms("broadcast")`.
            timeout: seconds.

        Raises:
            MismatchError: an array passed off root does not look like the root's value.
        """
        return self._run(self._calls.broadcast(x, root, algorithm=algorithm), timeout)

    def reduce(
        self,
        x: T,
        op: Reducer = "sum",
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T | MaybeNone:
        """Combine all ranks' `x`; the result is on the root, None elsewhere.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor",
                "minloc", "maxloc", a `pycoll.Op`, or a function (a, b) -> c, applied in rank order.
            root: rank that gets the result.
            out: on the root, array of x's dtype and shape for the result (may be `x` itself);
                ignored elsewhere.
            algorithm: see `pycoll.algorithms("reduce")`.
            timeout: seconds.
        """
        return self._run(self._calls.reduce(x, op, root, out, algorithm=algorithm), timeout)

    def all_reduce(
        self,
        x: T,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """Combine all ranks' `x`; the result, the same bits, is on every rank.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: as in `reduce`.
            out: array of x's dtype and shape for the result; may be `x` itself.
            algorithm: see `pycoll.algorithms("all_reduce")`.
            timeout: seconds.
        """
        result: T = self._run(self._calls.all_reduce(x, op, out, algorithm=algorithm), timeout)
        return result

    allreduce = all_reduce

    def all_reduce_many(
        self,
        xs: Sequence[T],
        op: Reducer = "sum",
        out: Sequence[Any] | None = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Combine all ranks' arrays, each as `all_reduce` would, in few large messages.

        Args:
            xs: arrays or numbers, on all ranks as many, of the same dtypes and shapes.
            op: as in `reduce`.
            out: for each of `xs` an array for its result, or None: a new one. ``out=xs`` is in
                place.
            algorithm: see `pycoll.algorithms("all_reduce")`.
            timeout: seconds.

        Returns:
            The results, in the order of `xs`.
        """
        result: list[T] = self._run(
            self._calls.all_reduce_many(xs, op, out, algorithm=algorithm), timeout
        )
        return result

    @overload
    def gather(
        self,
        x: np.ndarray[Any, D],
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> np.ndarray[Any, D] | MaybeNone: ...
    @overload
    def gather(
        self,
        x: A,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> A | MaybeNone: ...
    @overload
    def gather(
        self,
        x: T,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> list[T] | MaybeNone: ...
    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Collect all ranks' `x` on the root: an array (size, *x.shape), or a list of objects.

        Args:
            x: array, the same dtype and shape on all ranks; or an object.
            root: rank that gets the result; None elsewhere.
            out: on the root, array of shape (size, *x.shape) for the result; ignored elsewhere.
            algorithm: see `pycoll.algorithms("gather")`.
            timeout: seconds.
        """
        return self._run(self._calls.gather(x, root, out, algorithm=algorithm), timeout)

    @overload
    def all_gather(  # type: ignore[overload-overlap]
        self,
        x: np.ndarray[Any, D],
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> np.ndarray[Any, D]: ...
    @overload
    def all_gather(  # type: ignore[overload-overlap]
        self, x: A, out: Any = None, *, algorithm: str | None = None, timeout: float | None = None
    ) -> A: ...
    @overload
    def all_gather(
        self, x: T, out: Any = None, *, algorithm: str | None = None, timeout: float | None = None
    ) -> list[T]: ...
    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Collect all ranks' `x` on every rank: an array (size, *x.shape), or a list of objects.

        Args:
            x: array, the same dtype and shape on all ranks; or an object.
            out: array of shape (size, *x.shape) for the result; `x` may be ``out[rank]``.
            algorithm: see `pycoll.algorithms("all_gather")`.
            timeout: seconds.
        """
        return self._run(self._calls.all_gather(x, out, algorithm=algorithm), timeout)

    @overload
    def scatter(
        self,
        x: None,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def scatter(
        self,
        x: np.ndarray[Any, D] | None,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> np.ndarray[Any, D]: ...
    @overload
    def scatter(
        self,
        x: A | None,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> A: ...
    @overload
    def scatter(
        self,
        x: Sequence[T] | None,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T: ...
    def scatter(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return row `rank` of the root's `x`.

        Args:
            x: on the root an array (size, ...), or a list or tuple of size objects; None elsewhere.
            root: rank whose value it is.
            out: array of the dtype and shape of a row for the result.
            algorithm: see `pycoll.algorithms("scatter")`.
            timeout: seconds.

        Raises:
            ValueError: off root also when `out` turns out not to look like a row; the scatter has
                taken place then, and the communicator stays usable.
        """
        return self._run(self._calls.scatter(x, root, out, algorithm=algorithm), timeout)

    @overload
    def reduce_scatter(
        self,
        x: np.ndarray[Any, D],
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> np.ndarray[Any, D]: ...
    @overload
    def reduce_scatter(
        self,
        x: A,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> A: ...
    def reduce_scatter(
        self,
        x: Any,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Combine all ranks' ``x[rank]``: each rank gets one row of the reduction.

        Args:
            x: array (size, ...), the same dtype and shape on all ranks.
            op: as in `reduce`; a function gets rows of x.
            out: array of a row's dtype and shape; may be ``x[rank]``.
            algorithm: see `pycoll.algorithms("reduce_scatter")`.
            timeout: seconds.
        """
        return self._run(self._calls.reduce_scatter(x, op, out, algorithm=algorithm), timeout)

    @overload
    def all_to_all(  # type: ignore[overload-overlap]
        self, x: A, out: Any = None, *, algorithm: str | None = None, timeout: float | None = None
    ) -> A: ...
    @overload
    def all_to_all(
        self,
        x: Sequence[T],
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> list[T]: ...
    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Exchange rows: row i of the result is rank i's ``x[rank]``.

        Args:
            x: array (size, ...), the same dtype and shape on all ranks; or a list or tuple of
                size objects.
            out: array of x's dtype and shape for the result; may be `x` itself.
            algorithm: see `pycoll.algorithms("all_to_all")`.
            timeout: seconds.
        """
        return self._run(self._calls.all_to_all(x, out, algorithm=algorithm), timeout)

    def scan(
        self,
        x: T,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """Combine the `x` of the ranks 0 to this one, in rank order.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: as in `reduce`.
            out: array of x's dtype and shape for the result.
            algorithm: "shared_memory", or "linear": everything to everybody, combined there.
            timeout: seconds.
        """
        result: T = self._run(self._calls.scan(x, op, out, algorithm=algorithm), timeout)
        return result

    def exscan(
        self,
        x: T,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> T | MaybeNone:
        """Combine the `x` of the ranks before this one, as `scan`.

        On rank 0 the result is None, and `out` stays as it is.
        """
        return self._run(self._calls.exscan(x, op, out, algorithm=algorithm), timeout)

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Return when every rank has called it.

        Args:
            algorithm: see `pycoll.algorithms("barrier")`.
            timeout: seconds.
        """
        self._run(self._calls.barrier(algorithm=algorithm), timeout)

    # --- point to point --------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send `x` to rank `dest`; returns when `x` may be changed.

        Values of at most 64 KiB are buffered (up to 1 MiB for each receiver); larger ones wait for
        their receive. A send to oneself is always buffered.

        Args:
            x: array or object.
            dest: receiving rank, or `pycoll.PROC_NULL`: nothing is done.
            tag: 0 to 2**31 - 1.
            timeout: seconds; when they have passed the message is withdrawn.
        """
        self._run(self._calls.send(x, dest, tag), timeout)

    def ssend(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send `x` to rank `dest`; returns when it is received there, however short it is.

        On arrival it is a message like any other. Sent to oneself, it waits for a receive in
        another thread or in a request.

        Args:
            x: array or object.
            dest: receiving rank, or `pycoll.PROC_NULL`: nothing is done.
            tag: 0 to 2**31 - 1.
            timeout: seconds; when they have passed the message is withdrawn.
        """
        self._run(self._calls.ssend(x, dest, tag), timeout)

    def bsend(self, x: Any, dest: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send a copy of `x` to rank `dest`; returns without waiting for it, however long it is.

        The copy takes memory until it is received, also after this communicator was closed here;
        when this rank ends before, a long one is lost. Nobody is told if it is never received:
        where an error shall be heard of, use `isend`. The twin `ibsend` is done when `x` has been
        copied: at once, but for an array on a GPU, which must not be changed before.

        Args:
            x: array or object.
            dest: receiving rank, or `pycoll.PROC_NULL`: nothing is done.
            tag: 0 to 2**31 - 1.
            timeout: seconds, for copying from a GPU.
        """
        self._run(self._calls.bsend(x, dest, tag), timeout)

    def _finish_in_core(self, request: CoreRequest, seconds: float) -> Any:
        """Return the result of what the core's engine has begun and that takes long."""
        task = request._task
        text = task.call.text.removeprefix("i")
        self._finish_begun(text, p2p.finish_send(task), (request,), seconds)
        return request.result

    def _finish_both_in_core(self, received: CoreRequest, sent: CoreRequest, seconds: float) -> Any:
        """The same for a receive and a send at the same time."""
        _, _, dest, tag, _ = sent._description
        source = received._description[2]
        text = f"sendrecv(dest={dest}, source={source if source >= 0 else 'ANY'}, tag={tag})"
        steps = p2p.finish_both(received._task, sent._task)
        self._finish_begun(text, steps, (received, sent), seconds)
        return received.result

    def _finish_begun(
        self, text: str, steps: CallSteps, begun: Sequence[CoreRequest], seconds: float
    ) -> None:
        try:
            self._run(Prepared(text, lambda _: steps, collective=False), seconds)
        except BaseException as exc:
            with self._group.engine.locked():
                for request in begun:
                    request._task.cancel()  # also if the call did not even begin
                is_well = all([request.is_well for request in begun])
            if is_well and isinstance(exc, OperationTimeout):
                return  # it was done before it could be given up
            raise

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Receive a message and return its value.

        Args:
            source: rank, or `pycoll.ANY_SOURCE`; from `pycoll.PROC_NULL` comes None at once.
            tag: or `pycoll.ANY_TAG`.
            out: writable array to fill; a shorter message fills the front of it.
            status: filled in with source, tag and length.
            timeout: seconds; when they have passed the receive is withdrawn.

        Raises:
            MismatchError: the message is of another dtype than `out`, or an object.
            TruncationError: it is larger than `out`. Both leave it first in the queue.
        """
        return self._run(self._calls.recv(source, tag, out, status), timeout)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int = ANY_SOURCE,
        sendtag: int = 0,
        recvtag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Send `x` to `dest` and receive from `source` at the same time; returns what came.

        Args:
            x: array or object.
            dest, source: ranks, or `pycoll.PROC_NULL`; source also `pycoll.ANY_SOURCE`.
            sendtag, recvtag: tags, as of `send` and `recv`.
            out: writable array to fill, as in `recv`; may be `x` itself.
            status: filled in as by `recv`.
            timeout: seconds; when they have passed both are withdrawn.
        """
        prepared = self._calls.sendrecv(x, dest, source, sendtag, recvtag, out, status)
        return self._run(prepared, timeout)

    def probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout: float | None = None
    ) -> Status:
        """Wait for a message and return its `Status`; the message stays in the queue.

        Args:
            source, tag: as of `recv`.
            timeout: seconds.
        """
        status: Status = self._run(self._calls.probe(source, tag), timeout)
        return status

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Return the `Status` of a message that is here, or None; never waits.

        Args:
            source, tag: as of `recv`.
        """
        status: Status | None = self._run(self._calls.iprobe(source, tag), math.inf)
        return status

    def mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout: float | None = None
    ) -> Message:
        """Wait for a message and take it out of the queue: only the `Message` returned receives it.

        Args:
            source, tag: as of `recv`.
            timeout: seconds.
        """
        return Message(self, *self._run(self._calls.mprobe(source, tag), timeout))

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Message | None:
        """Return the `Message` that `mprobe` would, if one is here, or None; never waits.

        Args:
            source, tag: as of `recv`.
        """
        found = self._run(self._calls.improbe(source, tag), math.inf)
        return Message(self, *found) if found is not None else None

    # --- uneven blocks ---------------------------------------------------------------------

    def gatherv(
        self, x: A, root: int = 0, out: Any = None, *, timeout: float | None = None
    ) -> list[A] | MaybeNone:
        """Collect all ranks' `x`, of whatever shapes, on the root: a list of arrays by rank.

        Args:
            x: array of any shape, of the same dtype on all ranks.
            root: rank that gets the result; None elsewhere.
            out: on the root, places for the arrays: a list of arrays of their dtype and shapes (or
                None, where a new one is wanted); or one array, in which they stand one after the
                other along its leading axis: the list then has views of it. Ignored elsewhere.
            timeout: seconds.

        Raises:
            ValueError: also when `out` turns out not to fit; the call has taken place then, the
                communicator stays usable, and what is in `out` is not defined.
        """
        result: list[A] | None = self._run(self._calls.gatherv(x, root, out), timeout)
        return result

    def all_gatherv(self, x: A, out: Any = None, *, timeout: float | None = None) -> list[A]:
        """Collect all ranks' `x`, of whatever shapes, on every rank: a list of arrays by rank.

        Args:
            x: array of any shape, of the same dtype on all ranks.
            out: places for the arrays, on this rank alone: as in `gatherv`.
            timeout: seconds.
        """
        result: list[A] = self._run(self._calls.all_gatherv(x, out), timeout)
        return result

    @overload
    def scatterv(
        self, xs: None, root: int = 0, out: Any = None, *, timeout: float | None = None
    ) -> Any: ...
    @overload
    def scatterv(
        self,
        xs: Sequence[A] | None,
        root: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
    ) -> A: ...
    def scatterv(
        self,
        xs: Sequence[Any] | None,
        root: int = 0,
        out: Any = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Return array number `rank` of the root's list.

        Args:
            xs: on the root one array for each rank, of any shapes and one dtype; None elsewhere.
            root: rank whose list it is.
            out: array of the dtype and shape of the result.
            timeout: seconds.

        Raises:
            ValueError: off root also when `out` turns out not to fit, as in `scatter`.
        """
        return self._run(self._calls.scatterv(xs, root, out), timeout)

    def all_to_allv(
        self, xs: Sequence[A], out: Any = None, *, timeout: float | None = None
    ) -> list[A]:
        """Exchange arrays of any shapes: item i of the result is rank i's ``xs[rank]``.

        Args:
            xs: one array for each rank; all of the same dtype, on all ranks.
            out: places for the arrays that come, on this rank alone: as in `gatherv`.
            timeout: seconds.
        """
        result: list[A] = self._run(self._calls.all_to_allv(xs, out), timeout)
        return result

    def reduce_scatterv(
        self,
        x: A,
        counts: Sequence[int],
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> A:
        """Combine all ranks' `x`: each rank gets its part, of ``counts[rank]`` rows.

        Args:
            x: array whose leading axis is ``sum(counts)`` long, the same on all ranks.
            counts: rows for each rank, the same on all ranks; may be 0.
            op: as in `reduce`; a function gets the rows of one rank.
            out: array for the result; may be this rank's rows of `x`.
            algorithm: see `pycoll.algorithms("reduce_scatter")`.
            timeout: seconds.
        """
        result: A = self._run(
            self._calls.reduce_scatterv(x, counts, op, out, algorithm=algorithm), timeout
        )
        return result

    # --- persistent ------------------------------------------------------------------------

    @property
    def persistent(self) -> Persistent:
        """Makes requests to start again and again: ``comm.persistent.all_reduce(x, out=y)``."""
        return Persistent(self._group, self._nonblocking_calls, self._op_timeout, self._short)

    # --- communicators ---------------------------------------------------------------------

    def dup(self, *, name: str | None = None, timeout: float | None = None) -> Communicator:
        """Return a new communicator of the same ranks; a collective call.

        Its messages never meet those of this one.

        Args:
            name: what messages call it; None: "dup of ..." this one.
            timeout: seconds.
        """
        name = subgroups.check_name(name) or f"dup of {self.name}"
        return Communicator(self._world, self._copy("dup()", name, timeout))

    @overload
    def split(
        self,
        color: int,
        key: int | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Communicator: ...
    @overload
    def split(
        self,
        color: int | None,
        key: int | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Communicator | None: ...
    def split(
        self,
        color: int | None,
        key: int | None = None,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Communicator | None:
        """Return a communicator of the ranks that passed the same `color`; a collective call.

        Args:
            color: int of 64 bits; None: this rank is in no new communicator, and gets None.
            key: int of 64 bits. The new ranks are in the order of keys, then of ranks here; None:
                this rank.
            name: what messages call it; None: "split of ..." this one, and the color.
            timeout: seconds.
        """
        name = subgroups.check_name(name)
        color, key = subgroups.check_color(color), subgroups.check_key(key, self.rank)
        made = self._split("split()", color, key, name, timeout)
        return None if made is None else Communicator(self._world, made)

    def split_by_host(self, *, timeout: float | None = None) -> Communicator:
        """Return a communicator of the ranks on this host, in their order; a collective call."""
        name = f"host {self.node} of {self.name}"
        made = self._split("split_by_host()", self.node, self.rank, name, timeout)
        assert made is not None
        return Communicator(self._world, made)

    def sub(
        self, ranks: Iterable[int], key: int | None = None, *, name: str | None = None
    ) -> Communicator | None:
        """Return a communicator of these ranks, numbered in the order given; no message is sent.

        Every one of `ranks` makes the same call, the others need not; they get None. Ranks that
        list them in different orders make different communicators, which never meet. The
        calls for the same ranks are told apart by their order: the first on each rank belong
        together, and so on. Threads that make them at the same time pass different keys. It works
        on a communicator that is broken, too.

        Args:
            ranks: ranks of this communicator, each once.
            key: int of 64 bits, the same on all of `ranks`: only calls with the same key meet.
            name: what messages call it; None: the ranks "of ..." this one.
        """
        checked, name = subgroups.check_ranks(ranks, self.size), subgroups.check_name(name)
        key = subgroups.check_sub_key(key)
        self._check_open()
        made = self._makings.sub(self._group, checked, key, name)
        return None if made is None else Communicator(self._world, made)

    def grid(
        self,
        shape: Sequence[int],
        names: Sequence[str] | None = None,
        periodic: bool | Sequence[bool] = False,
        *,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Grid:
        """Return a communicator of the same ranks that form a grid; a collective call.

        Args:
            shape: ranks along each axis, row-major: the last axis varies quickest. Their product
                is the size of this communicator.
            names: of the axes, to be used instead of their indices.
            periodic: whether the ends of an axis are neighbors: of all axes, or of each.
            name: what messages call the grid; None: "grid of ..." this one. Communicators of its
                axes have the names of these.
            timeout: seconds.
        """
        name = subgroups.check_name(name) or f"grid of {self.name}"
        layout = grids.check_layout(shape, names, periodic, self.size)
        return grids.Grid(self._world, self._copy(f"grid({layout})", name, timeout), layout)

    def _copy(self, text: str, name: str, timeout: float | None) -> Group:
        made = self._split(text, 0, self.rank, name, timeout)
        assert made is not None
        return made

    def _split(
        self, text: str, color: int | None, key: int, name: str | None, timeout: float | None
    ) -> Group | None:
        group, row = self._group, self._makings.row(color, key)
        prepared = Prepared(
            text,
            lambda signature: subgroups.exchange(group, signature, row),
            lambda native: subgroups.exchange_native(native, text, row),
        )
        return subgroups.split(group, self._run(prepared, timeout), name)

    # --- shared arrays ---------------------------------------------------------------------

    def share(self, x: Any, *, timeout: float | None = None) -> tuple[np.ndarray[Any, Any], ...]:
        """Return every rank's `x` as an array of this process; a collective call.

        All ranks are on one host. What one writes to its array the others read in theirs, without
        a call: `barrier()` says when. An array stays as long as a rank holds it, or a view of it,
        also when its owner has deleted it or has ended. The call returns when all have made it.

        Args:
            x: NumPy array or PyTorch tensor in shared memory: from `pycoll.empty` or `zeros`, or
                made after `pycoll.share_arrays()`; or a view of one, of any strides. Shapes and
                dtypes may differ.
            timeout: seconds.

        Returns:
            NumPy arrays by rank; that of this rank is `x` itself. Which can be written to depends
            on what their owners passed.

        Raises:
            ValueError: on all ranks: an `x` does not lie in shared memory, or is no array.
        """
        group = self._group
        if group.size > 1 and group.native is None:
            raise ValueError(
                "share(): these ranks do not share memory; comm.split_by_host() gives those of "
                "one host, which do"
            )
        own, said = shared_arrays.expose(x, group.rank, group.size)
        prepared = self._calls.all_gather(said)._replace(text="share()")
        all_said = self._run(prepared, timeout)
        for rank, other in enumerate(all_said):
            if other.refused:
                shared_arrays.take_back(own)
                raise ValueError(f"rank {rank}: {other.refused}")
        memory = group.engine.shared_memory
        assert own is not None
        found = []
        for rank, other in enumerate(all_said):
            if rank == group.rank or memory is None:
                found.append(own)
                continue
            local = memory.ranks.index(group.members[rank])
            found.append(shared_arrays.borrow(memory.host, local, other, group.rank, group.size))
        return tuple(found)

    def explain(
        self, collective: str, nbytes: int = 0, op: Reducer = "sum", *, blocking: bool = True
    ) -> Explanation:
        """Say which algorithm a call would run, why, and what the others would take.

        Nothing is sent, and the answer is the same on all ranks.

        Args:
            collective: for example ``"all_reduce"``.
            nbytes: of one rank's value; of one block (what one rank has for one other, or all
                others) in gather, scatter, all_gather, reduce_scatter and all_to_all.
            op: the operator, where something is reduced.
            blocking: False: of the twin with an i in front.

        Raises:
            ValueError: there is no such collective or operator, or `nbytes` is below 0.
        """
        self._check_open()
        return explain.explain(self._group, collective, nbytes, op, blocking)

    def close(self) -> None:
        """Give this communicator up. Not collective; may be called again.

        Closing the world communicator is `pycoll.finalize()`.

        Raises:
            MismatchError: another rank has made another call than this one, as can be seen by now,
                and no call after it has told so.
        """
        error, engine = None, self._group.engine
        if not self._closed and engine.closed is None:
            with engine.locked():
                error = engine.look_back(self._group.context)
                self._group.close()
                self._group.context.messages = None  # it refers to this object
                self._group.context.collectives = None
        self._shut()
        if error is not None:
            raise error

    def _shut(self) -> None:
        """Refuse every call from now on."""
        self._closed = True
        for name in self._short:
            del self.__dict__[name]
        self._short = {}

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job at once; `pycoll-run` exits with `code`."""
        code = arguments.check_int(code, "code")
        engine = self._group.engine
        if engine.control is not None and engine.closed is None:
            with engine.locked():
                engine.control.post("abort", code=code)
                engine.control.close(2.0)
        os._exit(code & 0xFF)

    # --- running ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._group.engine.closed is not None:
            raise Error(self._group.engine.closed)
        if self._closed:
            raise Error("this communicator is closed")

    def _resume(
        self,
        name: str,
        heard: bytearray,
        *args: Any,
        timeout: float | None = None,
        **keywords: Any,
    ) -> Any:
        """Go on with a collective of uneven blocks whose first round the core has done."""
        prepared = resumed(self._group, name, memoryview(heard), args, keywords)
        return self._run(prepared, timeout)

    def _run(self, prepared: Prepared[Any], timeout: float | None) -> Any:
        """Run a call to its end; returns what the caller gets."""
        self._check_open()
        group, text, seconds = self._group, prepared.text, self._seconds(timeout)
        result: Any = BY_MESSAGES
        native, core = prepared.native, group.native
        if native is not None and core is not None:
            call = Call(text, group.number, group.context)
            self._fetch(prepared, call, seconds)
            result = core.run(call, seconds, lambda: native(core))
        elif prepared.by_two_levels is not None:
            self._fetch(prepared, Call(text, group.number, group.context), seconds)
            result = prepared.by_two_levels(f"{text}\0{caller()}".encode(), seconds)
        if result is BY_MESSAGES:
            collective = prepared.collective
            call = Call(text, group.number if collective else -1, group.context)
            signature = f"{text}\0{caller()}".encode() if collective else b""
            result = group.engine.run(call, lambda: prepared.steps(signature), seconds, collective)
        value, late = prepared.conclude(group.engine, result)
        if late:
            self._await(late, Call(text, -1, group.context), seconds, prepared.collective)
        return value

    def _fetch(self, prepared: Prepared[Any], call: Call, timeout: float) -> None:
        """Have what a call reads in host memory; the call has begun, whatever comes."""
        engine = self._group.engine
        stages = [value.stage for value in prepared.reads if value.stage is not None]
        if stages:
            from pycoll._cuda.copies import all_of

            pulls = all_of(stage.pull(engine) for stage in stages)
            self._await(pulls, call, timeout, collective=True)

    def _await(
        self, copies: Sequence[Operation], call: Call, timeout: float, collective: bool
    ) -> None:
        """Wait for copies, as a part of a call."""
        engine = self._group.engine
        try:
            for copy in copies:
                engine.watch(copy)
            for copy in copies:
                engine.wait(copy, call, timeout)
                if copy.error is not None:
                    raise copy.error
        except BaseException as exc:
            for copy in copies:
                copy.cancel()
            if collective:
                engine.give_up(call.context, exc)
            raise

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._op_timeout
        return arguments.check_timeout(timeout, "timeout")
