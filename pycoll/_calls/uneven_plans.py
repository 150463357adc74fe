"""The plans of collectives on blocks that differ in shape (`uneven`), and their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pycoll._arrays import conversion, operators, refusals
from pycoll._arrays.operators import Op
from pycoll._arrays.value import Value
from pycoll._calls import arguments, collectives, shared_memory_uneven, uneven, wide_averages
from pycoll._calls.arguments import Target
from pycoll._calls.call_plan import CallPlan, Route, route_of
from pycoll._calls.collectives import type_text
from pycoll._calls.group import IN_SHARED_MEMORY, Bound, Group
from pycoll._calls.shared_memory import ShmComm, counts_text, part_of
from pycoll._calls.shared_memory_calls import serves
from pycoll._calls.uneven_out import BlockTarget, BlockTargets
from pycoll._cuda.late_copies import LateCopies
from pycoll._dtypes import Array, DType
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._support.wording import a_kind

if TYPE_CHECKING:
    from pycoll._arrays.types import Reducer

_EVEN = {
    "gatherv": "gather",
    "all_gatherv": "all_gather",
    "scatterv": "scatter",
    "all_to_allv": "all_to_all",
}


# --- arguments -----------------------------------------------------------------------------


def prepare_gatherv(group: Group, x: Any, root: int, out: Any, blocking: bool) -> CallPlan[Any]:
    """Collect arrays of any shapes on the root: there the list by rank, None elsewhere.

    Args:
        group: of the communicator.
        x: array; the same dtype on all ranks.
        root: rank that gets the list.
        out: on the root, places of the blocks, as of `BlockTargets`.
        blocking: the call may go through shared memory.

    Raises:
        TypeError: `x` is no array.
        ValueError: there is no such root, or `out` cannot fit.
    """
    root = arguments.check_root(root, group.size)
    block = _block("gatherv", x)
    wanted = out if group.rank == root else None
    targets = BlockTargets(wanted, group.size, block.dtype, {root: block}, [block])
    text = _prefix(blocking) + _text("gatherv", block.dtype, root)
    return GathervPlan(group, text, _route(group, blocking), [block], root, targets)


def prepare_all_gatherv(group: Group, x: Any, out: Any, blocking: bool) -> CallPlan[Any]:
    """Collect arrays of any shapes on every rank: the list by rank; as `prepare_gatherv`."""
    block = _block("all_gatherv", x)
    targets = BlockTargets(out, group.size, block.dtype, {group.rank: block}, [block])
    text = _prefix(blocking) + _text("all_gatherv", block.dtype, 0)
    return AllGathervPlan(group, text, _route(group, blocking), [block], 0, targets)


def prepare_scatterv(group: Group, xs: Any, root: int, out: Any, blocking: bool) -> CallPlan[Any]:
    """Give rank i the root's ``xs[i]``.

    Args:
        group: of the communicator.
        xs: on the root a list or tuple of size arrays of one dtype; elsewhere not looked at.
        root: rank whose arrays they are.
        out: array for the result, or None.
        blocking: the call may go through shared memory.

    Raises:
        TypeError: `xs` is no list of arrays of one dtype, or `out` no array.
        ValueError: it has another length, there is no such root, or `out` cannot fit.
    """
    root = arguments.check_root(root, group.size)
    own = _blocks("scatterv", xs, group.size) if group.rank == root else None
    mine = own[root] if own is not None else None
    target = BlockTarget(out, mine.dtype if mine is not None else None, mine, own or ())
    text = _prefix(blocking) + _text("scatterv", None, root)
    return ScattervPlan(group, text, _route(group, blocking), own or (), root, target)


def prepare_all_to_allv(group: Group, xs: Any, out: Any, blocking: bool) -> CallPlan[Any]:
    """Exchange arrays of any shapes: item i of the result is rank i's ``xs[rank]``.

    Args:
        group: of the communicator.
        xs: list or tuple of size arrays; one dtype, the same on all ranks.
        out: places of the blocks, as of `BlockTargets`.
        blocking: the call may go through shared memory.

    Raises:
        TypeError: `xs` is no list of arrays of one dtype.
        ValueError: it has another length, or `out` cannot fit.
    """
    own = _blocks("all_to_allv", xs, group.size)
    targets = BlockTargets(out, group.size, own[0].dtype, {group.rank: own[group.rank]}, own)
    text = _prefix(blocking) + _text("all_to_allv", own[0].dtype, 0)
    return AllToAllvPlan(group, text, _route(group, blocking), own, 0, targets)


def prepare_reduce_scatterv(
    group: Group,
    x: Any,
    counts: Any,
    op: Reducer,
    out: Any,
    algorithm: str | None,
    blocking: bool,
) -> CallPlan[Any]:
    """Combine all ranks' `x`: rank r gets ``counts[r]`` rows, those after the lower ranks'.

    Args:
        group: of the communicator.
        x: array (sum(counts), ...), the same dtype and shape on all ranks.
        counts: rows of each rank, the same on all.
        op: as in `reduce`; a function that is not elementwise gets the rows of one rank at a time.
        out: array of this rank's rows for the result, or None; may be those rows of `x`.
        algorithm: one of reduce_scatter's.
        blocking: the call may go through shared memory.

    Raises:
        TypeError: `x` is no array of a dtype that `op` takes, or a count is no int.
        ValueError: `counts` or `out` does not fit, or `algorithm` does not exist or cannot serve.
    """
    resolved = operators.resolve(op)
    value = conversion.wrap(x)
    if value is None:
        raise TypeError(refusals.of_split("reduce_scatterv takes an array", x))
    operators.check_operand(resolved, value, value.array.ndim)
    checked = _counts(counts, value.array.shape, group.size)
    rest = value.array.shape[1:]
    row_nbytes = value.dtype.itemsize * math.prod(rest)
    chosen = group.choose(
        "reduce_scatter",
        max(checked) * row_nbytes,
        algorithm,
        rank_order=not resolved.commutative,
        whole=not resolved.elementwise,
        shm=blocking and serves(resolved, value.dtype),
    )
    begin, count = sum(checked[: group.rank]), checked[group.rank]
    target = arguments.Target(out, value, (count, *rest))
    target.check_overlap(value, (target.value.place, value.place[begin : begin + count]))
    text = (
        f"{_prefix(blocking)}reduce_scatterv({type_text(value)}, {counts_text(checked)}, "
        f"op={resolved.signature}, algorithm={chosen})"
    )
    route = route_of(group, chosen, blocking, None)
    return ReduceScattervPlan(group, text, route, value, checked, resolved, chosen, target)


def _text(name: str, dtype: DType | None, root: int) -> str:
    """What must be the same on all ranks; of a scatterv only its root knows the dtype."""
    rooted = {"gatherv": f"{dtype}, root={root}", "scatterv": f"root={root}"}
    return f"{name}({rooted.get(name, dtype)})"


def _prefix(blocking: bool) -> str:
    return "" if blocking else "i"


def _route(group: Group, blocking: bool) -> Route:
    return route_of(group, IN_SHARED_MEMORY, blocking, None) if blocking else Route.MESSAGES


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


# --- plans ---------------------------------------------------------------------------------


class _UnevenPlan(CallPlan[Any]):
    """What these calls have in common.

    Args:
        group, text, route: as of `CallPlan`.
        own: this rank's blocks, or block; nothing in a scatterv off root.
        root: the root, if it has one.
        targets: where blocks go.
    """

    __slots__ = ("own", "root", "targets")

    method: ClassVar[str]

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        own: Sequence[Value],
        root: int,
        targets: BlockTargets,
    ) -> None:
        super().__init__(group, text, route)
        self.own = own
        self.root = root
        self.targets = targets

    @property
    def reads(self) -> Sequence[Value]:
        return self.own

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the list of blocks."""
        return self.targets.finish(got, late)

    def in_shared_memory(self, shm: ShmComm) -> Any:
        return shared_memory_uneven.run(shm, self.method, self.own, self.root, self.targets)


