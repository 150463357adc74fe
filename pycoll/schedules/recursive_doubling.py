"""Recursive doubling: partners exchange all they have, at distance 1, 2, 4 and so on."""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce
from pycoll.schedules.folding import Fold, fold_in, fold_of, fold_out
from pycoll.schedules.powers import distances
from pycoll.schedules.relabel import relabel


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Exchange with partners, the lower rank's operand left: rank order, same bits everywhere.

    If P is not a power of two, ranks fold in pairs (see `folding`), P' the largest one in P.
    Cost: steps lg P, bytes lg P S a rank; with the fold lg P' + 2 and (lg P' + 1) S.
    Source: Thakur, Rabenseifner and Gropp, Optimization of collective
    communication operations in MPICH, 2005.
    """
    fold = fold_of(size)
    yield from fold_in(fold, rank, 0)
    if fold.stays(rank):
        for distance in distances(fold.core):
            partner = fold.rank_at(fold.place(rank) ^ distance)
            yield Send(partner, 0)
            yield from recv_reduce(partner, 0, incoming_first=partner < rank)
    yield from fold_out(fold, rank, 0)


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Exchange all blocks so far with partners; what a rank has is a run of neighbors.

    If P is not a power of two, ranks fold in pairs (see `folding`), P' the largest one in P.
    Cost: steps lg P, bytes (P - 1) / P S a rank, S all blocks together; with the fold at most
    lg P' + 2 steps, and up to 4 / 3 S more out of rank 0, the busiest.
    Source: MPICH, src/mpi/coll/allgather/allgather_intra_recursive_doubling.c.
    """
    fold = fold_of(size)
    other = fold.other(rank)
    if not fold.stays(rank):
        assert other is not None
        yield Send(other, rank)
        yield Recv(other, tuple([block for block in range(size) if block != rank]))
        return
    if other is not None:
        yield Recv(other, other)
    place = fold.place(rank)
    for distance in distances(fold.core):
        partner = fold.rank_at(place ^ distance)
        yield Send(partner, _blocks(fold, place, distance))
        yield Recv(partner, _blocks(fold, place ^ distance, distance))
    if other is not None:
        yield Send(other, tuple([block for block in range(size) if block != other]))


def scan(rank: int, size: int) -> Iterator[Step]:
    """At distance d send what is combined so far to rank + d; put that of rank - d on its left.

    Cost: steps ceil(lg P), one less if P is at most 3/4 of the next power of two;
    bytes at most ceil(lg P) S a rank.
    Source: Hillis and Steele, Data parallel algorithms, 1986 (Kogge and Stone, 1973).
    """
    for distance in distances(size):
        if rank + distance < size:
            yield Send(rank + distance, 0)
        if rank >= distance:
            yield from recv_reduce(rank - distance, 0, incoming_first=True)


def exscan(rank: int, size: int) -> Iterator[Step]:
    """Send each value to the rank after; ranks 1 to P - 1 scan what came, by doubling.

    Cost: steps one more than the scan of P - 1 ranks; bytes at most (ceil(lg P) + 1) S a rank.
    Source: the definition, and `scan`.
    """
    if rank < size - 1:
        yield Send(rank + 1, 0)
    if rank:
        yield Recv(rank - 1, 1)
        yield from relabel(scan(rank - 1, size - 1), range(1, size), (1,))


def _blocks(fold: Fold, place: int, count: int) -> range:
    """Ranks that stand behind the aligned group of `count` places in which `place` is."""
    first = place - place % count
    return range(fold.ranks(first)[0], fold.ranks(first + count - 1)[-1] + 1)
