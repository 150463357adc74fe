"""Pairwise exchange: everyone with everyone, in an order in which nobody is wanted by two at once.

Nothing makes one exchange wait for the one before: order here is the order of posting, which keeps
ranks from all sending to rank 0 first.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Copy, Recv, Send, Step, recv_reduce


def _exchanges(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Whom to send to and whom to receive from; the same rank if P is a power of two."""
    for i in range(1, size):
        if size & (size - 1) == 0:
            yield rank ^ i, rank ^ i
        else:
            yield (rank + i) % size, (rank - i) % size


def all_to_all(rank: int, size: int) -> Iterator[Step]:
    """Exchange a block with every other rank.

    Cost: steps 1; bytes (P - 1) / P S a rank.
    Source: MPICH, src/mpi/coll/alltoall/alltoall_intra_pairwise.c.
    """
    yield Copy(rank, size + rank)
    for dest, source in _exchanges(rank, size):
        yield Send(dest, dest)
        yield Recv(source, size + source)


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Exchange a chunk with every other rank, combining this rank's own as they come.

    Cost: steps 1; bytes (P - 1) / P S a rank.
    Source: MPICH, src/mpi/coll/reduce_scatter/reduce_scatter_intra_pairwise.c.
    """
    for dest, source in _exchanges(rank, size):
        yield Send(dest, dest)
        yield from recv_reduce(source, rank)
