"""What the records of all ranks say together: which message is whose, who has waited for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pycoll._trace.records import DONE, FAILED, RankRecords, Record

_RECEIVES = frozenset({"recv", "irecv", "sendrecv", "isendrecv", "mprobe", "improbe"})
_SENDS = frozenset({"send", "ssend", "bsend", "isend", "issend", "ibsend", "sendrecv", "isendrecv"})
_FROM_ROOT = frozenset({"broadcast", "scatter", "scatterv"})
_TO_ROOT = frozenset({"reduce", "gather", "gatherv"})
_PREFIX = frozenset({"scan", "exscan"})
_NO_WAITING = frozenset({"isend", "issend", "ibsend", "irecv", "isendrecv"})


class Clock(NamedTuple):
    """How a host's CLOCK_MONOTONIC relates to that of the launcher's host.

    Attributes:
        samples: (time there, by how much it is ahead, by how much that may be wrong), nanoseconds,
            in order; none: it is the launcher's own clock.
    """

    samples: Sequence[tuple[int, int, int]] = ()

    @property
    def bound(self) -> int:
        """By how much a time may be wrong, nanoseconds."""
        return max((bound for _, _, bound in self.samples), default=0)

    def here(self, there: int) -> int:
        """Return a time of that host as one of the launcher's."""
        if not self.samples:
            return there
        (at, ahead, _), (last_at, last_ahead, _) = self.samples[0], self.samples[-1]
        if last_at > at:  # clocks drift apart
            ahead += (last_ahead - ahead) * (there - at) // (last_at - at)
        return there - ahead


class RankTrace(NamedTuple):
    """What is known of a rank.

    Attributes:
        rank: its number.
        host: the name of its host.
        clock: of its host.
        recorded: its records.
        end: how it has ended, in words; "": with status 0.
    """

    rank: int
    host: str
    clock: Clock
    recorded: RankRecords
    end: str = ""


class TracedCall(NamedTuple):
    """A call of a rank, by the launcher's clock.

    Attributes:
        rank: whose.
        record: what it is; its times are those of its host.
        begin, end, done: nanoseconds; end of one that has not ended: the end of the trace.
        communicator: its number, in what all ranks record; 0: it has none.
    """

    rank: int
    record: Record
    begin: int
    end: int
    done: int
    communicator: int

    @property
    def base(self) -> str:
        """The name without the i of a non-blocking call."""
        what = self.record.what
        is_twin = what[0] == "i" and what not in ("iprobe", "improbe")
        return (what[1:] if is_twin else what).replace("allreduce", "all_reduce")


class TracedCommunicator(NamedTuple):
    """A communicator: its name, and its ranks as ranks of the world."""

    name: str
    members: tuple[int, ...]


class TracedMessage(NamedTuple):
    """A message: the call that has sent it, and that which has received it."""

    send: TracedCall
    receive: TracedCall


class TracedWait(NamedTuple):
    """A part of a call in which a rank has waited for another.

    Attributes:
        operation: the call in which it waits.
        until: when the other has come, by the launcher's clock.
        rank: the other.
        what: the call that needs it, which may be one that was started before.
    """

    operation: TracedCall
    until: int
    rank: int
    what: TracedCall

    @property
    def duration(self) -> int:
        """How long, nanoseconds."""
        return self.until - self.operation.begin


