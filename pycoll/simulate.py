"""How long a collective takes on a network that is made up: the schedules of all ranks, timed.

The ranks run as the core runs them: a step is posted as soon as its hazards are met, receives
into scratch `SCRATCH` at a time, a schedule once for each segment with so many of them under way.
What differs is that every rank has a core of its own and that nothing is buffered:

    message      starts when it is posted on both ends and all its ports are free; takes the latency
                 of its link and its bytes over the bandwidth, and holds the ports for all that time
    port         carries one message at a time; each rank has one out and one in
    reduction    takes time by the byte; a rank combines one thing at a time
    copy         takes no time

Messages that wait for a port leave it in the order in which they could have started, those of one
moment by segment. A chunk is its share of the bytes, fractions included.

Nothing is sent and nothing measured: the same arguments give the same times anywhere.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll._support.checks import check_int, check_nbytes
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind
from pycoll.errors import Error
from pycoll.schedule import Recv, Reduce, Send
from pycoll.schedules import find, schedule

SCRATCH = 4
"""Receives to be reduced that are open at a time, in one segment on one rank."""

WINDOW = 16
"""Segments under way at a time on one rank."""

PIECES = frozenset({"broadcast", "reduce", "all_reduce", "scan"})
"""Where chunks are pieces of one value; elsewhere a chunk is a block."""

_TICKS = 1e15
"""Time is counted in femtoseconds, so that what happens at the same moment is known to."""


class Link(NamedTuple):
    """What a message takes: `latency_s` seconds, and its bytes over `bandwidth`, bytes a second."""

    latency_s: float
    bandwidth: float


class Network(NamedTuple):
    """The machines.

    Attributes:
        latency_s: seconds that a message of no bytes takes between ranks of one host.
        bandwidth: bytes a second between ranks of one host.
        between: the same between hosts; None: as inside one.
        shared_ports: all ranks of a host share one more port out and one in, for messages from and
            to other hosts.
        reduce_s_per_byte: seconds that combining takes, by the byte of the result.
    """

    latency_s: float = 20e-6
    bandwidth: float = 5e9
    between: Link | None = None
    shared_ports: bool = False
    reduce_s_per_byte: float = 0.0

    def link(self, same_host: bool) -> Link:
        """Return the link between two ranks."""
        inside = Link(self.latency_s, self.bandwidth)
        return inside if same_host or self.between is None else self.between


ONE_HOST = Network()
"""Ranks that share a machine, roughly; for what a model is asked most, which of two is quicker."""


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


@edge
def simulate(
    collective: str,
    name: str,
    size: int,
    nbytes: float,
    *,
    segments: int = 1,
    root: int = 0,
    hosts: Sequence[int] | None = None,
    network: Network = ONE_HOST,
    window: int = WINDOW,
) -> Timing:
    """Time one algorithm.

    Args:
        collective: for example ``"all_reduce"``.
        name: for example ``"ring"``.
        size: number of ranks.
        nbytes: of one rank's value in broadcast, reduce, all_reduce, scan and exscan, of one block
            (what one rank has for one other, or for all others) elsewhere.
        segments: into how many segments each chunk is cut.
        root: the root, for collectives that have one.
        hosts: by rank the number of its host; None: all are on one.
        network: the machines.
        window: how many segments a rank has under way at a time.

    Raises:
        TypeError: a number or the network is none.
        ValueError: there is no such algorithm, or a number makes no sense.
        pycoll.Error: the algorithm deadlocks, or a message has no other half (`pycoll.prove` says
            where); pycoll's own do not.
    """
    find(collective, name)
    if not isinstance(network, Network):
        raise TypeError(
            f"network is a pycoll.simulate.Network, as Network(latency_s=20e-6, bandwidth=5e9), "
            f"not {a_kind(network)}"
        )
    for value, what in (size, "size"), (segments, "segments"), (window, "window"), (root, "root"):
        check_int(value, what)
    check_nbytes(nbytes)
    if min(size, segments, window) < 1:
        raise ValueError(f"size {size}, segments {segments} and window {window} must be 1 or more")
    if not 0 <= root < size:
        raise ValueError(f"root is {root}, but the ranks are 0 to {size - 1}")
    for link in (network.link(True), network.link(False)):
        if not (link.bandwidth > 0 and link.latency_s >= 0 and network.reduce_s_per_byte >= 0):
            raise ValueError(f"bandwidths must be above 0, and times 0 or more: {network}")
    given: object = hosts if hosts is not None else (0,) * size
    if not isinstance(given, Iterable):
        raise TypeError(f"hosts is a list of hosts' numbers, not {a_kind(given)}")
    placed = tuple(given)
    for host in placed:
        check_int(host, "a host")
    if len(placed) != size:
        raise ValueError(f"hosts must name a host for each of {size} ranks, not for {len(placed)}")
    program = _Program(collective, name, size, nbytes / segments, root, placed, network)
    return _Simulation(program, segments, window).run()


class _Program:
    """The schedules of all ranks as one list of steps, with what each takes.

    Attributes:
        owner: by step, its rank.
        partner: by Send and Recv, the step that is the other half of the message; -1: a Reduce or a
            Copy.
        sends, reduces: by step, whether it is a Send, a Reduce.
        ticks: by step, how long it takes; a Recv takes what its Send takes.
        line: by step, the line in which a message waits, one for each pair of ranks that talk.
        ports: by line, the numbers of the ports that its messages hold.
        waits, successors: hazards, as in `Schedule`.
        first: by rank, the steps that wait for nothing, in order; receives into scratch apart.
        scratch: by rank, the receives into scratch, in order.
        counts: by rank, its number of steps.
        port_count: number of ports.
    """

    def __init__(
        self,
        collective: str,
        name: str,
        size: int,
        nbytes: float,
        root: int,
        hosts: tuple[int, ...],
        network: Network,
    ) -> None:
        self.what = f"{collective} {name}, size {size}"
        self.size = size
        self.owner: list[int] = []
        self.partner: list[int] = []
        self.sends: list[bool] = []
        self.reduces: list[bool] = []
        self.ticks: list[int] = []
        self.line: list[int] = []
        self.ports: list[tuple[int, ...]] = []
        self.waits: list[int] = []
        self.successors: list[tuple[int, ...]] = []
        self.first: list[list[int]] = []
        self.scratch: list[list[int]] = []
        self.counts: list[int] = []
        self.port_count = 2 * size + 2 * len(set(hosts))
        chunk = nbytes / find(collective, name).chunks(size) if collective in PIECES else nbytes
        shared = {host: 2 * size + 2 * index for index, host in enumerate(sorted(set(hosts)))}
        lines: dict[tuple[int, int], int] = {}
        halves: dict[tuple[int, int, int, bool], int] = {}

        for rank in range(size):
            compiled = schedule(collective, name, rank, size, root, hosts)
            base = len(self.owner)
            self.first.append([])
            self.scratch.append([])
            self.counts.append(len(compiled.steps))
            self.owner += [rank] * len(compiled.steps)
            self.waits += compiled.waits
            self.successors += [tuple([base + p for p in later]) for later in compiled.successors]
            for position, step in enumerate(compiled.steps):
                index, load = base + position, chunk * len(compiled.chunks[position])
                ticks, line = 0, -1
                if isinstance(step, Send | Recv):
                    sends = isinstance(step, Send)
                    ends = (rank, step.peer) if sends else (step.peer, rank)
                    halves[(*ends, compiled.number[position], sends)] = index
                    same = hosts[rank] == hosts[step.peer]
                    link = network.link(same)
                    ticks = round((link.latency_s + load / link.bandwidth) * _TICKS)
                    line = lines.setdefault(ends, len(lines))
                    if line == len(self.ports):
                        ports = [2 * ends[0], 2 * ends[1] + 1]
                        if network.shared_ports and not same:
                            ports += [shared[hosts[ends[0]]], shared[hosts[ends[1]]] + 1]
                        self.ports.append(tuple(ports))
                elif isinstance(step, Reduce):
                    ticks = round(load * network.reduce_s_per_byte * _TICKS)
                self.sends.append(isinstance(step, Send))
                self.reduces.append(isinstance(step, Reduce))
                self.ticks.append(ticks)
                self.line.append(line)
                if isinstance(step, Recv) and step.scratch:
                    self.scratch[rank].append(index)
                elif compiled.waits[position] == 0:
                    self.first[rank].append(index)

        self.partner = [-1] * len(self.owner)
        for (sender, receiver, number, sends), index in halves.items():
            other = halves.get((sender, receiver, number, not sends))
            if other is None:
                raise Error(
                    f"{self.what}: message {number} from rank {sender} to rank {receiver} has no "
                    f"{'Recv' if sends else 'Send'}; pycoll.prove says more"
                )
            self.partner[index] = other


class _Simulation:
    """One execution: what is posted, what is under way, and what happens next.

    A message is (segment, index of its Send). A segment's state is made when a rank first opens it.
    """

    def __init__(self, program: _Program, segments: int, window: int) -> None:
        self.program = program
        self.segments = segments
        self.window = window
        self.now = 0
        self.events: list[tuple[int, int, int]] = []  # when it ends, segment, a Send or a Reduce
        self.waits: list[list[int]] = []
        self.posted: list[bytearray] = []
        self.left: list[list[int]] = []
        self.opened: list[list[int]] = []  # receives into scratch, by segment and rank
        self.next_segment = [0] * program.size
        self.under_way = [0] * program.size
        self.finish = [-1] * program.size
        self.completed: list[tuple[int, int]] = []
        self.matched: list[tuple[int, int]] = []  # messages posted on both ends just now
        self.free = [True] * program.port_count
        self.carried = [0] * program.port_count
        self.lines: list[deque[tuple[int, tuple[int, int]]]] = [deque() for _ in program.ports]
        self.waiting: list[set[int]] = [set() for _ in self.free]  # lines in use, by port
        self.queued = 0
        self.combining: list[deque[tuple[int, int]]] = [deque() for _ in range(program.size)]

    def run(self) -> Timing:
        """Let time pass until nothing moves any more."""
        program, events = self.program, self.events
        for rank in range(program.size):
            self._open_segments(rank)
        self._settle()
        self._start_messages(set())
        while events:
            self.now = events[0][0]
            freed: set[int] = set()
            while events and events[0][0] == self.now:
                _, segment, index = heapq.heappop(events)
                self.completed.append((segment, index))
                if program.sends[index]:
                    self.completed.append((segment, program.partner[index]))
                    freed.update(program.ports[program.line[index]])
                else:
                    self._combine_next(program.owner[index])
            for port in freed:
                self.free[port] = True
            self._settle()
            self._start_messages(freed)
        if -1 in self.finish:
            raise Error(f"{program.what}: a deadlock; pycoll.prove says where")
        return self._timing()

    def _timing(self) -> Timing:
        seconds = max(self.finish) / _TICKS
        carried = (self.carried[2 * rank : 2 * rank + 2] for rank in range(self.program.size))
        return Timing(
            seconds,
            tuple([ticks / _TICKS for ticks in self.finish]),
            tuple([max(ticks) / _TICKS / seconds if seconds else 0.0 for ticks in carried]),
        )

    # --- steps -----------------------------------------------------------------------------

    def _open_segments(self, rank: int) -> None:
        """Post what can be posted of the next segments of a rank."""
        program = self.program
        while self.next_segment[rank] < self.segments and self.under_way[rank] < self.window:
            segment = self.next_segment[rank]
            self.next_segment[rank] += 1
            if segment == len(self.waits):
                self.waits.append(list(program.waits))
                self.posted.append(bytearray(len(program.owner)))
                self.left.append(list(program.counts))
                self.opened.append([0] * program.size)
            self.under_way[rank] += 1
            for index in program.first[rank]:
                self._post(segment, index)
            for _ in range(SCRATCH):
                self._open_scratch(segment, rank)
            if program.counts[rank] == 0:
                self._end_segment(rank)

    def _end_segment(self, rank: int) -> None:
        self.under_way[rank] -= 1
        if self.under_way[rank] == 0 and self.next_segment[rank] == self.segments:
            self.finish[rank] = self.now

    def _open_scratch(self, segment: int, rank: int) -> None:
        receives, opened = self.program.scratch[rank], self.opened[segment]
        if opened[rank] < len(receives):
            self._post(segment, receives[opened[rank]])
            opened[rank] += 1

    def _post(self, segment: int, index: int) -> None:
        program = self.program
        partner = program.partner[index]
        if partner >= 0:
            posted = self.posted[segment]
            posted[index] = True
            if posted[partner]:
                self.matched.append((segment, index if program.sends[index] else partner))
        elif program.ticks[index]:
            waiting = self.combining[program.owner[index]]
            waiting.append((segment, index))
            if len(waiting) == 1:
                heapq.heappush(self.events, (self.now + program.ticks[index], segment, index))
        else:
            self.completed.append((segment, index))

    def _combine_next(self, rank: int) -> None:
        waiting = self.combining[rank]
        waiting.popleft()
        if waiting:
            segment, index = waiting[0]
            ticks = self.program.ticks[index]
            heapq.heappush(self.events, (self.now + ticks, segment, index))

    def _settle(self) -> None:
        """Post what the completed steps were waited for by, until there is no more."""
        program, completed = self.program, self.completed
        while completed:
            segment, index = completed.pop()
            rank, waits, left = program.owner[index], self.waits[segment], self.left[segment]
            for later in program.successors[index]:
                waits[later] -= 1
                if waits[later] == 0:
                    self._post(segment, later)
            if program.reduces[index]:
                self._open_scratch(segment, rank)
            left[rank] -= 1
            if left[rank] == 0:
                self._end_segment(rank)
                self._open_segments(rank)

    # --- messages --------------------------------------------------------------------------

    def _start_messages(self, freed: set[int]) -> None:
        """Start what can be started: first what has waited longest for the ports now free."""
        program, lines, waiting = self.program, self.lines, self.waiting
        able = {line for port in freed for line in waiting[port] if self._is_free(line)}
        for _, line in sorted([(lines[line][0][0], line) for line in able]):
            if self._is_free(line):
                _, message = lines[line].popleft()
                self._start(message, line)
                if not lines[line]:
                    for port in program.ports[line]:
                        waiting[port].remove(line)
        self.matched.sort()
        for message in self.matched:
            line = program.line[message[1]]
            if self._is_free(line):
                self._start(message, line)
                continue
            if not lines[line]:
                for port in program.ports[line]:
                    waiting[port].add(line)
            self.queued += 1
            lines[line].append((self.queued, message))
        self.matched.clear()

    def _is_free(self, line: int) -> bool:
        return all([self.free[port] for port in self.program.ports[line]])

    def _start(self, message: tuple[int, int], line: int) -> None:
        segment, index = message
        ticks = self.program.ticks[index]
        for port in self.program.ports[line]:
            self.free[port] = False
            self.carried[port] += ticks
        heapq.heappush(self.events, (self.now + ticks, segment, index))
