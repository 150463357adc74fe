"""Ranks as threads of one process: the reference implementation of a transport in Python.

A `Hub` is the world of `size` ranks. Each rank's `InprocTransport` has a mailbox, a deque of
closures that its owner runs in `progress`, and an eventfd that says the mailbox is not empty.
Everything that changes a rank's state is a note in its mailbox, so that each rank's handlers
and completions run under that rank's own lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pycoll._transports.base import (
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Arrival,
    Handler,
    Parts,
    Transfer,
    Transport,
    Withdrawn,
    nbytes_of,
)
from pycoll.errors import PeerFailed


class Hub:
    """The transports of the ranks of one in-process world."""

    def __init__(self, size: int) -> None:
        self.transports: list[InprocTransport | None] = [None] * size

    def mailbox(self, rank: int) -> InprocTransport | None:
        """Return the transport of `rank` if it is open."""
        return self.transports[rank]


class _Message:
    """A message between two ranks: the state that sender and receiver share under a lock."""

    __slots__ = ("lock", "parts", "sender", "transfer")

    def __init__(self, sender: InprocTransport, parts: Parts, transfer: _Send) -> None:
        self.lock = threading.Lock()
        self.sender = sender
        self.parts: Parts | None = parts
        self.transfer = transfer

    def take(self, into: memoryview) -> bool:
        """Copy the payload into `into`; False if the sender has taken it back."""
        with self.lock:
            if self.parts is None:
                return False
            offset = 0
            for part in self.parts:
                into[offset : offset + len(part)] = part
                offset += len(part)
            self.parts = None
        self.sender.post(self.transfer.finish)
        return True

    def withdraw(self) -> bool:
        with self.lock:
            taken = self.parts is None
            self.parts = None
        return not taken


class _Send(Transfer):
    __slots__ = ("message", "pending", "receiver", "withdrawn")

    def __init__(self, pending: dict[_Send, None]) -> None:
        super().__init__()
        self.pending = pending
        self.message: _Message | None = None
        self.receiver: InprocTransport | None = None
        self.withdrawn: Callable[[], None] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self.pending.pop(self, None)
        super().finish(error)

    def cancel(self) -> None:
        super().cancel()
        self.pending.pop(self, None)
        if self.message and self.message.withdraw() and self.receiver and self.withdrawn:
            self.receiver.post(self.withdrawn)


class _InprocArrival(Arrival):
    __slots__ = ("_message", "_on_used")

    def __init__(
        self,
        peer: int,
        header: bytes,
        nbytes: int,
        payload: memoryview | None,
        message: _Message | None,
        on_used: Callable[[], None],
    ) -> None:
        super().__init__(peer, header, nbytes, payload)
        self._message = message
        self._on_used = on_used

    def accept(self, into: memoryview) -> Transfer:
        if self._message is None:
            return self.copy(into)
        transfer = Transfer()  # one copy, done when this returns: nothing is left to redirect
        transfer.finish(None if self._message.take(into) else Withdrawn())
        return transfer

    def release(self) -> None:
        if self._message is not None:
            if self._message.withdraw():
                self._message.sender.post(self._message.transfer.finish)
        elif self.payload is not None:
            self.payload = None
            self._on_used()


class InprocTransport(Transport):
    """The transport of one rank of a `Hub`."""

    name = "inproc"

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._notes: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False
        self._handler: Handler | None = None
        self._owed: dict[int, int] = {}
        self._links: set[int] = set()
        self._pending: dict[int, dict[_Send, None]] = {}
        self._forgotten: dict[int, str] = {}
        self._closed = False

    def address(self) -> dict[str, Any]:
        return {}

    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        self._handler = handler
        self._hub.transports[self._rank] = self

    def post(self, note: Callable[[], None]) -> None:
        """Have `note` run by this rank's owner; called from any rank's thread."""
        self._notes.append(note)
        if not self._closed:
            os.eventfd_write(self._bell, 1)
            self._rung = True

    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, may_buffer=True)

    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, may_buffer=False)

    def _start(self, peer: int, header: bytes, parts: Parts, may_buffer: bool) -> Transfer:
        pending = self._pending.setdefault(peer, {})
        transfer = _Send(pending)
        receiver = self._hub.mailbox(peer)
        if receiver is None or peer in self._forgotten:
            reason = self._forgotten.get(peer, "its transport is closed")
            transfer.finish(PeerFailed(peer, reason))
            return transfer
        self._links.add(peer)
        nbytes = nbytes_of(parts)
        cost = nbytes + MESSAGE_COST
        has_room = nbytes <= EAGER_LIMIT and self._owed.get(peer, 0) + cost <= CREDIT
        if may_buffer and (has_room or peer == self._rank):
            self._owed[peer] = self._owed.get(peer, 0) + cost
            payload = memoryview(bytearray().join(parts))

            def used() -> None:
                self.post(lambda: self._repay(peer, cost))

            arrival = _InprocArrival(self._rank, header, nbytes, payload, None, used)
            receiver.post(lambda: receiver.deliver(arrival))
            transfer.finish()
        else:
            message = _Message(self, parts, transfer)
            arrival = _InprocArrival(self._rank, header, nbytes, None, message, lambda: None)
            transfer.message, transfer.receiver = message, receiver
            transfer.withdrawn = lambda: receiver.take_back(arrival)
            pending[transfer] = None
            receiver.post(lambda: receiver.deliver(arrival))
        return transfer

    def deliver(self, arrival: Arrival) -> None:
        """Hand an arrival to this rank's owner."""
        assert self._handler is not None
        self._handler.arrived(arrival)

    def take_back(self, arrival: Arrival) -> None:
        """Tell this rank's owner that a message was withdrawn."""
        assert self._handler is not None
        self._handler.withdrawn(arrival)

    def farewell(self, peer: int) -> None:
        """Tell this rank's owner that `peer` has closed."""
        assert self._handler is not None
        self._handler.finished(peer)

    def _repay(self, peer: int, cost: int) -> None:
        self._owed[peer] -= cost

    def progress(self) -> bool:
        if not self._notes:
            return False
        while self._notes:
            self._notes.popleft()()
        return True

    def forget(self, peer: int, reason: str) -> None:
        self._forgotten[peer] = reason
        for send in list(self._pending.pop(peer, {})):
            if send.message is not None and send.message.withdraw():
                send.finish(PeerFailed(peer, reason))

    def sleep(self) -> bool:
        # Not in `progress`: a note may be read before it has rung, and would ring for ever.
        if self._rung and not self._closed:
            self._rung = False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        return self.is_idle()

    @property
    def is_receiving(self) -> bool:
        return False  # to accept a message is to have it

    def is_idle(self) -> bool:
        return not self._notes

    def fileno(self) -> int:
        return self._bell

    def links(self) -> list[int]:
        return sorted(self._links - {self._rank})

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._hub.transports[self._rank] = None
        for peer in self._links - {self._rank}:
            receiver = self._hub.mailbox(peer)
            if receiver is not None:
                receiver.post(lambda receiver=receiver: receiver.farewell(self._rank))  # type: ignore[misc]
        os.close(self._bell)
