"""Exchanges between ranks that have met: each gives something, and gets what all have given."""

from __future__ import annotations


class Exchange:
    """The exchange under way, the rounds before it being over.

    Attributes:
        round: its number, from 0.
        given: what each rank has given to it.
        gone: why there can be no exchange any more; "": there can.
    """

    def __init__(self, size: int) -> None:
        self.round = 0
        self.given: dict[int, bytes] = {}
        self.gone = ""
        self._size = size

    def missing(self) -> list[int]:
        """Return the ranks that have not come to it, in order."""
        return [rank for rank in range(self._size) if rank not in self.given]

    def give(self, rank: int, info: bytes) -> list[bytes] | None:
        """Take what a rank gives; returns what all have given when it is the last one."""
        self.given[rank] = info
        if len(self.given) < self._size:
            return None
        infos = [self.given[rank] for rank in range(self._size)]
        self.round += 1
        self.given = {}
        return infos

    def end(self, why: str) -> list[int]:
        """End it, and all that would follow; returns the ranks that wait in it."""
        if self.gone:
            return []
        self.gone = why
        waiting, self.given = sorted(self.given), {}
        return waiting
