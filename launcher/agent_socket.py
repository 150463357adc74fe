"""Where ranks that another launcher has started come to the agent of their host: a Unix socket.

Its name is derived from the job's key, in the kernel's own space of names, which hosts that have a
network of their own do not share: so ranks find each other on a host without being told who is
there, and nobody else can have been there before. Who comes, and who is there, must be of the same
user. A message is a length of 4 bytes and msgpack, descriptors come after it.
"""

from __future__ import annotations

import array
import errno
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from pycoll._rendezvous.local import framed, take_frames
from pycoll._support.ready import ready
from pycoll.errors import BootstrapError

_LENGTH_NBYTES = 4
_MAX_NBYTES = 16 << 20
_READ_NBYTES = 64 << 10
_AT_ONCE = 128  # descriptors; the kernel takes 253
_SEND_S = 5.0
_PAUSE_S = 0.01  # where too many wait
_NUMBER_NBYTES = array.array("i").itemsize
_CREDENTIALS = struct.Struct("3i")


class Ticket(NamedTuple):
    """Where a job meets, and the key to it: what rank 0 gives to the others.

    Attributes:
        key: the job's.
        port: where the meeting listens.
        addresses: of its host, the best first; a name is one too.
    """

    key: bytes
    port: int
    addresses: Sequence[str]

    def text(self) -> str:
        """Write it without spaces, in ASCII."""
        return f"{self.key.hex()};{self.port};{','.join(self.addresses)}"

    @classmethod
    def read(cls, text: str) -> Ticket:
        """Read what `text` wrote.

        Raises:
            BootstrapError: it is something else.
        """
        try:
            key, port, addresses = text.strip().split(";")
            return cls(bytes.fromhex(key), int(port), [one for one in addresses.split(",") if one])
        except ValueError:
            raise BootstrapError("what the ranks exchanged to meet is not of pycoll") from None


def name(key: bytes) -> str:
    """The socket's name for a job, among processes that can see each other.

    Containers may share a network, but not processes: then each is a host of its own.
    """
    seen = b"%d" % os.stat("/proc/self/ns/pid").st_ino
    digest = hashlib.blake2b(seen, key=key, digest_size=16, person=b"pycoll door").hexdigest()
    return f"\0pycoll-{digest}"


def connect(name: str, deadline: float) -> socket.socket:
    """Go to a door.

    Raises:
        ConnectionRefusedError: there is none.
        TimeoutError: too many wait there until the deadline, of time.monotonic().
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        while True:
            try:
                connection.setblocking(False)
                connection.connect(name)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError("pycoll's launcher on this host lets nobody in") from None
                time.sleep(_PAUSE_S)  # the kernel does not tell when there is room
            else:
                connection.setblocking(True)
                return connection
    except OSError:
        connection.close()
        raise


def peer_of(connection: socket.socket) -> int:
    """The process at the other end.

    Raises:
        PermissionError: it is another user's.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise PermissionError(f"process {pid}, at the socket of this job, is of user {uid}")
    if pid <= 0:
        raise PermissionError("the process at the socket of this job is in another container")
    return int(pid)


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message, and descriptors, of which the other end gets copies.

    Raises:
        OSError: the other end has gone, or does not read.
    """
    packed = msgpack.packb(message)
    connection.settimeout(_SEND_S)
    connection.sendall(framed(packed))
    for start in range(0, len(descriptors), _AT_ONCE):
        _send_descriptors(connection, descriptors[start : start + _AT_ONCE])


def send_if_ready(connection: socket.socket, message: Any) -> None:
    """Send a short message that may be lost, but to whom does not read what came before.

    Raises:
        OSError: the other end has gone.
    """
    if ready([connection], 0, select.POLLOUT):
        send(connection, message)


def _send_descriptors(connection: socket.socket, descriptors: Sequence[int]) -> None:
    deadline = time.monotonic() + _SEND_S
    while True:
        try:
            socket.send_fds(connection, [b"d"], list(descriptors))
        except OSError as exc:
            # More are on their way than a user may have open, until others have taken theirs.
            if exc.errno != errno.ETOOMANYREFS or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def receive(connection: socket.socket, deadline: float) -> Any:
    """Wait for a message; None: the other end has gone.

    Raises:
        TimeoutError: the deadline, of time.monotonic(), has passed.
    """
    head = _receive_exactly(connection, _LENGTH_NBYTES, deadline)
    body = head and _receive_exactly(connection, int.from_bytes(head, "little"), deadline)
    return msgpack.unpackb(body) if body else None


def receive_descriptors(connection: socket.socket, count: int, deadline: float) -> list[int]:
    """Receive descriptors, which this process then has; child processes do not inherit them.

    Raises:
        OSError: the other end has gone, or too many files are open.
        TimeoutError: the deadline, of time.monotonic(), has passed.
    """
    found: list[int] = []
    try:
        while len(found) < count:
            _wait(connection, deadline)
            # Not socket.recv_fds, which ignores the flag.
            space = socket.CMSG_SPACE(_AT_ONCE * _NUMBER_NBYTES)
            data, ancillary, flags, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
            for _, _, numbers in ancillary:
                found += array.array("i", numbers)
            if flags & socket.MSG_CTRUNC:
                raise OSError("this process may not open so many files (ulimit -n)")
            if not data:
                raise OSError("pycoll's launcher on this host has ended")
    except OSError:
        for descriptor in found:
            os.close(descriptor)
        raise
    return found


class Reader:
    """Collects the message of a connection that must not be waited for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def read(self) -> Any:
        """Return a message, or None: not all of it is there.

        Raises:
            EOFError: the other end has gone, or sends what makes no sense.
        """
        try:
            data = self._connection.recv(_READ_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._data += data
        frames, is_good = take_frames(self._data, _READ_NBYTES)
        if not data or not is_good:
            raise EOFError
        try:
            return msgpack.unpackb(frames[0]) if frames else None
        except ValueError as exc:
            raise EOFError from exc


def _receive_exactly(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """So many bytes; b"": the other end has gone."""
    data = b""
    while len(data) < min(nbytes, _MAX_NBYTES):
        _wait(connection, deadline)
        try:
            part = connection.recv(nbytes - len(data))
        except ConnectionError:
            part = b""
        if not part:
            return b""
        data += part
    return data


def _wait(connection: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not ready([connection], remaining):
        raise TimeoutError
