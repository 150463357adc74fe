"""PAT, parallel aggregated trees: lg P steps for any number of ranks, far distances first.

Each block goes to all ranks through a tree of its own, and all trees are the same, turned: what
has to go o ranks to the right goes by the bits of o, the highest first. The messages of all trees
between two ranks at one distance travel as one. For 8 ranks, what rank 0 sends, by offset:

    to rank 4    0
    to rank 2    0 4
    to rank 1    0 2 4 6

Unlike in Bruck's algorithm the last and largest messages go to the nearest rank.
From: Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter operations at scale, 2025
(arXiv 2506.20252); NCCL 2.23.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce
from pycoll.schedules.powers import distances


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Send to the rank d to the right, d = ..., 4, 2, 1, its own block and others that came.

    Cost: steps ceil(lg P), one less if P is at most 3/4 of the next power of two;
    bytes (P - 1) / P S a rank, S all blocks together.
    Source: Jeaugey, arXiv 2506.20252; NCCL 2.23.
    """
    for distance in reversed(distances(size)):
        left = (rank - distance) % size
        yield Send((rank + distance) % size, _blocks(rank, size, distance))
        yield Recv(left, _blocks(left, size, distance))


def reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """The mirror in time of all_gather: from the near to the far, combining on the way.

    Cost: steps ceil(lg P), one less if P is at most 3/4 of the next power of two;
    bytes (P - 1) / P S a rank.
    Source: Jeaugey, arXiv 2506.20252; NCCL 2.23.
    """
    for distance in distances(size):
        left = (rank - distance) % size
        yield Send(left, _blocks(left, size, distance))
        yield from recv_reduce((rank + distance) % size, _blocks(rank, size, distance))


def _blocks(rank: int, size: int, distance: int) -> tuple[int, ...]:
    """Blocks that go on from `rank` by `distance`: all further bits are zero, and none too far."""
    return tuple([(rank - offset) % size for offset in range(0, size - distance, 2 * distance)])
