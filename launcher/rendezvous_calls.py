"""What ranks wait in, and which communicators are broken."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from pycoll._rendezvous.wire import Context
from pycoll._support.differing_calls import different_calls

# Broken communicators that are remembered, so that a later cause is not taken for the first.
_MAX_BROKEN = 10_000

# Communicators whose ranks are kept.
_MAX_MEMBERS = 256


class RankWait(NamedTuple):
    """One wait of one rank.

    Attributes:
        context, number: its communicator, and which collective call on it; -1: point to point.
        call, where: the call as text, and the file and line of the wait.
        made: file and line where the call was made, if that was noted; else "".
        since: of time.monotonic().
        name, members: what messages call the communicator, and its ranks.
        serial: counts the waits of this rank.
    """

    context: Context
    number: int
    call: str
    where: str
    made: str
    since: float
    name: str = "world"
    members: tuple[int, ...] = ()
    serial: int = 0

    @property
    def which(self) -> str:
        """The number of the call, and its communicator unless that is the world: " #3 on dp"."""
        number = f" #{self.number}" if self.number >= 0 else ""
        return number + (f" on {self.name}" if self.name != "world" else "")

    def __str__(self) -> str:
        call = f"{self.call}{self.which}"
        return f"{call} at {self.where}" if self.where else call

    @property
    def call_and_place(self) -> str:
        """The call, and where it was made: "barrier() at train.py:3"."""
        place = self.made or self.where
        return f"{self.call} at {place}" if place else self.call

    def is_same_call(self, other: RankWait) -> bool:
        """Whether both are in the same call, wherever they were made."""
        mine = (self.context, self.number, self.call)
        return mine == (other.context, other.number, other.call)


class RankWaits:
    """The wait of each rank, compared with those of the others.

    A number counts the collective calls on one communicator (context), so ranks that wait in the
    same (context, number) must make the same call. Negative numbers are point-to-point calls:
    each rank has its own.
    """

    def __init__(self) -> None:
        self._waits: dict[int, RankWait] = {}
        self._last: dict[int, tuple[RankWait, float]] = {}
        self._together: dict[tuple[Context, int], set[int]] = {}
        self._broken: dict[Context, None] = {}  # in the order they broke
        self._members: dict[Context, tuple[int, ...]] = {}
        self.num_started = 0  # waits that have begun

    def wait_of(self, rank: int) -> RankWait | None:
        """Return what `rank` waits in."""
        return self._waits.get(rank)

    def last_of(self, rank: int) -> tuple[RankWait, float] | None:
        """Return what `rank` waited in last, and when that ended (by time.monotonic())."""
        return self._last.get(rank)

    def waits(self) -> dict[int, RankWait]:
        """Return what each rank waits in that does; not to be changed."""
        return self._waits

    def start(self, rank: int, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Note that `rank` waits in the call that post "waiting" describes.

        Returns:
            The fields of post "broken" if another rank waits in another call, else None.
        """
        members = fields.pop("members")
        since = time.monotonic() - fields.pop("waited_s")
        wait = RankWait(since=since, members=self._kept(fields["context"], members), **fields)
        before = self._waits.get(rank)
        if before is not None and wait.number >= 0 and wait.is_same_call(before):
            self._waits[rank] = wait._replace(since=before.since)  # it looked up, and waits on
            return None
        self.stop(rank)
        self._waits[rank] = wait
        self.num_started += 1
        if wait.number < 0:
            return None
        together = self._together.setdefault((wait.context, wait.number), set())
        # One is enough: those who wait already agree, or the communicator is broken.
        other = min(together, default=None)
        together.add(rank)
        if other is None or wait.is_same_call(self._waits[other]):
            return None
        calls = {each: self._waits[each].call_and_place for each in (rank, other)}
        return {
            "context": wait.context,
            "error": "MismatchError",
            "rank": rank,
            "reason": f"made another call than rank {other}",
            "message": different_calls(wait.name, wait.number, calls),
            "members": members,
        }

    def _kept(self, context: Context, members: list[int]) -> tuple[int, ...]:
        """Keep the ranks of a communicator once, and not for each that waits in it."""
        ranks = tuple(members)
        if self._members.get(context) != ranks:
            if len(self._members) >= _MAX_MEMBERS:
                self._members.clear()
            self._members[context] = ranks
        return self._members[context]

    def stop(self, rank: int) -> None:
        wait = self._waits.pop(rank, None)
        if wait is None:
            return
        self._last[rank] = wait, time.monotonic()
        if wait.number < 0:
            return
        key = (wait.context, wait.number)
        together = self._together[key]
        together.discard(rank)
        if not together:
            del self._together[key]

    def note_broken(self, context: Context) -> bool:
        """Note that a communicator is broken; False if it was already."""
        if context in self._broken:
            return False
        self._broken[context] = None
        if len(self._broken) > _MAX_BROKEN:
            del self._broken[next(iter(self._broken))]
        return True
