"""The communicator: checks arguments once, picks an algorithm, and runs the call.

Everything a user can get wrong alone is found here, before anything is sent: such a call does not
count, and may be repeated. What ranks get wrong together is found by the calls themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

from pycoll._calls import arguments, explain, subgroups
from pycoll._calls.calls import Calls
from pycoll._calls.group import Group
from pycoll._communicator import grid as grids
from pycoll._communicator.collectives import Collectives
from pycoll._communicator.point_to_point import PointToPoint
from pycoll._communicator.recovery import Recovery
from pycoll._requests.nonblocking import NonBlocking, Persistent
from pycoll._runtime import counters
from pycoll._runtime.engine import Engine
from pycoll._support.foreign_names import ABSENT_FROM_COMMUNICATORS, OF_COMMUNICATORS, Hinting
from pycoll._support.public_edge import edge, edges, public
from pycoll._transports._core import METHODS
from pycoll.errors import MismatchError

if TYPE_CHECKING:
    import numpy as np

    from pycoll._arrays.types import Reducer
    from pycoll._calls.explain import Explanation
    from pycoll._communicator.grid import Grid
    from pycoll._communicator.tracing import Tracer
    from pycoll._runtime.counters import Counters


class World:
    """What all communicators of a world share: its engine, and its place.

    Attributes:
        tracer: records what they do; None: nobody has asked for that.
    """

    def __init__(
        self,
        engine: Engine,
        local_rank: int,
        local_size: int,
        node: int,
        tracer: Tracer | None = None,
    ) -> None:
        self.tracer = tracer
        self.engine = engine
        self.local_rank = local_rank
        self.local_size = local_size
        self.node = node


_IN_CORE = {
    "finish": "_finish_in_core",
    "finish_both": "_finish_both_in_core",
}
"""Methods that only the core calls, by what it calls them."""


@public
@edges
class Communicator(
    Collectives,
    PointToPoint,
    Recovery,
    NonBlocking,
    Hinting,
    foreign=OF_COMMUNICATORS,
    absent=ABSENT_FROM_COMMUNICATORS,
    prefix="comm.",
):
    """A group of ranks that communicate with each other and with nobody else.

    Arrays are NumPy arrays, memoryviews, array.array, PyTorch tensors, JAX arrays and everything
    else with DLPack or the CUDA array interface, on an NVIDIA GPU too; results come as the kind
    that was passed in, where it is. Everything else travels as a pickled object. In every
    collective all ranks make the same call; where one splits or stacks, the leading axis is the
    rank axis.

    Every blocking method takes `timeout`, seconds; None: `op_timeout`, math.inf: none. An array
    passed in may be changed as soon as the method returns.

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
        op_timeout: default deadline of its operations, seconds; may be set.
    """

    def __init__(self, world: World, group: Group) -> None:
        self._world = world
        self._group = group
        self._calls = Calls(group, blocking=True)
        self._nonblocking_calls = Calls(group, blocking=False)
        self._makings = subgroups.Makings()
        self._closed = False
        self._fast: dict[str, Any] = {}
        # The core's methods keep what they call for all that they do not do themselves. Were that
        # this object, which keeps them, all would stay until Python looks for reference cycles.
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        self._fast = twin._fast_methods()
        if world.tracer is not None:
            self._fast = world.tracer.methods(twin, self._fast)
        self.__dict__.update(self._fast)

    def _fast_methods(self) -> dict[str, Any]:
        """Return the core's methods, which stand before those of this class and call them.

        They do the common case, NumPy arrays, themselves.
        """
        from pycoll._requests import core_collectives, core_requests

        group, slow = self._group, self._in_python
        context: Any = group.context
        messages = core_requests.messages_of(group, context, slow)
        context.core.messages_usable = True
        calls = self._nonblocking_calls, self._calls
        collectives = core_collectives.collectives_of(group, context, calls, slow)
        context.core.collectives_usable = True
        names = core_collectives.NONBLOCKING + METHODS
        methods = {name: getattr(messages, name) for name in core_requests.NAMES}
        methods |= {name: getattr(collectives, name) for name in names}
        for twin in ("all_reduce", "iall_reduce"):
            methods[twin.replace("_", "")] = methods[twin]
        return methods

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

    @property
    def op_timeout(self) -> float:
        """Default deadline of every operation on this communicator, seconds; math.inf: none.

        It may be set, to None for none, too: for the operations, and the waits for requests, that
        begin from then on. Communicators made from this one begin with its value. At first it is
        that of `pycoll.init` or `join`, or of `pycoll-run --op-timeout`. Ranks need not agree.

        Raises:
            TypeError, ValueError: set to what is no number of seconds.
        """
        return self._group.op_timeout

    @op_timeout.setter
    @edge
    def op_timeout(self, seconds: float | None) -> None:
        if seconds is None:
            seconds = math.inf
        self._group.op_timeout = arguments.check_timeout(seconds, "op_timeout")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator cannot be pickled: take what you need of it, as comm.rank")

    def __repr__(self) -> str:
        state = ", closed" if self._closed or self._group.context.is_closed else ""
        name = "" if self.name == "world" else f" {self.name!r}"
        return f"<pycoll.Communicator{name} rank {self.rank} of {self.size}{state}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.close()
        except MismatchError:
            if exc_info[0] is None:  # else that one is the cause
                raise

    # --- what it has exchanged -------------------------------------------------------------

    def counters(self) -> Counters:
        """Return how many bytes and messages were sent to and received from each rank.

        Counted are the messages of this communicator since it was made: point to point, and those
        of its collectives, blocking or not, by every transport. Bytes are those of payloads: values
        and pickled objects; what pycoll puts before each (18 bytes at least) is not counted. A
        message is sent when the value may be changed, and received when the value is there: one
        that is under way is not counted yet, one that has not been asked for is not received.
        A large collective divides its values: each piece is a message. A broadcast or scatter
        begins with messages of some tens of bytes, which tell the others what comes.

        What a blocking collective does in shared memory is not counted: no message is sent there,
        ranks read each other's memory. `algorithm="ring"`, or another, makes it messages, and so
        does PYCOLL_ALGORITHM. A communicator made from this one counts for itself.

        Returns:
            `Counters`: sent_bytes, sent_messages, received_bytes, received_messages, int64 arrays
            of shape ``(size,)`` by rank, copies that are the caller's.

        Raises:
            Error: this communicator is closed.
        """
        self._check_open()
        return counters.of_context(self._group.context)

    # --- persistent ------------------------------------------------------------------------

    @property
    def persistent(self) -> Persistent:
        """Makes requests to start again and again: ``comm.persistent.all_reduce(x, out=y)``."""
        return Persistent(self._group, self._nonblocking_calls, self._fast)

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

    def _made(self, group: Group) -> Communicator:
        return Communicator(self._world, group)

    def _copy(self, text: str, name: str, timeout: float | None) -> Group:
        made = self._split(text, 0, self.rank, name, timeout)
        assert made is not None
        return made

    def _split(
        self, text: str, color: int | None, key: int, name: str | None, timeout: float | None
    ) -> Group | None:
        group, row = self._group, self._makings.row(color, key)
        rows = self._run(subgroups.exchange(group, text, row), timeout)
        return subgroups.split(group, rows, name)

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
        from pycoll._communicator import sharing

        return sharing.share(self._group, x, lambda plan: self._run(plan, timeout))

    def explain(
        self,
        collective: str,
        nbytes: int = 0,
        op: Reducer = "sum",
        *,
        blocking: bool = True,
        dtype: Any = None,
    ) -> Explanation:
        """Say which algorithm a call would run, why, and what the others would take.

        Nothing is sent, and the answer is the same on all ranks.

        Args:
            collective: for example ``"all_reduce"``.
            nbytes: of one rank's value; of one block (what one rank has for one other, or all
                others) in gather, scatter, all_gather, reduce_scatter and all_to_all.
            op: the operator, where something is reduced.
            blocking: False: of the twin with an i in front.
            dtype: of the elements, where something is reduced, for example ``"int64"``. None:
                floats, or integers if the operator takes nothing else.

        Raises:
            ValueError: there is no such collective or operator, or `nbytes` is below 0.
            TypeError: the operator does not work on `dtype`.
        """
        self._check_open()
        return explain.explain(self._group.selector, collective, nbytes, op, blocking, dtype)

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
        self._shut()
        if error is not None:
            raise error

    def _shut(self) -> None:
        """Refuse every call from now on."""
        self._closed = True
        for name in self._fast:
            del self.__dict__[name]
        self._fast = {}