class GathervPlan(_UnevenPlan):
    """A gatherv; arguments as of `_UnevenPlan`."""

    __slots__ = ()

    method = "gatherv"

    def steps(self, signature: bytes) -> CallSteps:
        return uneven.gatherv(self.group, signature, self.own[0], self.root, self.targets)

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the list of blocks on the root, None elsewhere."""
        return self.targets.finish(got, late) if self.group.rank == self.root else None


class AllGathervPlan(_UnevenPlan):
    """An all_gatherv; arguments as of `_UnevenPlan`."""

    __slots__ = ()

    method = "all_gatherv"

    def steps(self, signature: bytes) -> CallSteps:
        return uneven.all_gatherv(self.group, signature, self.own[0], self.targets)


class ScattervPlan(_UnevenPlan):
    """A scatterv; arguments as of `_UnevenPlan`."""

    __slots__ = ()

    method = "scatterv"

    def steps(self, signature: bytes) -> CallSteps:
        return uneven.scatterv(self.group, signature, self.own, self.root, self.targets)

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return this rank's block."""
        return self.targets.finish(got, late)[0]


class AllToAllvPlan(_UnevenPlan):
    """An all_to_allv; arguments as of `_UnevenPlan`."""

    __slots__ = ()

    method = "all_to_allv"

    def steps(self, signature: bytes) -> CallSteps:
        return uneven.all_to_allv(self.group, signature, self.own, self.targets)


class ReduceScattervPlan(CallPlan[Any]):
    """A reduce_scatterv.

    Args:
        group, text, route: as of `CallPlan`.
        x: this rank's array.
        counts: rows of each rank.
        op: what combines.
        choice: the algorithm.
        target: where the result goes.
    """

    __slots__ = ("choice", "counts", "op", "target", "x")

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        x: Value,
        counts: list[int],
        op: Op,
        choice: Choice,
        target: Target,
    ) -> None:
        super().__init__(group, text, route)
        self.x = x
        self.counts = counts
        self.op = op
        self.choice = choice
        self.target = target

    @property
    def reads(self) -> Sequence[Value]:
        return (self.x,)

    def steps(self, signature: bytes) -> CallSteps:
        """Run the schedule of a reduce_scatter, on chunks that differ in length."""
        x, memory = self.x, self.target.memory
        if wide_averages.applies(self.op, x.dtype):
            return wide_averages.run(self.group, signature, x, memory, self._bind)
        return collectives.run(self.group, signature, self._bind(x, memory))

    def _bind(self, x: Value, memory: Array | None) -> Bound:
        assert memory is not None
        return uneven.bind_reduce_scatterv(self.group, x, self.counts, self.op, self.choice, memory)

    def in_shared_memory(self, shm: ShmComm) -> Any:
        return shared_memory_uneven.reduce_scatterv(
            shm,
            part_of("uneven", self.text),
            self.x,
            self.counts,
            self.op,
            self.target.memory,
        )

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return this rank's rows."""
        return self.target.result(late)
