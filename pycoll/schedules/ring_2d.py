"""The ring in two dimensions: ranks in rows and columns, as square as their number allows.

Rings along rows and along columns, for 12 ranks in 3 rows:

     0 ─  1 ─  2 ─  3          each row and each column is a ring:
     │    │    │    │          2 + 3 steps instead of 11
     4 ─  5 ─  6 ─  7
     │    │    │    │
     8 ─  9 ─ 10 ─ 11

Fewer steps than one ring, and the same bytes. The larger messages go along rows, between ranks
that are near. A prime number of ranks has one row: the plain ring. Below, P = R C, R rows of C
ranks, R <= C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pycoll.schedule import Step
from pycoll.schedules import ring
from pycoll.schedules.relabel import relabel


def shape(size: int) -> tuple[int, int]:
    """Rows, and ranks a row: the factors of `size` that are nearest to each other."""
    rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    return rows, size // rows


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Along the row combine the chunks of each column, then along the column each rank's own.

    Cost: steps R + C - 2; bytes (P - 1) / P S a rank.
    Source: Ueno and Yokota, Exhaustive study of hierarchical allreduce patterns for large
    messages between GPUs, 2019; Horovod's rows are hosts.
    """
    row, column, columns = _lines(rank, size)
    yield from relabel(ring.reduce_scatter(rank % len(row), len(row)), row, columns)
    yield from relabel(ring.reduce_scatter(rank // len(row), len(column)), column, column)


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Along the column gather its blocks, then along the row those of all columns.

    Cost: steps R + C - 2; bytes (P - 1) / P S a rank, S all blocks together.
    Source: as reduce_scatter, of which it is the way back.
    """
    row, column, columns = _lines(rank, size)
    yield from relabel(ring.all_gather(rank // len(row), len(column)), column, column)
    yield from relabel(ring.all_gather(rank % len(row), len(row)), row, columns)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Combine along the row, then the column, then pass on the same way back; P pieces.

    Cost: steps 2 (R + C - 2); bytes 2 (P - 1) / P S a rank.
    Source: as reduce_scatter.
    """
    rows, length = shape(size)
    # The pieces of a column lie one behind the other.
    pieces = [rank % length * rows + rank // length for rank in range(size)]
    for part in (reduce_scatter, all_gather):
        yield from relabel(part(rank, size), range(size), pieces)


def _lines(rank: int, size: int) -> tuple[Sequence[int], Sequence[int], list[tuple[int, ...]]]:
    """The rank's row, its column, and the columns of the whole row, left to right."""
    _, length = shape(size)
    first = rank - rank % length
    columns = [tuple(range(start, size, length)) for start in range(length)]
    return range(first, first + length), columns[rank % length], columns
