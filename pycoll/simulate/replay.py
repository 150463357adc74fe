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

SHARING = 64
"""Messages whose bytes share a port at a time; others wait."""

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
    """What a step takes, in ticks from its start.

    Attributes:
        lead: until its bytes begin to pass.
        alone: for which its bytes pass if no others share its ports.
        tail: from when the last byte has left until it is there.
        holds: for which it holds each of its ports against the start of others.
        stages: all moments at which something happens, but for the bytes.
    """

    lead: int
    alone: int
    tail: int
    holds: tuple[int, ...]
    stages: tuple[int, ...]


class _Flow:
    """The bytes of a message while they pass.

    Attributes:
        job: segment and Send.
        ports: those that its bytes share with others.
        alone: ticks that all of it takes alone.
        left: the fraction that has not passed at `since`.
        among: among how many its busiest port is divided from then on.
        end: when it has passed, if no others come or go.
        due: when it is looked at, at the latest at its end.
    """

    __slots__ = ("alone", "among", "due", "end", "job", "left", "ports", "since")

    def __init__(self, job: tuple[int, int], ports: tuple[int, ...], alone: int) -> None:
        self.job, self.ports, self.alone = job, ports, alone
        self.left, self.since, self.among = 1.0, 0, 0
        self.end = self.due = -1

    def divide(self, among: int, now: int) -> None:
        """Let it have another part of its ports from now on."""
        if self.among:
            self.left -= (now - self.since) / (self.alone * self.among)
        self.since, self.among = now, among
        self.end = now + max(round(self.left * (self.alone * among)), 0)


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
    for lead_s, sent_s, done_s, holds_s in table.spans(nbytes / segments):
        lead, sent, done = (round(seconds * _TICKS) for seconds in (lead_s, sent_s, done_s))
        holds = tuple([round(hold * _TICKS) for hold in holds_s])
        stages = {hold for hold in holds if hold}
        if lead or sent == lead:
            stages.add(lead)
        spans.append(_Span(lead, sent - lead, done - sent, holds, tuple(sorted(stages))))
    return _Execution(table, spans, segments, window).run()


_SENT, _ARRIVED = -1, -2
"""What may have happened to a job, beside a moment of its `_Span.stages`."""


