"""Calls whose arguments were checked: what a communicator runs, starts, or starts again and again.

For each method of a communicator there is one here that finds everything a user can get wrong
alone, before anything is sent, and returns the call as a `Prepared`. The blocking method runs it,
its non-blocking twin starts it, a persistent request prepares and starts it each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pycoll._calls.group import IN_CORE, SHARED_MEMORY, Group
from pycoll._calls.prepared import Prepared
from pycoll._calls.shared_memory import Native
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, PROC_NULL, Held, Status
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    from pycoll import schedules
    from pycoll._arrays import conversion, objects, operators
    from pycoll._arrays.conversion import Value
    from pycoll._arrays.operators import Op
    from pycoll._arrays.types import A, MaybeNone, Reducer, T
    from pycoll._calls import (
        arguments,
        collectives,
        many,
        object_collectives,
        p2p,
        rooted,
        shared_memory_calls,
        shared_memory_rooted,
        two_level,
        uneven,
    )
    from pycoll._calls.arguments import Target
    from pycoll._calls.collectives import Reduction
    from pycoll._calls.group import Bound
    from pycoll._calls.two_level import TwoLevel
    from pycoll._gpu import cuda_ipc
else:  # a program that only calls barrier() imports no NumPy
    rooted, arguments = LazyModule("pycoll._calls.rooted"), LazyModule("pycoll._calls.arguments")
    conversion, collectives = (
        LazyModule("pycoll._arrays.conversion"),
        LazyModule("pycoll._calls.collectives"),
    )
    cuda_ipc, two_level = LazyModule("pycoll._gpu.cuda_ipc"), LazyModule("pycoll._calls.two_level")
    many = LazyModule("pycoll._calls.many")
    shared_memory_rooted = LazyModule("pycoll._calls.shared_memory_rooted")
    shared_memory_calls = LazyModule("pycoll._calls.shared_memory_calls")
    object_collectives, objects = (
        LazyModule("pycoll._calls.object_collectives"),
        LazyModule("pycoll._arrays.objects"),
    )
    operators, p2p, uneven = (
        LazyModule("pycoll._arrays.operators"),
        LazyModule("pycoll._calls.p2p"),
        LazyModule("pycoll._calls.uneven"),
    )
    schedules = LazyModule("pycoll.schedules")


Matched = tuple[Status, Held | None]
"""What a matched probe has found; None: the message of PROC_NULL."""

BY_CUDA_IPC = Choice("linear")
"""How ranks that leave the core to offer to each other move: each value is copied once."""

HIERARCHICAL = "hierarchical"
"""The algorithm that may run in two levels."""


class Calls:
    """Prepares the calls of one communicator; arguments as of the methods of `Communicator`.

    Args:
        group: the communicator's ranks.
        blocking: whether the caller waits in the call. Only then it may run in the compiled core.
    """

    def __init__(self, group: Group, blocking: bool) -> None:
        self._group = group
        self._blocking = blocking
        self._prefix = "" if blocking else "i"
        self._two_level: TwoLevel | None = None

    # --- collectives -----------------------------------------------------------------------

    def barrier(self, *, algorithm: str | None = None) -> Prepared[None]:
        """Prepare a barrier."""
        group, chosen = self._group, self._choose("barrier", 0, algorithm)
        text = f"{self._prefix}barrier(algorithm={chosen})"
        return self._scheduled(
            text,
            lambda: collectives.barrier(group, chosen),
            Native.barrier if chosen.name == SHARED_MEMORY else None,
            by_two_levels=self._by_two_levels(
                text, chosen, 0, lambda both: two_level.barrier(both)
            ),
        )

    def broadcast(
        self, x: T | None, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared[T | Any]:
        """Prepare a broadcast."""
        group, root = self._group, arguments.check_root(root, self._group.size)
        announces = self._choose("broadcast", 0, algorithm).name == SHARED_MEMORY
        outgoing = p2p.Outgoing(x) if group.rank == root else None
        mine = None if outgoing is not None else arguments.fillable(x)
        forced = None if algorithm == SHARED_MEMORY else algorithm
        gpu = conversion.here()
        value = outgoing.value if outgoing is not None else None
        nbytes = outgoing.nbytes if outgoing is not None else 0
        offers = algorithm is None and rooted.offers(group, "broadcast", value, nbytes)

        def native(core: Native) -> Any:
            return shared_memory_rooted.broadcast(core, group, outgoing, mine, root, gpu, offers)

        return Prepared(
            f"{self._prefix}broadcast(root={root}{_forced(algorithm)})",
            lambda signature: rooted.broadcast(
                group, signature, outgoing, mine, BY_CUDA_IPC.name if offers else forced, root, gpu
            ),
            native if announces else None,
            lambda got: x if outgoing is not None else conversion.unwrapped(got),
            reads=() if offers else _arrays(value),
        )

    def reduce(
        self,
        x: T,
        op: Reducer = "sum",
        root: int = 0,
        out: Any = None,
        *,
        algorithm: str | None = None,
    ) -> Prepared[T | MaybeNone]:
        """Prepare a reduce."""
        group, root = self._group, arguments.check_root(root, self._group.size)
        resolved = operators.resolve(op)
        is_root = group.rank == root
        if arguments.reduces_objects(x, op):
            arguments.no_out(out if is_root else None)
            return self._fold(x, resolved, root, algorithm)
        value, reduction = self._reduction("reduce", x, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape) if is_root else None
        if target is not None:
            target.check_overlap(value, (target.value.place, value.place))
        memory = target.memory if target is not None else None

        def native(core: Native) -> None:
            shared_memory_calls.combine(core, "reduce", value, memory, resolved, root)

        type_text = collectives.type_text(value)
        return self._scheduled(
            f"{self._prefix}reduce({type_text}, {reduction_text(reduction)}, root={root})",
            lambda: collectives.reduce(group, value, reduction, root, memory),
            native if reduction.choice.name == SHARED_MEMORY else None,
            lambda _: target.result() if target is not None else None,
            reads=(value,),
        )

    def all_reduce(
        self, x: T, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> Prepared[T]:
        """Prepare an all_reduce."""
        group, resolved = self._group, operators.resolve(op)
        if arguments.reduces_objects(x, op):
            arguments.no_out(out)
            return self._fold(x, resolved, None, algorithm)
        value, reduction = self._reduction("all_reduce", x, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value, (target.value.place, value.place))
        memory = target.memory

        in_pieces = memory is target.array and self._in_pieces(resolved, value, target.value)

        def native(core: Native) -> None:
            if in_pieces:
                shared_memory_calls.all_reduce(core, value, target.value, resolved)
            else:
                shared_memory_calls.combine(core, "all_reduce", value, memory, resolved)

        def by_two_levels(both: TwoLevel) -> None:
            two_level.all_reduce(both, value, memory, resolved)

        type_text = collectives.type_text(value)
        text = f"{self._prefix}all_reduce({type_text}, {reduction_text(reduction)})"
        return self._scheduled(
            text,
            lambda: collectives.all_reduce(group, value, reduction, memory),
            native if reduction.choice.name == SHARED_MEMORY else None,
            lambda _: target.result(),
            by_two_levels=(
                self._by_two_levels(text, reduction.choice, memory.nbytes, by_two_levels)
                if reduction.choice.name == HIERARCHICAL and self._serves(resolved, value)
                else None
            ),
            reads=() if in_pieces else (value,),
        )

    def all_reduce_many(
        self,
        xs: Sequence[T],
        op: Reducer = "sum",
        out: Sequence[Any] | None = None,
        *,
        algorithm: str | None = None,
    ) -> Prepared[list[T]]:
        """Prepare an all_reduce_many."""
        self._check_algorithm("all_reduce", algorithm)
        return many.prepare_all_reduce_many(self._group, xs, op, out, algorithm, self._blocking)

    def gather(
        self, x: Any, root: int = 0, out: Any = None, *, algorithm: str | None = None
    ) -> Prepared[Any]:
        """Prepare a gather."""
        group, root = self._group, arguments.check_root(root, self._group.size)
        self._check_algorithm("gather", algorithm)
        is_root = group.rank == root
        value = conversion.wrap(x)
        if value is None:
            arguments.no_out(out if is_root else None)
            parts = objects.dump(x)
            choice = Choice(arguments.by_messages("gather", algorithm) or "linear")
            return Prepared(
                f"{self._prefix}gather(object, root={root}, algorithm={choice})",
                lambda signature: object_collectives.gather(group, signature, parts, choice, root),
            )
        chosen = self._choose("gather", value.array.nbytes, algorithm)
        shape = (group.size, *value.array.shape)
        target = arguments.Target(out, value, shape) if is_root else None
        if target is not None:
            target.check_overlap(value)
        memory = target.memory if target is not None else None

        offers = self._offers(algorithm, chosen, value, value.array.nbytes, target)
        way = BY_CUDA_IPC if chosen == IN_CORE else chosen

        def native(core: Native) -> Any:
            return shared_memory_calls.move(core, "gather", value, memory, root, offers)

        type_text = collectives.type_text(value)
        return self._scheduled(
            f"{self._prefix}gather({type_text}, root={root}, algorithm={chosen})",
            lambda: collectives.gather(group, value, way, root, memory),
            native if chosen.name == SHARED_MEMORY else None,
            lambda _: target.result() if target is not None else None,
            reads=() if offers else (value,),
        )

    def all_gather(self, x: Any, out: Any = None, *, algorithm: str | None = None) -> Prepared[Any]:
        """Prepare an all_gather."""
        group = self._group
        self._check_algorithm("all_gather", algorithm)
        value = conversion.wrap(x)
        if value is None:
            arguments.no_out(out)
            parts = objects.dump(x)
            forced = None if algorithm == SHARED_MEMORY else algorithm
            in_core = algorithm == SHARED_MEMORY and group.native is not None
            return Prepared(
                f"{self._prefix}all_gather(object{_forced(algorithm)})",
                lambda signature: object_collectives.all_gather(group, signature, parts, forced),
                (lambda core: shared_memory_calls.all_gather_objects(core, parts))
                if in_core
                else None,
            )
        chosen = self._choose("all_gather", value.array.nbytes, algorithm)
        shape = (group.size, *value.array.shape)
        target = arguments.Target(out, value, shape)
        row = target.value.place[group.rank, ...]
        target.check_overlap(value, (row, value.place))
        memory = target.memory

        offers = self._offers(algorithm, chosen, value, value.array.nbytes, target)
        way = BY_CUDA_IPC if chosen == IN_CORE else chosen

        def native(core: Native) -> Any:
            return shared_memory_calls.move(core, "all_gather", value, memory, offers=offers)

        return self._scheduled(
            f"{self._prefix}all_gather({collectives.type_text(value)}, algorithm={chosen})",
            lambda: collectives.all_gather(group, value, way, memory),
            native if chosen.name == SHARED_MEMORY else None,
            lambda _: target.result(),
            reads=() if offers else (value,),
        )

    def scatter(
        self, x: Any, root: int = 0, out: Any = None, *, algorithm: str | None = None
    ) -> Prepared[Any]:
        """Prepare a scatter."""
        group, root = self._group, arguments.check_root(root, self._group.size)
        announces = self._choose("scatter", 0, algorithm).name == SHARED_MEMORY
        blocks = self._scatter_blocks(x) if group.rank == root else None
        wanted = arguments.fillable_out(out)
        if isinstance(blocks, list):
            arguments.no_out(out)
        elif blocks is not None and out is not None:
            arguments.Target(out, blocks, blocks.array.shape[1:]).check_overlap(blocks)
        forced = None if algorithm == SHARED_MEMORY else algorithm
        gpu = conversion.here()
        whole = blocks if isinstance(blocks, conversion.Value) else None
        nbytes = whole.array.nbytes // group.size if whole is not None else 0
        offers = algorithm is None and rooted.offers(group, "scatter", whole, nbytes)

        def native(core: Native) -> Any:
            return shared_memory_rooted.scatter(core, blocks, root, gpu, wanted, offers)

        return Prepared(
            f"{self._prefix}scatter(root={root}{_forced(algorithm)})",
            lambda signature: rooted.scatter(
                group, signature, blocks, BY_CUDA_IPC.name if offers else forced, root, gpu, wanted
            ),
            native if announces else None,
            lambda received: scattered(out, wanted, *received),
            reads=() if offers else _arrays(whole),
        )

    def reduce_scatter(
        self, x: Any, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> Prepared[Any]:
        """Prepare a reduce_scatter."""
        group, resolved = self._group, operators.resolve(op)
        value = arguments.split_value("reduce_scatter", x, group.size)
        reduction = self._choose_reduction("reduce_scatter", value, resolved, algorithm)
        row = value.place[group.rank, ...]
        target = arguments.Target(out, value, value.array.shape[1:])
        target.check_overlap(value, (target.value.place, row))
        memory = target.memory

        def native(core: Native) -> None:
            shared_memory_calls.combine(core, "reduce_scatter", value, memory, resolved)

        type_text = collectives.type_text(value)
        return self._scheduled(
            f"{self._prefix}reduce_scatter({type_text}, {reduction_text(reduction)})",
            lambda: collectives.reduce_scatter(group, value, reduction, memory),
            native if reduction.choice.name == SHARED_MEMORY else None,
            lambda _: target.result(),
            reads=(value,),
        )

    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str | None = None) -> Prepared[Any]:
        """Prepare an all_to_all."""
        group = self._group
        self._check_algorithm("all_to_all", algorithm)
        if conversion.wrap(x) is None:
            arguments.no_out(out)
            arguments.check_objects("all_to_all", x, group.size)
            blocks = [objects.dump(item) for item in x]
            in_core = algorithm == SHARED_MEMORY and group.native is not None
            name = "pairwise" if algorithm in (None, SHARED_MEMORY) else algorithm
            choice = Choice(name)
            return Prepared(
                f"{self._prefix}all_to_all(object{_forced(algorithm)})",
                lambda signature: object_collectives.all_to_all(group, signature, blocks, choice),
                (lambda core: shared_memory_calls.all_to_all_objects(core, blocks))
                if in_core
                else None,
            )
        value = arguments.split_value("all_to_all", x, group.size)
        chosen = self._choose("all_to_all", value.array.nbytes // group.size, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value, (target.value.place, value.place))
        if out is not None and conversion.overlap(target.value.place, value.place):
            # In place: rows come in before those that were there have left.
            if value.stage is not None:
                target.value.follow(value)
            else:
                value = conversion.Value(value.array.copy(), value.dtype, value.kind)
        memory = target.memory

        offers = self._offers(algorithm, chosen, value, value.array.nbytes // group.size, target)
        way = BY_CUDA_IPC if chosen == IN_CORE else chosen

        def native(core: Native) -> Any:
            return shared_memory_calls.move(core, "all_to_all", value, memory, offers=offers)

        return self._scheduled(
            f"{self._prefix}all_to_all({collectives.type_text(value)}, algorithm={chosen})",
            lambda: collectives.all_to_all(group, value, way, memory),
            native if chosen.name == SHARED_MEMORY else None,
            lambda _: target.result(),
            reads=() if offers else (value,),
        )

    def scan(
        self, x: T, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> Prepared[T]:
        """Prepare a scan."""
        return self._scan("scan", x, op, out, algorithm)

    def exscan(
        self, x: T, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> Prepared[T | MaybeNone]:
        """Prepare an exscan."""
        return self._scan("exscan", x, op, out, algorithm)

    def _scheduled(
        self,
        text: str,
        bound: Callable[[], Bound],
        native: Callable[[Native], Any] | None = None,
        finish: Callable[[Any], Any] | None = None,
        by_two_levels: Callable[[bytes, float], Any] | None = None,
        reads: Sequence[Value] = (),
    ) -> Prepared[Any]:
        """Prepare a call that runs one schedule; the arguments are as of `Prepared`."""
        group = self._group

        def steps(signature: bytes) -> CallSteps:
            return collectives.run(group, signature, bound())

        return Prepared(text, steps, native, finish, by_two_levels, reads=reads, bound=bound)

    # --- uneven blocks ---------------------------------------------------------------------

    def gatherv(self, x: A, root: int = 0, out: Any = None) -> Prepared[list[A] | MaybeNone]:
        """Prepare a gatherv."""
        return uneven.prepare_gatherv(self._group, x, root, out, self._blocking)

    def all_gatherv(self, x: A, out: Any = None) -> Prepared[list[A]]:
        """Prepare an all_gatherv."""
        return uneven.prepare_all_gatherv(self._group, x, out, self._blocking)

    def scatterv(self, xs: Sequence[A] | None, root: int = 0, out: Any = None) -> Prepared[A | Any]:
        """Prepare a scatterv."""
        return uneven.prepare_scatterv(self._group, xs, root, out, self._blocking)

    def all_to_allv(self, xs: Sequence[A], out: Any = None) -> Prepared[list[A]]:
        """Prepare an all_to_allv."""
        return uneven.prepare_all_to_allv(self._group, xs, out, self._blocking)

    def reduce_scatterv(
        self,
        x: A,
        counts: Sequence[int],
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
    ) -> Prepared[A]:
        """Prepare a reduce_scatterv."""
        self._check_algorithm("reduce_scatter", algorithm)
        return uneven.prepare_reduce_scatterv(
            self._group, x, counts, op, out, algorithm, self._blocking
        )

    # --- point to point --------------------------------------------------------------------

    def send(self, x: Any, dest: int, tag: int = 0) -> Prepared[None]:
        """Prepare a send."""
        return self._send("send", x, dest, tag)

    def ssend(self, x: Any, dest: int, tag: int = 0) -> Prepared[None]:
        """Prepare a send that is done when it is received."""
        return self._send("ssend", x, dest, tag)

    def bsend(self, x: Any, dest: int, tag: int = 0) -> Prepared[None]:
        """Prepare a send that copies its value."""
        group = self._group
        dest, tag = arguments.check_peer(dest, "dest", group.size), arguments.check_tag(tag)
        outgoing = p2p.Outgoing(x)
        outgoing.detach()
        text = f"{self._prefix}bsend({outgoing.text}, dest={_name(dest)}, tag={tag})"

        def steps(_: bytes) -> CallSteps:
            if dest == PROC_NULL:
                return _nothing()
            return p2p.buffered_send(group, outgoing, dest, tag, text)

        return Prepared(text, steps, collective=False)

    def _send(self, name: str, x: Any, dest: int, tag: int) -> Prepared[None]:
        group = self._group
        dest, tag = arguments.check_peer(dest, "dest", group.size), arguments.check_tag(tag)
        outgoing = p2p.Outgoing(x, is_synchronous=name == "ssend")
        return Prepared(
            f"{self._prefix}{name}({outgoing.text}, dest={_name(dest)}, tag={tag})",
            lambda _: _nothing() if dest == PROC_NULL else p2p.send(group, outgoing, dest, tag),
            collective=False,
        )

    def recv(
        self,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
    ) -> Prepared[Any]:
        """Prepare a recv."""
        group = self._group
        source = arguments.check_source(source, group.size)
        tag = arguments.check_tag(tag, wildcard=True)
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        gpu = conversion.here() if target is None else None

        def steps(_: bytes) -> CallSteps:
            if source != PROC_NULL:
                return p2p.receive(group, source, tag, target, status, gpu)
            _fill_null(status)
            return _nothing(out)

        text = f"{self._prefix}recv(source={_name(source)}, tag={_name(tag)})"
        return Prepared(text, steps, collective=False, receives=True)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        source: int = ANY_SOURCE,
        sendtag: int = 0,
        recvtag: int = ANY_TAG,
        out: Any = None,
        status: Status | None = None,
    ) -> Prepared[Any]:
        """Prepare a sendrecv."""
        group = self._group
        dest = arguments.check_peer(dest, "dest", group.size)
        source = arguments.check_source(source, group.size)
        sendtag, recvtag = arguments.check_tag(sendtag), arguments.check_tag(recvtag, wildcard=True)
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        if out is not x:
            arguments.check_apart(x, target)
        outgoing = None if dest == PROC_NULL else p2p.Outgoing(x)
        if out is x and outgoing is not None:
            outgoing.detach()
            if target is not None and outgoing.value is not None:
                target.follow(outgoing.value)
        gpu = conversion.here() if target is None else None

        def steps(_: bytes) -> CallSteps:
            if source == PROC_NULL:
                _fill_null(status)
                receiving = _nothing(out)
            else:
                receiving = p2p.receive(group, source, recvtag, target, status, gpu)
            return p2p.send_receive(group, outgoing, (dest, sendtag), receiving)

        places = f"dest={_name(dest)}, source={_name(source)}, tag={_name(sendtag)}"
        return Prepared(f"{self._prefix}sendrecv({places})", steps, collective=False)

    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Status]:
        """Prepare a probe."""
        return self._probe("probe", source, tag)

    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Status | None]:
        """Prepare an iprobe."""
        return self._probe("iprobe", source, tag)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Matched]:
        """Prepare an mprobe."""
        return self._probe("mprobe", source, tag)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prepared[Matched | None]:
        """Prepare an improbe."""
        return self._probe("improbe", source, tag)

    def _probe(self, name: str, source: int, tag: int) -> Prepared[Any]:
        group = self._group
        source = arguments.check_source(source, group.size)
        tag = arguments.check_tag(tag, wildcard=True)

        def steps(_: bytes) -> CallSteps:
            if source == PROC_NULL:
                return _nothing((Status(), None) if name.endswith("mprobe") else Status())
            return p2p.PROBES[name](group, source, tag)

        text = f"{name}(source={_name(source)}, tag={_name(tag)})"
        return Prepared(text, steps, collective=False)

    def receive_held(
        self, found: Status, held: Held | None, out: Any, status: Status | None
    ) -> Prepared[Any]:
        """Prepare the receive of a message that a matched probe has found; None: there is none."""
        group = self._group
        arguments.check_status(status)
        target = arguments.fillable_out(out)
        gpu = conversion.here() if target is None else None

        def steps(_: bytes) -> CallSteps:
            if held is not None:
                return p2p.receive_held(group, held, target, status, gpu)
            _fill_null(status)
            return _nothing(out)

        which = f"source={_name(found.source)}, tag={_name(found.tag)}"
        text = f"{self._prefix}recv(the message of {which})"
        return Prepared(text, steps, collective=False, receives=True)

    # --- what several share ----------------------------------------------------------------

    def _choose(
        self,
        collective: str,
        nbytes: int,
        algorithm: str | None,
        rank_order: bool = False,
        whole: bool = False,
        native: bool = True,
    ) -> Choice:
        if not isinstance(algorithm, str | None):
            raise TypeError(f"algorithm is a name, not a {type(algorithm).__name__}")
        self._refuse_core(collective, algorithm)
        return self._group.choose(
            collective, nbytes, algorithm, rank_order, whole, native and self._blocking
        )

    def _offers(
        self, forced: str | None, choice: Choice, x: Value, nbytes: int, target: Target | None
    ) -> bool:
        """Whether this rank would offer x, in messages of so many bytes, instead of using the core.

        Without `target` it has no part of the result.
        """
        if x.stage is None or choice != IN_CORE or forced:
            return False
        result = target.value.stage if target is not None else x.stage
        group = self._group
        return cuda_ipc.is_for_all(group.engine, group.context, x.stage, nbytes, result)

    def _by_two_levels(
        self, text: str, choice: Choice, nbytes: int, steps: Callable[[TwoLevel], Any]
    ) -> Callable[[bytes, float], Any] | None:
        """Return how a call runs in two levels, None: it does not."""
        group = self._group
        if choice.name != HIERARCHICAL or not self._blocking or not two_level.serve(group, nbytes):
            return None
        if self._two_level is None:
            self._two_level = two_level.TwoLevel(group)
        both = self._two_level
        return lambda signature, timeout: both.run(text, signature, timeout, lambda: steps(both))

    def _check_algorithm(self, collective: str, algorithm: str | None) -> None:
        self._choose(collective, 0, algorithm)

    def _refuse_core(self, collective: str, algorithm: str | None) -> None:
        if algorithm == SHARED_MEMORY and not self._blocking and self._group.size > 1:
            raise ValueError(
                f"i{collective} cannot use {SHARED_MEMORY}, which takes all ranks at the same "
                f"time; use {' or '.join(schedules.names(collective))}"
            )

    def _scan(
        self, collective: str, x: Any, op: Reducer, out: Any, algorithm: str | None
    ) -> Prepared[Any]:
        group, resolved = self._group, operators.resolve(op)
        self._check_algorithm(collective, algorithm)
        count = group.rank + (collective == "scan")
        if arguments.reduces_objects(x, op):
            arguments.no_out(out)
            parts = objects.dump(x)
            return Prepared(
                f"{self._prefix}{collective}(object, op={resolved.signature})",
                lambda signature: object_collectives.all_gather(group, signature, parts, None),
                finish=lambda values: _folded(values[:count], resolved) if count else None,
            )
        value, reduction = self._reduction(collective, x, resolved, algorithm)
        bind = collectives.scan if collective == "scan" else collectives.exscan
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value)
        memory = target.memory

        def native(core: Native) -> None:
            shared_memory_calls.combine(core, collective, value, memory, resolved)

        type_text = collectives.type_text(value)
        return self._scheduled(
            f"{self._prefix}{collective}({type_text}, {reduction_text(reduction)})",
            lambda: bind(group, value, reduction, memory),
            native if reduction.choice.name == SHARED_MEMORY else None,
            lambda _: target.result() if count else None,
            reads=(value,),
        )

    def _fold(self, x: Any, op: Op, root: int | None, algorithm: str | None) -> Prepared[Any]:
        """Reduce objects: gather them, and combine them in rank order."""
        if algorithm is not None:
            raise ValueError("objects are reduced by gathering them: algorithm does not apply")
        group, parts = self._group, objects.dump(x)

        def finish(values: Any) -> Any:
            return None if values is None else _folded(values, op)

        if root is None:
            return Prepared(
                f"{self._prefix}all_reduce(object, op={op.signature})",
                lambda signature: object_collectives.all_gather(group, signature, parts, None),
                finish=finish,
            )
        return Prepared(
            f"{self._prefix}reduce(object, op={op.signature}, root={root})",
            lambda signature: object_collectives.gather(
                group, signature, parts, object_collectives.LINEAR, root
            ),
            finish=finish,
        )

    def _scatter_blocks(self, x: Any) -> Value | list[Any]:
        if x is None or conversion.wrap(x) is None:
            arguments.check_objects("scatter", x, self._group.size)
            return [objects.dump(item) for item in x]
        return arguments.split_value("scatter", x, self._group.size)

    def _reduction(
        self, collective: str, x: Any, op: Op, algorithm: str | None
    ) -> tuple[Value, Reduction]:
        value = conversion.wrap_operand(x)
        return value, self._choose_reduction(collective, value, op, algorithm)

    def _choose_reduction(
        self, collective: str, value: Value, op: Op, algorithm: str | None
    ) -> Reduction:
        operators.check(op, value.dtype)
        operators.check_whole(op, value.array.ndim)
        nbytes = value.array.nbytes
        if collective == "reduce_scatter":
            nbytes //= self._group.size
        chosen = self._choose(
            collective,
            nbytes,
            algorithm,
            rank_order=not op.commutative,
            whole=not op.elementwise,
            native=self._serves(op, value),
        )
        return collectives.Reduction(op, chosen)

    def _in_pieces(self, op: Op, x: Value, result: Value) -> bool:
        """Whether the core's all_reduce copies to and from a GPU while it reduces."""
        native = self._group.native
        if native is None or (x.stage is None and result.stage is None):
            return False
        return x.array.nbytes > native.core.piece_nbytes and shared_memory_calls.serves(op, x)

    def _serves(self, op: Op, value: Value) -> bool:
        """Whether the core may combine: all ranks, or in two levels where order is no matter.

        Between hosts the same algorithm also runs by messages, and must give the same bits.
        """
        order_is_no_matter = value.dtype.family in ("b", "i", "u")
        return shared_memory_calls.serves(op, value) and (
            self._group.native is not None or order_is_no_matter
        )


