"""The chain: each rank hands on what it got. Slow for one message, best for a stream of segments.

root ──> root + 1 ──> root + 2 ──> ... ──> root - 1
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step
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
