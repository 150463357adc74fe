"""What both ends of a rendezvous over ZeroMQ share: keys, and one descriptor to sleep on."""

from __future__ import annotations

import contextlib
import os
import select

import zmq

from pycoll._rendezvous.wire import check_key
from pycoll._support.zmq_auth import Keys
from pycoll.errors import BootstrapError


def derive_keys(key: bytes) -> Keys:
    """Derive the key pairs of the rendezvous from the job's key.

    Raises:
        ValueError: the key is shorter than 16 bytes.
        BootstrapError: libzmq was built without CURVE.
    """
    check_key(key)
    try:
        return Keys.derive(key, b"pycoll rdv")
    except zmq.ZMQError as exc:
        raise BootstrapError(
            "this pyzmq has no CURVE security; install one that has (`pip install pyzmq`)"
        ) from exc


class Wakeup:
    """One descriptor to sleep on for several ZeroMQ sockets and a flag of our own.

    A ZeroMQ socket's own descriptor (ZMQ_FD) is edge-triggered, and sending takes the edge of a
    message that came meanwhile. The flag gives it back: who may have taken one calls `restore`,
    so that whoever sleeps on `fileno()` until it is readable misses nothing.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._flag = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._flag, select.EPOLLIN)
        self._sockets: dict[zmq.Socket[bytes], int] = {}

    def fileno(self) -> int:
        """Return the descriptor: readable while a socket has news or the flag is set."""
        return self._epoll.fileno()

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Watch `socket`, which stays the caller's."""
        fd = int(socket.get(zmq.FD))
        self._epoll.register(fd, select.EPOLLIN)
        self._sockets[socket] = fd
        self.restore(socket)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Watch `socket` no longer; before it is closed, because its descriptor is used again."""
        fd = self._sockets.pop(socket, None)
        if fd is not None:
            self._epoll.unregister(fd)

    def restore(self, socket: zmq.Socket[bytes], mask: int = zmq.POLLIN) -> None:
        """Set the flag if `socket` is ready for anything in `mask`."""
        if int(socket.get(zmq.EVENTS)) & mask:
            self.set()

    def set(self) -> None:
        """Set the flag."""
        if not self._epoll.closed:
            os.eventfd_write(self._flag, 1)

    def clear(self) -> None:
        if not self._epoll.closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._flag)

    def wait(self, timeout_s: float) -> None:
        """Sleep until the descriptor is readable, at most `timeout_s` (at most a minute)."""
        self._epoll.poll(max(0.0, min(timeout_s, 60.0)))

    def close(self) -> None:
        """Give the descriptors back, after every socket was removed; may be called again."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._flag)