def reduction_text(reduction: Reduction) -> str:
    """Return operator and algorithm as a call's text shows them."""
    return f"op={reduction.op.signature}, algorithm={reduction.choice}"


def _arrays(value: Value | None) -> tuple[Value, ...]:
    return (value,) if value is not None else ()


def scattered(out: Any, wanted: Value | None, value: Value | None, data: memoryview) -> Any:
    """Return what a scatter returns.

    Args:
        out: the caller's, `wanted` what it is as a Value; or None.
        value: the block that has come, which is `wanted` if that could have it; None: an object.
        data: the block's bytes, or the object's.
    """
    if value is None:
        arguments.no_out(out)
        return objects.load(data)
    if wanted is None or value is wanted:
        return conversion.unwrap(value)
    checked = conversion.check_out(out, value.dtype, value.array.shape)
    checked.array[...] = value.array
    return conversion.unwrap(checked)


def _folded(values: Sequence[Any], op: Op) -> Any:
    assert callable(op.fn)
    return object_collectives.fold(values, op.fn)


def _nothing(result: Any = None) -> CallSteps:
    """A call that is done at once."""
    yield from ()
    return result


def _name(rank: int) -> str:
    if rank >= 0:
        return str(rank)
    return "PROC_NULL" if rank == PROC_NULL else "ANY"


def _fill_null(status: Status | None) -> None:
    if status is not None:
        status.source, status.tag, status.nbytes = PROC_NULL, ANY_TAG, 0


def _forced(algorithm: str | None) -> str:
    return f", algorithm={algorithm}" if algorithm else ""


def resumed(
    group: Group, name: str, heard: memoryview, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Prepared[Any]:
    """Prepare a blocking collective of uneven blocks of which the core has done the first round.

    Args:
        group: of its communicator.
        name: gatherv, all_gatherv, scatterv or all_to_allv.
        heard: what the other ranks have said in that round.
        args, keywords: of the call.
    """
    import inspect  # late: few calls need it

    bound = inspect.signature(getattr(Calls, name)).bind(None, *args, **keywords)
    bound.apply_defaults()
    prepare = getattr(uneven, f"prepare_{name}")
    prepared: Prepared[Any] = prepare(group, *bound.args[1:], blocking=True, heard=heard)
    return prepared


def sign_uneven(name: str, code: int, root: int) -> tuple[str, int]:
    """See `uneven.sign`, which is imported when such a call is made."""
    return uneven.sign(name, code, root)
