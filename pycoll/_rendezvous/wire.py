"""What both ends of a rendezvous share, whatever carries it: the frames and what is in them.

A frame is the msgpack of ``[kind, fields]``. What ranks post has a schema (`parse_post`), which
the client applies before it sends and the server after it received: the server believes nothing.

Protocol, version `WIRE_VERSION`; `Server` is `launcher/rendezvous_server.py`.

    a rank sends            answer or effect
    join {version, rank,    once all ranks have joined: met {infos}, to all of them.
      size, pid, info}      refused {message} if this one may not join, or if the job cannot
                            meet any more. `info` is opaque bytes.
    exchange {round, info}  once all ranks have sent theirs for this round (they are counted
                            from 0): exchanged {round, infos}, to all of them; refused {message}
                            if one of them is gone
    who {}                  who {missing, lowest}: who has not joined, or not come to the
                            exchange; the lowest rank present
    withdraw {}             it gave up waiting; its rank may join again
    table {id}              table {id, lines}: see `Server.table`
    bye {}                  bye {}: everything it sent before has been handled
    raised, abort, left,    see `parse_post` for the fields. waiting and
      broken, waiting,      running are remembered, "seen" is for `Server.look`, the
      running, seen, tell,  others become a notice or an event
      cut
    agree {context, number, once all of `members` that live have sent theirs: agreed {context,
      name, call, where,    number, flag, ranks, different}, to these. `flag` is true if those of
      members, flag}        all of these are; `ranks` are these; `different` is a text if their
                            calls are not the same, else ""

    pushed to ranks         when
    failed {rank, reason,   a rank raised (but not PeerFailed), aborted, or its process ended
      detail}               and not with status 0; once a rank, to all others
    left {rank, links,      a rank finalized; to all others
      calls, error}
    ended {rank, reason}    a rank's process ended with status 0; to all others
    broken {context, error, a rank said so, or two ranks wait in the same (context, number)
      rank, reason,         in different calls; to the members, the first for a context only
      message}
    told {rank, note}       a rank has told this one something: bytes that nobody else reads
    look {round, contexts}  `Server.look` was called: answer with "seen"
"""

from __future__ import annotations

import operator
import time

import msgpack

from pycoll._support.wording import ranks_text
from pycoll.errors import BootstrapError

TYPE_CHECKING = False  # of typing, whose import takes longer than the meeting
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

WIRE_VERSION = 7
"""Compared when a rank joins. Any change of a kind or a field is a new version."""

MAX_FRAME_NBYTES = 16 << 20
MAX_INFO_NBYTES = 64 << 10

AGREES = -2
"""In place of the number of a call that a wait needs: all of the ranks that live must agree."""

Context = int | str | bytes
"""The name of a communicator; no two in a job have the same one."""

# Texts longer than these many characters lose their middle. They keep every frame far below
# MAX_FRAME_NBYTES, at which the connection would be cut.
_LONG_TEXT = 1 << 20
_SHORT_TEXT = 4 << 10

_MIN_KEY_NBYTES = 16
_MAX_CONTEXT_NBYTES = 256
_MAX_NOTE_NBYTES = 1 << 10
_MAX_NAME = 200
_BROKEN_ERRORS = frozenset({"MismatchError", "OperationTimeout", "PeerFailed", "Revoked"})


class MalformedError(ValueError):
    """A frame or a field is not what the protocol says."""


def check_key(key: bytes) -> None:
    """Raise ValueError if `key` is too short for a job's."""
    if len(key) < _MIN_KEY_NBYTES:
        raise ValueError(f"the job's key has {len(key)} bytes; at least {_MIN_KEY_NBYTES} needed")


