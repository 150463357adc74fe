"""Algorithms over the binomial tree of `trees`: few steps, whole values."""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce
from pycoll.schedules.trees import (
    binomial_branch,
    binomial_children,
    binomial_parent,
    position,
    rank_at,
)


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Receive from the parent, then send to the children, largest branch first.

    Cost: steps floor(lg P); bytes ceil(lg P) S at the root, the busiest.
    Source: MPICH, src/mpi/coll/bcast/bcast_intra_binomial.c.
    """
    place = position(rank, size, root)
    if place:
        yield Recv(rank_at(binomial_parent(place), size, root), 0)
    for child in reversed(binomial_children(place, size)):
        yield Send(rank_at(child, size, root), 0)


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Combine the branches of the children, nearest first, then send to the parent.

    From root 0 operands stay in rank order; from another root they begin at the root.
    Cost: steps floor(lg P); bytes ceil(lg P) S at the root, the busiest.
    Source: MPICH, src/mpi/coll/reduce/reduce_intra_binomial.c.
    """
    place = position(rank, size, root)
    for child in binomial_children(place, size):
        yield from recv_reduce(rank_at(child, size, root), 0)
    if place:
        yield Send(rank_at(binomial_parent(place), size, root), 0)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce up the tree to rank 0, in rank order, then broadcast down it.

    Cost: steps 2 floor(lg P); bytes ceil(lg P) S in and as many out at rank 0, the busiest.
    Source: Open MPI, ompi/mca/coll/base/coll_base_allreduce.c (nonoverlapping).
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)


def gather(rank: int, size: int, root: int) -> Iterator[Step]:
    """Collect the blocks of each child's branch, then send this branch's, in one message each.

    Cost: steps floor(lg P); bytes (P - 1) / P S at the root, the busiest, S all blocks together.
    Source: MPICH, src/mpi/coll/gather/gather_intra_binomial.c.
    """
    place = position(rank, size, root)
    for child in binomial_children(place, size):
        yield Recv(rank_at(child, size, root), _blocks(child, size, root))
    if place:
        parent = rank_at(binomial_parent(place), size, root)
        yield Send(parent, _blocks(place, size, root))


def scatter(rank: int, size: int, root: int) -> Iterator[Step]:
    """Receive this branch's blocks, then send each child its branch's, in one message each.

    Cost: steps floor(lg P); bytes (P - 1) / P S at the root, the busiest, S all blocks together.
    Source: MPICH, src/mpi/coll/scatter/scatter_intra_binomial.c.
    """
    place = position(rank, size, root)
    if place:
        parent = rank_at(binomial_parent(place), size, root)
        yield Recv(parent, _blocks(place, size, root))
    for child in reversed(binomial_children(place, size)):
        yield Send(rank_at(child, size, root), _blocks(child, size, root))


def _blocks(place: int, size: int, root: int) -> tuple[int, ...]:
    """Ranks of the branch at `place`: its blocks."""
    return tuple([rank_at(block, size, root) for block in binomial_branch(place, size)])
