"""Whether all ranks do the same: found out by running the algorithm for a rank that may be any.

`AnyRank` stands in for the number of a rank. It can be moved around the ring, as
``(rank + 3) % size``, or to a partner, as ``rank ^ 4``; a question whose answer depends on the
number, as whether ``rank < 3``, ends the attempt. Where an algorithm comes to its end with it, the
steps are those of every rank: if one sends to the rank 3 further, so does each. That proves it for
all ranks in the time of one, and the author need not say anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NoReturn

from pycoll.schedule import Copy, Recv, Send
from pycoll.schedules import ROOTED, Algorithm

AROUND, PARTNERS = "around the ring", "by partners"
"""How a rank is turned into another: r is added to all numbers, modulo their count; or xor r."""


class Undecided(Exception):
    """What was asked depends on which rank it is."""


class _Either:
    """A truth that depends on which rank it is; it may be kept, not asked."""

    def __bool__(self) -> NoReturn:
        raise Undecided


class AnyRank:
    """The number ``base + (rank + offset) % size``, or ``base + (rank ^ offset)``."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, turned: str, size: int, offset: int = 0, base: int = 0) -> None:
        self.turned, self.size, self.offset, self.base = turned, size, offset, base

    def _like(self, offset: int, base: int) -> AnyRank:
        return AnyRank(self.turned, self.size, offset, base)

    def __add__(self, other: int) -> AnyRank:
        return self._like(self.offset, self.base + _number(other))

    __radd__ = __add__

    def __sub__(self, other: int) -> AnyRank:
        return self + -_number(other)

    def __mod__(self, size: int) -> AnyRank:
        if self.turned != AROUND or size != self.size:
            raise Undecided
        return self._like((self.offset + self.base) % size, 0)

    def __xor__(self, bits: int) -> AnyRank:
        if self.turned != PARTNERS or self.base or not 0 <= _number(bits) < self.size:
            raise Undecided
        return self._like(self.offset ^ bits, 0)

    __rxor__ = __xor__

    def __eq__(self, other: object) -> Any:
        if isinstance(other, AnyRank) and self.base == other.base:
            return self.offset == other.offset
        return False if _apart(self, other) else _Either()

    def __ne__(self, other: object) -> Any:
        equal = self == other
        return not equal if isinstance(equal, bool) else equal

    def __lt__(self, other: object) -> Any:
        return _Either()

    __le__ = __gt__ = __ge__ = __lt__

    def __index__(self) -> NoReturn:
        raise Undecided

    __bool__ = __index__


def symmetry_of(algorithm: Algorithm, size: int) -> str | None:
    """Return how one rank's steps become every other's: `AROUND`, `PARTNERS`, or None.

    None: the ranks differ, or nothing shows that they do not.
    """
    if algorithm.collective in ROOTED or algorithm.hosts or size < 2:
        return None
    turns = [AROUND] if size & (size - 1) else [AROUND, PARTNERS]
    return next((turned for turned in turns if _holds(algorithm, size, turned)), None)


def _holds(algorithm: Algorithm, size: int, turned: str) -> bool:
    bases: set[int] = set()
    fixed: set[int] = set()
    try:
        for step in algorithm.steps(AnyRank(turned, size), size):
            if isinstance(step, Send | Recv):
                peer: object = step.peer
                if not isinstance(peer, AnyRank) or peer.base or not peer.offset:
                    return False
            chunks = _chunks(step.chunk)
            for chunk in (*chunks, step.source) if isinstance(step, Copy) else chunks:
                if isinstance(chunk, AnyRank):
                    bases.add(chunk.base)
                else:
                    fixed.add(_number(chunk))
    except Exception:  # whatever an author's code says to a number that is none
        return False
    # Which chunks are the same must not depend on the rank, either.
    meet = any(high - low < size for low, high in pairwise(sorted(bases)))
    return not (meet or any(base <= chunk < base + size for base in bases for chunk in fixed))


def _chunks(chunk: Any) -> Iterable[Any]:
    return (chunk,) if isinstance(chunk, int | AnyRank) else chunk


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise Undecided
    return value


def _apart(one: AnyRank, other: object) -> bool:
    """Whether two numbers differ, whichever rank it is."""
    if isinstance(other, AnyRank):
        return abs(one.base - other.base) >= one.size
    return not (isinstance(other, int) and one.base <= other < one.base + one.size)


def turn_back(symmetry: str, rank: int, by: int, size: int) -> int:
    """Return which rank's part `rank` takes where rank `by` takes that of rank 0."""
    return (rank - by) % size if symmetry == AROUND else rank ^ by