def read_key(text: str) -> bytes:
    """Read PYCOLL_KEY.

    Raises:
        BootstrapError: it is no key.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise BootstrapError("PYCOLL_KEY is not a hexadecimal key") from None
    try:
        check_key(key)
    except ValueError as exc:
        raise BootstrapError(f"PYCOLL_KEY cannot be the key of a job: {exc}") from exc
    return key


def late_question(key: bytes) -> bytes:
    """Return what who has the job's key asks the launcher of a job that has met already."""
    import hashlib  # not sooner: hardly any process asks

    return b"?" + hashlib.blake2b(key, digest_size=32, person=b"pycoll rdv late").digest()


class Backlog:
    """What could not be sent yet because the launcher does not read.

    In order, but of a state only the latest, so that a stopped launcher costs no memory.
    """

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._state: bytes | None = None

    def __len__(self) -> int:
        return len(self._frames) + (self._state is not None)

    def add(self, frame: bytes, is_state: bool) -> None:
        """Add a frame; a state replaces the one that waits."""
        if is_state:
            self._state = frame
        else:
            self._frames.append(frame)

    def flush(self, send: Callable[[bytes], bool]) -> None:
        """Pass frames to `send` until it does not take one."""
        taken = 0
        while taken < len(self._frames) and send(self._frames[taken]):
            taken += 1
        del self._frames[:taken]
        if not self._frames and self._state is not None and send(self._state):
            self._state = None

    def clear(self) -> None:
        """Forget everything."""
        self._frames.clear()
        self._state = None


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


def already_joined(rank: int, joined: int, late: int) -> str:
    """Say that process `late` cannot be a rank that process `joined` is already."""
    return (
        f"rank {rank} is already process {joined}; this is process {late}. Each rank joins once: "
        "a process started by a rank must not call init()"
    )


def seconds_since(start: float) -> str:
    """Write the time since `start`, of time.monotonic(), for people: "0.3 s", "12 s"."""
    return f"{round(time.monotonic() - start, 1):g} s"


def too_late(
    rank: int, size: int, start: float, missing: Sequence[int], joined: str, launcher: str
) -> str:
    """Say that a rank has waited in vain; if nobody is missing, for `launcher`."""
    waited = f"rank {rank} waited {seconds_since(start)} for the job to meet"
    if not missing:
        return f"{waited}: {launcher} does not answer"
    have = "has" if len(missing) == 1 else "have"
    return f"{waited}: {ranks_text(missing)} of {size} {have} not {joined}"


def print_missing(rank: int, size: int, start: float, missing: Sequence[int], join: str) -> None:
    """Print on standard error for whom a rank waits."""
    import contextlib
    import sys

    with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error is closed
        print(
            f"pycoll: rank {rank} has waited {seconds_since(start)} for {ranks_text(missing)} "
            f"of {size} to {join}",
            file=sys.stderr,
            flush=True,
        )


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
    """A rank, or -1: none."""
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


def _peer(value: object, size: int) -> int:
    return integer(value, 0, size - 1)


def _note(value: object, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) > _MAX_NOTE_NBYTES:
        raise MalformedError(f"a note has at most {_MAX_NOTE_NBYTES} bytes")
    return value


