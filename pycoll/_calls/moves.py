"""Collectives that move values, prepared: arguments are checked, and nothing is sent yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._calls.group import IN_CORE, SHARED_MEMORY
from pycoll._calls.prepared import Prepared
from pycoll._calls.preparing import BY_CUDA_IPC, Preparing, forced_text
from pycoll._calls.shared_memory import Native
from pycoll._selection.select import Choice
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    from pycoll._arrays import conversion, objects
    from pycoll._arrays.types import T
    from pycoll._arrays.value import Value
    from pycoll._calls import (
        arguments,
        collectives,
        object_collectives,
        p2p,
        rooted,
        shared_memory_calls,
        shared_memory_rooted,
        two_level,
    )
else:  # a program that only calls barrier() imports no NumPy
    rooted = LazyModule("pycoll._calls.rooted")
    arguments = LazyModule("pycoll._calls.arguments")
    conversion = LazyModule("pycoll._arrays.conversion")
    collectives = LazyModule("pycoll._calls.collectives")
    two_level = LazyModule("pycoll._calls.two_level")
    shared_memory_rooted = LazyModule("pycoll._calls.shared_memory_rooted")
    shared_memory_calls = LazyModule("pycoll._calls.shared_memory_calls")
    object_collectives = LazyModule("pycoll._calls.object_collectives")
    objects = LazyModule("pycoll._arrays.objects")
    p2p = LazyModule("pycoll._calls.p2p")


class Moves(Preparing):
    """Prepares barriers and collectives that move values; a part of `Calls`."""

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
            f"{self._prefix}broadcast(root={root}{forced_text(algorithm)})",
            lambda signature: rooted.broadcast(
                group, signature, outgoing, mine, BY_CUDA_IPC.name if offers else forced, root, gpu
            ),
            native if announces else None,
            lambda got: x if outgoing is not None else conversion.unwrapped(got),
            reads=() if offers else _arrays(value),
        )

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
                f"{self._prefix}all_gather(object{forced_text(algorithm)})",
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
            f"{self._prefix}scatter(root={root}{forced_text(algorithm)})",
            lambda signature: rooted.scatter(
                group, signature, blocks, BY_CUDA_IPC.name if offers else forced, root, gpu, wanted
            ),
            native if announces else None,
            lambda received: scattered(out, wanted, *received),
            reads=() if offers else _arrays(whole),
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
                f"{self._prefix}all_to_all(object{forced_text(algorithm)})",
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

    def _scatter_blocks(self, x: Any) -> Value | list[Any]:
        if x is None or conversion.wrap(x) is None:
            arguments.check_objects("scatter", x, self._group.size)
            return [objects.dump(item) for item in x]
        return arguments.split_value("scatter", x, self._group.size)


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
