"""The chain: each rank hands on what it got. Slow for one message, best for a stream of segments.

root ──> root + 1 ──> root + 2 ──> ... ──> root - 1
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce
from pycoll.schedules.relabel import relabel
from pycoll.schedules.trees import position


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Receive from the rank before, send to the rank after.

    Cost: steps P - 1; bytes S a rank. In K segments the time is that of K + P - 2 segments.
    Source: Open MPI, ompi/mca/coll/base/coll_base_bcast.c (pipeline).
    """
    place = position(rank, size, root)
    if place:
        yield Recv((rank - 1) % size, 0)
    if place < size - 1:
        yield Send((rank + 1) % size, 0)


def reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Combine what the rank after sends, send to the rank before: the chain backwards.

    From root 0 operands stay in rank order; from another root they begin at the root.
    Cost: steps P - 1; bytes S a rank. In K segments the time is that of K + P - 2 segments.
    Source: Open MPI, ompi/mca/coll/base/coll_base_reduce.c (pipeline).
    """
    place = position(rank, size, root)
    if place < size - 1:
        yield from recv_reduce((rank + 1) % size, 0)
    if place:
        yield Send((rank - 1) % size, 0)


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Reduce down the chain to rank 0, in rank order, then back up.

    Cost: steps 2 (P - 1); bytes 2 S a rank (S if P = 2).
    Source: NCCL runs such a chain inside each host of its trees, src/graph/trees.cc.
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)


def scan(rank: int, size: int) -> Iterator[Step]:
    """Put what comes from the rank before on the left, send to the rank after.

    Cost: steps P - 1; bytes S a rank.
    Source: Open MPI, ompi/mca/coll/base/coll_base_scan.c (linear).
    """
    if rank:
        yield from recv_reduce(rank - 1, 0, incoming_first=True)
    if rank < size - 1:
        yield Send(rank + 1, 0)


def exscan(rank: int, size: int) -> Iterator[Step]:
    """Send each value to the rank after; ranks 1 to P - 1 scan what came, along the chain.

    Cost: steps P - 1; bytes 2 S a rank (S if P = 2).
    Source: the definition, and `scan`.
    """
    if rank < size - 1:
        yield Send(rank + 1, 0)
    if rank:
        yield Recv(rank - 1, 1)
        yield from relabel(scan(rank - 1, size - 1), range(1, size), (1,))
