"""The communicator: checks arguments once, picks an algorithm, and runs the call.

Everything a user can get wrong alone is found here, before anything is sent: such a call does not
count, and may be repeated. What ranks get wrong together is found by the calls themselves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from pycoll.context import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
from pycoll.engine import Engine
from pycoll.errors import Error
from pycoll.group import SHARED_MEMORY, Group
from pycoll.late import Late
from pycoll.memory import SharedMemory
from pycoll.native import Native
from pycoll.task import Call, CallSteps, caller

if TYPE_CHECKING:
    from pycoll import (
        announced,
        arguments,
        arrays,
        collectives,
        native_announced,
        native_calls,
        object_collectives,
        objects,
        ops,
        p2p,
    )
    from pycoll.arguments import Reducer
    from pycoll.arrays import Value
    from pycoll.collectives import Reduction
    from pycoll.ops import Op
else:  # a program that only calls barrier() imports no NumPy
    announced, arguments = Late("pycoll.announced"), Late("pycoll.arguments")
    arrays, collectives = Late("pycoll.arrays"), Late("pycoll.collectives")
    native_announced = Late("pycoll.native_announced")
    native_calls = Late("pycoll.native_calls")
    object_collectives, objects = Late("pycoll.object_collectives"), Late("pycoll.objects")
    ops, p2p = Late("pycoll.ops"), Late("pycoll.p2p")

COLLECTIVES = (
    "barrier",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
)
"""Methods that the compiled core has too."""


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


class Communicator:
    """A group of ranks that communicate with each other and with nobody else.

    Arrays are NumPy arrays, memoryviews, array.array, PyTorch tensors, JAX arrays and everything
    else with DLPack in host memory; results come as the kind that was passed in. Everything else
    travels as a pickled object. In every collective all ranks make the same call; where one
    splits or stacks, the leading axis is the rank axis.

    Every blocking method takes `timeout`, seconds; None: the default of `pycoll.init`, math.inf:
    none. An array passed in may be changed as soon as the method returns.

    Raises, from every method: PeerFailed (a rank it needs has ended), OperationTimeout,
    MismatchError (ranks made different calls), and TypeError or ValueError for wrong arguments,
    before anything is sent.

    Attributes:
        rank: this process's rank, 0 to size - 1.
        size: number of ranks.
        local_rank, local_size: the same among the job's ranks on this host.
        node: number of this host, from 0.
    """

    def __init__(self, world: World, group: Group) -> None:
        self._world = world
        self._group = group
        self._closed = False
        self._short: dict[str, Any] = {}
        if group.engine.shared_memory is not None and group.size > 1:
            self._short = self._short_way(group.engine.shared_memory)
            self.__dict__.update(self._short)

    def _short_way(self, memory: SharedMemory) -> dict[str, Any]:
        """Return the core's methods, which stand before those of this class and call them.

        They do the common case, NumPy arrays between ranks of this host, themselves.
        """
        from pycoll.transports._core import PointToPoint

        group, channel = self._group, memory.transport.channel
        local = {world: index for index, world in enumerate(memory.ranks)}
        locals_ = [local.get(world, -1) for world in group.members]
        short = PointToPoint(
            channel, group.context.ident, locals_, self.send, self.recv, self._finish_send
        )
        short.usable = group.engine.op_timeout == math.inf
        with group.engine.locked():
            group.context.short = short
            group.context.count()
        methods = {"send": short.send, "recv": short.recv}
        if group.native is not None:
            methods |= group.native.methods([(name, getattr(self, name)) for name in COLLECTIVES])
            methods["allreduce"] = methods["all_reduce"]
        return methods

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

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<pycoll.Communicator rank {self.rank} of {self.size}{state}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- collectives -----------------------------------------------------------------------

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
        group, root = self._group, arguments.check_root(root, self.size)
        self._check_algorithm("broadcast", algorithm)
        outgoing = p2p.Outgoing(x) if group.rank == root else None
        mine = None if outgoing is not None else arguments.fillable(x)

        text = f"broadcast(root={root}{_forced(algorithm)})"
        result: Any = native_announced.BY_MESSAGES
        if self._announces("broadcast", algorithm):
            result = self._native(
                text, timeout, native_announced.broadcast, group, outgoing, mine, root
            )
        if result is native_announced.BY_MESSAGES:
            forced = None if algorithm == SHARED_MEMORY else algorithm
            result = self._collective(
                text, timeout, announced.broadcast, outgoing, mine, forced, root
            )
        return x if outgoing is not None else result

    def reduce(
        self,
        x: Any,
        op: Reducer = "sum",
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
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
        group, root = self._group, arguments.check_root(root, self.size)
        resolved = ops.resolve(op)
        is_root = group.rank == root
        if arguments.reduces_objects(x, op):
            arguments.no_out(out if is_root else None)
            return self._fold(x, resolved, root, algorithm, timeout)
        value, reduction = self._reduction("reduce", x, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape) if is_root else None
        if target is not None:
            target.check_overlap(value.array, (target.array, value.array))
        memory = target.memory if target is not None else None
        text = f"reduce({collectives.type_text(value)}, {_text(reduction)}, root={root})"
        if reduction.algorithm == SHARED_MEMORY:
            self._native(
                text, timeout, native_calls.combine, "reduce", value, memory, resolved, root
            )
        else:
            self._collective(text, timeout, collectives.reduce, value, reduction, root, memory)
        return target.result() if target is not None else None

    def all_reduce(
        self,
        x: Any,
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Combine all ranks' `x`; the result, the same bits, is on every rank.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: as in `reduce`.
            out: array of x's dtype and shape for the result; may be `x` itself.
            algorithm: see `pycoll.algorithms("all_reduce")`.
            timeout: seconds.
        """
        resolved = ops.resolve(op)
        if arguments.reduces_objects(x, op):
            arguments.no_out(out)
            return self._fold(x, resolved, None, algorithm, timeout)
        value, reduction = self._reduction("all_reduce", x, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value.array, (target.array, value.array))
        text = f"all_reduce({collectives.type_text(value)}, {_text(reduction)})"
        memory = target.memory
        if reduction.algorithm == SHARED_MEMORY:
            self._native(text, timeout, native_calls.combine, "all_reduce", value, memory, resolved)
        else:
            self._collective(text, timeout, collectives.all_reduce, value, reduction, memory)
        return target.result()

    allreduce = all_reduce

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
        group, root = self._group, arguments.check_root(root, self.size)
        self._check_algorithm("gather", algorithm)
        is_root = group.rank == root
        value = arrays.wrap(x)
        if value is None:
            arguments.no_out(out if is_root else None)
            parts = objects.dump(x)
            chosen = arguments.linear_only("gather", algorithm)
            text = f"gather(object, root={root}, algorithm={chosen})"
            return self._collective(text, timeout, object_collectives.gather, parts, chosen, root)
        nbytes = value.array.nbytes
        chosen = group.choose("gather", nbytes, algorithm)
        shape = (group.size, *value.array.shape)
        target = arguments.Target(out, value, shape) if is_root else None
        if target is not None:
            target.check_overlap(value.array)
        memory = target.memory if target is not None else None
        text = f"gather({collectives.type_text(value)}, root={root}, algorithm={chosen})"
        if chosen == SHARED_MEMORY:
            self._native(text, timeout, native_calls.move, "gather", value, memory, root)
        else:
            self._collective(text, timeout, collectives.gather, value, chosen, root, memory)
        return target.result() if target is not None else None

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
        group = self._group
        self._check_algorithm("all_gather", algorithm)
        value = arrays.wrap(x)
        if value is None:
            arguments.no_out(out)
            text = f"all_gather(object{_forced(algorithm)})"
            if algorithm == SHARED_MEMORY and group.native is not None:
                parts = objects.dump(x)
                return self._native(text, timeout, native_calls.all_gather_objects, parts)
            return self._collective(
                text, timeout, object_collectives.all_gather, objects.dump(x), algorithm
            )
        chosen = group.choose("all_gather", value.array.nbytes, algorithm)
        shape = (group.size, *value.array.shape)
        target = arguments.Target(out, value, shape)
        target.check_overlap(value.array, (target.array[group.rank, ...], value.array))
        text = f"all_gather({collectives.type_text(value)}, algorithm={chosen})"
        if chosen == SHARED_MEMORY:
            self._native(text, timeout, native_calls.move, "all_gather", value, target.memory)
        else:
            self._collective(text, timeout, collectives.all_gather, value, chosen, target.memory)
        return target.result()

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
        group, root = self._group, arguments.check_root(root, self.size)
        self._check_algorithm("scatter", algorithm)
        blocks = self._scatter_blocks(x, algorithm) if group.rank == root else None
        wanted = arguments.fillable_out(out)
        if isinstance(blocks, list):
            arguments.no_out(out)
        elif blocks is not None and out is not None:
            arguments.Target(out, blocks, blocks.array.shape[1:]).check_overlap(blocks.array)
        text = f"scatter(root={root}{_forced(algorithm)})"
        received: Any = native_announced.BY_MESSAGES
        if self._announces("scatter", algorithm):
            received = self._native(text, timeout, native_announced.scatter, blocks, root)
        if received is native_announced.BY_MESSAGES:
            forced = None if algorithm == SHARED_MEMORY else algorithm
            received = self._collective(text, timeout, announced.scatter, blocks, forced, root)
        value, buffer = received
        if value is None:
            arguments.no_out(out)
            return objects.load(buffer)
        if wanted is None:
            return arrays.unwrap(value)
        checked = arrays.check_out(out, value.dtype, value.array.shape)
        checked.array[...] = value.array
        return out

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
        group = self._group
        resolved = ops.resolve(op)
        value = arguments.split_value("reduce_scatter", x, self.size)
        _, reduction = self._reduction("reduce_scatter", x, resolved, algorithm)
        row = value.array[group.rank, ...]
        target = arguments.Target(out, value, value.array.shape[1:])
        target.check_overlap(value.array, (target.array, row))
        text = f"reduce_scatter({collectives.type_text(value)}, {_text(reduction)})"
        memory = target.memory
        if reduction.algorithm == SHARED_MEMORY:
            self._native(
                text, timeout, native_calls.combine, "reduce_scatter", value, memory, resolved
            )
        else:
            self._collective(text, timeout, collectives.reduce_scatter, value, reduction, memory)
        return target.result()

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
        group = self._group
        self._check_algorithm("all_to_all", algorithm)
        if arrays.wrap(x) is None:
            arguments.no_out(out)
            arguments.check_objects("all_to_all", x, self.size)
            blocks = [objects.dump(item) for item in x]
            chosen = group.choose("all_to_all", 0, algorithm, native=False)
            text = f"all_to_all(object{_forced(algorithm)})"
            if chosen == SHARED_MEMORY:
                return self._native(text, timeout, native_calls.all_to_all_objects, blocks)
            return self._collective(text, timeout, object_collectives.all_to_all, blocks, chosen)
        value = arguments.split_value("all_to_all", x, self.size)
        chosen = group.choose("all_to_all", value.array.nbytes // group.size, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value.array, (target.array, value.array))
        if out is not None and arrays.overlap(target.array, value.array):
            # In place: rows come in before those that were there have left.
            value = arrays.Value(value.array.copy(), value.dtype, value.kind)
        text = f"all_to_all({collectives.type_text(value)}, algorithm={chosen})"
        if chosen == SHARED_MEMORY:
            self._native(text, timeout, native_calls.move, "all_to_all", value, target.memory)
        else:
            self._collective(text, timeout, collectives.all_to_all, value, chosen, target.memory)
        return target.result()

    def scan(
        self,
        x: Any,
        op: Reducer = "sum",
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Combine the `x` of the ranks 0 to this one, in rank order.

        Args:
            x: array or number, the same dtype and shape on all ranks; with a Python function as
                `op` also any object.
            op: as in `reduce`.
            algorithm: "shared_memory", or "linear": everything to everybody, combined there.
            timeout: seconds.
        """
        return self._prefix("scan", x, op, algorithm, timeout)

    def exscan(
        self,
        x: Any,
        op: Reducer = "sum",
        *,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Combine the `x` of the ranks before this one, as `scan`; None on rank 0."""
        return self._prefix("exscan", x, op, algorithm, timeout)

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        group = self._group
        chosen = group.choose("barrier", 0, algorithm)
        text = f"barrier(algorithm={chosen})"
        if chosen == SHARED_MEMORY:
            self._native(text, timeout, Native.barrier)
        else:
            self._collective(text, timeout, collectives.barrier, chosen)

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
        dest, tag = arguments.check_peer(dest, "dest", self.size), arguments.check_tag(tag)
        outgoing = p2p.Outgoing(x)
        if dest == PROC_NULL:
            self._check_open()
            return
        text = f"send({outgoing.text}, dest={dest}, tag={tag})"
        self._point_to_point(text, lambda: p2p.send(self._group, outgoing, dest, tag), timeout)

    def _finish_send(self, dest: int, number: int) -> None:
        """Wait for a send that the core has begun and that takes long."""
        group = self._group
        memory = group.engine.shared_memory
        assert memory is not None
        transport, world = memory.transport, group.members[dest]
        text = f"send(array, dest={dest})"
        self._point_to_point(text, lambda: p2p.finish_send(transport.adopt(world, number)), None)

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
        source, tag = (
            arguments.check_source(source, self.size),
            arguments.check_tag(tag, wildcard=True),
        )
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        if source == PROC_NULL:
            self._check_open()
            _fill_null(status)
            return out
        text = f"recv(source={_name(source)}, tag={_name(tag)})"
        return self._point_to_point(
            text, lambda: p2p.receive(self._group, source, tag, target, status), timeout
        )

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
        """Send `x` to `dest` and receive from `source` at the same time; returns what came."""
        group = self._group
        dest, source = (
            arguments.check_peer(dest, "dest", self.size),
            arguments.check_source(source, self.size),
        )
        sendtag, recvtag = arguments.check_tag(sendtag), arguments.check_tag(recvtag, wildcard=True)
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        arguments.check_apart(x, target)
        outgoing: p2p.Outgoing | None = p2p.Outgoing(x)
        if dest == PROC_NULL:
            outgoing = None

        def steps() -> CallSteps:
            receiving = None
            if source != PROC_NULL:
                receiving = p2p.receive(group, source, recvtag, target, status)
            return p2p.send_receive(group, outgoing, (dest, sendtag), receiving)

        if source == PROC_NULL:
            _fill_null(status)
        text = f"sendrecv(dest={_name(dest)}, source={_name(source)}, tag={_name(sendtag)})"
        result = self._point_to_point(text, steps, timeout)
        return out if source == PROC_NULL else result

    def probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, *, timeout: float | None = None
    ) -> Status:
        """Wait for a message and return its `Status`; the message stays in the queue."""
        source, tag = (
            arguments.check_source(source, self.size),
            arguments.check_tag(tag, wildcard=True),
        )
        if source == PROC_NULL:
            return Status()
        text = f"probe(source={_name(source)}, tag={_name(tag)})"
        status: Status = self._point_to_point(
            text, lambda: p2p.probe(self._group, source, tag), timeout
        )
        return status

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Status | None:
        """Return the `Status` of a message that is here, or None; never waits."""
        source, tag = (
            arguments.check_source(source, self.size),
            arguments.check_tag(tag, wildcard=True),
        )
        if source == PROC_NULL:
            return Status()
        status: Status | None = self._point_to_point(
            "iprobe()", lambda: p2p.probe_now(self._group, source, tag), math.inf
        )
        return status

    # --- communicators ---------------------------------------------------------------------

    def dup(self, *, timeout: float | None = None) -> Communicator:
        """Return a new communicator of the same ranks; a collective call.

        Its messages never meet those of this one.
        """
        made = self._split("dup()", 0, self.rank, timeout)
        assert made is not None
        return made

    def split(
        self, color: int | None, key: int | None = None, *, timeout: float | None = None
    ) -> Communicator | None:
        """Return a communicator of the ranks that passed the same `color`; a collective call.

        Args:
            color: any int; None: this rank is in no new communicator, and gets None.
            key: the new ranks are in the order of keys, then of ranks here; None: this rank.
            timeout: seconds.
        """
        if color is not None:
            color = arguments.check_int(color, "color")
        key = self.rank if key is None else arguments.check_int(key, "key")
        return self._split("split()", color, key, timeout)

    def _split(
        self, text: str, color: int | None, key: int, timeout: float | None
    ) -> Communicator | None:
        group = self._group
        parts = objects.dump((color, key))
        number = group.number
        said = self._collective(text, timeout, object_collectives.all_gather, parts, None)
        if color is None:
            return None
        chosen = sorted((key, rank) for rank, (other, key) in enumerate(said) if other == color)
        members = [group.members[rank] for _, rank in chosen]
        engine = group.engine
        with engine.locked():
            child = Group(engine, group.child_ident(number, members), members)
        return Communicator(self._world, child)

    def close(self) -> None:
        """Give this communicator up. Not collective; may be called again.

        Closing the world communicator is `pycoll.finalize()`.
        """
        if self._closed:
            return
        self._closed = True
        for name in self._short:
            del self.__dict__[name]
        self._short = {}
        engine = self._group.engine
        if engine.closed is None:
            with engine.locked():
                self._group.close()

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job at once; `pycoll-run` exits with `code`."""
        code = arguments.check_int(code, "code")
        engine = self._group.engine
        if engine.control is not None and engine.closed is None:
            with engine.locked():
                engine.control.post("abort", code=code)
                engine.control.close(2.0)
        os._exit(code & 0xFF)

    def _prefix(
        self, collective: str, x: Any, op: Reducer, algorithm: str | None, timeout: float | None
    ) -> Any:
        group, resolved = self._group, ops.resolve(op)
        count = self.rank + (collective == "scan")
        if arguments.reduces_objects(x, op):
            assert callable(resolved.fn)
            text = f"{collective}(object, op={resolved.signature})"
            parts = objects.dump(x)
            values = self._collective(text, timeout, object_collectives.all_gather, parts, None)
            return object_collectives.fold(values[:count], resolved.fn) if count else None
        value = arrays.wrap_operand(x)
        ops.check(resolved, value.dtype)
        chosen = group.choose_prefix(collective, algorithm, native_calls.serves(resolved, value))
        reduction = collectives.Reduction(resolved, chosen)
        text = f"{collective}({collectives.type_text(value)}, {_text(reduction)})"
        target = arguments.Target(None, value, value.array.shape)
        if chosen == SHARED_MEMORY:
            self._native(
                text, timeout, native_calls.combine, collective, value, target.memory, resolved
            )
        else:
            self._collective(
                text, timeout, collectives.prefix, value, resolved, count, target.memory
            )
        return target.result() if count else None

    # --- arguments -------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._group.engine.closed is not None:
            raise Error(self._group.engine.closed)
        if self._closed:
            raise Error("this communicator is closed")

    def _check_algorithm(self, collective: str, algorithm: str | None) -> None:
        self._group.choose(collective, 0, algorithm)

    def _scatter_blocks(self, x: Any, algorithm: str | None) -> Value | list[Any]:
        if x is None or arrays.wrap(x) is None:
            arguments.check_objects("scatter", x, self.size)
            arguments.linear_only("scatter", algorithm)
            return [objects.dump(item) for item in x]
        return arguments.split_value("scatter", x, self.size)

    def _reduction(
        self, collective: str, x: Any, op: Op, algorithm: str | None
    ) -> tuple[Value, Reduction]:
        value = arrays.wrap_operand(x)
        ops.check(op, value.dtype)
        nbytes = value.array.nbytes
        if collective == "reduce_scatter":
            nbytes //= self.size
        chosen = self._group.choose(
            collective,
            nbytes,
            algorithm,
            rank_order=not op.commutative,
            whole=not op.elementwise,
            native=native_calls.serves(op, value),
        )
        return value, collectives.Reduction(op, chosen)

    # --- running ---------------------------------------------------------------------------

    def _fold(
        self, x: Any, op: Op, root: int | None, algorithm: str | None, timeout: float | None
    ) -> Any:
        """Reduce objects: gather them, and combine them in rank order."""
        if algorithm is not None:
            raise ValueError("objects are reduced by gathering them: algorithm does not apply")
        parts = objects.dump(x)
        if root is None:
            text = f"all_reduce(object, op={op.signature})"
            values = self._collective(text, timeout, object_collectives.all_gather, parts, None)
        else:
            text = f"reduce(object, op={op.signature}, root={root})"
            values = self._collective(
                text, timeout, object_collectives.gather, parts, "linear", root
            )
        if values is None:
            return None
        assert callable(op.fn)
        return object_collectives.fold(values, op.fn)

    def _collective(
        self, text: str, timeout: float | None, steps: Callable[..., CallSteps], *args: Any
    ) -> Any:
        """Run a collective; `text` is its signature: what must be the same on all ranks."""
        self._check_open()
        group = self._group
        call = Call(text, group.number, group.context)
        signature = f"{text}\0{caller()}".encode()
        return group.engine.run(
            call, lambda: steps(group, signature, *args), self._timeout(timeout), collective=True
        )

    def _native(
        self, text: str, timeout: float | None, steps: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a collective in the compiled core."""
        self._check_open()
        group = self._group
        assert group.native is not None
        call = Call(text, group.number, group.context)
        return group.native.run(call, self._timeout(timeout), lambda: steps(group.native, *args))

    def _announces(self, collective: str, algorithm: str | None) -> bool:
        """Whether the root announces what comes in shared memory."""
        return self._group.choose(collective, 0, algorithm) == SHARED_MEMORY

    def _point_to_point(
        self, text: str, steps: Callable[[], CallSteps], timeout: float | None
    ) -> Any:
        self._check_open()
        call = Call(text, -1, self._group.context)
        return self._group.engine.run(call, steps, self._timeout(timeout), collective=False)

    def _timeout(self, timeout: float | None) -> float:
        if timeout is None:
            return self._world.op_timeout
        return arguments.check_timeout(timeout, "timeout")


def _name(rank: int) -> str:
    return {ANY_SOURCE: "ANY", PROC_NULL: "PROC_NULL"}.get(rank, str(rank))


def _fill_null(status: Status | None) -> None:
    if status is not None:
        status.source, status.tag, status.nbytes = PROC_NULL, ANY_TAG, 0


def _forced(algorithm: str | None) -> str:
    return f", algorithm={algorithm}" if algorithm else ""


def _text(reduction: Reduction) -> str:
    return f"op={reduction.op.signature}, algorithm={reduction.algorithm}"