def _pair(value: object, size: int) -> tuple[Context, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise MalformedError(f"{value!r:.100} is not a communicator and a number")
    return _context(value[0], size), _number(value[1], size)


def _pairs(value: object, size: int) -> list[tuple[Context, int]]:
    if not isinstance(value, list | tuple):
        raise MalformedError(f"{value!r:.100} is not a list")
    return [_pair(pair, size) for pair in value]


def _options(value: object, size: int) -> list[list[tuple[Context, int, list[int]]]]:
    """What a wait needs: one of these lists, and of that all; see `launcher.deadlock`."""
    if not isinstance(value, list | tuple):
        raise MalformedError(f"{value!r:.100} is not a list")
    options = []
    for option in value:
        if not isinstance(option, list | tuple):
            raise MalformedError(f"{option!r:.100} is not a list")
        needs = []
        for need in option:
            if not isinstance(need, list | tuple) or len(need) != 3:
                raise MalformedError(f"{need!r:.100} is not a communicator, a number and ranks")
            context, number, ranks = need
            needs.append((_context(context, size), _number(number, size), _ranks(ranks, size)))
        options.append(needs)
    return options


def _calls(value: object, size: int) -> list[list[Any]]:
    """Check what a rank has called last: of each communicator its name, two numbers, a text."""
    if not isinstance(value, list | tuple):
        raise MalformedError("last calls are a list")
    checks = (_context, _number, _number, _text(_SHORT_TEXT))
    if any(not isinstance(call, list | tuple) or len(call) != len(checks) for call in value):
        raise MalformedError("a last call is a list of four")
    return [
        [check(field, size) for check, field in zip(checks, call, strict=True)] for call in value
    ]


def _name_of_error(value: object, size: int) -> str:
    if not isinstance(value, str) or value not in _BROKEN_ERRORS:
        raise MalformedError(f"{value!r:.100} is not one of {', '.join(sorted(_BROKEN_ERRORS))}")
    return value


_POSTS: dict[str, dict[str, Callable[[object, int], Any]]] = {
    "raised": {
        "error": _text(_SHORT_TEXT), "text": _text(_LONG_TEXT), "peer_failed": _flag,
        "needed": _rank, "why": _text(_SHORT_TEXT),
    },
    "abort": {"code": _number},
    "note": {"text": _text(_SHORT_TEXT)},
    "unencrypted": {},
    "left": {"links": _ranks, "calls": _calls, "error": _text(_SHORT_TEXT)},
    "broken": {
        "context": _context, "error": _name_of_error, "rank": _rank,
        "reason": _text(_SHORT_TEXT), "message": _text(_LONG_TEXT), "members": _ranks,
    },
    "waiting": {
        "context": _context, "number": _number, "call": _text(_SHORT_TEXT),
        "where": _text(_SHORT_TEXT), "made": _text(_SHORT_TEXT), "members": _ranks,
        "waited_s": _seconds,
        "name": _text(_MAX_NAME), "serial": _number,
    },
    "running": {},
    "seen": {
        "round": _number, "serial": _number, "call": _pair, "options": _options, "started": _pairs,
        "quiet": _flag, "threads": _number, "ends": _flag,
    },
    "tell": {"rank": _peer, "note": _note},
    "cut": {"rank": _peer, "reason": _text(_SHORT_TEXT)},
    "agree": {
        "context": _context, "number": _number, "name": _text(_MAX_NAME),
        "call": _text(_SHORT_TEXT), "where": _text(_SHORT_TEXT), "members": _ranks, "flag": _flag,
    },
}  # fmt: skip


def parse_post(kind: str, fields: dict[str, Any], size: int) -> dict[str, Any]:
    """Check what a rank of a job of `size` posts, and return it in its plain form.

    Of "waiting" all but the first four fields may be left out, of "left" `calls` and `error`, of
    "raised" `needed` (-1: no rank) and `why`. Long texts are cut.

    Raises:
        MalformedError: no such kind, a field too many or too few, or a wrong value.
    """
    schema = _POSTS.get(kind)
    if schema is None:
        raise MalformedError(f"there is no post {kind!r:.100}; there are {', '.join(_POSTS)}")
    if kind == "waiting":
        fields = {
            "members": [],
            "waited_s": 0.0,
            "made": "",
            "name": "world",
            "serial": 0,
            **fields,
        }
    if kind == "raised":
        fields = {"needed": -1, "why": "", **fields}
    if kind == "left":
        fields = {"calls": [], "error": "", **fields}
    if fields.keys() != schema.keys():
        raise MalformedError(f"post {kind!r} has the fields {', '.join(schema) or 'none'}")
    parsed = {}
    for name, check in schema.items():
        try:
            parsed[name] = check(fields[name], size)
        except MalformedError as exc:
            raise MalformedError(f"field {name!r} of post {kind!r}: {exc}") from exc
    return parsed
