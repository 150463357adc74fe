"""Memory for what is on its way: received to be combined, or copied from where it arrived."""

from __future__ import annotations

KEPT_NBYTES = 64 << 20
"""Bytes that an engine keeps for later calls."""

WORTH_NBYTES = 64 << 10
"""Bytes from which memory is kept."""

SPARE = 4
"""Memory is taken for what needs at least the SPAREth part of it."""


def new_bytes(nbytes: int) -> memoryview:
    """Return uninitialized writable memory."""
    if nbytes < 4096:
        return memoryview(bytearray(nbytes))
    import numpy as np  # late: a barrier does not need it

    return np.empty(nbytes, np.uint8).data


class Scratch:
    """Memory that calls use one after the other.

    Fresh memory costs its pages, and with RDMA a registration: for large values more than what is
    done in it.
    """

    def __init__(self) -> None:
        self._kept: list[memoryview] = []  # what was given back last is last

    def take(self, nbytes: int) -> memoryview:
        """Return at least so many bytes, with anything in them."""
        for index in reversed(range(len(self._kept))):
            if nbytes <= len(self._kept[index]) <= SPARE * nbytes:
                return self._kept.pop(index)
        return new_bytes(nbytes)

    def give_back(self, memory: memoryview) -> None:
        """Keep what `take` has returned, or let it go; nobody uses it any more."""
        if len(memory) < WORTH_NBYTES:
            return
        self._kept.append(memory)
        nbytes = sum(map(len, self._kept))
        while nbytes > KEPT_NBYTES:
            nbytes -= len(self._kept.pop(0))
