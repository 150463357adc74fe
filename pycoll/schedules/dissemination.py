"""Dissemination: each rank tells the one 1, 2, 4, ... ranks further what it has heard."""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Send, Step, recv_reduce
from pycoll.schedules.powers import distances


def barrier(rank: int, size: int) -> Iterator[Step]:
    """After lg P steps each rank has heard of every other, of some more than once.

    Cost: steps ceil(lg P); bytes 0.
    Source: Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988.
    """
    for distance in distances(size):
        yield Send((rank + distance) % size, 0)
        yield from recv_reduce((rank - distance) % size, 0)
