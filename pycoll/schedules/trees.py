"""Rank arithmetic of trees: who is above, who is below, who belongs to a branch.

The binomial tree over positions 0 to n - 1, drawn for n = 8. A position hangs from the one that has
its lowest set bit cleared, so that every branch is a run of neighbors:

    0 ─┬─ 1
       ├─ 2 ─── 3
       └─ 4 ─┬─ 5
             └─ 6 ─── 7

A rank's position counts from the root: position 0 is the root, position 1 the next rank, and so on
around. The height is floor(lg n); position 0 has ceil(lg n) children.

The complete binary tree, level by level (heap order), of height floor(lg n):

            0
        ┌───┴───┐
        1       2
      ┌─┴─┐   ┌─┴─┐
      3   4   5   6
    ┌─┘
    7

The two trees of the double tree, of height ceil(lg n). In the first a position's lowest set bit is
its level, so that it lies between what hangs from it on the left and on the right; odd positions
are leaves. The second is the first in a mirror (x plays n - 1 - x): there the even ones are.

    0 ──────────┐                       ┌────────── 7
                4                       3
            ┌───┴───┐               ┌───┴───┐
            2       6               1       5
          ┌─┴─┐   ┌─┴─┐           ┌─┴─┐   ┌─┴─┐
          1   3   5   7           0   2   4   6

So no position works in both. If n is odd the mirror would not do that, and the second tree is
the first shifted by one (x plays x - 1): there position 0 alone has children in both.
Source: NCCL, src/graph/trees.cc; Sanders, Speck and Traff, Two-tree algorithms for full bandwidth
broadcast, reduction and scan, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TreeNode(NamedTuple):
    """Who is above and who is below; no parent: the root of its tree."""

    parent: int | None
    children: Sequence[int]


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


def binary_parent(place: int) -> int:
    """Position above `place` in the complete binary tree; position 0 has none."""
    return (place - 1) // 2


def binary_children(place: int, size: int) -> range:
    """Positions below `place` in the complete binary tree."""
    return range(min(2 * place + 1, size), min(2 * place + 3, size))


def double_tree(place: int, size: int) -> tuple[TreeNode, TreeNode]:
    """Where a position is in the first and in the second tree of the double tree."""
    if size % 2 == 0:
        parent, children = _between(size - 1 - place, size)
        above = None if parent is None else size - 1 - parent
        second = TreeNode(above, [size - 1 - child for child in children])
    else:
        parent, children = _between((place - 1) % size, size)
        above = None if parent is None else (parent + 1) % size
        second = TreeNode(above, [(child + 1) % size for child in children])
    return _between(place, size), second


def double_tree_roots(size: int) -> tuple[int, int]:
    """Positions of the roots of the two trees."""
    return 0, size - 1 if size % 2 == 0 else 1 % size


def _between(place: int, size: int) -> TreeNode:
    """A position in the first tree, which is between its children by number."""
    if place == 0:
        return TreeNode(None, [1 << (size - 1).bit_length() - 1] if size > 1 else [])
    bit = place & -place
    parent = (place ^ bit) | (bit << 1)
    children = [place - bit // 2] if bit > 1 else []
    # On the right there may be fewer levels than on the left.
    steps = (1 << level for level in reversed(range(bit.bit_length() - 1)))
    children += next(([place + step] for step in steps if place + step < size), [])
    return TreeNode(parent if parent < size else place ^ bit, children)
