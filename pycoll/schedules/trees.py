"""Rank arithmetic of trees: who is above, who is below, who belongs to a branch.

The binomial tree over positions 0 to n - 1, drawn for n = 8. A position hangs from the one that has
its lowest set bit cleared, so that every branch is a run of neighbors:

    0 ─┬─ 1
       ├─ 2 ─── 3
       └─ 4 ─┬─ 5
             └─ 6 ─── 7

A rank's position counts from the root: position 0 is the root, position 1 the next rank, and so on
around. The height is floor(lg n); position 0 has ceil(lg n) children.
"""

from __future__ import annotations


def position(rank: int, size: int, root: int) -> int:
    """Place of `rank` when places are counted from `root`."""
    return (rank - root) % size


def rank_at(place: int, size: int, root: int) -> int:
    """Rank at `place`, the inverse of `position`."""
    return (place + root) % size


def binomial_parent(place: int) -> int:
    """Position that `place` hangs from; position 0 has none."""
    return place & (place - 1)


def binomial_children(place: int, size: int) -> list[int]:
    """Positions below `place`, nearest (and smallest branch) first."""
    steps = (1 << bit for bit in range(size.bit_length()))
    return [place + step for step in steps if step < _reach(place, size) and place + step < size]


def binomial_branch(place: int, size: int) -> range:
    """Position `place` and all that hang from it, directly or not: a run of neighbors."""
    return range(place, min(size, place + _reach(place, size)))


def _reach(place: int, size: int) -> int:
    """Length of the branch at `place` if it were not cut off at `size`: its lowest set bit."""
    return place & -place or size
