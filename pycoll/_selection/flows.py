"""How much travels in a call, over each kind of link, and how much of it must wait for the rest.

An algorithm is so many messages, of so many chunks, some of which wait for others (`Cost`). This is
put into units that have a price (`costs.Work`), for ranks of one host, or of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycoll._selection.costs import Work
from pycoll.schedule import Recv, Send, chunks_of
from pycoll.schedules import REDUCING, Algorithm, Cost, cost_of, steps_of

COUNTED_HOSTS = 4
"""Of more hosts so many are looked at."""


class Flow(NamedTuple):
    """What travels over one kind of link in a call, each segment of each chunk once.

    Attributes:
        steps: messages in the longest chain of which each waits for the one before.
        path: chunks that come one after the other: in the heaviest such chain, or through the
            busiest place.
        load: chunks through the busiest place, which the next segment waits for; `load_messages`
            as many messages.
        ends: of messages, that one core has to see to; `end_chunks` as many chunks.
    """

    steps: float
    path: float
    load: float
    load_messages: float
    ends: float
    end_chunks: float

    def work(self, chunk: float, segments: int) -> Work:
        """Return the work for chunks of so many bytes.

        The first segment takes all steps, each of the others follows the one before as soon as the
        busiest place has done with that. What a core has to see to beyond those comes on top.
        """
        follow = segments - 1
        steps = self.steps + follow * self.load_messages
        path_nbytes = (self.path + follow * self.load) * chunk / segments
        return Work(
            steps=steps,
            path_nbytes=path_nbytes,
            ends=max(0.0, self.ends * segments - steps),
            end_nbytes=max(0.0, self.end_chunks * chunk - path_nbytes),
        )


def one_host(cost: Cost, size: int, cores: float) -> Flow:
    """Return what travels between `size` ranks that share `cores` cores."""
    # Where there are more ranks than cores the work of all counts, elsewhere that of the busiest.
    end_chunks = max(2 * cost.volume / min(cores, size), cost.load)
    each = cost.messages / max(1, cost.volume)
    path = max(cost.path, cost.load)  # one message after the other comes in, or leaves
    return Flow(cost.steps, path, cost.load, cost.load * each, end_chunks * each, end_chunks)


def one_host_work(
    algorithm: Algorithm, cost: Cost, chunk: float, segments: int, size: int, cores: float
) -> Work:
    """Return the whole work of an algorithm on one host; `chunk` in bytes."""
    work = one_host(cost, size, cores).work(chunk, segments)
    combined = combined_chunks(algorithm, cost, min(cores, size)) * chunk
    return work._replace(calls=max(1.0, size / cores), combined_nbytes=combined)


def core_work(collective: str, nbytes: int, size: int, cores: float) -> Work:
    """Return about what shared memory takes: all meet, and copy each block that moves."""
    others = size - 1
    volume = {
        "barrier": 0,
        "broadcast": others,
        "reduce": others,
        "gather": others,
        "scatter": others,
        "all_reduce": 2 * others,
    }.get(collective, size * others)
    copied = volume / min(cores, size) * nbytes
    return Work(
        calls=max(1.0, size / cores),
        steps=1,
        path_nbytes=nbytes if others and volume else 0,
        ends=2 * others / min(cores, size),
        end_nbytes=copied,
        combined_nbytes=copied if collective in REDUCING else 0.0,
    )


def combined_chunks(algorithm: Algorithm, cost: Cost, parallel: float) -> float:
    """Return how many chunks are combined with others, one after the other."""
    if algorithm.collective not in REDUCING:
        return 0.0
    # In an all_reduce half of what moves is combined, as a rule: the rest are results.
    half = algorithm.collective == "all_reduce" and not algorithm.combines_all
    return (0.5 if half else 1.0) * max(cost.volume / parallel, cost.path)


def between_hosts(
    algorithm: Algorithm, hosts: Sequence[int], cores: Mapping[int, float]
) -> tuple[Flow, Flow]:
    """Return what travels inside hosts, and what between them.

    Every step of the ranks of a few hosts is looked at: others are taken to be like them.

    Args:
        algorithm: one that states its cost.
        hosts: by rank the number of its host.
        cores: of each host.
    """
    size, numbers = len(hosts), list(dict.fromkeys(hosts))
    cost = cost_of(algorithm, size, hosts=hosts)
    assert cost is not None
    inside, across = _Most(), _Most()
    for host in numbers[:: -(-len(numbers) // COUNTED_HOSTS)]:
        links = {True: _Traffic(), False: _Traffic()}
        for rank in (rank for rank in range(size) if hosts[rank] == host):
            for step in steps_of(algorithm, rank, size, 0, hosts):
                if isinstance(step, Send | Recv):
                    traffic = links[hosts[step.peer] == host]
                    traffic.add(isinstance(step, Send), len(chunks_of(step)))
        inside.see(links[True], cores[host])
        across.see(links[False], cores[host])
    steps, path = float(cost.steps), float(cost.path)
    if algorithm.hosts:  # those that are between hosts: as many as if each had one rank
        alone = cost_of(algorithm, len(numbers), hosts=range(len(numbers)))
        assert alone is not None
        steps = alone.steps
        path = alone.path * algorithm.chunks(size) / algorithm.chunks(len(numbers))
    # In any other algorithm each step has some message between hosts, and the rest wait for it.
    return (
        inside.flow(max(0.0, cost.steps - steps), max(0.0, cost.path - path), is_shared=False),
        across.flow(steps, path, is_shared=True),
    )


class _Traffic:
    """Messages and chunks of one host's ranks, on one kind of link; [0] come in, [1] leave."""

    def __init__(self) -> None:
        self.messages = [0, 0]
        self.chunks = [0, 0]

    def add(self, leaves: bool, chunks: int) -> None:
        self.messages[leaves] += 1
        self.chunks[leaves] += chunks


class _Most:
    """The most of what several hosts have."""

    def __init__(self) -> None:
        self._ends = self._end_chunks = 0.0  # for a core
        self._load = self._load_messages = 0  # through the port of a host, one way

    def see(self, traffic: _Traffic, cores: float) -> None:
        self._ends = max(self._ends, sum(traffic.messages) / cores)
        self._end_chunks = max(self._end_chunks, sum(traffic.chunks) / cores)
        self._load = max(self._load, *traffic.chunks)
        self._load_messages = max(self._load_messages, *traffic.messages)

    def flow(self, steps: float, path: float, is_shared: bool) -> Flow:
        """Return the flow; `is_shared`: all of a host's ranks send through one port."""
        if not is_shared:
            return Flow(steps, path, 0, 0, self._ends, self._end_chunks)
        return Flow(
            steps,
            max(path, self._load),
            self._load,
            self._load_messages,
            self._ends,
            self._end_chunks,
        )
