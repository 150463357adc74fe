"""Through a tree: up to its root while combining, down from its root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pycoll.schedule import Chunks, Recv, Send, Step, recv_reduce


def up(parent: int | None, children: Sequence[int], chunk: Chunks) -> Iterator[Step]:
    """Combine what comes from each child, in this order, then send to the parent."""
    for child in children:
        yield from recv_reduce(child, chunk)
    if parent is not None:
        yield Send(parent, chunk)


def down(parent: int | None, children: Sequence[int], chunk: Chunks) -> Iterator[Step]:
    """Receive from the parent, then send to each child, in this order."""
    if parent is not None:
        yield Recv(parent, chunk)
    for child in children:
        yield Send(child, chunk)
