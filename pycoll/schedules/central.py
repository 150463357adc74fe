"""Everything through rank 0, the parameter server of old: few messages, one very busy rank.

There is no all_to_all of this kind: rank 0 would have to hold the P * P blocks of all.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce
from pycoll.schedules import linear


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Each sends to rank 0, which combines in rank order and sends the result to each.

    Cost: steps 2; bytes (P - 1) S in and as many out at rank 0.
    Source: Open MPI, ompi/mca/coll/base/coll_base_allreduce.c (basic linear).
    """
    yield from linear.reduce(rank, size, 0)
    yield from linear.broadcast(rank, size, 0)


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Gather at rank 0, which sends each the blocks of all others in one message.

    Cost: steps 2; bytes (P - 1)^2 / P S out of rank 0, S all blocks together.
    Source: Open MPI, ompi/mca/coll/base/coll_base_allgather.c (basic linear).
    """
    yield from linear.gather(rank, size, 0)
    if rank == 0:
        for peer in range(1, size):
            yield Send(peer, _all_but(peer, size))
    else:
        yield Recv(0, _all_but(rank, size))


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Reduce all chunks at rank 0, in rank order, which sends each its own.

    Cost: steps 2; bytes (P - 1) S into rank 0.
    Source: Open MPI, ompi/mca/coll/base/coll_base_reduce_scatter.c (nonoverlapping).
    """
    if rank:
        yield Send(0, range(size))
        yield Recv(0, rank)
        return
    for peer in range(1, size):
        yield from recv_reduce(peer, range(size))
    for peer in range(1, size):
        yield Send(peer, peer)


def _all_but(rank: int, size: int) -> tuple[int, ...]:
    return tuple([block for block in range(size) if block != rank])
