"""Which algorithm runs: a pure function of what is the same on all ranks.

Everything that can serve a call is a candidate; what the table of costs says takes least time is
chosen, with as many segments as take least. What is looked at: the call's collective, bytes and
operator, the communicator's ranks and hosts, and what the job has agreed on. Never a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pycoll._selection import costs, flows
from pycoll._selection.agreed import SHARED_MEMORY, Agreed
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    from pycoll import schedules
    from pycoll._selection.costs import Work
    from pycoll._selection.flows import Flow
    from pycoll.schedules import Algorithm, Cost, reordered
else:  # a job that talks through shared memory needs none of them
    schedules = LazyModule("pycoll.schedules")
    reordered = LazyModule("pycoll.schedules.reordered")

MIN_SEGMENT_NBYTES = 64 << 10
"""A shorter segment is not worth its message."""

MAX_SEGMENTS = 256
"""More are not tried."""

MAX_FORCED_SEGMENTS = 4096
"""A call has 2**16 lanes, and a segment takes one."""

UNKNOWN_S = math.inf
"""The time of an algorithm that states no cost."""

BLOCKS = frozenset({"gather", "all_gather", "scatter", "reduce_scatter", "all_to_all", "exscan"})
"""Collectives in which a chunk is a block, or a value, whatever the algorithm."""

KNOWN_QUERIES = 4096
"""Choices that a communicator remembers; more than there are lengths of three significant bits."""


class Choice(NamedTuple):
    """How a collective runs; the same on all ranks of a call.

    Attributes:
        name: of the algorithm.
        segments: into how many segments each chunk is cut, for a pipeline.
    """

    name: str
    segments: int = 1

    def __str__(self) -> str:
        return self.name if self.segments == 1 else f"{self.name}, segments={self.segments}"


class Candidate(NamedTuple):
    """A way to run a call, and the time that the table expects."""

    choice: Choice
    seconds: float


class Refused(NamedTuple):
    """An algorithm that is no candidate, and why."""

    name: str
    why: str


class Query(NamedTuple):
    """A call, as far as it matters here.

    Attributes:
        collective: for example ``"all_reduce"``.
        nbytes: of one rank's value in broadcast, reduce, all_reduce, scan and exscan, of one block
            (what one rank has for one other, or all others) elsewhere.
        rank_order: the operator is not commutative.
        whole: the operator takes the whole value only, no pieces of it.
        shm: it may go through shared memory, if it can.
    """

    collective: str
    nbytes: int
    rank_order: bool = False
    whole: bool = False
    shm: bool = True


class Selector:
    """Chooses for one communicator.

    Args:
        agreed: by the job.
        hosts: by rank the number of its host.
        shm: the ranks can run collectives in shared memory.

    Attributes:
        agreed: by the job.
        size: number of ranks.
        shm: they can run collectives in shared memory.
        link: the kind of link on which most depends: between hosts if there are several.
    """

    def __init__(self, agreed: Agreed, hosts: Sequence[int], shm: bool) -> None:
        self.agreed = agreed
        self.shm = shm
        self._hosts = tuple(hosts)
        self.size = len(self._hosts)
        self._ranks = {host: self._hosts.count(host) for host in dict.fromkeys(self._hosts)}
        self._cores = {host: agreed.cores.get(host, n) for host, n in self._ranks.items()}
        self._is_crowded = any(n > self._cores[host] for host, n in self._ranks.items())
        shares = all(host in agreed.sharing for host, n in self._ranks.items() if n > 1)
        machines = {agreed.machines.get(host, str(host)) for host in self._ranks}
        networks = {agreed.networks.get(host) for host in self._ranks}
        self._inside = costs.SHM if shares else costs.TCP
        self._between = costs.TCP if len(machines) == 1 else costs.NET
        if None not in networks and len(networks) == 1:
            self._between = costs.RDMA
            if not agreed.sharing:  # then it is RDMA that the user has asked for
                self._inside = costs.RDMA
        self.link = self._inside if len(self._ranks) == 1 else self._between
        # Every message takes the same kind of link, and all ranks share the same cores.
        is_spread = len(self._ranks) == self.size and len(machines) == 1
        self._is_even = len(self._ranks) == 1 or is_spread
        self._flows: dict[Algorithm, tuple[Flow, Flow]] = {}
        self._chosen: dict[Query, Choice] = {}

    def choose(self, request: Query) -> Choice:
        """Return how a call runs.

        Raises:
            ValueError: there is no such collective.
        """
        request = self._rounded(request)
        choice = self._chosen.get(request)
        if choice is None:
            if self._takes_shared_memory(request) and self._allows(
                request.collective, SHARED_MEMORY
            ):
                choice = Choice(SHARED_MEMORY)  # without a look at times
            else:
                choice = self.ranking(request)[0][0].choice
            if len(self._chosen) >= KNOWN_QUERIES:
                self._chosen.clear()
            self._chosen[request] = choice
        return choice

    def segments(self, name: str, request: Query) -> int:
        """Return into how many segments an algorithm that was asked for cuts each chunk."""
        algorithm = schedules.find(request.collective, name)
        return self._timed(algorithm, self._rounded(request)).choice.segments

    def several_segments(self, name: str, request: Query) -> int:
        """Return the best number of segments above 1; 1 if there is none."""
        algorithm = schedules.find(request.collective, name)
        found = [c for c in self._ways(algorithm, request) if c.choice.segments > 1]
        return min(found, key=_seconds).choice.segments if found else 1

    def ranking(self, request: Query) -> tuple[list[Candidate], list[Refused]]:
        """Return what can serve a call, the one to take first, and what cannot.

        `shared_memory` comes first wherever it can serve, whatever its time: a call of a NumPy
        array enters the core without asking here, and the same call on other ranks must follow.
        The others come by time. A rule of PYCOLL_ALGORITHM that
        leaves nothing which can serve is ignored.
        """
        request = self._rounded(request)
        able: list[Candidate] = []
        refused: list[Refused] = []
        collective = request.collective
        if self._takes_shared_memory(request):
            able.append(self._timed_core(request))
        else:
            refused.append(Refused(SHARED_MEMORY, self._why_not_shared_memory(request)))
        for name in schedules.names(collective):
            algorithm = schedules.find(collective, name)
            why = self._why_not(algorithm, request)
            if why is None:
                able.append(self._timed(algorithm, request))
            else:
                refused.append(Refused(name, why))
        obeying = [found for found in able if self._allows(collective, found.choice.name)]
        if obeying:
            why = f"PYCOLL_ALGORITHM={collective}:{self.agreed.rules.get(collective)}"
            refused += [Refused(found.choice.name, why) for found in able if found not in obeying]
            able = obeying
        able.sort(key=lambda found: (found.choice.name != SHARED_MEMORY, found.seconds))
        return able, refused

    def ordered_by(self, collective: str, name: str) -> str:
        """Return the file by whose order of hosts an algorithm runs; "": by numbers of ranks."""
        if name == SHARED_MEMORY or not self.agreed.order(self._hosts):
            return ""
        keeps = reordered.keeps_rank_order(schedules.find(collective, name))
        return "" if keeps else self.agreed.topology

    def _rounded(self, request: Query) -> Query:
        """Return the request with a length of three significant bits: so there are few of them."""
        if self.agreed.segment_nbytes:  # exact, for segments must not be longer than that
            return request
        low = max(0, request.nbytes.bit_length() - 3)
        return request._replace(nbytes=request.nbytes >> low << low)

    # --- who can serve ---------------------------------------------------------------------

    def _allows(self, collective: str, name: str) -> bool:
        rule = self.agreed.rules.get(collective)
        return rule is None or rule.allows(name)

    def _takes_shared_memory(self, request: Query) -> bool:
        return self.shm and request.shm

    def _why_not_shared_memory(self, request: Query) -> str:
        if self.size == 1:
            return "needs more than one rank"
        if not self.shm:
            return "needs all ranks on one host, sharing memory"
        return "takes blocking calls with the C core's operators only"

    def _why_not(self, algorithm: Algorithm, request: Query) -> str | None:
        """Say why an algorithm is no candidate; None if it is."""
        rule = self.agreed.rules.get(request.collective)
        is_named = rule is not None and not rule.excluded and algorithm.name in rule.names
        if algorithm.cost is None and not is_named:
            return "states no cost, so it is taken only where it is named"
        if algorithm.hosts and not is_named and not 1 < len(self._ranks) < self.size:
            return "needs several hosts, and several ranks on one of them"
        return _unable(algorithm, request.rank_order, request.whole)

    # --- time ------------------------------------------------------------------------------

    def _timed_core(self, request: Query) -> Candidate:
        collective, nbytes, table = request.collective, request.nbytes, self.agreed.costs
        [cores] = self._cores.values()
        row = costs.CORE, collective, SHARED_MEMORY, costs.WHOLE
        factor = table.factor(row, self.size, nbytes, self.size > cores)
        work = flows.core_work(collective, nbytes, self.size, cores)
        return Candidate(Choice(SHARED_MEMORY), table.seconds((costs.CORE, work)) * factor)

    def _timed(self, algorithm: Algorithm, request: Query) -> Candidate:
        """Return an algorithm with the number of segments that takes least time."""
        return min(self._ways(algorithm, request), key=_seconds)

    def _ways(self, algorithm: Algorithm, request: Query) -> Iterator[Candidate]:
        """Give an algorithm with every number of segments that makes sense."""
        collective, nbytes, table = request.collective, request.nbytes, self.agreed.costs
        cost = schedules.cost_of(algorithm, self.size, hosts=self._hosts)
        pieces = 1 if collective in BLOCKS else algorithm.chunks(self.size)
        chunk = nbytes / pieces
        for segments in self._numbers_of_segments(cost, chunk, request.whole):
            seconds = UNKNOWN_S
            if cost is not None:
                how = costs.WHOLE if segments == 1 else costs.CUT
                # Factors are for one kind of link: where they are mixed, they mean nothing.
                row = self.link, collective, algorithm.name, how
                factor = table.factor(row, self.size, nbytes, self._is_crowded)
                works = self._works(algorithm, cost, chunk, segments)
                seconds = table.seconds(*works) * (factor if self._is_even else 1.0)
            yield Candidate(Choice(algorithm.name, segments), seconds)

    def _numbers_of_segments(self, cost: Cost | None, chunk: float, whole: bool) -> Iterator[int]:
        forced = self.agreed.segment_nbytes
        if whole or chunk == 0 or forced == 0:
            yield 1
        elif forced is not None:
            yield max(1, min(-(-int(chunk) // forced), MAX_FORCED_SEGMENTS))
        else:
            yield 1
            segments = 2
            # Only what waits for others can be overlapped.
            while cost is not None and cost.path > cost.load and segments <= MAX_SEGMENTS:
                if chunk < segments * MIN_SEGMENT_NBYTES:
                    return
                yield segments
                segments *= 2

    def _works(
        self, algorithm: Algorithm, cost: Cost, chunk: float, segments: int
    ) -> list[tuple[str, Work]]:
        """Return how much of everything an algorithm takes, on each kind of link."""
        cores = sum(self._cores.values())
        if self._is_even:
            work = flows.one_host_work(algorithm, cost, chunk, segments, self.size, cores)
            return [(self.link, work)]
        both = self._flows.get(algorithm)
        if both is None:
            placed = algorithm
            if order := self.agreed.order(self._hosts):
                placed = reordered.reordered(algorithm, order)
            both = flows.between_hosts(placed, self._hosts, self._cores)
            self._flows[algorithm] = both
        inside, across = (flow.work(chunk, segments) for flow in both)
        inside = inside._replace(
            calls=max(1.0, *(n / self._cores[host] for host, n in self._ranks.items())),
            combined_nbytes=flows.combined_chunks(algorithm, cost, min(self.size, cores)) * chunk,
        )
        return [(self._inside, inside), (self._between, across)]


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


def usable(
    collective: str, name: str, *, rank_order: bool = False, whole: bool = False
) -> str | None:
    """Say why an algorithm cannot serve an operator; None if it can.

    Raises:
        ValueError: there is no such collective or algorithm.
    """
    why = _unable(schedules.find(collective, name), rank_order, whole)
    if why is None:
        return None
    every = schedules.TABLE[collective].values()
    able = [other.name for other in every if _unable(other, rank_order, whole) is None]
    return f"{collective} {name} {why}; use {' or '.join(able)}"


def _unable(algorithm: Algorithm, rank_order: bool, whole: bool) -> str | None:
    collective = algorithm.collective
    if collective not in schedules.REDUCING:
        return None
    if rank_order and not algorithm.rank_order:
        return "does not combine in rank order, which an operator that is not commutative needs"
    # Where chunks are blocks, those are what the operator is for.
    if whole and collective not in BLOCKS and algorithm.chunks(2) > 1:
        return "cuts the value in pieces, which an operator that is not elementwise does not allow"
    return None
