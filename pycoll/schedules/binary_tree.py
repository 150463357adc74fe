"""Algorithms over the complete binary tree of `trees`: whole values, and no rank has more than
three neighbors, however many ranks there are. In segments it is a pipeline lg P deep.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Step
from pycoll.schedules.flow import down, up
from pycoll.schedules.trees import TreeNode, binary_children, binary_parent, position, rank_at


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Receive from the parent, then send to both children.

    Cost: steps floor(lg P); bytes 2 S at ranks with two children, the busiest.
    Source: Open MPI, ompi/mca/coll/base/coll_base_bcast.c (bintree).
    """
    yield from down(*_node(rank, size, root), 0)


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Combine what both children send, then send to the parent. Not in rank order.

    Cost: steps floor(lg P); bytes 2 S at ranks with two children, the busiest.
    Source: Open MPI, ompi/mca/coll/base/coll_base_reduce.c (binary).
    """
    yield from up(*_node(rank, size, root), 0)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce to rank 0, then broadcast from it.

    Cost: steps 2 floor(lg P); bytes 3 S in and as many out at ranks with three neighbors (P > 4),
    2 S at the busiest of three or four, S of two.
    Source: Open MPI, ompi/mca/coll/base/coll_base_allreduce.c (nonoverlapping), over these trees.
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)


def _node(rank: int, size: int, root: int) -> TreeNode:
    place = position(rank, size, root)
    children = [rank_at(child, size, root) for child in binary_children(place, size)]
    return TreeNode(rank_at(binary_parent(place), size, root) if place else None, children)
