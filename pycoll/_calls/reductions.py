"""Collectives that combine values, prepared: arguments are checked, and nothing is sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._calls.group import SHARED_MEMORY
from pycoll._calls.prepared import Prepared
from pycoll._calls.preparing import HIERARCHICAL, Preparing, reduction_text
from pycoll._calls.shared_memory import Native
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    from pycoll._arrays import objects, operators
    from pycoll._arrays.operators import Op
    from pycoll._arrays.types import MaybeNone, Reducer, T
    from pycoll._calls import (
        arguments,
        collectives,
        many,
        object_collectives,
        shared_memory_calls,
        two_level,
    )
    from pycoll._calls.two_level import TwoLevel
else:  # a program that only calls barrier() imports no NumPy
    arguments = LazyModule("pycoll._calls.arguments")
    collectives = LazyModule("pycoll._calls.collectives")
    two_level = LazyModule("pycoll._calls.two_level")
    many = LazyModule("pycoll._calls.many")
    shared_memory_calls = LazyModule("pycoll._calls.shared_memory_calls")
    object_collectives = LazyModule("pycoll._calls.object_collectives")
    objects = LazyModule("pycoll._arrays.objects")
    operators = LazyModule("pycoll._arrays.operators")


class Reductions(Preparing):
    """Prepares collectives that combine values; a part of `Calls`."""

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


def _folded(values: Sequence[Any], op: Op) -> Any:
    assert callable(op.fn)
    return object_collectives.fold(values, op.fn)
