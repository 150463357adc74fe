"""What ranks have called last, as it lies in the memory of their hosts, which outlives them.

- Collectives in shared memory the compiled core keeps where it compares calls anyway: of each
  communicator the last 1024 of each rank, as collective, operator, dtype, root, and bytes.
- It notes the last 1024 waits of each rank in these: for whom, when, and where in the program.
- It notes the last 1024 collectives by messages of each rank, as text, and when.
- It notes the last 1024 messages of each rank that go from program to program.
- It notes what the last 128 communicators are called that a rank has made.

Their layout is in notes.py. A rank may have written anything there: what makes no sense is shown as
it is, or left out.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgpack

from pycoll._launcher.notes import CALLS, MESSAGES, NAMES, NOTED, TEXT_NBYTES, WAITS
from pycoll._support.wording import ranks_text, whole_text

DTYPES = (
    *("", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Types of elements, by their numbers in pycoll/_dtypes.py."""

_REDUCES = frozenset({"reduce", "all_reduce", "reduce_scatter", "scan", "exscan"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_CALL = struct.Struct("@QQ")
_METHOD_AT = 56  # in the second, as in transports/_core/host/region.h
_OF_PARTS = {
    "ints": " of Python ints",
    "objects": " of Python objects",
    "operator": " with an operator of the program's own",
}

_ANY = -1
_STATES = {0: ", not finished", 16: "", 32: ", given up", 48: ", handed on"}
_MOST_PACKED_NBYTES = 16 << 20


class KeptCall(NamedTuple):
    """A collective in shared memory as it was kept.

    Attributes:
        signature: differs if collective, operator, dtype, root or shape do.
        kept: bytes of one rank's value, or of one block; above them the number of the method.
        place: where it was made; "": it did not wait, or where is not known.
        when: how long it has waited, as text; "": not long.
    """

    signature: int
    kept: int
    place: str = ""
    when: str = ""

    @property
    def text(self) -> str:
        """The call, without where it was made."""
        from pycoll._transports._core import KINDS, METHODS, OPS, PARTS  # which has kept it

        kind, root = _name(KINDS, self.signature & 15), self.signature >> 13 & 0xFFFF
        part, method = self.signature >> 29 & 7, self.kept >> _METHOD_AT
        op = _name(OPS, self.signature >> 4 & 15)
        if part:  # whose bytes are not those of the program's call
            whole = _name(PARTS, part)
            text = whole_text(whole, kind, root)
            if method:
                text = f"{_name(METHODS, method)}{_OF_PARTS.get(whole, '')}"
            return f"{text}, op={op}" if kind in _REDUCES and whole != "operator" else text
        text = f"{kind}, {self.kept % (1 << _METHOD_AT)} bytes"
        if kind in _REDUCES:
            text += f" of {_name(DTYPES, self.signature >> 8 & 31)}, op={op}"
        if kind in _ROOTED:
            text += f", root={root}"
        return text

    def __str__(self) -> str:
        return f"{self.text}{f' at {self.place}' if self.place else ''}{self.when}"


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"


class NotedCall(NamedTuple):
    """A collective by messages as it was noted.

    Attributes:
        signature: differs if the calls do.
        place: where it was made; "": that does not fit.
        when: how long ago it has begun, and how long it has taken, as text.
    """

    signature: str
    place: str
    when: str

    @property
    def text(self) -> str:
        """The call, without where it was made."""
        return self.signature

    def __str__(self) -> str:
        return f"{self.text}{f' at {self.place}' if self.place else ''}{self.when}"


class NotedMessage(NamedTuple):
    """A send or a receive as it was noted.

    Attributes:
        number: it counts the rank's messages.
        ident: of the communicator.
        is_send: else it is a receive.
        peer: rank of the world; -1: any may send it.
        tag: -1: any may come.
        nbytes: of a receive that has not finished the most that fits, 0: any number.
        state: 0: under way; 16: finished; 32: withdrawn, or failed; 48: received in another way.
    """

    number: int
    ident: int
    is_send: bool
    peer: int
    tag: int
    nbytes: int
    state: int

    @property
    def is_under_way(self) -> bool:
        """Whether it had not finished."""
        return self.state == 0

    def text(self, on: str) -> str:
        """Return it as text; `on`: what its communicator is called."""
        peer = "any rank" if self.peer == _ANY else f"rank {self.peer}"
        tag = "any tag" if self.tag == _ANY else f"tag {self.tag}"
        nbytes = f"{self.nbytes} bytes"
        if not self.is_send and self.state != 16:
            nbytes = f"at most {nbytes}" if self.nbytes else "of any length"
        what = f"send to {peer}" if self.is_send else f"recv from {peer}"
        return f"{what}, {tag}, {nbytes}, on {on}{_STATES[self.state]}"


class RankCalls(NamedTuple):
    """The collectives of one rank on one communicator.

    Attributes:
        number: how many it has made.
        last: the last of them, the oldest first.
    """

    number: int
    last: Sequence[KeptCall | NotedCall]

    def get(self, number: int) -> KeptCall | NotedCall | None:
        """Return a call by its number, from 1; None: it has not made it, or it is not kept."""
        index = number - 1 - self.number + len(self.last)
        return self.last[index] if 0 <= index < len(self.last) else None


Kept = dict[tuple[int, str], dict[int, RankCalls]]
"""Of each communicator, by its number and how calls go, those of its ranks, as in the world."""


class JobCalls(NamedTuple):
    """What ranks have called last, of one host or of several.

    Attributes:
        ranks: of which something could be known.
        kept: collectives.
        messages: of each rank, the oldest first.
        names: of communicators.
    """

    ranks: list[int]
    kept: Kept
    messages: dict[int, list[NotedMessage]]
    names: dict[int, str]


class HostCalls(NamedTuple):
    """What the ranks of one host have called last, as it was read from their memory.

    Attributes:
        ranks: of the world, by their numbers on the host.
        kept: of each communicator and rank how many calls it has made, and the last of them.
        notes: of each rank.
        now_ns: when that was, of CLOCK_MONOTONIC there.
    """

    ranks: list[int]
    kept: list[tuple[int, list[tuple[int, int, bytes]]]]
    notes: list[bytes]
    now_ns: int

    @classmethod
    def read(cls, memfd: int, notes: list[bytes], ranks: list[int]) -> HostCalls:
        """Read it from the memory of a host, whose ranks have noted that."""
        try:
            from pycoll._transports._core import kept_calls
        except ImportError:  # it was not built: then ranks have nothing in shared memory
            return cls(ranks, [], notes, time.monotonic_ns())
        kept = [
            (
                ident,
                [
                    (ranks[local], number, last)
                    for _, local, number, last in of_ident
                    if local < len(ranks)
                ],
            )
            for ident, of_ident in kept_calls(memfd, len(ranks))
        ]
        return cls(ranks, kept, notes, time.monotonic_ns())

    def packed(self) -> bytes:
        """Return it as an agent sends it; of very many communicators with fewer calls of each."""
        most = NOTED * _CALL.size
        while True:
            kept = [
                (ident, [(rank, number, last[len(last) - most :] if most else b"")
                         for rank, number, last in of_ident])
                for ident, of_ident in self.kept
            ]  # fmt: skip
            if sum(len(last) for _, ranks in kept for *_, last in ranks) <= _MOST_PACKED_NBYTES:
                return zlib.compress(msgpack.packb(self._replace(kept=kept)), 1)
            most = most // 2 // _CALL.size * _CALL.size

    @classmethod
    def unpacked(cls, data: bytes) -> HostCalls:
        """Return what `packed` was made of."""
        return cls(*msgpack.unpackb(zlib.decompress(data)))


def unfinished(notes: bytes) -> str:
    """Return which sends, receives and calls of a rank are under way, in short; "": none."""
    names = {1: "world"}
    for ident, nbytes, text in NAMES.records(notes):
        names.setdefault(ident, _text(text[:nbytes]))
    found = [
        message.text(names.get(message.ident, f"communicator {message.ident}"))
        for message in _messages(notes)
        if message.is_under_way
    ]
    for _, (ordinal, _, _, _, ended, nbytes, text) in CALLS.newest(notes, NOTED):
        if ordinal and not ended:
            signature, _, place = text[:nbytes].partition(b"\0")
            found.append(f"{_text(signature)}{f' at {_text(place)}' if place else ''}")
    if not found:
        return ""
    first = found[0].removesuffix(_STATES[0])
    return f"not finished: {first}{f', and {len(found) - 1} more' if len(found) > 1 else ''}"


def merged(hosts: Iterable[HostCalls]) -> JobCalls:
    """Return what the ranks of several hosts have called last."""
    calls = JobCalls([], {}, {}, {1: "world"})
    for host in hosts:
        calls.ranks.extend(host.ranks)
        waits = {}
        for rank, notes in zip(host.ranks, host.notes, strict=True):
            calls.messages[rank] = list(_messages(notes))
            waits[rank] = _waits(notes, host)
            for ident, nbytes, text in NAMES.records(notes):
                if ident:
                    calls.names.setdefault(ident, _text(text[:nbytes]))
            for ident, noted in _noted(notes, host.now_ns).items():
                calls.kept.setdefault((ident, "by messages"), {})[rank] = noted
        for ident, of_ident in host.kept:
            for rank, number, last in of_ident:
                of_rank = calls.kept.setdefault((ident, "in shared memory"), {})
                of_rank[rank] = RankCalls(number, list(_kept(ident, number, last, waits[rank])))
    for (ident, _), of_rank in calls.kept.items():
        if ident == 1:  # the world: who has not called anything there is missing
            for rank in calls.ranks:
                of_rank.setdefault(rank, RankCalls(0, []))
    return calls


Waits = dict[tuple[int, int], tuple[str, str]]
"""By communicator and number: where the call was made, and how long it has waited, as text."""


def _kept(ident: int, number: int, last: bytes, waits: Waits) -> Iterator[KeptCall]:
    for index, (signature, kept) in enumerate(_CALL.iter_unpack(last)):
        wait = waits.get((ident, number - len(last) // _CALL.size + 1 + index), ("", ""))
        yield KeptCall(signature, kept, *wait)


def _messages(notes: bytes) -> Iterator[NotedMessage]:
    for number, (ident, nbytes, tag, peer, what) in MESSAGES.newest(notes, NOTED):
        kind, state = what & 15, what & ~15
        if kind in (1, 2) and state in _STATES:
            yield NotedMessage(number, ident, kind == 1, peer, tag, nbytes, state)


def _waits(notes: bytes, host: HostCalls) -> Waits:
    calls: dict[tuple[int, int], list[tuple[int, int, int, str]]] = {}
    for ident, number, since, until, peer, nbytes, text in WAITS.records(notes):
        if number and peer < len(host.ranks):
            wait = since, until, host.ranks[peer], _text(text[:nbytes])
            calls.setdefault((ident, number), []).append(wait)
    return {call: _waited(found, host.now_ns) for call, found in calls.items()}


def _waited(found: list[tuple[int, int, int, str]], now_ns: int) -> tuple[str, str]:
    """Where a call was made, and how long it has waited for all for whom it did."""
    place = next((place for *_, place in found if place), "")
    going_on = [wait for wait in found if not wait[1]]
    peers = ranks_text({peer for *_, peer, _ in going_on or found})
    if going_on:
        since = min(since for since, *_ in going_on)
        return place, f", waits for {peers}, {_seconds(now_ns - since)}"
    waited = sum(max(0, until - since) for since, until, *_ in found)
    ago = now_ns - max(until for _, until, *_ in found)
    return place, f", waited {_seconds(waited)} for {peers}, until {_seconds(ago)} before"


def _noted(notes: bytes, now_ns: int) -> dict[int, RankCalls]:
    found = sorted(note for note in CALLS.records(notes) if note[0])
    calls: dict[int, list[NotedCall]] = {}
    numbers = {}
    for _, ident, number, begun, ended, nbytes, text in found:
        calls.setdefault(ident, []).append(_noted_call(text, nbytes, begun, ended, now_ns))
        numbers[ident] = number + 1
    return {ident: RankCalls(numbers[ident], calls[ident]) for ident in calls}


def _noted_call(text: bytes, nbytes: int, begun: int, ended: int, now_ns: int) -> NotedCall:
    signature, _, place = text[:nbytes].partition(b"\0")
    when = f", begun {_seconds(now_ns - begun)} before"
    when += f", took {_seconds(ended - begun)}" if ended else ", not finished"
    return NotedCall(_text(signature), _text(place) if nbytes < TEXT_NBYTES else "", when)


def _text(data: bytes) -> str:
    """What a rank has written, as one line."""
    text = data.decode(errors="replace")
    return "".join(each if each.isprintable() else "?" for each in text)


def _seconds(nanoseconds: int) -> str:
    seconds = max(0, nanoseconds) / 1e9
    return f"{seconds:.6f} s" if seconds < 0.001 else f"{seconds:.3f} s"


Made = dict[int, KeptCall | NotedCall | None]
"""What each rank has called."""


def first_difference(ranks: Mapping[int, RankCalls]) -> tuple[int, Made]:
    """Return the first call in which ranks differ, and what each has called; 0: they do not.

    A rank that has not made it has called None.
    """
    least = max((calls.number - len(calls.last) + 1 for calls in ranks.values()), default=1)
    most = max((calls.number for calls in ranks.values()), default=0)
    for number in range(least, most + 1):
        made = {rank: calls.get(number) for rank, calls in ranks.items()}
        if len({call and call.signature for call in made.values()}) > 1:
            return number, made
    return 0, {}