class _Execution:
    """The state of all ranks.

    A job is a message, named by its Send, or a Reduce: (segment, step). A segment's state is made
    when a rank first opens it.
    """

    def __init__(
        self, table: ReplayedSteps, spans: list[_Span], segments: int, window: int
    ) -> None:
        count, ports = len(table.ranks), table.placement.port_count
        self.table = table
        self.spans = spans
        self.segments = segments
        self.window = window
        self.now = round(table.placement.start_s() * _TICKS)
        self.events: list[tuple[int, int, int, int]] = []  # when, job, what has happened to it
        self.waits: list[array[int]] = []
        self.posted: list[bytearray] = []
        self.left: list[list[int]] = []
        self.opened: list[list[int]] = []  # receives into scratch, by segment and rank
        self.next_segment = [0] * count
        self.under_way = [0] * count
        self.finish = [-1] * count
        self.completed: list[tuple[int, int]] = []
        self.ready: list[tuple[int, int, int]] = []  # jobs ready just now: segment, place, step
        self.free = bytearray(b"\1") * ports  # for the start of another
        self.freed: set[int] = set()
        self.flows: dict[tuple[int, int], _Flow] = {}
        self.sharers: dict[int, list[_Flow]] = {}  # by port
        self.sharing = bytearray(ports)  # how many those are
        self.changed: set[int] = set()
        self.carrying: dict[int, tuple[int, int]] = {}  # by port, how many messages since when
        self.carried: dict[int, int] = {}
        self.busy = bytearray(len(table.ports))  # by line, whether its last job is under way
        self.lines: dict[int, deque[tuple[int, int, int]]] = {}  # jobs that wait, by line
        self.waiting: dict[int, list[tuple[int, int]]] = {}  # the first of each line, by port
        self.idle: list[tuple[int, int]] = []  # the first of lines that were busy until now
        self.queued = 0

    def run(self) -> Timing:
        table, events = self.table, self.events
        for place in range(len(table.ranks)):
            self._open_segments(place)
        self._settle()
        self._start_jobs()
        while events:
            self.now = events[0][0]
            while events and events[0][0] == self.now:
                _, segment, step, what = heapq.heappop(events)
                self._pass(segment, step, what)
            self._settle()
            self._start_jobs()
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

    def _pass(self, segment: int, step: int, what: int) -> None:
        """Let something happen to a job; not below 0: it has lasted so long."""
        table = self.table
        if what == _ARRIVED:
            self.completed.append((segment, table.partner[step]))
            return
        if what == _SENT:
            flow = self.flows.get((segment, step))
            if flow is not None and flow.end > self.now:  # others have come since
                flow.due = flow.end
                heapq.heappush(self.events, (flow.end, segment, step, _SENT))
            elif flow is not None:  # else it has left sooner, since others have
                self._end_flow(flow)
            return
        span = self.spans[table.kind[step]]
        for port, hold in zip(table.ports[table.line[step]], span.holds, strict=True):
            if hold == what != 0:
                self.free[port] = 1
                self.freed.add(port)
        if what == span.lead:
            if span.alone:
                self._begin_flow(segment, step)
            else:
                self._end_job(segment, step)

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
        elif self.spans[table.kind[step]].lead:
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

    # --- starting --------------------------------------------------------------------------

    def _start_jobs(self) -> None:
        """Start what can be started: first what has waited longest for what is free now."""
        lines = [self._first_at(port) for port in self.freed if port in self.waiting]
        if self.idle:
            lines.append(iter(sorted(self.idle)))
        for first in heapq.merge(*lines) if lines else ():
            line = first[1]
            if self.busy[line] or not self._is_free(line):
                continue
            _, segment, step = self.lines[line].popleft()
            self._leave(first)
            if not self.lines[line]:
                del self.lines[line]
            self._start(segment, step, line)
        self.freed.clear()
        self.idle.clear()
        self.ready.sort()
        for segment, _, step in self.ready:
            line = self.table.line[step]
            if not self.busy[line] and line not in self.lines and self._is_free(line):
                self._start(segment, step, line)
                continue
            self.queued += 1
            self.lines.setdefault(line, deque()).append((self.queued, segment, step))
            if len(self.lines[line]) == 1 and not self.busy[line]:
                self._join(line)
        self.ready.clear()
        self._divide()

    def _first_at(self, port: int) -> Iterator[tuple[int, int]]:
        """Give the lines that wait for a port while it is free, who has waited longest first."""
        for first in tuple(self.waiting[port]):
            if not self.free[port] or self.sharing[port] >= SHARING:
                return
            yield first

    def _join(self, line: int) -> tuple[int, int]:
        first = self.lines[line][0][0], line
        for port in self.table.ports[line]:
            insort(self.waiting.setdefault(port, []), first)
        return first

    def _leave(self, first: tuple[int, int]) -> None:
        for port in self.table.ports[first[1]]:
            self.waiting[port].remove(first)
            if not self.waiting[port]:
                del self.waiting[port]

    def _is_free(self, line: int) -> bool:
        free, sharing = self.free, self.sharing
        return all([free[port] and sharing[port] < SHARING for port in self.table.ports[line]])

    def _start(self, segment: int, step: int, line: int) -> None:
        kind = self.table.kind[step]
        span, ports = self.spans[kind], self.table.ports[line]
        self.busy[line] = 1
        for port, hold in zip(ports, span.holds, strict=True):
            if hold:
                self.free[port] = 0
        if self.table.sends[step]:
            for port in ports[:2]:
                count, since = self.carrying.get(port, (0, self.now))
                self.carrying[port] = count + 1, since
        for elapsed in span.stages:
            heapq.heappush(self.events, (self.now + elapsed, segment, step, elapsed))
        if not span.lead and span.alone:
            self._begin_flow(segment, step)

    # --- bytes -----------------------------------------------------------------------------

    def _begin_flow(self, segment: int, step: int) -> None:
        table = self.table
        line = table.line[step]
        ports = table.ports[line][: table.shared[line]]
        flow = _Flow((segment, step), ports, self.spans[table.kind[step]].alone)
        self.flows[segment, step] = flow
        for port in ports:
            self.sharers.setdefault(port, []).append(flow)
            self.sharing[port] += 1
        self.changed.update(ports)

    def _divide(self) -> None:
        """Give each flow of a port at which others have come or gone an equal part of it."""
        sharing = self.sharing
        for port in self.changed:
            for flow in self.sharers.get(port, ()):
                among = max([sharing[other] for other in flow.ports])
                if among == flow.among:
                    continue
                flow.divide(among, self.now)
                if not self.now <= flow.due <= flow.end:
                    flow.due = flow.end
                    heapq.heappush(self.events, (flow.end, *flow.job, _SENT))
        self.changed.clear()

    def _end_flow(self, flow: _Flow) -> None:
        del self.flows[flow.job]
        for port in flow.ports:
            self.sharing[port] -= 1
            self.sharers[port].remove(flow)
            if not self.sharers[port]:
                del self.sharers[port]
        self.changed.update(flow.ports)
        self.freed.update(flow.ports)
        self._end_job(*flow.job)

    def _end_job(self, segment: int, step: int) -> None:
        """Let a reduction be made, or a message have left."""
        table = self.table
        line, tail = table.line[step], self.spans[table.kind[step]].tail
        self.busy[line] = 0
        if line in self.lines:
            self.idle.append(self._join(line))
        self.completed.append((segment, step))
        if not table.sends[step]:
            return
        for port in table.ports[line][:2]:
            count, since = self.carrying.pop(port)
            if count > 1:
                self.carrying[port] = count - 1, since
            else:
                self.carried[port] = self.carried.get(port, 0) + self.now - since
        if tail:
            heapq.heappush(self.events, (self.now + tail, segment, step, _ARRIVED))
        else:
            self.completed.append((segment, table.partner[step]))
