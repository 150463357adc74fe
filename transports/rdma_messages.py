"""Sends, receives and arrivals of a link by RDMA."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pycoll._transports.base import (
    MESSAGE_COST,
    Arrival,
    Elsewhere,
    Parts,
    Reach,
    Transfer,
    nbytes_of,
)
from pycoll._transports.rdma_frames import PIECE
from pycoll._transports.rdma_lane import Write
from pycoll._transports.registrations import Lease

if TYPE_CHECKING:
    from pycoll._transports.rdma_link import RdmaLink


class Pieces:
    """A payload on its way through frames.

    Attributes:
        left: bytes that are not sent.
    """

    __slots__ = ("_offset", "_parts", "left")

    def __init__(self, parts: Parts) -> None:
        self.left = nbytes_of(parts)
        self._parts = deque(parts)
        self._offset = 0

    def next(self) -> tuple[int, list[memoryview]]:
        """Take as much as fits into a frame; returns where it begins, and the views of it."""
        offset, room = self._offset, PIECE
        views = []
        while self._parts and room:
            part = self._parts.popleft()
            view, rest = part[:room], part[room:]
            views.append(view)
            room -= len(view)
            if rest:
                self._parts.appendleft(rest)
        self._offset += PIECE - room
        self.left -= PIECE - room
        return offset, views


class RdmaSend(Transfer):
    """A message that waits to be accepted, or is under way."""

    __slots__ = ("id", "is_written", "link", "parts", "pieces", "write")

    def __init__(self, link: RdmaLink, number: int, parts: Parts) -> None:
        super().__init__()
        self.link = link
        self.id = number
        self.parts = parts
        self.write: Write | None = None
        self.is_written = False  # over a lane, this one or one that is gone
        self.pieces: Pieces | None = None

    @property
    def committed(self) -> bool:
        # Without a write, but written: a lane is gone, and the peer will say what it has.
        return self.is_written and (self.write is None or self.write.is_posted)

    def cancel(self) -> None:
        super().cancel()
        self.link.take_back(self)


class RdmaReceive(Transfer):
    """An accepted message that is not here yet.

    Attributes:
        epoch: of the lane over which the sender was told to write, or 0.
        is_complete: all is here, and only `done` is still to be said.
    """

    __slots__ = ("epoch", "filled", "id", "into", "is_complete", "lease", "link", "nbytes")

    def __init__(self, link: RdmaLink, number: int, nbytes: int, into: memoryview) -> None:
        super().__init__()
        self.link = link
        self.id = number
        self.nbytes = nbytes
        self.into = into
        self.filled = 0
        self.lease: Lease | None = None
        self.epoch = 0
        self.is_complete = False

    def cancel(self) -> None:
        super().cancel()
        self.link.give_up(self)

    def redirect(self, into: memoryview) -> None:
        self.link.redirect(self, into)

    def release(self) -> None:
        """End the use of its memory."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None


class RdmaArrival(Arrival):
    """A message that has come, or is announced."""

    __slots__ = ("id", "link")

    def __init__(
        self, link: RdmaLink, header: bytes, nbytes: int, payload: memoryview | None, number: int
    ) -> None:
        super().__init__(link.peer, header, nbytes, payload)
        self.link = link
        self.id = number

    def accept(self, into: memoryview) -> Transfer:
        if self.payload is not None:
            return self.copy(into)
        return self.link.accept(self, into)

    def reach(self, into: memoryview, elsewhere: Elsewhere) -> Reach | None:
        if self.payload is not None:
            return None
        return self.link.reach(into, elsewhere)

    def release(self) -> None:
        if self.payload is None:
            self.link.drop(self)
        else:
            self.payload = None
            self.link.consumed(self.nbytes + MESSAGE_COST)
