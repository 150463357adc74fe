"""Sends, receives and arrivals of the zmq transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pycoll._transports.base import MESSAGE_COST, Arrival, Parts, Transfer

if TYPE_CHECKING:
    from pycoll._transports.zeromq import ZmqTransport

FRAGMENT = 1024 * 1024
"""Bytes of one DATA message. ZeroMQ on loopback was quickest in messages of about 1 MiB
(4.7 GB/s; 3 at 4 MiB, 1.4 at 64 MiB)."""


def _fragments(parts: Parts) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, view) of the pieces in which a payload travels: at least one."""
    offset = 0
    for part in parts:
        for start in range(0, len(part), FRAGMENT):
            piece = part[start : start + FRAGMENT]
            yield offset, piece
            offset += len(piece)
    if offset == 0:
        yield 0, memoryview(b"")


class ZmqSend(Transfer):
    """A message that waits for its GO, or whose fragments are under way."""

    __slots__ = ("id", "peer", "pending", "sent", "taken", "transport")

    def __init__(self, transport: ZmqTransport, peer: int, number: int, parts: Parts) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.id = number
        self.pending = deque(_fragments(parts))
        self.sent = 0
        self.taken = 0

    @property
    def committed(self) -> bool:
        # A receiver is done when it has stored the last fragment, and hears of a CANCEL later.
        return not self.pending

    def awaited(self) -> Collection[int]:
        return (self.peer,) if self.sent == 0 else ()

    def cancel(self) -> None:
        super().cancel()
        self.transport.take_back(self)


class ZmqReceive(Transfer):
    """An accepted message whose fragments are arriving."""

    __slots__ = ("filled", "id", "into", "nbytes", "peer", "stored", "transport")

    def __init__(
        self, transport: ZmqTransport, peer: int, number: int, nbytes: int, into: memoryview
    ) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.id = number
        self.nbytes = nbytes
        self.into = into
        self.filled = 0
        self.stored = 0

    def cancel(self) -> None:
        super().cancel()
        self.transport.give_up(self)

    def redirect(self, into: memoryview) -> None:
        into[: self.filled] = self.into[: self.filled]
        self.into = into


class ZmqArrival(Arrival):
    """A message that has come, or is announced.

    Attributes:
        ahead: its payload came AHEAD: it is above the eager limit, and was sent by `push`.
    """

    __slots__ = ("ahead", "id", "transport")

    def __init__(
        self,
        transport: ZmqTransport,
        peer: int,
        header: bytes | memoryview,
        nbytes: int,
        payload: memoryview | None,
        number: int,
        ahead: bool = False,
    ) -> None:
        super().__init__(peer, header, nbytes, payload)
        self.transport = transport
        self.id = number
        self.ahead = ahead

    def accept(self, into: memoryview) -> Transfer:
        if self.payload is not None:
            return self.copy(into)
        return self.transport.accept(self, into)

    def release(self) -> None:
        if self.payload is None:
            self.transport.drop(self)
        else:
            self.payload = None
            if self.ahead:
                self.transport.consumed_ahead(self.peer, self.nbytes)
            else:
                self.transport.consumed(self.peer, self.nbytes + MESSAGE_COST)
