"""One execution of a table of steps: what is posted, what is under way, and what happens next."""

from __future__ import annotations

import heapq
from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from pycoll.errors import Error
from pycoll.simulate.steps import ReplayedSteps

SCRATCH = 4
"""Receives to be reduced that are open at a time, in one segment on one rank."""

WINDOW = 16
"""Segments under way at a time on one rank."""

_TICKS = 1e15
"""Time is counted in femtoseconds, so that what happens at the same moment is known to."""


class Timing(NamedTuple):
    """How long a collective takes.

    Attributes:
        seconds: until the last rank is done.
        finish: by rank, seconds until it is done.
        busy: by rank, the fraction of `seconds` in which its port out carries a message, or its
            port in if that is more.
    """

    seconds: float
    finish: tuple[float, ...]
    busy: tuple[float, ...]


class _Span(NamedTuple):
    """What a step takes, in ticks.

    Attributes:
        done: until it is done: a message is there, a reduction made.
        holds: for which it holds its ports; a Send is done when it lets go of the first.
        stages: all of these, in order: when something happens.
    """

    done: int
    holds: tuple[int, ...]
    stages: tuple[int, ...]


def replay(table: ReplayedSteps, nbytes: float, segments: int, window: int) -> Timing:
    """Let time pass until all ranks of a table are done.

    Args:
        table: the steps.
        nbytes: of a value, or of a block.
        segments: into how many segments each chunk is cut.
        window: how many of them a rank has under way at a time.

    Raises:
        pycoll.Error: they are never done.
    """
    spans = []
    for done, holds in table.spans(nbytes / segments):
        whole = round(done * _TICKS), tuple([round(hold * _TICKS) for hold in holds])
        spans.append(_Span(*whole, tuple(sorted({whole[0], *whole[1]}))))
    return _Execution(table, spans, segments, window).run()


