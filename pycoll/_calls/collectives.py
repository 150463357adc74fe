"""Collectives on arrays: each binds the chunks of a schedule to memory, and `run` runs it.

The checks of the arguments are the communicator's: everything here is the same on all ranks, or
found out by the first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pycoll import schedules
from pycoll._arrays import conversion
from pycoll._arrays.operators import Combiner, Op, finisher
from pycoll._arrays.value import Value
from pycoll._calls.group import Bound, Group, How
from pycoll._calls.p2p import contiguous
from pycoll._dtypes import Array
from pycoll._runtime.binding import Binding, Combine
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._transports.base import Parts


class Reduction(NamedTuple):
    """An operator, and how the call that uses it runs."""

    op: Op
    choice: Choice


def type_text(value: Value) -> str:
    """Return dtype and shape as a call's text shows them."""
    return f"{value.dtype}{list(value.array.shape)}"


def run(group: Group, call: bytes, bound: Bound) -> CallSteps:
    """Run a collective to its end."""
    number = group.context.begin(call)
    yield from group.run((number, 0), call, bound.how, bound.binding, bound.granule)
    group.context.end(number)


def barrier(group: Group, choice: Choice) -> Bound:
    """Bind what returns when every rank has entered."""
    count = schedules.find("barrier", choice.name).chunks(group.size)
    nothing: list[Parts | None] = [(memoryview(b""),)] * count
    binding = Binding(nbytes=[0] * count, source=nothing, target=[None] * count)
    return Bound(("barrier", choice), binding)


def all_reduce(group: Group, x: Value, reduction: Reduction, result: Array) -> Bound:
    """Bind what reduces into `result` (C-contiguous, x's shape) on every rank."""
    how = "all_reduce", reduction.choice
    return _bind_reduction(group, how, x, reduction, group.size, result)


def reduce(group: Group, x: Value, reduction: Reduction, root: int, result: Array | None) -> Bound:
    """Bind what reduces into `result` (C-contiguous, x's shape) on the root; None elsewhere."""
    how = "reduce", reduction.choice, root
    return _bind_reduction(group, how, x, reduction, group.size, result)


def scan(group: Group, x: Value, reduction: Reduction, result: Array) -> Bound:
    """Bind what combines the x of the ranks up to this one into `result` (C-contiguous)."""
    how = "scan", reduction.choice
    return _bind_reduction(group, how, x, reduction, group.rank + 1, result)


def exscan(group: Group, x: Value, reduction: Reduction, result: Array) -> Bound:
    """Bind what combines the x of the ranks before this one into `result`; untouched on rank 0."""
    own, target = conversion.as_bytes(contiguous(x.array)), conversion.as_bytes(result)
    binding = Binding(
        nbytes=[len(own), len(own)],
        source=[(own,), None],
        target=[None, target],
        combine=Combiner(reduction.op, x.dtype, x.array.shape),
        finish=finisher(reduction.op, x.dtype, group.rank) if group.rank else None,
    )
    return Bound(("exscan", reduction.choice), binding, x.array.itemsize)


def _bind_reduction(
    group: Group, how: How, x: Value, reduction: Reduction, count: int, result: Array | None
) -> Bound:
    """Bind a reduction in which every piece of x is combined with its like, of `count` ranks."""
    combine = Combiner(reduction.op, x.dtype, x.array.shape)
    binding = bind_pieces(group, how, combine, contiguous(x.array), result)
    binding = binding._replace(finish=finisher(reduction.op, x.dtype, count))
    return Bound(how, binding, x.array.itemsize)


def bind_pieces(
    group: Group, how: How, combine: Combine, array: Array, result: Array | None
) -> Binding:
    """Bind the pieces of a C-contiguous array, as many as the algorithm wants, and the result's."""
    count = schedules.find(how[0], how[1].name).chunks(group.size)
    source = conversion.as_bytes(array)
    target = conversion.as_bytes(result) if result is not None else None
    ends = piece_ends(array.size, array.itemsize, count)
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    return Binding(
        nbytes=[span.stop - span.start for span in spans],
        source=[(source[span],) for span in spans],
        target=[target[span] for span in spans] if target is not None else [None] * count,
        combine=combine,
        blocks=(source, target),
    )


def reduce_scatter(group: Group, x: Value, reduction: Reduction, result: Array) -> Bound:
    """Bind what reduces row r of all ranks' x (size, ...) into rank r's `result` (C-contiguous)."""
    array = contiguous(x.array)
    source = rows(array)
    target: list[memoryview | None] = [None] * group.size
    target[group.rank] = conversion.as_bytes(result)
    binding = Binding(
        nbytes=_lengths(source),
        source=_sources(source),
        target=target,
        combine=Combiner(reduction.op, x.dtype, x.array.shape[1:]),
        blocks=(conversion.as_bytes(array), None) if reduction.op.elementwise else None,
        finish=finisher(reduction.op, x.dtype, group.size),
    )
    return Bound(("reduce_scatter", reduction.choice), binding, x.array.itemsize)


def gather(group: Group, x: Value, choice: Choice, root: int, result: Array | None) -> Bound:
    """Bind what gathers into `result` (size, ...) on the root; None elsewhere."""
    return _bind_blocks(group, ("gather", choice, root), x, result)


def all_gather(group: Group, x: Value, choice: Choice, result: Array) -> Bound:
    """Bind what gathers into `result` (size, ...) on every rank."""
    return _bind_blocks(group, ("all_gather", choice), x, result)


def _bind_blocks(group: Group, how: How, x: Value, result: Array | None) -> Bound:
    own = conversion.as_bytes(contiguous(x.array))
    source: list[Any] = [None] * group.size
    source[group.rank] = (own,)
    target = conversion.as_bytes(result) if result is not None else None
    binding = Binding(
        nbytes=[len(own)] * group.size,
        source=source,
        target=list(rows(result)) if result is not None else [None] * group.size,
        blocks=(None, target),
    )
    return Bound(how, binding, x.array.itemsize)


def all_to_all(group: Group, x: Value, choice: Choice, result: Array) -> Bound:
    """Bind what puts row `rank` of rank i's x into row i of `result` (size, ...)."""
    source, target = rows(contiguous(x.array)), rows(result)
    count = schedules.find("all_to_all", choice.name).chunks(group.size)
    nothing: list[Any] = [None] * group.size
    between: list[Any] = [None] * (count - 2 * group.size)  # blocks on their way to other ranks
    binding = Binding(
        nbytes=[x.array.nbytes // group.size] * count,
        source=[*_sources(source), *nothing, *between],
        target=[*nothing, *target, *between],
    )
    return Bound(("all_to_all", choice), binding, x.array.itemsize)


def piece_ends(size: int, itemsize: int, count: int) -> list[int]:
    """Return where `count` pieces of nearly equal numbers of elements begin and end, in bytes."""
    short, long = divmod(size, count)
    return [(i * short + min(i, long)) * itemsize for i in range(count + 1)]


def rows(array: Array) -> list[memoryview]:
    """Return byte views of the rows of a C-contiguous array."""
    view = conversion.as_bytes(array)
    nbytes = len(view) // len(array) if len(array) else 0
    return [view[i * nbytes : (i + 1) * nbytes] for i in range(len(array))]


def _lengths(views: Sequence[memoryview]) -> list[int | None]:
    return [len(view) for view in views]


def _sources(views: Sequence[memoryview]) -> list[Any]:
    return [(view,) for view in views]
