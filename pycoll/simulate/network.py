"""The machines of a simulation: links, hosts, racks, and what a message holds of them.

Everything that is shared is a port. A message holds a port out and one in of its ranks, and the
adapters of its hosts, while it begins, for its overhead; then its bytes pass through them, beside
those of others. Memory and cores it holds alone, from its start: memory that is ten times as quick
as a link for a tenth of the time that the bytes take there, so that ten ranks keep it busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SAME_HOST, SAME_RACK, FAR = range(3)
"""Levels of the network: where the two ends of a message are."""


class Link(NamedTuple):
    """What a message takes.

    Attributes:
        latency_s: seconds until the first byte is there.
        bandwidth: bytes a second.
        overhead_s: seconds of the latency, its first ones, in which neither rank can begin another
            message of that direction; None: all of them, as in the textbook's model of latency and
            bandwidth.
        core_s: seconds of a core that one end of a message takes.
        core_s_per_byte: the same of each byte.
    """

    latency_s: float
    bandwidth: float
    overhead_s: float | None = None
    core_s: float = 0.0
    core_s_per_byte: float = 0.0

    @property
    def hold_s(self) -> float:
        """Seconds for which a message holds its ports, before its bytes pass."""
        return self.latency_s if self.overhead_s is None else self.overhead_s


class Network(NamedTuple):
    """The machines.

    Attributes:
        latency_s: seconds that a message of no bytes takes between ranks of one host.
        bandwidth: bytes a second between ranks of one host.
        between: the same between hosts; None: as inside one.
        shared_ports: all ranks of a host share `adapters` more ports out and as many in, for
            messages from and to other hosts.
        reduce_s_per_byte: seconds that combining takes, by the byte of the result.
        overhead_s, core_s, core_s_per_byte: as of a `Link`, between ranks of one host.
        racks: the link between hosts of different racks; None: as between other hosts.
        hosts_per_rack: hosts that stand one behind the other in a rack; 0: all are in one.
        adapters: network adapters of a host, which its ranks take in turn.
        cores: that the ranks of a host share; 0: each has one of its own.
        call_s: seconds of a core that a rank takes for a call, before its first message.
        memory_bandwidth: bytes a second that all messages of a host together read from memory, and
            as many that they write.
    """

    latency_s: float = 20e-6
    bandwidth: float = 5e9
    between: Link | None = None
    shared_ports: bool = False
    reduce_s_per_byte: float = 0.0
    overhead_s: float | None = None
    core_s: float = 0.0
    core_s_per_byte: float = 0.0
    racks: Link | None = None
    hosts_per_rack: int = 0
    adapters: int = 1
    cores: int = 0
    call_s: float = 0.0
    memory_bandwidth: float = math.inf

    def link(self, same_host: bool) -> Link:
        """Return the link between two ranks of one rack."""
        return self.at(SAME_HOST if same_host else SAME_RACK)

    def at(self, level: int) -> Link:
        """Return the link at a level."""
        if level == FAR and self.racks is not None:
            return self.racks
        if level != SAME_HOST and self.between is not None:
            return self.between
        own = self.latency_s, self.bandwidth, self.overhead_s, self.core_s, self.core_s_per_byte
        return Link(*own)

    def why_not(self) -> str:
        """Say what makes no sense in it; "": nothing."""
        links = [self.at(level) for level in (SAME_HOST, SAME_RACK, FAR)]
        times = [self.reduce_s_per_byte, self.call_s]
        for link in links:
            times += [link.latency_s, link.hold_s, link.core_s, link.core_s_per_byte]
        if not all(0 <= time < math.inf for time in times):
            return f"times must be 0 or more: {self}"
        if any(link.hold_s > link.latency_s for link in links):
            return f"an overhead is a part of the latency and must not be above it: {self}"
        if not all(speed > 0 for speed in (self.memory_bandwidth, *(x.bandwidth for x in links))):
            return f"bandwidths must be above 0: {self}"
        if self.hosts_per_rack < 0 or self.adapters < 1 or self.cores < 0:
            return f"adapters must be 1 or more, cores and hosts_per_rack 0 or more: {self}"
        return ""

    @property
    def uses_cores(self) -> bool:
        """Whether messages wait for a core."""
        links = [self.at(level) for level in (SAME_HOST, SAME_RACK, FAR)]
        return bool(self.cores) or any(link.core_s or link.core_s_per_byte for link in links)


ONE_HOST = Network()
"""Ranks that share a machine, roughly; for what a model is asked most, which of two is quicker."""


class Placement:
    """Where the ranks are on a network, and which ports their messages hold.

    Attributes:
        hosts: by rank the position of its host among the hosts.
        counts: by host, its number of ranks.
        port_count: number of ports.
        period: placement and network look the same from rank r and from rank r + `period`, counted
            around; the number of ranks if that holds for no smaller one.
    """

    def __init__(self, hosts: Sequence[int], network: Network) -> None:
        numbers = {host: index for index, host in enumerate(sorted(set(hosts)))}
        self.network = network
        self.hosts = [numbers[host] for host in hosts]
        self.counts = [0] * len(numbers)
        self._local = []
        for host in self.hosts:
            self._local.append(self.counts[host])
            self.counts[host] += 1
        self._host_ports = 2 * network.adapters + 4
        self._first = 3 * len(hosts)
        self.port_count = self._first + self._host_ports * len(numbers)
        self._has_memory, self._has_cores = network.memory_bandwidth < math.inf, network.uses_cores
        self.period = self._find_period()

    def level(self, one: int, other: int) -> int:
        """Say how far apart two ranks are."""
        here, there = self.hosts[one], self.hosts[other]
        if here == there:
            return SAME_HOST
        racked = self.network.hosts_per_rack
        return FAR if racked and here // racked != there // racked else SAME_RACK

    def shared(self, level: int) -> int:
        """Return how many of the `ports` of a message, the first ones, its bytes share."""
        return 4 if self.network.shared_ports and level != SAME_HOST else 2

    def ports(self, sender: int, receiver: int, level: int) -> tuple[int, ...]:
        """Return the ports that a message holds, those of `holds` in the same order."""
        adapters = self.network.adapters
        here, there = (
            self._first + self._host_ports * self.hosts[rank] for rank in (sender, receiver)
        )
        found = [3 * sender, 3 * receiver + 1]
        if self.shared(level) == 4:
            found.append(here + 2 * (self._local[sender] % adapters))
            found.append(there + 2 * (self._local[receiver] % adapters) + 1)
        if self._has_memory:
            found += [here + 2 * adapters, there + 2 * adapters + 1]
        if self._has_cores:
            found += [here + 2 * adapters + 2, there + 2 * adapters + 3]
        return tuple(found)

    def holds(self, level: int, nbytes: float, here: int, there: int) -> list[float]:
        """Return for how many seconds from its start a message holds each of its ports.

        `here`, `there`: how many ranks the two hosts have. A core sees to both ends of a message
        inside a host; there the two ports of the cores are held together.
        """
        link, memory = self.network.at(level), self.network.memory_bandwidth
        found = [link.hold_s] * self.shared(level)
        if self._has_memory:
            found += [nbytes / memory] * 2
        if self._has_cores:
            ends = 2 if level == SAME_HOST else 1
            work = ends * (link.core_s + nbytes * link.core_s_per_byte)
            found += [work / self._cores(count) for count in (here, there)]
        return found

    def arithmetic(self, rank: int) -> tuple[int, ...]:
        """Return the ports that a reduction holds."""
        own = 3 * rank + 2
        if not self._has_cores:
            return (own,)
        host = self._first + self._host_ports * self.hosts[rank]
        return own, host + 2 * self.network.adapters + 3

    def arithmetic_holds(self, nbytes: float, here: int) -> list[float]:
        """Return for how many seconds a reduction holds each of its ports."""
        took = nbytes * self.network.reduce_s_per_byte
        return [took, took / self._cores(here)] if self._has_cores else [took]

    def start_s(self) -> float:
        """Return when the ranks send their first message."""
        if len(self.hosts) == 1:
            return 0.0
        return self.network.call_s * max(count / self._cores(count) for count in self.counts)

    def _cores(self, count: int) -> int:
        """How many cores work for so many ranks of a host."""
        return min(self.network.cores or count, count)

    def _find_period(self) -> int:
        network, size = self.network, len(self.hosts)
        apart = len(self.counts) > 1
        racked = apart and network.racks is not None and network.hosts_per_rack > 0
        alone = not (self._has_memory or self._has_cores)
        if alone and not racked and (not apart or not (network.between or network.shared_ports)):
            return 1
        period = self.counts[0] * (network.hosts_per_rack if racked else 1)
        alike = all(host == rank // self.counts[0] for rank, host in enumerate(self.hosts))
        return period if alike and size % period == 0 else size
