"""The way from a rank to the launcher of its own host: a Unix socket that the rank inherits.

The launcher makes a pair of sockets for each rank, and puts a greeting into its own end: the job's
key. Who finds the greeting at the other end has the right descriptor, of the right job, and is the
first to use it. Everybody else leaves it alone.
"""

from __future__ import annotations

import _socket  # socket itself takes longer to import than everything else here
import os
import select
import stat
import time

from pycoll._rendezvous.wire import Backlog

_LENGTH_NBYTES = 4
_READ_NBYTES = 64 << 10
# In one call of `receive`: more than the kernel keeps for a sender that has died, yet little enough
# for one that floods.
_MAX_READS = 16


def framed(frame: bytes) -> bytes:
    """A frame as it is sent: its length, then so many bytes."""
    return len(frame).to_bytes(_LENGTH_NBYTES, "little") + frame


def take_frames(incoming: bytearray, max_nbytes: int) -> tuple[list[bytes], bool]:
    """Take whole frames out of what has come; whether no longer one is announced than may be."""
    frames, start, is_good = [], 0, True
    while len(incoming) >= (body := start + _LENGTH_NBYTES):
        end = body + int.from_bytes(incoming[start:body], "little")
        is_good = end - body <= max_nbytes
        if not is_good or end > len(incoming):
            break
        frames.append(bytes(incoming[body:end]))
        start = end
    del incoming[:start]
    return frames, is_good


def greeting(key: bytes) -> bytes:
    """What the launcher sends first."""
    return framed(key)


def adopt(link: str, key: bytes, max_nbytes: int) -> LocalLink | None:
    """Take over the descriptor that PYCOLL_LINK names; child processes will not inherit it.

    Args:
        link: the value of the variable.
        key: the job's.
        max_nbytes: longest frame that is received.

    Returns:
        None if the descriptor is not open here, is something else, or another process uses it.

    Raises:
        OSError: too many files are open.
    """
    try:
        descriptor, inode = map(int, link.split(":"))
        status = os.fstat(descriptor)
    except (ValueError, OverflowError, OSError):
        return None
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
        return None
    socket = _socket.socket(fileno=descriptor)
    socket.setblocking(False)
    expected = greeting(key)
    try:
        # First without taking it: it is another's if it is not the expected one.
        mine = socket.recv(len(expected), _socket.MSG_PEEK) == expected
        if mine:
            socket.recv(len(expected))
            os.set_inheritable(descriptor, False)
    except OSError:
        mine = False
    if mine:
        return LocalLink(FrameSocket(socket, max_nbytes))
    socket.detach()
    return None


class FrameSocket:
    """One end of a stream that carries frames (`framed`).

    It never blocks, and keeps at most one frame that is under way.

    Args:
        socket: the end, which becomes its own.
        max_nbytes: the connection is cut when a longer frame is announced.

    Attributes:
        is_open: False once everything was received and nothing more can come.
    """

    def __init__(self, socket: _socket.socket, max_nbytes: int) -> None:
        self._socket, self._max_nbytes = socket, max_nbytes
        self._socket.setblocking(False)
        self.is_open = True
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        """Send a frame, or begin to; False: it is not taken, one is under way already."""
        if not self.flush():
            return False
        self._outgoing = memoryview(framed(frame))
        self.flush()
        return True

    def flush(self) -> bool:
        """Go on with the frame under way; returns whether it has been sent."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing, _socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:  # closed at the other end: `receive` still gives what had come
                sent = len(self._outgoing)
            self._outgoing = self._outgoing[sent:]
        return True

    def receive(self) -> list[bytes]:
        for _ in range(_MAX_READS):
            try:
                data = self._socket.recv(_READ_NBYTES)
            except BlockingIOError:
                break
            except OSError:  # the other end was closed before it had read everything
                data = b""
            if not data:
                self.is_open = False
                break
            self._incoming += data
        frames, is_good = take_frames(self._incoming, self._max_nbytes)
        self.is_open = self.is_open and is_good
        return frames

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        self.is_open = False
        self._outgoing = memoryview(b"")
        self._socket.close()


class LocalLink:
    """A rank's end, with a descriptor to sleep on; what it does, `connection.Connection` says.

    Args:
        socket: connected; it becomes the link's own.
    """

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._backlog = Backlog()
        self._flag, self._is_flagged = os.eventfd(0, os.EFD_CLOEXEC), False
        self._epoll = select.epoll()
        self._epoll.register(self._flag, select.EPOLLIN)
        self._epoll.register(socket, select.EPOLLIN)
        self._waits_to_send = False

    @property
    def is_open(self) -> bool:
        return self._socket.is_open

    def fileno(self) -> int:
        return self._epoll.fileno()

    def wake(self) -> None:
        if not self._epoll.closed and not self._is_flagged:
            self._is_flagged = True
            os.eventfd_write(self._flag, 1)

    def wait(self, timeout_s: float) -> None:
        self._epoll.poll(max(0.0, min(timeout_s, 60.0)))

    def connect(self, timeout_s: float) -> None:
        """Do nothing: it was connected when it was made."""

    def raise_if_late(self, deadline: float) -> None:
        """Do nothing: who has the descriptor is in time."""

    def send(self, frame: bytes, is_state: bool = False) -> None:
        if self.is_open:
            self._backlog.add(frame, is_state)
            self._flush()

    def pump(self) -> list[bytes]:
        if self._epoll.closed:
            return []
        if self._is_flagged:
            self._is_flagged = False
            os.eventfd_read(self._flag)
        if not self.is_open:
            return []
        self._flush()
        received = self._socket.receive()
        if not self._socket.is_open:
            self._disconnect()
        return received

    def close(self, linger_s: float) -> None:
        """Disconnect, after at most `linger_s` for what waits to be sent; may be called again."""
        deadline = time.monotonic() + linger_s
        while self._waits_to_send and (remaining := deadline - time.monotonic()) > 0:
            self.wait(remaining)
            self.pump()
        if not self._epoll.closed:
            self._disconnect()
            self._epoll.close()
            os.close(self._flag)

    def _flush(self) -> None:
        self._backlog.flush(self._socket.send)
        waits = not self._socket.flush() or len(self._backlog) > 0
        if waits != self._waits_to_send:
            self._waits_to_send = waits
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT * waits)

    def _disconnect(self) -> None:
        self._backlog.clear()
        self._waits_to_send = False
        if self._socket.fileno() >= 0:
            # A child process may have the socket too: closing it alone would leave it in the epoll.
            self._epoll.unregister(self._socket)
            self._socket.close()
