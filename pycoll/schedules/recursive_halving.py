"""Recursive halving: partners at distance 1, 2, 4, ... exchange halves, quarters, ... of the value.

The distance doubles while the pieces halve. So the largest messages go to the nearest rank, and
what is combined comes from a run of neighbors: rank order. Which piece a rank ends with is told
by its place's bits, the lowest first:

    place          0         1         2         3
    distance 1     a b - -   - - c d   a b - -   - - c d
    distance 2     a - - -   - - c -   - b - -   - - - d

If P is not a power of two, ranks fold in pairs (see `folding`), P' the largest power of two in P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.schedule import Recv, Send, Step, recv_reduce
from pycoll.schedules.folding import Fold, fold_in, fold_of, fold_out
from pycoll.schedules.powers import distances


class _Exchange(NamedTuple):
    """One exchange: with which place, what this place keeps, and what the other one does."""

    other: int
    kept: range
    given: range


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Scatter the reduction by halving, then gather it the same way back; P' pieces.

    Cost: steps 2 lg P, bytes 2 (P - 1) / P S a rank; with the fold 2 lg P' + 2 steps and
    S more at ranks that have taken in another.
    Source: Rabenseifner, Optimization of collective reduction operations, 2004.
    """
    fold = fold_of(size)
    yield from fold_in(fold, rank, range(fold.core))
    if fold.stays(rank):
        exchanges = _exchanges(fold.place(rank), fold.core)
        yield from _halve(fold, rank, exchanges)
        for other, kept, given in reversed(exchanges):
            yield Send(fold.rank_at(other), kept)
            yield Recv(fold.rank_at(other), given)
    yield from fold_out(fold, rank, range(fold.core))


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Scatter the reduction by halving, then gather it to the root the same way back; P' pieces.

    With the fold the root is always one of a pair and stays.
    Cost: steps 2 lg P, bytes 2 (P - 1) / P S at the root, the busiest; with the fold
    2 lg P' + 1 steps and S more.
    Source: Rabenseifner, Optimization of collective reduction operations, 2004.
    """
    fold = fold_of(size, keep=root)
    yield from fold_in(fold, rank, range(fold.core))
    if not fold.stays(rank):
        return
    exchanges = _exchanges(fold.place(rank), fold.core)
    yield from _halve(fold, rank, exchanges)
    # What differs between the two places: the root is reached once no bit does.
    away = fold.place(rank) ^ fold.place(root)
    for other, kept, given in reversed(exchanges):
        distance = fold.place(rank) ^ other
        if away & distance:
            yield Send(fold.rank_at(other), kept)
            return
        yield Recv(fold.rank_at(other), given)


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Exchange chunks of half, a quarter, ... of all ranks with partners, in rank order.

    Cost: steps lg P, bytes (P - 1) / P S a rank; with the fold at most lg P' + 2 steps, and about
    S more into ranks that have taken in another.
    Source: MPICH, src/mpi/coll/reduce_scatter/reduce_scatter_intra_recursive_halving.c, which
    begins at the largest distance and so does not keep rank order.
    """
    fold = fold_of(size)
    other = fold.other(rank)
    yield from fold_in(fold, rank, range(size))
    if not fold.stays(rank):
        assert other is not None
        yield Recv(other, rank)
        return
    place = fold.place(rank)
    for distance in distances(fold.core):
        partner = fold.rank_at(place ^ distance)
        yield Send(partner, _chunks(fold, place ^ distance, 2 * distance))
        yield from recv_reduce(
            partner, _chunks(fold, place, 2 * distance), incoming_first=partner < rank
        )
    if other is not None:
        yield Send(other, other)


def _exchanges(place: int, core: int) -> list[_Exchange]:
    """Whom a place meets, and which pieces each of the two keeps."""
    exchanges: list[_Exchange] = []
    pieces = range(core)
    for distance in distances(core):
        low, high = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
        kept, given = (high, low) if place & distance else (low, high)
        exchanges.append(_Exchange(place ^ distance, kept, given))
        pieces = kept
    return exchanges


def _halve(fold: Fold, rank: int, exchanges: list[_Exchange]) -> Iterator[Step]:
    """Combine fewer and fewer pieces of more and more ranks."""
    for other, kept, given in exchanges:
        partner = fold.rank_at(other)
        yield Send(partner, given)
        yield from recv_reduce(partner, kept, incoming_first=partner < rank)


def _chunks(fold: Fold, place: int, distance: int) -> tuple[int, ...]:
    """Chunks of all ranks whose place has the same bits below `distance`."""
    places = range(place % distance, fold.core, distance)
    return tuple([rank for each in places for rank in fold.ranks(each)])
