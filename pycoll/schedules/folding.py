"""Folding ranks in pairs until their number is a power of two, for algorithms that need one.

The pairs stand in for P' ranks, the largest power of two in P. Of each pair one rank hands all it
has to the other, sits out, and gets what it should have at the end:

    P = 6, P' = 4     in 1->0 3->2     places 0 1 2 3 = ranks 0 2 4 5     out 0->1 2->3

The ranks of a pair are neighbors and places keep the order of ranks, so rank order is kept.
Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.schedule import Chunks, Recv, Send, Step, recv_reduce
from pycoll.schedules.powers import power_below


class Fold(NamedTuple):
    """Which ranks pair up, which of them stay, and in which places.

    Attributes:
        core: how many places there are, a power of two.
        pairs: how many places stand for two ranks.
        first: the place of the first pair; the others follow.
        keep: a rank that stays, whichever of its pair it is.
    """

    core: int
    pairs: int
    first: int
    keep: int

    def ranks(self, place: int) -> range:
        """Ranks that a place stands for."""
        beyond = min(max(place - self.first, 0), self.pairs)
        paired = self.first <= place < self.first + self.pairs
        return range(place + beyond, place + beyond + 1 + paired)

    def place(self, rank: int) -> int:
        """Place that stands for a rank."""
        if not self.pairs:  # all ranks do the same, whatever their numbers
            return rank
        return rank - min(max((rank - self.first + 1) // 2, 0), self.pairs)

    def rank_at(self, place: int) -> int:
        """The rank that is in a place."""
        if not self.pairs:
            return place
        ranks = self.ranks(place)
        return self.keep if self.keep in ranks else ranks[0]

    def stays(self, rank: int) -> bool:
        """Whether a rank has a place of its own, or sits out."""
        return self.rank_at(self.place(rank)) == rank

    def other(self, rank: int) -> int | None:
        """The other rank of the pair, if `rank` is in one."""
        if not self.pairs:
            return None
        ranks = self.ranks(self.place(rank))
        return None if len(ranks) == 1 else ranks[0] + ranks[1] - rank


def fold_of(size: int, keep: int = 0) -> Fold:
    """Fold `size` ranks so that the pairs begin with the first or include `keep`, which stays."""
    core = power_below(size)
    pairs = size - core
    return Fold(core, pairs, min(keep - keep % 2, size - 2 * pairs), keep)


def fold_in(fold: Fold, rank: int, chunks: Chunks) -> Iterator[Step]:
    """Combine `chunks` of each pair, in rank order, at the rank that stays."""
    other = fold.other(rank)
    if other is None:
        return
    if fold.stays(rank):
        yield from recv_reduce(other, chunks, incoming_first=other < rank)
    else:
        yield Send(other, chunks)


def fold_out(fold: Fold, rank: int, chunks: Chunks) -> Iterator[Step]:
    """Give `chunks` to the rank that sat out."""
    other = fold.other(rank)
    if other is None:
        return
    if fold.stays(rank):
        yield Send(other, chunks)
    else:
        yield Recv(other, chunks)
