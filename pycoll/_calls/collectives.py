"""Collectives on arrays: each binds the chunks of a schedule to memory, which `Group.run` runs.

The checks of the arguments are the communicator's: everything here is the same on all ranks, or
found out by the first message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from pycoll import schedules
from pycoll._arrays import conversion, operators
from pycoll._calls.group import Bound, Group, How
from pycoll._runtime.binding import Binding, Combine, CoreReduction
from pycoll._selection.select import Choice
from pycoll._transports.base import Parts

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._arrays.value import Value
    from pycoll._dtypes import Array


def type_text(value: Value) -> str:
    """Return dtype and shape as a call's text shows them."""
    return f"{value.dtype}{list(value.array.shape)}"


def barrier(group: Group, choice: Choice) -> Bound:
    """Bind what returns when every rank has entered."""
    count = schedules.find("barrier", choice.name).chunks(group.size)
    nothing: list[Parts | None] = [(memoryview(b""),)] * count
    binding = Binding(nbytes=[0] * count, source=nothing, target=[None] * count)
    return Bound(("barrier", choice), binding)


def bind(
    group: Group,
    collective: str,
    choice: Choice,
    x: Value,
    result: Array | list[Array] | None,
    op: Op | None = None,
    root: int = 0,
) -> Bound:
    """Bind a collective on arrays.

    Args:
        group: the communicator's ranks.
        collective: one of those in `_BINDING`.
        choice: its algorithm.
        x: this rank's value.
        result: gets the result, C-contiguous; of a gather it may be a list of its rows, each of
            which is. None: this rank has none.
        op: what combines, if something does.
        root: the root, if there is one.
    """
    how: How = (
        (collective, choice, root) if collective in schedules.ROOTED else (collective, choice)
    )
    return Bound(how, _BINDING[collective](group, how, x, op, result), x.array.itemsize)


def _pieces(group: Group, how: How, x: Value, op: Op | None, result: Array | None) -> Binding:
    """Bind a reduction in which every piece of x is combined with its like."""
    assert op is not None
    count = group.rank + 1 if how[0] == "scan" else group.size
    combine = operators.reduction(op, x, x.array.shape, count)
    return bind_pieces(group, how, combine, conversion.operand(x.array), result)


def _before(group: Group, how: How, x: Value, op: Op | None, result: Array | None) -> Binding:
    """Bind what combines the x of the ranks before this one; `result` is untouched on rank 0."""
    assert op is not None
    assert result is not None
    own, target = conversion.as_bytes(conversion.operand(x.array)), conversion.as_bytes(result)
    return Binding(
        nbytes=[len(own), len(own)],
        source=[(own,), None],
        target=[None, target],
        combine=operators.reduction(op, x, x.array.shape, group.rank),
    )


def bind_pieces(
    group: Group, how: How, combine: Combine | CoreReduction, array: Array, result: Array | None
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


def _own_row(group: Group, how: How, x: Value, op: Op | None, result: Array | None) -> Binding:
    """Bind what reduces row r of all ranks' x (size, ...) into rank r's `result`."""
    assert op is not None
    assert result is not None
    array = conversion.operand(x.array)
    source = rows(array)
    target: list[memoryview | None] = [None] * group.size
    target[group.rank] = conversion.as_bytes(result)
    return Binding(
        nbytes=_lengths(source),
        source=_sources(source),
        target=target,
        combine=operators.reduction(op, x, x.array.shape[1:], group.size),
        blocks=(conversion.as_bytes(array), None) if op.elementwise else None,
    )


def bind_rows(
    group: Group, choice: Choice, x: Value, counts: Sequence[int], op: Op, result: Array
) -> Bound:
    """Bind what reduces rows of all ranks' x: this rank's ``counts[rank]`` rows into `result`."""
    source = cut(conversion.operand(x.array), counts)
    target: list[memoryview | None] = [None] * group.size
    target[group.rank] = conversion.as_bytes(result)
    binding = Binding(
        nbytes=_lengths(source),
        source=_sources(source),
        target=target,
        combine=operators.reduction(op, x, (-1, *x.array.shape[1:]), group.size),
    )
    return Bound(("reduce_scatter", choice), binding, x.array.itemsize)


def _gathered(
    group: Group, how: How, x: Value, op: Op | None, result: Array | list[Array] | None
) -> Binding:
    """Bind what gathers into `result` (size, ...), or a list of arrays."""
    own = conversion.as_bytes(conversion.contiguous(x.array))
    source: list[Any] = [None] * group.size
    source[group.rank] = (own,)
    target: list[Any] = [None] * group.size
    if isinstance(result, list):
        target = [conversion.as_bytes(row) for row in result]
    elif result is not None:
        target = list(rows(result))
    whole = result if not isinstance(result, list) else None
    return Binding(
        nbytes=[len(own)] * group.size,
        source=source,
        target=target,
        blocks=(None, conversion.as_bytes(whole) if whole is not None else None),
    )


def _exchanged(group: Group, how: How, x: Value, op: Op | None, result: Array | None) -> Binding:
    """Bind what puts row `rank` of rank i's x into row i of `result` (size, ...)."""
    assert result is not None
    source, target = rows(conversion.contiguous(x.array)), rows(result)
    count = schedules.find("all_to_all", how[1].name).chunks(group.size)
    nothing: list[Any] = [None] * group.size
    between: list[Any] = [None] * (count - 2 * group.size)  # blocks on their way to other ranks
    return Binding(
        nbytes=[x.array.nbytes // group.size] * count,
        source=[*_sources(source), *nothing, *between],
        target=[*nothing, *target, *between],
    )


_BINDING: dict[str, Callable[[Group, How, Value, Op | None, Any], Binding]] = {
    "all_reduce": _pieces,
    "reduce": _pieces,
    "scan": _pieces,
    "exscan": _before,
    "reduce_scatter": _own_row,
    "gather": _gathered,
    "all_gather": _gathered,
    "all_to_all": _exchanged,
}


def piece_ends(size: int, itemsize: int, count: int) -> list[int]:
    """Return where `count` pieces of nearly equal numbers of elements begin and end, in bytes."""
    short, long = divmod(size, count)
    return [(i * short + min(i, long)) * itemsize for i in range(count + 1)]


def rows(array: Array) -> list[memoryview]:
    """Return byte views of the rows of a C-contiguous array."""
    return cut(array, [1] * len(array))


def cut(array: Array, counts: Sequence[int]) -> list[memoryview]:
    """Return byte views of the parts of a C-contiguous array: so many rows each."""
    view = conversion.as_bytes(array)
    nbytes = len(view) // len(array) if len(array) else 0
    ends = accumulate((count * nbytes for count in counts), initial=0)
    return [view[begin:end] for begin, end in pairwise(ends)]


def _lengths(views: Sequence[memoryview]) -> list[int | None]:
    return [len(view) for view in views]


def _sources(views: Sequence[memoryview]) -> list[Any]:
    return [(view,) for view in views]
