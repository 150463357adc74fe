"""Collectives on blocks that differ in shape (`uneven`), prepared: nothing is sent yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion, operators, refusals
from pycoll._calls import (
    arguments,
    collectives,
    shared_memory_calls,
    shared_memory_uneven,
    uneven,
    uneven_out,
)
from pycoll._calls.call_plan import CallPlan, ResultOf, Route, Steps
from pycoll._calls.group import IN_SHARED_MEMORY
from pycoll._calls.preparing import Preparing
from pycoll._calls.scheduled import ArrayPlan
from pycoll._calls.shared_memory import counts_text
from pycoll._support.wording import a_kind

if TYPE_CHECKING:
    from pycoll._arrays.types import A, MaybeNone, Reducer
    from pycoll._arrays.value import Value
    from pycoll._calls.uneven_out import BlockTargets

_EVEN = {
    "gatherv": "gather",
    "all_gatherv": "all_gather",
    "scatterv": "scatter",
    "all_to_allv": "all_to_all",
}


class UnevenCalls(Preparing):
    """Prepares collectives on blocks that differ in shape or length; a part of `Calls`."""

    def gatherv(self, x: A, root: int = 0, out: Any = None) -> CallPlan[list[A] | MaybeNone]:
        group, root = self._group, arguments.check_root(root, self._group.size)
        block, is_root = _block("gatherv", x), self._group.rank == root
        known, wanted = {root: block}, out if is_root else None
        targets = uneven_out.BlockTargets(wanted, group.size, block.dtype, known, [block])
        return self._uneven(
            "gatherv",
            f"{block.dtype}, root={root}",
            [block],
            root,
            targets,
            lambda call: uneven.gatherv(group, call, block, root, targets),
            targets.finish if is_root else lambda got, late: None,
        )

    def all_gatherv(self, x: A, out: Any = None) -> CallPlan[list[A]]:
        group, block = self._group, _block("all_gatherv", x)
        known = {group.rank: block}
        targets = uneven_out.BlockTargets(out, group.size, block.dtype, known, [block])
        return self._uneven(
            "all_gatherv",
            str(block.dtype),
            [block],
            0,
            targets,
            lambda call: uneven.all_gatherv(group, call, block, targets),
            targets.finish,
        )

    def scatterv(self, xs: Sequence[A] | None, root: int = 0, out: Any = None) -> CallPlan[A | Any]:
        group, root = self._group, arguments.check_root(root, self._group.size)
        own = _blocks("scatterv", xs, group.size) if group.rank == root else []
        mine = own[root] if own else None
        target = uneven_out.BlockTarget(out, mine.dtype if mine is not None else None, mine, own)
        return self._uneven(
            "scatterv",
            f"root={root}",  # nobody else knows the dtype
            own,
            root,
            target,
            lambda call: uneven.scatterv(group, call, own, root, target),
            lambda got, late: target.finish(got, late)[0],
        )

    def all_to_allv(self, xs: Sequence[A], out: Any = None) -> CallPlan[list[A]]:
        group = self._group
        own = _blocks("all_to_allv", xs, group.size)
        dtype, known = own[0].dtype, {group.rank: own[group.rank]}
        targets = uneven_out.BlockTargets(out, group.size, dtype, known, own)
        return self._uneven(
            "all_to_allv",
            str(dtype),
            own,
            0,
            targets,
            lambda call: uneven.all_to_allv(group, call, own, targets),
            targets.finish,
        )

    def _uneven(
        self,
        method: str,
        what: str,
        own: Sequence[Value],
        root: int,
        targets: BlockTargets,
        steps: Steps,
        result: ResultOf,
    ) -> CallPlan[Any]:
        """Prepare a call on blocks.

        Args:
            method: which.
            what: of its text, what must be the same on all ranks.
            own: this rank's blocks, or block; nothing in a scatterv off root.
            root: the root, if it has one.
            targets: where blocks go.
            steps, result: as of `CallPlan`.
        """
        return CallPlan(
            self._group,
            f"{self._prefix}{method}({what})",
            steps,
            self._route(IN_SHARED_MEMORY) if self._blocking else Route.MESSAGES,
            lambda shm: shared_memory_uneven.run(shm, method, own, root, targets),
            result,
            own,
        )

    def reduce_scatterv(
        self,
        x: A,
        counts: Sequence[int],
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
    ) -> CallPlan[A]:
        self._check_algorithm("reduce_scatter", algorithm)
        group, resolved = self._group, operators.resolve(op)
        value = conversion.wrap(x)
        if value is None:
            raise TypeError(refusals.of_split("reduce_scatterv takes an array", x))
        operators.check_operand(resolved, value, value.array.ndim)
        checked = _counts(counts, value.array.shape, group.size)
        rest = value.array.shape[1:]
        chosen = self._choose(
            "reduce_scatter",
            max(checked) * value.dtype.itemsize * math.prod(rest),
            algorithm,
            rank_order=not resolved.commutative,
            whole=not resolved.elementwise,
            shm=shared_memory_calls.serves(resolved, value.dtype),
        )
        begin, count = sum(checked[: group.rank]), checked[group.rank]
        target = arguments.Target(out, value, (count, *rest))
        target.check_overlap(value, (target.value.place, value.place[begin : begin + count]))
        text = (
            f"{self._prefix}reduce_scatterv({collectives.type_text(value)}, "
            f"{counts_text(checked)}, op={resolved.signature}, algorithm={chosen})"
        )
        return ArrayPlan(
            group,
            text,
            self._route(chosen),
            "reduce_scatter",
            chosen,
            value,
            target,
            resolved,
            counts=checked,
        )


def _block(what: str, x: Any) -> Value:
    value = conversion.wrap(x)
    if value is None:
        raise TypeError(
            f"{what} takes an array, not {a_kind(x)}. "
            f"For numbers and Python objects use {_EVEN[what]}."
        )
    return value


def _blocks(what: str, xs: Any, size: int) -> list[Value]:
    """Return one array for each rank; all have one dtype."""
    if not isinstance(xs, list | tuple):
        raise TypeError(
            f"{what} takes a list of arrays, one for each rank, not {a_kind(xs)}. "
            f"For an array with an axis of ranks use {_EVEN[what]}."
        )
    if len(xs) != size:
        raise ValueError(
            f"{what} takes a list of {size} arrays, one for each rank; this one has {len(xs)}"
        )
    values = [_block(what, x) for x in xs]
    for rank, value in enumerate(values):
        if value.dtype != values[0].dtype:
            raise TypeError(
                f"{what} takes arrays of one dtype: the one for rank 0 is {values[0].dtype}, "
                f"the one for rank {rank} {value.dtype}. Convert them to one."
            )
    return values


def _counts(counts: Any, shape: tuple[int, ...], size: int) -> list[int]:
    if isinstance(counts, str | bytes) or not hasattr(counts, "__iter__"):
        raise TypeError(f"counts is a sequence of {size} ints, not {a_kind(counts)}")
    checked = [arguments.check_int(count, "a count") for count in counts]
    if len(checked) != size:
        raise ValueError(f"counts has {len(checked)} items, but there are {size} ranks")
    if min(checked) < 0:
        raise ValueError(f"counts has {min(checked)} in it; a rank gets 0 rows or more")
    if not shape or shape[0] != sum(checked):
        raise ValueError(
            "reduce_scatterv: the leading axis of x is cut by counts, so x has the shape "
            f"({sum(checked)}, ...); this one has {shape}"
        )
    return checked
