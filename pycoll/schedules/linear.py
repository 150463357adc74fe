"""Linear algorithms: everyone with the root, or everyone with everyone, in one step.

The plainest of each family, and what serves operators that are not commutative: a rank combines
its neighbors from itself outwards, first those below (their operand left), then those above.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Copy, Recv, Send, Step, recv_reduce


def _others(rank: int, size: int) -> list[int]:
    return [peer for peer in range(size) if peer != rank]


def _combine(rank: int, size: int, chunk: int) -> Iterator[Step]:
    """Combine `chunk` with that of every other rank, in rank order."""
    for peer in reversed(range(rank)):
        yield from recv_reduce(peer, chunk, incoming_first=True)
    for peer in range(rank + 1, size):
        yield from recv_reduce(peer, chunk)


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends to each.

    Cost: steps 1; bytes (P - 1) S at the root.
    Source: Open MPI, ompi/mca/coll/base/coll_base_bcast.c (basic linear).
    """
    if rank == root:
        for peer in _others(rank, size):
            yield Send(peer, 0)
    else:
        yield Recv(root, 0)


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Each sends to the root, which combines in rank order.

    Cost: steps 1; bytes (P - 1) S at the root.
    Source: Open MPI, ompi/mca/coll/base/coll_base_reduce.c (basic linear).
    """
    if rank == root:
        yield from _combine(rank, size, 0)
    else:
        yield Send(root, 0)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Each combines one piece of all ranks, in rank order, and sends it to every other.

    In one step, each sending its whole value to every other, ranks would differ in their bits:
    each would have to begin with its own operand.
    Cost: steps 2; bytes 2 (P - 1) / P S a rank, in messages of S / P.
    Source: the definitions of reduce_scatter and all_gather.
    """
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)


def gather(rank: int, size: int, root: int) -> Iterator[Step]:
    """Each sends its block to the root.

    Cost: steps 1; bytes (P - 1) / P S at the root, S all blocks together.
    Source: Open MPI, ompi/mca/coll/base/coll_base_gather.c (basic linear).
    """
    if rank == root:
        for peer in _others(rank, size):
            yield Recv(peer, peer)
    else:
        yield Send(root, rank)


def scatter(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends each its block.

    Cost: steps 1; bytes (P - 1) / P S at the root, S all blocks together.
    Source: Open MPI, ompi/mca/coll/base/coll_base_scatter.c (basic linear).
    """
    if rank == root:
        for peer in _others(rank, size):
            yield Send(peer, peer)
    else:
        yield Recv(root, rank)


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Each sends its block to every other.

    The barrier of this name is this with blocks of no bytes.
    Cost: steps 1; bytes (P - 1) / P S a rank, S all blocks together.
    Source: the definition.
    """
    for peer in _others(rank, size):
        yield Send(peer, rank)
        yield Recv(peer, peer)


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Each sends every other its chunk and combines its own in rank order.

    Cost: steps 1; bytes (P - 1) / P S a rank.
    Source: the definition.
    """
    for peer in _others(rank, size):
        yield Send(peer, peer)
    yield from _combine(rank, size, rank)


def all_to_all(rank: int, size: int) -> Iterator[Step]:
    """Each sends every other its block, lowest rank first.

    Cost: steps 1; bytes (P - 1) / P S a rank.
    Source: Open MPI, ompi/mca/coll/base/coll_base_alltoall.c (basic linear).
    """
    yield Copy(rank, size + rank)
    for peer in _others(rank, size):
        yield Send(peer, peer)
        yield Recv(peer, size + peer)
