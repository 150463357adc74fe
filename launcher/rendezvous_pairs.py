"""The launcher's ends of sockets that ranks of its own host inherit: see `_rendezvous.local`."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Iterator

from pycoll._rendezvous.local import FrameSocket, greeting
from pycoll._rendezvous.wire import MAX_FRAME_NBYTES

# What waits for a rank that does not read (it is stopped); what comes on top is dropped.
_MAX_WAITING_NBYTES = 64 << 20


class Pair:
    """The launcher's end of one pair."""

    def __init__(self, end: FrameSocket, epoll: select.epoll) -> None:
        self.end = end
        self._epoll = epoll
        self._waiting: deque[bytes] = deque()
        self._waiting_nbytes = 0
        self._waits_to_send = False

    @property
    def number(self) -> int:
        """Its number among the pairs that are open."""
        return self.end.fileno()

    def send(self, frame: bytes) -> None:
        """Send, now or when the rank reads again; never blocks. Without a connection: nothing."""
        if self.end.is_open and self._waiting_nbytes < _MAX_WAITING_NBYTES:
            self._waiting.append(frame)
            self._waiting_nbytes += len(frame)
            self.flush()

    def flush(self) -> None:
        """Send what the rank takes now."""
        while self._waiting and self.end.send(self._waiting[0]):
            self._waiting_nbytes -= len(self._waiting.popleft())
        waits = not self.end.flush() or bool(self._waiting)
        if waits != self._waits_to_send:
            self._waits_to_send = waits
            self._epoll.modify(self.end, select.EPOLLIN | select.EPOLLOUT * waits)


class Pairs:
    """All pairs of a job: one of the `rendezvous_carriers`.

    Args:
        key: the job's.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._epoll = select.epoll()
        self._pairs: dict[int, Pair] = {}

    def open(self) -> int:
        """Make a pair; returns the descriptor for the rank, which the caller closes.

        Raises:
            OSError: too many files are open.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        ours.send(greeting(self._key))
        end = FrameSocket(ours, MAX_FRAME_NBYTES)
        self._epoll.register(end, select.EPOLLIN)
        self._pairs[end.fileno()] = Pair(end, self._epoll)
        return theirs.detach()

    def find(self, number: int) -> Pair | None:
        """Return the pair of that number, if it is still open."""
        return self._pairs.get(number)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` may have something."""
        return self._epoll.fileno()

    def receive(self) -> Iterator[tuple[Pair, bytes]]:
        """Give what has come, and from where; send what waits."""
        # All of them: what ranks said last must be heard before their ends are seen.
        for descriptor, _ in self._epoll.poll(0, max(1, len(self._pairs))):
            pair = self._pairs[descriptor]
            pair.flush()
            for frame in pair.end.receive():
                yield pair, frame
            if not pair.end.is_open:
                self._close(pair.end)

    def close(self) -> None:
        """Close the launcher's ends; may be called again."""
        for pair in list(self._pairs.values()):
            self._close(pair.end)
        self._epoll.close()

    def _close(self, end: FrameSocket) -> None:
        del self._pairs[end.fileno()]
        # A fork of this process may have the socket too: closing alone would leave it in the epoll.
        self._epoll.unregister(end)
        end.close()


def link_variable(descriptor: int) -> str:
    """The value of PYCOLL_LINK for a rank that inherits `descriptor`."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"
