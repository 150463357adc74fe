"""What both ends of a rendezvous share: keys, frames, and one descriptor to sleep on.

A frame is the msgpack of ``[kind, fields]``. What ranks post has a schema (`parse_post`), which
the client applies before it sends and the server after it received: the server believes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import select
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack
import zmq
from zmq.utils import z85

from pycoll.errors import BootstrapError

WIRE_VERSION = 1
"""Compared when a rank joins. Any change of a kind or a field is a new version."""

MAX_FRAME_NBYTES = 16 << 20
MAX_INFO_NBYTES = 64 << 10

Context = int | str | bytes
"""The name of a communicator; no two in a job have the same one."""

# Texts longer than these many characters lose their middle. They keep every frame far below
# MAX_FRAME_NBYTES, at which libzmq would cut the connection.
_LONG_TEXT = 1 << 20
_SHORT_TEXT = 4 << 10

_MIN_KEY_NBYTES = 16
_MAX_CONTEXT_NBYTES = 256
_BROKEN_ERRORS = frozenset({"MismatchError", "OperationTimeout", "PeerFailed", "KeyboardInterrupt"})


class MalformedError(ValueError):
    """A frame or a field is not what the protocol says."""


class Keys(NamedTuple):
    """The CURVE key pairs of a job, in Z85 (40 bytes of ASCII each)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def derive_keys(key: bytes) -> Keys:
    """Derive both key pairs from the job's key; the public halves are as secret as the key.

    Raises:
        ValueError: the key is shorter than 16 bytes.
        BootstrapError: libzmq was built without CURVE.
    """
    if len(key) < _MIN_KEY_NBYTES:
        raise ValueError(f"the job's key has {len(key)} bytes; at least {_MIN_KEY_NBYTES} needed")
    server_secret = _secret(key, b"pycoll rdv srv")
    client_secret = _secret(key, b"pycoll rdv cli")
    try:
        return Keys(
            zmq.curve_public(server_secret), server_secret,
            zmq.curve_public(client_secret), client_secret,
        )  # fmt: skip
    except zmq.ZMQError as exc:
        raise BootstrapError(
            "this pyzmq has no CURVE security; install one that has (`pip install pyzmq`)"
        ) from exc


def _secret(key: bytes, person: bytes) -> bytes:
    return z85.encode(hashlib.blake2b(key, digest_size=32, person=person).digest())


def pack(kind: str, fields: dict[str, Any]) -> bytes:
    """Encode one frame; text that is not valid Unicode (lone surrogates) arrives escaped."""
    packed: bytes = msgpack.packb([kind, fields], unicode_errors="backslashreplace")
    return packed


def unpack(frame: bytes, max_items: int) -> tuple[str, dict[str, Any]]:
    """Decode one frame, with at most `max_items` entries in any list or map.

    Raises:
        MalformedError: it is not a frame.
    """
    message = _decode(frame, max_items)
    match message:
        case [str(kind), dict(fields)] if all(isinstance(name, str) for name in fields):
            return kind, fields
    raise MalformedError("a frame is a list of a kind and its fields")


def pack_info(info: dict[str, Any]) -> bytes:
    """Encode what a rank tells the others about itself; the server passes it on unread.

    Raises:
        ValueError: it has more than 64 KiB.
    """
    packed: bytes = msgpack.packb(info, unicode_errors="backslashreplace")
    if len(packed) > MAX_INFO_NBYTES:
        raise ValueError(
            f"a rank's info may have {MAX_INFO_NBYTES} bytes, this one has {len(packed)}"
        )
    return packed


def unpack_info(packed: bytes) -> dict[str, Any]:
    """Decode what `pack_info` made.

    Raises:
        MalformedError: it did not.
    """
    info = _decode(packed, MAX_INFO_NBYTES)
    if not isinstance(info, dict):
        raise MalformedError("a rank's info is a map")
    return info


