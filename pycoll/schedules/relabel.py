"""Algorithms made of others: the same steps among other ranks, on other chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pycoll.schedule import Chunks, Copy, Recv, Reduce, Send, Step


def relabel(
    steps: Iterable[Step], ranks: Sequence[int], chunks: Sequence[Chunks]
) -> Iterator[Step]:
    """Give the steps with ``ranks[i]`` for peer i and ``chunks[j]`` for chunk j.

    Where one chunk becomes several, they travel together; a Copy needs single ones.
    """
    for step in steps:
        match step:
            case Send(peer, chunk):
                yield Send(ranks[peer], _renamed(chunk, chunks))
            case Recv(peer, chunk, scratch):
                yield Recv(ranks[peer], _renamed(chunk, chunks), scratch)
            case Reduce(chunk, incoming_first):
                yield Reduce(_renamed(chunk, chunks), incoming_first)
            case Copy(source, chunk):
                before, after = chunks[source], chunks[chunk]
                assert isinstance(before, int)
                assert isinstance(after, int)
                yield Copy(before, after)


def _renamed(chunk: Chunks, chunks: Sequence[Chunks]) -> Chunks:
    if isinstance(chunk, int):
        return chunks[chunk]
    several = [chunks[one] for one in chunk]
    return tuple([c for part in several for c in ((part,) if isinstance(part, int) else part)])