class Timeline:
    """All calls of all ranks.

    Args:
        traces: what is known of each rank, in order.

    Attributes:
        traces: the same.
        operations: by rank, in the order in which they began, then by ordinal.
        communicators: by number.
        begin, end: of all, by the launcher's clock, nanoseconds.
    """

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self.traces = traces
        self.communicators: dict[int, TracedCommunicator] = {}
        self._numbers: dict[str, int] = {"": 0}
        times = [
            trace.clock.here(time)
            for trace in traces
            for record in trace.recorded.records
            for time in (record.begin, max(record.end, record.done) or record.begin)
        ]
        self.begin, self.end = min(times, default=0), max(times, default=0)
        self.operations = {trace.rank: list(self._operations(trace)) for trace in traces}
        self._by_ordinal = {
            rank: {each.record.ordinal: each for each in operations}
            for rank, operations in self.operations.items()
        }

    def _operations(self, trace: RankTrace) -> Iterator[TracedCall]:
        here = trace.clock.here
        for record in trace.recorded.records:
            yield TracedCall(
                trace.rank,
                record,
                here(record.begin),
                here(record.end) if record.end else self.end,
                here(record.done) if record.done else 0,
                self._number(record.communicator),
            )

    def _number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self._numbers))
        if number and number not in self.communicators:
            _, name, members = text.split("\0")
            self.communicators[number] = TracedCommunicator(
                name, tuple(map(int, members.split(",")))
            )
        return number

    def waiting_for(self, operation: TracedCall) -> TracedCall | None:
        """Return the call that has waited for what a call has started; None: no such."""
        return self._by_ordinal[operation.rank].get(operation.record.waited_by)

    # --- messages ------------------------------------------------------------------------------

    def messages(self) -> list[TracedMessage]:
        """Return all messages of which both ends are known.

        The n-th message from a rank to another, on one communicator and with one tag, is what the
        n-th such receive has got. Where calls were lost in between, or threads have made them at
        the same time, nobody knows which is the n-th: there it ends.
        """
        sends = self._ends(_SENDS, lambda each: (each.record.peer, each.record.tag))
        receives = self._ends(_RECEIVES, lambda each: (each.record.source, each.record.receive_tag))
        found = []
        for (communicator, rank, peer, tag), sent in sends.items():
            got = receives.get((communicator, peer, rank, tag), ())
            found += [TracedMessage(*pair) for pair in zip(sent, got, strict=False)]
        return found

    def _ends(
        self, names: frozenset[str], peer_of: Callable[[TracedCall], tuple[int, int]]
    ) -> dict[tuple[int, int, int, int], list[TracedCall]]:
        """Return one side's calls by (communicator, rank there, peer there, tag)."""
        found: dict[tuple[int, int, int, int], list[TracedCall]] = defaultdict(list)
        unknown: set[tuple[int, int, int, int]] = set()
        for trace in self.traces:
            recorded = trace.recorded
            for each in self.operations[trace.rank]:
                if recorded.lost and each.record.ordinal >= recorded.lost_from:
                    break
                if each.record.what not in names or each.record.state == FAILED:
                    continue
                peer, tag = peer_of(each)
                if peer < 0 or tag < 0 or not each.communicator:
                    continue
                members = self.communicators[each.communicator].members
                key = each.communicator, members.index(trace.rank), peer, tag
                before = found[key][-1] if found[key] else None
                if before is not None and _overlap(before, each):
                    unknown.add(key)
                if key not in unknown:
                    found[key].append(each)
        return found

    # --- who waits for whom --------------------------------------------------------------------

    def waits(self, messages: Sequence[TracedMessage]) -> list[TracedWait]:
        """Return where ranks have waited for others that had not come yet; one for a call."""
        found: list[TracedWait] = []
        for message in messages:
            found += self._wait(message.receive, {message.send.rank: message.send})
        for calls in self.collectives().values():
            for each in calls.values():
                needed = self._needed(each)
                absent = [rank for rank in needed if rank not in calls]
                if absent and each.record.state != DONE:
                    found += self._in_vain(each, min(absent))
                else:
                    found += self._wait(each, {r: c for r, c in calls.items() if r in needed})
        for operations in self.operations.values():
            for each in operations:
                source = each.record.source
                if each.record.what in _RECEIVES and each.record.state != DONE and source >= 0:
                    members = self.communicators[each.communicator].members
                    found += self._in_vain(each, members[source])
        longest: dict[tuple[int, int], TracedWait] = {}
        for wait in found:
            key = wait.operation.rank, wait.operation.record.ordinal
            if key not in longest or longest[key].until < wait.until:
                longest[key] = wait
        return list(longest.values())

    def collectives(self) -> dict[tuple[int, int], dict[int, TracedCall]]:
        """Return by (communicator, number) the calls of its ranks; a call that was repeated once.

        A call that is wrong in itself fails, does not count, and may be repeated.
        """
        found: dict[tuple[int, int], dict[int, TracedCall]] = defaultdict(dict)
        for rank, operations in self.operations.items():
            for each in operations:
                if each.record.number >= 0 and each.communicator:
                    found[each.communicator, each.record.number][rank] = each
        return found

    def _needed(self, call: TracedCall) -> frozenset[int]:
        """Return the ranks, of the world, without which a call cannot end on this one."""
        members = self.communicators[call.communicator].members
        base, root = call.base, call.record.peer
        me = members.index(call.rank)
        needed: tuple[int, ...]
        if base in _FROM_ROOT:
            needed = () if me == root or not 0 <= root < len(members) else (members[root],)
        elif base in _TO_ROOT:
            needed = members if me == root else ()
        elif base in _PREFIX:
            needed = members[:me]
        else:
            needed = members
        return frozenset(needed)

    def _wait(self, call: TracedCall, others: Mapping[int, TracedCall]) -> Iterator[TracedWait]:
        """Yield how long a rank has waited for the last of those that a call needs."""
        last = max(others.values(), key=lambda each: each.begin, default=None)
        if last is None or last.rank == call.rank:
            return
        waiting: TracedCall | None = call
        if call.record.what in _NO_WAITING or call.record.what != call.base:
            waiting = self.waiting_for(call)
        if waiting is None:
            return
        until = min(waiting.end, last.begin)
        if until > waiting.begin:
            yield TracedWait(waiting, until, last.rank, call)

    def _in_vain(self, call: TracedCall, rank: int) -> Iterator[TracedWait]:
        """Yield how long a rank has waited in a call that another has never made."""
        trace = self.traces[rank]
        if rank != call.rank and not trace.recorded.lost and call.record.what == call.base:
            yield TracedWait(call, call.end, rank, call)


def _overlap(one: TracedCall, other: TracedCall) -> bool:
    """Whether two threads were in two calls at the same time."""
    return one.record.thread != other.record.thread and other.begin < one.end
