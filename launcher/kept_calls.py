"""The last collectives of ranks, and the first in which they differ.

Those in shared memory the compiled core keeps where it compares calls anyway: of each communicator
the last 1024 of each rank, as collective, operator, dtype, root, and bytes. Of those by messages it
notes the last 1024 of each rank, as text. Both are there when the rank is not.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from pycoll._launcher.outcome import ranks_text

if TYPE_CHECKING:
    from pycoll._launcher.rendezvous_calls import RankWait

KINDS = (
    *("barrier", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter"),
    *("reduce_scatter", "all_to_all", "scan", "exscan"),
)
"""Collectives, numbered as in transports/_core/python/arguments/kinds.h."""

OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor")
"""Operators, numbered as in transports/_core/reduce/reduce.h."""

DTYPES = (
    *("", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Types of elements, by their numbers in pycoll/_dtypes.py."""

_REDUCES = frozenset({"reduce", "all_reduce", "reduce_scatter", "scan", "exscan"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_CALL = struct.Struct("@QQ")
_TEXT_NBYTES = 96
_NOTE = struct.Struct(f"@QQQII{_TEXT_NBYTES}s")
_SHOWN = 20


class KeptCall(NamedTuple):
    """A call as it was kept.

    Attributes:
        signature: differs if collective, operator, dtype, root or shape do.
        nbytes: of one rank's value, or of one block.
    """

    signature: int
    nbytes: int

    def __str__(self) -> str:
        kind = _name(KINDS, self.signature & 15)
        text = f"{kind}, {self.nbytes} bytes"
        if kind in _REDUCES:
            dtype, op = self.signature >> 8 & 31, self.signature >> 4 & 15
            text += f" of {_name(DTYPES, dtype)}, op={_name(OPS, op)}"
        if kind in _ROOTED:
            text += f", root={self.signature >> 13 & 0xFFFF}"
        return text


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"


class NotedCall(NamedTuple):
    """A call by messages as it was noted.

    Attributes:
        signature: differs if the calls do.
        place: where it was made; "": that does not fit.
        ended: it has ended well.
    """

    signature: str
    place: str
    ended: bool

    def __str__(self) -> str:
        place = f" at {self.place}" if self.place else ""
        return f"{self.signature}{place}{'' if self.ended else ', not finished'}"


class RankCalls(NamedTuple):
    """The calls of one rank on one communicator.

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


def unpacked(
    found: Iterable[tuple[int, list[tuple[int, int, int, bytes]]]], world: Mapping[int, int]
) -> Kept:
    """Return what `_core.kept_calls` has found; `world`: ranks by their numbers on the host."""
    kept: Kept = {}
    for ident, ranks in found:
        kept[ident, "in shared memory"] = {
            world[local]: RankCalls(number, [KeptCall(*pair) for pair in _CALL.iter_unpack(last)])
            for _, local, number, last in ranks
            if local in world
        }
    return kept


def noted(notes: Mapping[int, bytes]) -> Kept:
    """Return what ranks have noted; `notes`: of each rank of the world."""
    kept: Kept = {}
    for rank, data in notes.items():
        found = sorted(
            note for note in _NOTE.iter_unpack(data[: len(data) // 128 * 128]) if note[0]
        )
        for ident in {note[1] for note in found}:
            mine = [note[2:] for note in found if note[1] == ident]
            calls = [_noted(text[:nbytes], ended) for _, ended, nbytes, text in mine]
            of_ident = kept.setdefault((ident, "by messages"), {})
            of_ident[rank] = RankCalls(mine[-1][0] + 1, calls)
    return kept


def _noted(text: bytes, ended: int) -> NotedCall:
    signature, _, place = text.partition(b"\0")
    is_whole = len(text) < _TEXT_NBYTES
    where = place.decode(errors="replace") if is_whole else ""
    return NotedCall(signature.decode(errors="replace"), where, bool(ended))


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


def lines(kept: Kept, names: Mapping[int, str], why: str) -> Iterator[str]:
    """Yield a report.

    Args:
        kept: the calls.
        names: of communicators, as far as they are known.
        why: what has happened.
    """
    yield f"Calls when {why}, counted from 1 on each communicator."
    for (ident, way), ranks in kept.items():
        if not any(calls.number for calls in ranks.values()):
            continue
        yield ""
        yield f"{way} on {names.get(ident, f'communicator {ident}')}, {ranks_text(ranks)}:"
        number, made = first_difference(ranks)
        if not number:
            yield f"    all have made the same, up to call {max(c.number for c in ranks.values())}"
        else:
            yield f"    the first in which they differ is call {number}:"
            order = sorted(made, key=lambda rank: (str(made[rank]), rank))
            for text, group in groupby(order, key=lambda rank: _made(made[rank])):
                yield f"        {ranks_text(list(group))}: {text}"
        for rank, calls in sorted(ranks.items()):
            yield f"    the last calls of rank {rank}:"
            shown = calls.last[-_SHOWN:]
            for index, call in enumerate(shown, calls.number - len(shown) + 1):
                yield f"        {index}  {call}"


def write(folder: str, hosts: Iterable[Kept], waits: Iterable[RankWait], why: str) -> str:
    """Write a report of each host to calls.txt in a folder; returns why that was not possible.

    Where no rank has called anything there is none.
    """
    names = {1: "world"}
    names |= {wait.context: wait.name for wait in waits if isinstance(wait.context, int)}
    path = os.path.join(folder, "calls.txt")
    hosts = list(hosts)
    of_ranks = (ranks for kept in hosts for ranks in kept.values())
    if not any(calls.number for ranks in of_ranks for calls in ranks.values()):
        return ""
    text = "\n\n".join("\n".join(lines(kept, names, why)) for kept in hosts)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except OSError as exc:
        return f"{path} cannot be written: {exc.strerror or exc}"
    return ""


def _made(call: KeptCall | NotedCall | None) -> str:
    return "has not made it" if call is None else str(call)
