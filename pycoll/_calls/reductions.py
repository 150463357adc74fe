"""Collectives that combine values, prepared: arguments are checked, and nothing is sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion, objects, operators
from pycoll._calls import (
    arguments,
    collectives,
    gathered_reductions,
    lists,
    many,
    number_plans,
    object_collectives,
    on_gpus,
    packings,
)
from pycoll._calls.call_plan import CallPlan
from pycoll._calls.preparing import Preparing
from pycoll._calls.scheduled import ArrayPlan
from pycoll._support.lazy_import import LazyModule
from pycoll._transports._core import OPS

if TYPE_CHECKING:
    from pycoll import _dtypes as dtypes
    from pycoll import schedules
    from pycoll._arrays.operators import Op
    from pycoll._arrays.types import MaybeNone, Reducer, T
    from pycoll._arrays.value import Value
    from pycoll._calls.arguments import Target
    from pycoll._calls.group import Numbered
    from pycoll._runtime.task import CallSteps
    from pycoll._selection.select import Choice
else:  # a program that only calls barrier() imports no NumPy
    dtypes = LazyModule("pycoll._dtypes")
    schedules = LazyModule("pycoll.schedules")


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
    ) -> CallPlan[T | MaybeNone]:
        group, root = self._group, arguments.check_root(root, self._group.size)
        is_root = group.rank == root
        number = self._of_number("reduce", x, op, algorithm, out if is_root else None, root)
        if number is not None:
            return number
        resolved = operators.resolve(op)
        if arguments.reduces_objects(x, op):
            arguments.no_out(out if is_root else None)
            _no_algorithm(algorithm)
            text = f"{self._prefix}reduce(object, op={resolved.signature}, root={root})"
            return self._reduced_objects(text, x, resolved, group.size, root)
        value = conversion.wrap_operand(x)
        chosen = self._choose_reduction("reduce", value, resolved, algorithm)
        target = None
        if is_root:
            target = arguments.Target(out, value, value.array.shape)
            target.check_overlap(value, (target.value.place, value.place))
        return self._combined("reduce", value, resolved, chosen, target, algorithm, root)

    def all_reduce(
        self, x: T, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> CallPlan[T]:
        number = self._of_number("all_reduce", x, op, algorithm, out)
        if number is not None:
            return number
        resolved = operators.resolve(op)
        if arguments.reduces_objects(x, op):
            arguments.no_out(out)
            _no_algorithm(algorithm)
            text = f"{self._prefix}all_reduce(object, op={resolved.signature})"
            return self._reduced_objects(text, x, resolved, self._group.size)
        value = conversion.wrap_operand(x)
        chosen = self._choose_reduction("all_reduce", value, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value, (target.value.place, value.place))
        return self._combined("all_reduce", value, resolved, chosen, target, algorithm)

    def all_reduce_many(
        self,
        xs: Sequence[T],
        op: Reducer = "sum",
        out: Sequence[Any] | None = None,
        *,
        algorithm: str | None = None,
    ) -> CallPlan[list[T]]:
        self._check_algorithm("all_reduce", algorithm)
        return many.prepare_all_reduce_many(self._group, xs, op, out, algorithm, self._blocking)

    def reduce_scatter(
        self, x: Any, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> CallPlan[Any]:
        group, resolved = self._group, operators.resolve(op)
        value = lists.one_array("reduce_scatter", x, group.size)
        if value is None:
            value = arguments.split_value("reduce_scatter", x, group.size)
        chosen = self._choose_reduction("reduce_scatter", value, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape[1:])
        target.check_overlap(value, (target.value.place, value.place[group.rank, ...]))
        return self._combined("reduce_scatter", value, resolved, chosen, target, algorithm)

    def scan(
        self, x: T, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> CallPlan[T]:
        return self._scan("scan", x, op, out, algorithm)

    def exscan(
        self, x: T, op: Reducer = "sum", out: Any = None, *, algorithm: str | None = None
    ) -> CallPlan[T | MaybeNone]:
        return self._scan("exscan", x, op, out, algorithm)

    def _scan(
        self, collective: str, x: Any, op: Reducer, out: Any, algorithm: str | None
    ) -> CallPlan[Any]:
        number = self._of_number(collective, x, op, algorithm, out)
        if number is not None:
            return number
        group, resolved = self._group, operators.resolve(op)
        self._check_algorithm(collective, algorithm)
        if arguments.reduces_objects(x, op):
            arguments.no_out(out)
            text = f"{self._prefix}{collective}(object, op={resolved.signature})"
            count = group.rank + (collective == "scan")
            return self._reduced_objects(text, x, resolved, count)
        value = conversion.wrap_operand(x)
        chosen = self._choose_reduction(collective, value, resolved, algorithm)
        target = arguments.Target(out, value, value.array.shape)
        target.check_overlap(value)
        return self._combined(collective, value, resolved, chosen, target, algorithm)

    def _combined(
        self,
        collective: str,
        value: Value,
        op: Op,
        chosen: Choice,
        target: Target | None,
        forced: str | None,
        root: int = 0,
    ) -> CallPlan[Any]:
        """Prepare a collective that combines arrays; `forced`: the caller's algorithm, or None."""
        text = self._described(collective, collectives.type_text(value), op.signature, chosen, root)
        if self._is_gathered(collective, op, value, forced):
            what = self._group, text, self._route(chosen), collective, chosen
            return gathered_reductions.GatheredReduction(*what, value, target, op, root)
        is_all_reduce = collective == "all_reduce"
        nbytes = value.array.nbytes // (1 if collective != "reduce_scatter" else self._group.size)
        may_use_gpus = on_gpus.applies(self._group, collective, op, value, nbytes, forced, chosen)
        reduction = None
        if may_use_gpus:
            reduction = on_gpus.prepare(self._group, collective, op, value, target, root)
        return ArrayPlan(
            self._group,
            text,
            self._route(chosen),
            collective,
            chosen,
            value,
            target,
            op,
            root,
            in_pieces=is_all_reduce and self._in_pieces(op, value, target),
            may_use_gpus=may_use_gpus,
            reduction=reduction,
        )

    def _reduced_objects(
        self, text: str, x: Any, op: Op, count: int, root: int | None = None
    ) -> CallPlan[Any]:
        """Prepare a reduction of objects: all, or a root, gather them and combine the first."""
        group, parts = self._group, objects.dump(x)

        def steps(call: Numbered) -> CallSteps:
            if root is None:
                return object_collectives.all_gather(group, call, parts, None)
            return object_collectives.gather(group, call, parts, object_collectives.LINEAR, root)

        moves = "all_gather" if root is None else "gather"
        return self._of_objects(text, moves, None, steps, [parts], root or 0, op, count)

    def _of_number(
        self, collective: str, x: Any, op: Reducer, algorithm: str | None, out: Any, root: int = 0
    ) -> CallPlan[Any] | None:
        """Prepare a reduction of a Python number without NumPy; None: that is not possible."""
        packing = packings.packing_of(x) if isinstance(op, str) else None
        if packing is packings.INT64:
            return self._of_int(collective, x, op, algorithm, out, root)
        if packing is None or out is not None or op not in OPS or op in packing.refused:
            return None
        group, nbytes = self._group, packing.itemsize
        chosen = self._choose(collective, nbytes, algorithm)
        text = self._described(collective, packing.text, op, chosen, root)
        route = self._route(chosen)
        return number_plans.plain(group, text, route, collective, chosen, x, op, root)

    def _of_int(
        self, collective: str, x: int, op: Any, algorithm: str | None, out: Any, root: int
    ) -> CallPlan[Any]:
        """Prepare a reduction of a Python int."""
        if op not in number_plans.FOLDS:  # which is an error
            operators.check(operators.resolve(op), dtypes.INT64, shown="an int")
        self._check_algorithm(collective, algorithm)
        gathers = collective in ("scan", "exscan") or op not in number_plans.MARKS
        runs = "all_gather" if gathers else "all_reduce"
        if algorithm not in ("shared_memory", *schedules.names(runs)):
            algorithm = None
        chosen = self._choose(runs, number_plans.INT_NBYTES, algorithm)
        text = self._described(collective, "int", op, chosen, root)
        route = self._route(chosen)
        if out is not None:
            out = arguments.Target(out, conversion.wrap_operand(0), ())
        return number_plans.of_int(
            *(self._group, text, route, collective, chosen, x, op, gathers, out, root)
        )

    def _described(self, collective: str, what: str, op: str, chosen: Choice, root: int) -> str:
        where = f", root={root}" if collective == "reduce" else ""
        return f"{self._prefix}{collective}({what}, op={op}, algorithm={chosen}{where})"


def _no_algorithm(algorithm: str | None) -> None:
    if algorithm is not None:
        raise ValueError("objects are reduced by gathering them: algorithm does not apply")
