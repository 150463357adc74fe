"""Algorithms around the ring of ranks: each rank talks to its two neighbors, one chunk a step.

    0 ──> 1 ──> 2 ──> 3
    ^                 │
    └─────────────────┘

Many steps, but each rank moves the fewest bytes possible: for large values.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Pass partial sums to the right: chunk c sets out from rank c + 1 and ends at rank c.

    Cost: steps P - 1; bytes (P - 1) / P S a rank.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(1, size):
        yield Send(right, (rank - i) % size)
        yield from recv_reduce(left, (rank - i - 1) % size)


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Pass blocks to the right, first its own, then what came before.

    Cost: steps P - 1; bytes (P - 1) / P S a rank, S all blocks together.
    Source: MPICH, src/mpi/coll/allgather/allgather_intra_ring.c.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(size - 1):
        yield Send(right, (rank - i) % size)
        yield Recv(left, (rank - i - 1) % size)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Combine chunk c at rank c, then pass the combined chunks around.

    Cost: steps 2 (P - 1); bytes 2 (P - 1) / P S a rank.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009.
    """
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)
