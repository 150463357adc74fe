"""Broadcast of a large value: scatter its pieces, then all ranks pass them around."""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step
from pycoll.schedules.trees import (
    binomial_branch,
    binomial_children,
    binomial_parent,
    position,
    rank_at,
)


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Scatter P pieces down the binomial tree, then pass them around the ring.

    After the scatter a rank has the pieces of its whole branch; those are not sent to it again, so
    the root receives nothing.
    Cost: steps P - 1; bytes 2 (P - 1) / P S at the root, the busiest.
    Source: MPICH, src/mpi/coll/bcast/bcast_intra_scatter_ring_allgather.c; skipping pieces: Zhou
    and others, A bandwidth-saving optimization for MPI broadcast collective operation, 2015.
    """
    place = position(rank, size, root)
    if place:
        parent = rank_at(binomial_parent(place), size, root)
        yield Recv(parent, binomial_branch(place, size))
    for child in reversed(binomial_children(place, size)):
        yield Send(rank_at(child, size, root), binomial_branch(child, size))
    held, held_right = (binomial_branch(p % size, size) for p in (place, place + 1))
    for i in range(size - 1):
        out, into = (place - i) % size, (place - i - 1) % size
        if out not in held_right:
            yield Send((rank + 1) % size, out)
        if into not in held:
            yield Recv((rank - 1) % size, into)
