"""The double binary tree of `trees`: half of the value over each of two trees, so that a rank
that works in one of them is a leaf of the other, and all links are in use.

Chunk 0 goes through the first tree, chunk 1 through the second. No step of one waits for a step of
the other, so both are under way together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pycoll.schedule import Step
from pycoll.schedules.flow import down, up
from pycoll.schedules.trees import TreeNode, double_tree, double_tree_roots, position, rank_at


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root feeds two trees over all other ranks.

    Cost: steps ceil(lg (P - 1)) + 1; bytes S a rank.
    Source: Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction
    and scan, 2009; the trees are those of NCCL, src/graph/trees.cc.
    """
    for chunk, node in enumerate(_nodes(rank, size, root)):
        yield from down(*node, chunk)


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Two trees over all other ranks feed the root. Not in rank order.

    Cost: steps ceil(lg (P - 1)) + 1; bytes S a rank.
    Source: Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction
    and scan, 2009; the trees are those of NCCL, src/graph/trees.cc.
    """
    for chunk, node in enumerate(_nodes(rank, size, root)):
        yield from up(*node, chunk)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce up each tree, then broadcast down it. Not in rank order if P is odd.

    Cost: steps 2 ceil(lg P); bytes 2 S in and as many out at the busiest if P > 3, P S / 2 of two
    or three.
    Source: NCCL, src/graph/trees.cc; Sanders, Speck and Traff, Two-tree algorithms for full
    bandwidth broadcast, reduction and scan, 2009.
    """
    for chunk, node in enumerate(double_tree(rank, size)):
        yield from up(*node, chunk)
        yield from down(*node, chunk)


def _nodes(rank: int, size: int, root: int) -> Sequence[TreeNode]:
    """The rank's place in both trees, the root above the roots of both."""
    if size == 1:
        return ()
    place = position(rank, size, root)
    if place == 0:
        tops = double_tree_roots(size - 1)
        return [TreeNode(None, [rank_at(top + 1, size, root)]) for top in tops]
    return [
        TreeNode(
            root if parent is None else rank_at(parent + 1, size, root),
            [rank_at(child + 1, size, root) for child in children],
        )
        for parent, children in double_tree(place - 1, size - 1)
    ]