def _decode(packed: bytes, max_items: int) -> object:
    try:
        message: object = msgpack.unpackb(
            packed, max_array_len=max_items, max_map_len=max_items, max_ext_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise MalformedError(str(exc)) from exc
    return message


def cut(text: str, limit: int) -> str:
    """Shorten `text` to about `limit` characters; the beginning and the end stay."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Write rank numbers for people: "rank 3", "ranks 1, 2", "ranks 0, 4-63"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 4 else [str(rank) for rank in run]
    plural = len(words) != 1 or "-" in words[0]
    return f"rank{'s' if plural else ''} {', '.join(words)}"


def seconds_since(start: float) -> str:
    """Write the time since `start`, of time.monotonic(), for people: "0.3 s", "12 s"."""
    return f"{round(time.monotonic() - start, 1):g} s"


def integer(value: object, low: int, high: int) -> int:
    """Return `value` as an int between `low` and `high`, both included; else MalformedError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # a TypeError says it is none
    except TypeError as exc:
        raise MalformedError(f"{value!r:.100} is not an integer") from exc
    if not low <= number <= high:
        raise MalformedError(f"{number} is not between {low} and {high}")
    return number


def _text(limit: int) -> Callable[[object, int], str]:
    def check(value: object, size: int) -> str:
        if not isinstance(value, str):
            raise MalformedError(f"{value!r:.100} is not a text")
        return cut(value, limit)

    return check


def _flag(value: object, size: int) -> bool:
    if not isinstance(value, bool):
        raise MalformedError(f"{value!r:.100} is not a bool")
    return value


def _number(value: object, size: int) -> int:
    return integer(value, -(1 << 63), (1 << 63) - 1)


def _seconds(value: object, size: int) -> float:
    if not isinstance(value, float) or not 0.0 <= value < 1e9:
        raise MalformedError("a number of seconds is wanted")
    return value


def _rank(value: object, size: int) -> int:
    return integer(value, -1, size - 1)


def _ranks(value: object, size: int) -> list[int]:
    if not isinstance(value, list | tuple | set | frozenset | range):
        raise MalformedError(f"{value!r:.100} is not a list of ranks")
    return sorted({integer(rank, 0, size - 1) for rank in value})


def _context(value: object, size: int) -> Context:
    if isinstance(value, str | bytes):
        if len(value) > _MAX_CONTEXT_NBYTES:
            raise MalformedError("a context's name is too long")
        return value
    return _number(value, size)


def _broken_error(value: object, size: int) -> str:
    if not isinstance(value, str) or value not in _BROKEN_ERRORS:
        raise MalformedError(f"{value!r:.100} is not one of {', '.join(sorted(_BROKEN_ERRORS))}")
    return value


_POSTS: dict[str, dict[str, Callable[[object, int], Any]]] = {
    "raised": {"error": _text(_SHORT_TEXT), "text": _text(_LONG_TEXT), "peer_failed": _flag},
    "abort": {"code": _number},
    "left": {"links": _ranks},
    "broken": {
        "context": _context, "error": _broken_error, "rank": _rank,
        "reason": _text(_SHORT_TEXT), "message": _text(_LONG_TEXT), "members": _ranks,
    },
    "waiting": {
        "context": _context, "number": _number, "call": _text(_SHORT_TEXT),
        "where": _text(_SHORT_TEXT), "members": _ranks, "waited_s": _seconds,
    },
    "running": {},
}  # fmt: skip


def parse_post(kind: str, fields: dict[str, Any], size: int) -> dict[str, Any]:
    """Check what a rank of a job of `size` posts, and return it in its plain form.

    `members` and `waited_s` of "waiting" may be left out. Long texts are cut.

    Raises:
        MalformedError: no such kind, a field too many or too few, or a wrong value.
    """
    schema = _POSTS.get(kind)
    if schema is None:
        raise MalformedError(f"there is no post {kind!r:.100}; there are {', '.join(_POSTS)}")
    if kind == "waiting":
        fields = {"members": [], "waited_s": 0.0, **fields}
    if fields.keys() != schema.keys():
        raise MalformedError(f"post {kind!r} has the fields {', '.join(schema) or 'none'}")
    parsed = {}
    for name, check in schema.items():
        try:
            parsed[name] = check(fields[name], size)
        except MalformedError as exc:
            raise MalformedError(f"field {name!r} of post {kind!r}: {exc}") from exc
    return parsed


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
        """Clear the flag."""
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
