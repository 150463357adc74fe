"""The schedules of the ranks as one table of steps, with what each waits for and what it holds.

Where the schedules of all ranks are one, turned (`symmetry`), the table has those of a few: of one
rank if all are placed alike, else of the ranks of one host, or of one rack. What such a rank sends
to a rank that is not in the table, it receives from another that does the same: so the message's
other half is found in the table, too. Whatever happens to a rank happens to those that it stands
for at the same moment, since two of them never want the same port.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pycoll.errors import Error
from pycoll.schedule import Recv, Reduce, Schedule, Send
from pycoll.schedules import find, schedule
from pycoll.simulate.network import Network, Placement
from pycoll.simulate.symmetry import symmetry_of, turn_back

PIECES = frozenset({"broadcast", "reduce", "all_reduce", "scan"})
"""Where chunks are pieces of one value; elsewhere a chunk is a block."""

_MESSAGE, _REDUCE, _COPY = range(3)


class ReplayedSteps:
    """Steps of ranks; a step is a number, and what is said of it stands in a column.

    Steps are numbered rank by rank, those ranks first that stand for the first of each host.

    Attributes:
        what: collective, algorithm and number of ranks, for errors.
        size: number of ranks.
        ranks: those in the table, in order; `part`: by rank the place in it of who does the same.
        owner: by step, the place of its rank.
        begin: by place, its first step; one more at the end.
        partner: by Send and Recv, the step that is the other half of the message; -1: a Reduce or a
            Copy.
        sends, reduces: by step, whether it is a Send, a Reduce.
        kind: by step, what it takes, by a number of `spans`.
        line: by step, the line in which it waits for ports: one for each pair of ranks that talk
            and one for the reductions of each rank; -1: a Copy.
        ports: by line, the ports that its steps hold.
        shared: by line, how many of those, the first ones, the bytes of a message share with
            others.
        waits: by step, for how many others it waits.
        successors, after: those that wait for step i are successors[after[i] : after[i + 1]].
        first: by place, the steps that wait for nothing, in order; receives into scratch apart.
        scratch: by place, the receives into scratch, in order.
    """

    def __init__(
        self,
        collective: str,
        name: str,
        size: int,
        root: int,
        hosts: Sequence[int],
        network: Network,
        every_rank: bool = False,
    ) -> None:
        self.what = f"{collective} {name}, size {size}"
        self.size = size
        self.placement = Placement(hosts, network)
        algorithm = find(collective, name)
        self.pieces = algorithm.chunks(size) if collective in PIECES else 1
        period = self.placement.period
        self.symmetry = None
        if period < size and not every_rank:
            self.symmetry = symmetry_of(algorithm, size)
        # Ranks of one part side by side: so they come in turn wherever several want to begin.
        in_order = sorted(range(size), key=lambda rank: (rank % period, rank))
        self.ranks = list(range(period)) if self.symmetry else in_order
        self.part = [0] * size
        for place, rank in enumerate(self.ranks):
            self.part[rank] = place
        if self.symmetry:
            self.part = [rank % period for rank in range(size)]
        self.owner, self.begin = array("i"), array("q", [0])
        self.partner, self.kind, self.line = array("q"), array("i"), array("i")
        self.sends, self.reduces = bytearray(), bytearray()
        self.waits, self.successors, self.after = array("i"), array("q"), array("q", [0])
        self.ports: list[tuple[int, ...]] = []
        self.shared: list[int] = []
        self.first: list[array[int]] = []
        self.scratch: list[array[int]] = []
        self._kinds: dict[tuple[int, ...], int] = {}
        self._lines: dict[tuple[int, int], int] = {}
        self._halves: dict[tuple[int, int, int, bool], int] = {}
        for place, rank in enumerate(self.ranks):
            self._add(place, rank, schedule(collective, name, rank, size, root, hosts))
        for (sender, receiver, number, sends), _ in self._halves.items():
            raise Error(
                f"{self.what}: message {number} from rank {sender} to rank {receiver} has no "
                f"{'Recv' if sends else 'Send'}; pycoll.prove says more"
            )
        del self._lines, self._halves

    def spans(self, nbytes: float) -> list[tuple[float, float, float, list[float]]]:
        """Return by kind of step the seconds from its start, on ports that nobody shares.

        They are those until its bytes begin to pass, until they have left, and until it is done;
        then by port how long it holds it.

        `nbytes`: of a value or a block, or of a segment of it.
        """
        placement, found = self.placement, []
        for what, level, chunks, here, there in self._kinds:
            load = nbytes / self.pieces * chunks
            if what == _MESSAGE:
                link = placement.network.at(level)
                holds = placement.holds(level, load, here, there)
                passing = load / link.bandwidth
                times = link.hold_s, link.hold_s + passing, link.latency_s + passing
                found.append((*times, holds))
            elif what == _REDUCE:
                holds = placement.arithmetic_holds(load, here)
                found.append((holds[0], holds[0], holds[0], holds))
            else:
                found.append((0.0, 0.0, 0.0, []))
        return found

    def _add(self, place: int, rank: int, compiled: Schedule) -> None:
        base = len(self.owner)
        steps = compiled.steps
        first, scratch = array("q"), array("q")
        self.first.append(first)
        self.scratch.append(scratch)
        self.begin.append(base + len(steps))
        self.owner.extend([place] * len(steps))
        self.partner.extend([-1] * len(steps))
        self.waits.extend(compiled.waits)
        self.sends.extend([isinstance(step, Send) for step in steps])
        self.reduces.extend([isinstance(step, Reduce) for step in steps])
        for later in compiled.successors:
            self.successors.extend([base + position for position in later])
            self.after.append(len(self.successors))
        count = self.placement.counts[self.placement.hosts[rank]]
        for position, step in enumerate(steps):
            index, chunks = base + position, len(compiled.chunks[position])
            if isinstance(step, Send | Recv):
                ends = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
                level = self.placement.level(rank, step.peer)
                counts = [self.placement.counts[self.placement.hosts[end]] for end in ends]
                self.kind.append(self._kind(_MESSAGE, level, chunks, *counts))
                ends = self._as_in_the_table(*ends)
                self.line.append(self._line(ends, level))
                self._match(ends, compiled.number[position], isinstance(step, Send), index)
            elif isinstance(step, Reduce):
                self.kind.append(self._kind(_REDUCE, 0, chunks, count, count))
                self.line.append(self._line((rank, rank), 0))
            else:
                self.kind.append(self._kind(_COPY, 0, chunks, count, count))
                self.line.append(-1)
            if isinstance(step, Recv) and step.scratch:
                scratch.append(index)
            elif compiled.waits[position] == 0:
                first.append(index)

    def _as_in_the_table(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return the same message, turned so that its sender is in the table."""
        if self.symmetry is None or sender == self.part[sender]:
            return sender, receiver
        by = sender - self.part[sender]
        return self.part[sender], turn_back(self.symmetry, receiver, by, self.size)

    def _kind(self, *key: int) -> int:
        return self._kinds.setdefault(key, len(self._kinds))

    def _line(self, ends: tuple[int, int], level: int) -> int:
        number = self._lines.setdefault(ends, len(self._lines))
        if number == len(self.ports):
            sender, receiver = (self.ranks[self.part[end]] for end in ends)
            alone = ends[0] == ends[1]
            placed = self.placement
            self.ports.append(
                placed.arithmetic(sender) if alone else placed.ports(sender, receiver, level)
            )
            self.shared.append(0 if alone else placed.shared(level))
        return number

    def _match(self, ends: tuple[int, int], number: int, sends: bool, index: int) -> None:
        other = self._halves.pop((*ends, number, not sends), None)
        if other is None:
            self._halves[(*ends, number, sends)] = index
        else:
            self.partner[index], self.partner[other] = other, index
