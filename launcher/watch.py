"""Watches for ranks that have waited long, and says without being asked who waits for whom.

A deadlock is told only if it is certain. What ranks have said may be old: so those that wait are
asked again, three times, and only those count that answer each time that they are still in the same
wait, with nothing under way that could end another's. An answer may be given before the rank has
looked at all that has come; when it answers the next time, it has. So what the last answers say was
true of all of them at once, after all had stopped, and had seen what the others sent before that.
A process that is stopped does not answer.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

from pycoll._launcher import wait_table
from pycoll._launcher.deadlock import Context, Need, View, awaited, circle, deadlocked
from pycoll._launcher.rendezvous_calls import RankWait
from pycoll._launcher.rendezvous_server import Server
from pycoll._launcher.wait_table import Waiter

_ROUNDS = 3
_PAUSE_S = 0.25  # between rounds, or `after_s`: longer than a message is on its way
_RETURNED_S = 0.5  # a long wait where others have returned
_ANSWER_S = 1.0  # who has not answered then is busy, or stopped

Key = tuple[object, ...]
"""An operation: the same for all of its ranks."""

Answers = Mapping[int, dict[str, Any]]
"""What ranks have said of themselves in one round: the fields of their post "seen"."""


class WaitReport(NamedTuple):
    """Who waits for whom at a moment.

    Attributes:
        heading: what a table of it is headed; "": nobody has waited long.
        is_deadlock: it is certain that some wait for ever.
        waiters: the ranks that have waited for a moment.
    """

    heading: str
    is_deadlock: bool
    waiters: Mapping[int, Waiter]


class Watch:
    """Tells, once an operation, of ranks that have waited long; a part of the launcher's loop.

    Who comes to an operation that was told of is told of only if that has closed a circle. What was
    told of and is no certain deadlock is looked at again after each `after_s`, and told if it has
    become one: a thread that could have ended it is gone, an alarm was called off, a rank that was
    stopped goes on.

    Args:
        server: knows what ranks wait in.
        size: number of ranks.
        after_s: how long is long, in seconds; 0: this does nothing.
        tell: called with the lines of a table, and whether it is certain that ranks wait for ever.
        doing: returns what the process of a rank is doing: rank and process.
        unfinished: returns which calls of a rank are under way that it does not wait for, or "".

    Attributes:
        returned: see `note_returned`.
    """

    def __init__(
        self,
        server: Server,
        size: int,
        after_s: float,
        tell: Callable[[list[str], bool], object],
        doing: Callable[[int, int], str],
        unfinished: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._server, self._size, self._after_s, self._tell = server, size, after_s, tell
        self._doing_of, self._unfinished = doing, unfinished
        self._told: dict[Key, set[int]] = {}  # operations, and of which ranks in them
        self._deadlocks: set[Key] = set()  # operations that were told to be parts of one
        self._certain: set[Key] = set()  # those of them of which that is certain
        self._again_at = math.inf  # when the others that were told of are looked at again
        self._looking: Iterator[float] | None = None
        self._number = 0  # of the last round
        self._asked: dict[int, RankWait] = {}  # in that round: who waited, and in what
        self._answers: dict[int, dict[str, Any]] = {}
        self._num_seen = 0  # waits that had begun when this last went through them
        self._due = math.inf
        self._wanted: list[Callable[[WaitReport], Iterator[float]]] = []
        self.returned: Mapping[int, Mapping[Context, int]] = {}
        server.on_seen = self._hear

    def note_returned(self, ranks: Mapping[int, Mapping[Context, int]]) -> None:
        """Know which ranks have done what they had to, and stay.

        The communicators of who waits for one of them, as is certain, are broken.

        Args:
            ranks: of each how many collectives it has started, by communicator.
        """
        self.returned = ranks
        self._due = 0.0

    def report(self, then: Callable[[WaitReport], Iterator[float]]) -> None:
        """Look who waits for whom, however long they have, and go on with `then`.

        Args:
            then: called with what was found; yields until when it waits for something.
        """
        self._wanted.append(then)

    def update(self, now: float) -> float:
        """Do what is due; returns when to call this again."""
        self._looking = self._looking or self._next_look(now)
        wake = next(self._looking, None) if self._looking is not None else None
        if wake is not None:
            return wake
        self._looking = self._next_look(now)  # what has come up meanwhile
        if self._looking is not None:
            return now
        return self._due if self._long_s else math.inf

    def _next_look(self, now: float) -> Iterator[float] | None:
        """What there is to look for; None: nothing yet."""
        if self._wanted:
            return self._report()
        has_begun = self._num_seen != self._server.calls.num_started
        if self._long_s and (has_begun or now >= self._due):
            return self._find(now)
        return None

    def _report(self) -> Iterator[float]:
        """Ask what ranks wait in, and tell who wants to know."""
        rounds, _ = yield from self._ask_in_rounds()
        waits = dict(self._server.calls.waits())
        found = WaitReport("", False, {})
        if waits:
            first = min(waits, key=lambda rank: waits[rank].since)
            waiters, others = self._waiters(rounds, waits)
            heading, certain = self._heading(first, rounds, waiters, others)
            found = WaitReport(heading, bool(certain), waiters)
        wanted, self._wanted = self._wanted, []
        for then in wanted:
            yield from then(found)

    @property
    def _long_s(self) -> float:
        """How long is long, in seconds; 0: no wait is."""
        return min(self._after_s or math.inf, _RETURNED_S) if self.returned else self._after_s

    def _hear(self, rank: int, fields: dict[str, Any]) -> None:
        if fields["round"] == self._number:
            self._answers[rank] = fields

    def _find(self, now: float) -> Iterator[float]:
        """Look at the oldest wait that was not told of, if it is old enough, else again at all."""
        calls = self._server.calls
        self._num_seen = calls.num_started
        keys = {rank: _key(rank, wait) for rank, wait in calls.waits().items()}
        self._deadlocks &= set(keys.values())
        self._certain &= self._deadlocks
        self._told = {
            key: {rank for rank in ranks if keys.get(rank) == key}
            for key, ranks in self._told.items()
            if key in keys.values()
        }
        untold = [rank for rank, key in keys.items() if rank not in self._told.get(key, ())]
        # Who was told of may wait for a rank that has returned since.
        left = untold or (keys if self.returned else ())
        first = min(left, key=lambda rank: calls.waits()[rank].since, default=None)
        self._due = calls.waits()[first].since + self._long_s if first is not None else math.inf
        if first is not None and now >= self._due:
            self._due = now + (_RETURNED_S if self.returned else 0.0)  # there may be others
            yield from self._look(first, keys[first])
            return
        if not self._told.keys() - self._certain:
            self._again_at = math.inf
        elif self._again_at == math.inf:
            self._again_at = now + self._after_s
        elif now >= self._again_at:
            self._again_at = now + self._after_s
            yield from self._look()
        self._due = min(self._due, self._again_at)

    def _look(self, first: int | None = None, key: Key | None = None) -> Iterator[float]:
        """Ask what ranks wait in, and tell.

        Args:
            first: who has waited long; None: some rank of a deadlock.
            key: the operation in which that is.
        """
        rounds, stuck = yield from self._ask_in_rounds()
        waits = dict(self._server.calls.waits())
        released = stuck and self._release(rounds, waits)
        if first is None:
            first = min(stuck & waits.keys(), key=lambda rank: waits[rank].since, default=None)
        if first is None or first not in waits or released:
            return
        is_long = time.monotonic() >= waits[first].since + self._after_s > 0
        if is_long and key in (None, _key(first, waits[first])):
            # Who has come since was not asked, and is looked at when it has waited long, too.
            keys = {rank: _key(rank, wait) for rank, wait in self._asked.items()}
            waits = {rank: w for rank, w in waits.items() if keys.get(rank) == _key(rank, w)}
            if first in waits:  # or it has left that wait, and has come to the same call again
                self._tell_of(first, keys, stuck, rounds, waits)

    def _tell_of(
        self,
        first: int,
        keys: Mapping[int, Key],
        stuck: frozenset[int],
        rounds: list[Answers],
        waits: Mapping[int, RankWait],
    ) -> None:
        """Tell of the wait of a rank, and those beside it, if that is news."""
        lines, certain = self._table(first, rounds, waits)
        circle_keys = {keys[rank] for rank in stuck if rank in keys}
        certain_keys = {keys[rank] for rank in certain if rank in keys}
        closes_one = first in stuck and not circle_keys & self._deadlocks
        is_news = keys[first] not in self._told or closes_one
        is_proved = bool(certain_keys) and not certain_keys & self._certain
        self._deadlocks |= circle_keys
        self._certain |= certain_keys
        for rank in waits:
            self._told.setdefault(keys[rank], set()).add(rank)
        if is_news or is_proved:
            self._tell(lines, bool(certain))

    def _with_returned(self, answers: Answers) -> dict[int, View]:
        """What is known of ranks that wait, and of those that have returned: they wait for ever."""
        views = _views(answers)
        for rank, started in self.returned.items():
            for_itself = Need(0, -1, frozenset([rank]))
            views[rank] = View(((for_itself,),), started, (0, -1))
        return views

    def _release(self, rounds: list[Answers], waits: Mapping[int, RankWait]) -> bool:
        """Break the communicators of those that wait for ranks which have returned, for ever."""
        quiet = {
            rank: said
            for rank, said in self._steady(rounds).items()
            if not said["threads"] and all(answers[rank]["quiet"] for answers in rounds)
        }
        views, released = self._with_returned(quiet), False
        for rank in deadlocked(views, self._gone()) - self.returned.keys():
            needed = min(awaited(rank, views) & self.returned.keys(), default=None)
            if needed is not None and rank in waits:
                released = True
                self._server.break_communicator(_has_returned(waits[rank], needed))
        return released

    def _ask_in_rounds(self) -> Generator[float, None, tuple[list[Answers], frozenset[int]]]:
        """Ask those that wait, until none of them can wait for ever: rounds, and who seems to."""
        rounds: list[Answers] = []
        stuck: frozenset[int] = frozenset()
        while len(rounds) < _ROUNDS and (stuck or not rounds):
            if rounds:
                yield from _until(time.monotonic() + min(_PAUSE_S, self._long_s or _PAUSE_S))
            yield from self._ask()
            rounds.append(self._answers)
            stuck = deadlocked(self._with_returned(self._steady(rounds)), self._gone())
            stuck -= self.returned.keys()
        return rounds, stuck

    def _ask(self) -> Iterator[float]:
        """Ask those that wait; go on when they have answered, or it is too late for that."""
        waits = self._server.calls.waits()
        self._number += 1
        self._asked, self._answers = dict(waits), {}
        contexts = {wait.context for wait in waits.values() if wait.number >= 0}
        self._server.look(self._asked, self._number, list(contexts))
        deadline = time.monotonic() + _ANSWER_S
        while (self._asked.keys() & waits.keys()) - self._answers.keys():
            if time.monotonic() >= deadline:
                return
            yield deadline

    def _gone(self) -> set[int]:
        states = ((rank, self._server.state(rank)[0]) for rank in range(self._size))
        return {rank for rank, state in states if state}

    def _steady(self, rounds: list[Answers]) -> Answers:
        """The last answers of ranks that were in the same wait each time."""
        waits = self._server.calls.waits()
        return {
            rank: last
            for rank, last in rounds[-1].items()
            if rank in waits
            and all(
                rank in answers and answers[rank]["serial"] == last["serial"] for answers in rounds
            )
        }

    # What to say.

    def _table(
        self, first: int, rounds: list[Answers], waits: Mapping[int, RankWait]
    ) -> tuple[list[str], frozenset[int]]:
        """The lines of a table, and the ranks of which it is certain that they wait for ever."""
        waiters, others = self._waiters(rounds, waits)
        heading, certain = self._heading(first, rounds, waiters, others)
        shown = {
            rank: self._with_process(rank, text)
            for rank, text in others.items()
            if rank not in waiters
        }
        return wait_table.table(heading, waiters, shown), certain

    def _waiters(
        self, rounds: list[Answers], waits: Mapping[int, RankWait]
    ) -> tuple[dict[int, Waiter], dict[int, str]]:
        """What is to be told of those that wait; and what others do, and those that cannot wait."""
        now = time.monotonic()
        waits = _told_apart(waits)
        known = _views(rounds[-1])
        doing = {rank: self._doing(rank) for rank in waits.keys() - rounds[-1].keys()}
        waiters = {
            rank: Waiter(
                wait.call,
                wait.which,
                wait.where,
                wait.name,
                wait.members,
                now - wait.since,
                awaited(rank, known),
                doing.get(rank, "").replace("running", ""),
            )
            for rank, wait in waits.items()
        }
        wanted = set().union(*(waiter.awaited for waiter in waiters.values()))
        others = {rank: self._doing(rank) for rank in sorted(wanted - waits.keys())}
        return waiters, {**others, **doing}

    def _heading(
        self,
        first: int,
        rounds: list[Answers],
        waiters: Mapping[int, Waiter],
        others: Mapping[int, str],
    ) -> tuple[str, frozenset[int]]:
        if len(rounds) == _ROUNDS:
            steady, gone = self._steady(rounds), self._gone()
            quiet = {r: said for r, said in steady.items() if all(a[r]["quiet"] for a in rounds)}
            alone = {rank: said for rank, said in quiet.items() if not said["threads"]}
            for answers in (alone, quiet, steady):
                views = _views(answers)
                stuck = deadlocked(views, gone)
                if stuck:
                    ring = circle(stuck, views, first if first in stuck else min(stuck), gone)
                    ends = any(answers[rank]["ends"] for rank in stuck)
                    helpers = [rank for rank in stuck if answers[rank]["threads"]]
                    doubt = "" if answers is not steady else "something may be on its way"
                    if helpers:
                        doubt = wait_table.threads_text(helpers)
                    text = wait_table.deadlock_text(ring, ends, doubt)
                    return text, frozenset() if ends or doubt else stuck
        causes = {rank: others[rank] for rank in _reached(first, waiters) if rank in others}
        return wait_table.waiting_text(causes, waiters[first].waited_s), frozenset()

    def _doing(self, rank: int) -> str:
        text, pid = self._server.state(rank)
        if rank in self.returned:
            text = "has returned"
        return text or self._doing_of(rank, pid)

    def _with_process(self, rank: int, text: str) -> str:
        pid = self._server.state(rank)[1]
        lines = [f"{text}, process {pid}", self._unfinished(rank)] if pid else [text]
        return "\n".join(filter(None, lines))


def _has_returned(wait: RankWait, rank: int) -> dict[str, Any]:
    """What to tell who waits for a rank that has returned."""
    message = f"rank {rank} is needed in {wait.call}, but the function has returned there"
    error = {"error": "PeerFailed", "rank": rank, "reason": "has returned", "message": message}
    return {"context": wait.context, "members": list(wait.members), **error}


def _told_apart(waits: Mapping[int, RankWait]) -> dict[int, RankWait]:
    """Number communicators that have the same name and the same ranks."""
    alike: dict[tuple[str, tuple[int, ...]], list[Context]] = defaultdict(list)
    for wait in waits.values():
        contexts = alike[wait.name, wait.members]
        if wait.context not in contexts:
            contexts.append(wait.context)
    told = {}
    for rank, wait in waits.items():
        contexts = alike[wait.name, wait.members]
        number = f" ({contexts.index(wait.context) + 1})" if len(contexts) > 1 else ""
        told[rank] = wait._replace(name=wait.name + number)
    return told


def _key(rank: int, wait: RankWait) -> Key:
    """The operation in which a rank waits; a message is one of each of its ranks."""
    if wait.number >= 0:
        return wait.context, wait.number
    return rank, wait.context, wait.serial


def _views(answers: Answers) -> dict[int, View]:
    views = {}
    for rank, said in answers.items():
        options = tuple(
            tuple(Need(context, number, frozenset(ranks)) for context, number, ranks in option)
            for option in said["options"]
        )
        views[rank] = View(options, dict(said["started"]), said["call"])
    return views


def _reached(first: int, waiters: Mapping[int, Waiter]) -> list[int]:
    """The ranks that `first` waits for, and those that these wait for, and so on."""
    found: dict[int, None] = {}
    left = [first]
    while left:
        rank = left.pop()
        if rank not in found:
            found[rank] = None
            left += waiters[rank].awaited if rank in waiters else ()
    return sorted(found)


def _until(deadline: float) -> Iterator[float]:
    while time.monotonic() < deadline:
        yield deadline