class _Execution:
    """The state of all ranks.

    A job is a message, named by its Send, or a Reduce: (segment, step). A segment's state is made
    when a rank first opens it.
    """

    def __init__(
        self, table: ReplayedSteps, spans: list[_Span], segments: int, window: int
    ) -> None:
        count = len(table.ranks)
        self.table = table
        self.spans = spans
        self.segments = segments
        self.window = window
        self.now = round(table.placement.start_s() * _TICKS)
        self.events: list[tuple[int, int, int, int]] = []  # when, job, ticks since its start
        self.waits: list[array[int]] = []
        self.posted: list[bytearray] = []
        self.left: list[list[int]] = []
        self.opened: list[list[int]] = []  # receives into scratch, by segment and rank
        self.next_segment = [0] * count
        self.under_way = [0] * count
        self.finish = [-1] * count
        self.completed: list[tuple[int, int]] = []
        self.ready: list[tuple[int, int, int]] = []  # jobs ready just now: segment, place, step
        self.free = bytearray(b"\1") * table.placement.port_count
        self.carried: dict[int, int] = {}
        self.lines: dict[int, deque[tuple[int, int, int]]] = {}  # jobs that wait, by line
        self.waiting: dict[int, list[tuple[int, int]]] = {}  # the first of each line, by port
        self.queued = 0

    def run(self) -> Timing:
        table, events = self.table, self.events
        for place in range(len(table.ranks)):
            self._open_segments(place)
        self._settle()
        self._start_jobs(set())
        while events:
            self.now = events[0][0]
            freed: set[int] = set()
            while events and events[0][0] == self.now:
                _, segment, step, elapsed = heapq.heappop(events)
                self._pass(segment, step, elapsed, freed)
            self._settle()
            self._start_jobs(freed)
        if -1 in self.finish:
            raise Error(f"{table.what}: a deadlock; pycoll.prove says where")
        return self._timing()

    def _timing(self) -> Timing:
        table, carried = self.table, self.carried
        seconds = max(self.finish) / _TICKS
        finish = [ticks / _TICKS for ticks in self.finish]
        most = [max(carried.get(3 * rank, 0), carried.get(3 * rank + 1, 0)) for rank in table.ranks]
        busy = [ticks / _TICKS / seconds if seconds else 0.0 for ticks in most]
        return Timing(
            seconds,
            tuple([finish[place] for place in table.part]),
            tuple([busy[place] for place in table.part]),
        )

    def _pass(self, segment: int, step: int, elapsed: int, freed: set[int]) -> None:
        """Let a job have lasted so long."""
        table = self.table
        span = self.spans[table.kind[step]]
        for port, hold in zip(table.ports[table.line[step]], span.holds, strict=True):
            if hold == elapsed:
                self.free[port] = 1
                freed.add(port)
        if not table.sends[step]:
            if elapsed == span.done:
                self.completed.append((segment, step))
            return
        if elapsed == span.holds[0]:
            self.completed.append((segment, step))
        if elapsed == span.done:
            self.completed.append((segment, table.partner[step]))

    # --- steps -----------------------------------------------------------------------------

    def _open_segments(self, place: int) -> None:
        """Post what can be posted of the next segments of a rank."""
        table = self.table
        while self.next_segment[place] < self.segments and self.under_way[place] < self.window:
            segment = self.next_segment[place]
            self.next_segment[place] += 1
            if segment == len(self.waits):
                ends = zip(table.begin, table.begin[1:], strict=False)
                self.waits.append(table.waits[:])
                self.posted.append(bytearray(len(table.owner)))
                self.left.append([end - begin for begin, end in ends])
                self.opened.append([0] * len(table.ranks))
            self.under_way[place] += 1
            for step in table.first[place]:
                self._post(segment, step)
            for _ in range(SCRATCH):
                self._open_scratch(segment, place)
            if self.left[segment][place] == 0:
                self._end_segment(place)

    def _end_segment(self, place: int) -> None:
        self.under_way[place] -= 1
        if self.under_way[place] == 0 and self.next_segment[place] == self.segments:
            self.finish[place] = self.now

    def _open_scratch(self, segment: int, place: int) -> None:
        receives, opened = self.table.scratch[place], self.opened[segment]
        if opened[place] < len(receives):
            self._post(segment, receives[opened[place]])
            opened[place] += 1

    def _post(self, segment: int, step: int) -> None:
        table = self.table
        partner = table.partner[step]
        if partner >= 0:
            posted = self.posted[segment]
            posted[step] = 1
            if posted[partner]:
                self._get_ready(segment, step if table.sends[step] else partner)
        elif self.spans[table.kind[step]].done:
            self._get_ready(segment, step)
        else:
            self.completed.append((segment, step))

    def _get_ready(self, segment: int, step: int) -> None:
        """Let a job wait for its ports: what all ranks do at this place comes one after another."""
        place = step - self.table.begin[self.table.owner[step]]
        self.ready.append((segment, place, step))

    def _settle(self) -> None:
        """Post what the completed steps were waited for by, until there is no more."""
        table, completed = self.table, self.completed
        while completed:
            segment, step = completed.pop()
            place, waits, left = table.owner[step], self.waits[segment], self.left[segment]
            for later in table.successors[table.after[step] : table.after[step + 1]]:
                waits[later] -= 1
                if waits[later] == 0:
                    self._post(segment, later)
            if table.reduces[step]:
                self._open_scratch(segment, place)
            left[place] -= 1
            if left[place] == 0:
                self._end_segment(place)
                self._open_segments(place)

    # --- ports -----------------------------------------------------------------------------

    def _start_jobs(self, freed: set[int]) -> None:
        """Start what can be started: first what has waited longest for the ports now free."""
        for first in heapq.merge(*[self._first_at(port) for port in freed if port in self.waiting]):
            line = first[1]
            if not self._is_free(line):
                continue
            _, segment, step = self.lines[line].popleft()
            self._leave(first)
            self._start(segment, step, line)
            if self.lines[line]:
                self._join(line)
            else:
                del self.lines[line]
        self.ready.sort()
        for segment, _, step in self.ready:
            line = self.table.line[step]
            if line not in self.lines and self._is_free(line):
                self._start(segment, step, line)
                continue
            self.queued += 1
            self.lines.setdefault(line, deque()).append((self.queued, segment, step))
            if len(self.lines[line]) == 1:
                self._join(line)
        self.ready.clear()

    def _first_at(self, port: int) -> Iterator[tuple[int, int]]:
        """Give the lines that wait for a port while it is free, who has waited longest first."""
        for first in tuple(self.waiting[port]):
            if not self.free[port]:
                return
            yield first

    def _join(self, line: int) -> None:
        first = self.lines[line][0][0], line
        for port in self.table.ports[line]:
            insort(self.waiting.setdefault(port, []), first)

    def _leave(self, first: tuple[int, int]) -> None:
        for port in self.table.ports[first[1]]:
            self.waiting[port].remove(first)
            if not self.waiting[port]:
                del self.waiting[port]

    def _is_free(self, line: int) -> bool:
        return all([self.free[port] for port in self.table.ports[line]])

    def _start(self, segment: int, step: int, line: int) -> None:
        span = self.spans[self.table.kind[step]]
        for port, hold in zip(self.table.ports[line], span.holds, strict=True):
            self.free[port] = 0
            self.carried[port] = self.carried.get(port, 0) + hold
        for elapsed in span.stages:
            heapq.heappush(self.events, (self.now + elapsed, segment, step, elapsed))
