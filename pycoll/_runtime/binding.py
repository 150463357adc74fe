"""Where the chunks of a collective are in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pycoll._transports.base import Parts

Combine = Callable[[memoryview, memoryview, memoryview], None]
"""(left, right, out): byte views of equal length; out may be left or right."""

CoreReduction = tuple[int, int, int]
"""A reduction that the core has: operator, dtype, and by what a result is divided, or 0."""

ChunkPlace = tuple[int, int, int]
"""Bytes of a chunk, and where it begins in what is passed and in the result; -1: it is not there"""


class Binding(NamedTuple):
    """Where the chunks of one run are; lists by chunk.

    Attributes:
        nbytes: length, or None if only the sender knows it.
        source: the value at the start, or None. Never written, unless it is also the target.
        target: where the value must be at the end, or None if it is not needed then.
        combine: the reduction, None if nothing is reduced.
        blocks: all sources as one block of memory, and all targets, where the chunks lie one behind
            the other: what neighbors have there is sent, received and reduced in one piece.
            None: every chunk is by itself.
        on_gpu: values that others offer are copied to the arrays on a GPU themselves; the targets,
            which are their staging buffers, are not used.
    """

    nbytes: list[int | None]
    source: list[Parts | None]
    target: list[memoryview | None]
    combine: Combine | CoreReduction | None = None
    blocks: tuple[memoryview | None, memoryview | None] | None = None
    on_gpu: bool = False

    def cut(self, index: int, count: int, granule: int) -> Binding:
        """Return segment `index` of `count` of every chunk; `granule` bytes stay together.

        Every source must be in one part (see `joined`).
        """

        def segment(nbytes: int) -> slice:
            units = nbytes // granule
            return slice(units * index // count * granule, units * (index + 1) // count * granule)

        nbytes: list[int | None] = []
        source: list[Parts | None] = []
        target: list[memoryview | None] = []
        for length, parts, view in zip(self.nbytes, self.source, self.target, strict=True):
            assert length is not None
            piece = segment(length)
            nbytes.append(piece.stop - piece.start)
            source.append((parts[0][piece],) if parts is not None else None)
            target.append(view[piece] if view is not None else None)
        return Binding(nbytes, source, target, self.combine)

    def joined(self) -> Binding:
        """Return the same with every source in one part."""
        source: list[Parts | None] = [
            parts if parts is None or len(parts) == 1 else (memoryview(b"".join(parts)),)
            for parts in self.source
        ]
        return self._replace(source=source)


def are_neighbors(chunks: Sequence[int]) -> bool:
    """Whether chunks follow each other."""
    return all(after == before + 1 for before, after in pairwise(chunks))


def fill_all(views: Sequence[memoryview], data: memoryview) -> None:
    """Copy the front of `data` to several places, one after the other."""
    begin = 0
    for view in views:
        view[:] = data[begin : begin + len(view)]
        begin += len(view)


def fill_from(parts: Parts, into: memoryview) -> None:
    """Copy a payload to the front of `into`."""
    offset = 0
    for part in parts:
        into[offset : offset + len(part)] = part
        offset += len(part)
