"""Bruck: lg P steps for any number of ranks, each of many blocks in one message.

What has to go o ranks to the right goes by the bits of o, one bit a step. For small blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Copy, Recv, Send, Step
from pycoll.schedules.powers import distances


def all_gather(rank: int, size: int) -> Iterator[Step]:
    """Send all blocks so far to the rank d to the left, d = 1, 2, 4, ...; the last time some.

    Blocks keep their chunks, so there is no rotation at the end.
    Cost: steps ceil(lg P), one less if P is at most 3/4 of the next power of two (the last message
    then waits for none of the step before); bytes (P - 1) / P S a rank, S all blocks together.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all
    communications in multiport message-passing systems, 1997.
    """
    for distance in distances(size):
        source, count = (rank + distance) % size, min(distance, size - distance)
        yield Send((rank - distance) % size, _run(rank, count, size))
        yield Recv(source, _run(source, count, size))


def all_to_all(rank: int, size: int) -> Iterator[Step]:
    """Blocks that go o ranks to the right move by the bits of o, the lowest first.

    The block for o ranks further has two places on its way and takes turns: the chunk in which it
    will be at the end here, P + (rank - o), and chunk 2 P + o. For a rank cannot receive into the
    place out of which it still sends, and around the ring all of them wait. Needs memory for
    P / 2 blocks more, about.
    Cost: steps ceil(lg P), one less if P is at most 3/4 of the next power of two;
    bytes about lg P / 2 S a rank, S one rank's blocks together.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all
    communications in multiport message-passing systems, 1997.
    """
    yield Copy(rank, size + rank)
    for distance in distances(size):
        moving = [offset for offset in range(size) if offset & distance]
        yield Send(
            (rank + distance) % size,
            tuple([_kept(rank, size, offset, offset % distance) for offset in moving]),
        )
        yield Recv(
            (rank - distance) % size,
            tuple([_kept(rank, size, offset, offset % (2 * distance)) for offset in moving]),
        )


def _run(first: int, count: int, size: int) -> tuple[int, ...]:
    return tuple([(first + i) % size for i in range(count)])


def _kept(rank: int, size: int, offset: int, moved: int) -> int:
    """Chunk here of the block for `offset` ranks further, when it has gone `moved` of them."""
    if moved == 0:
        return (rank + offset) % size
    hops_left = (offset - moved).bit_count()
    return 2 * size + offset if hops_left % 2 else size + (rank - offset) % size
