"""For whom ranks have waited lately, as far as what they note of their calls tells. Pure.

Of a wait in shared memory is noted for which rank it was, and how long; of a collective by messages
its communicator, and how long; of a message with whom. What a rank has waited beside the first two
it has waited for those from whom it has received. Each host sums its ranks' notes up (`WaitSums`),
the launcher's puts them together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll._launcher.notes import CALLS, MESSAGES, WAITS

if TYPE_CHECKING:
    from pycoll._launcher.host_memory import Tally

_RECEIVE = 2
_OF_A_SEND = 0.1  # as against a receive: it seldom waits


class Awaited(NamedTuple):
    """For whom ranks have waited.

    Attributes:
        ranks: of each rank its waits for another one: which, and which share of all its waits.
        groups: of each rank those for one of a group, it is not known which: its number, and that
            share.
        members: of each group.
    """

    ranks: Mapping[int, Mapping[int, float]]
    groups: Mapping[int, Mapping[int, float]]
    members: Mapping[int, Sequence[int]]

    def packed(self) -> list[list[list[object]]]:
        """Return it as JSON can say it."""
        return [
            [[rank, list(of_rank.items())] for rank, of_rank in self.ranks.items()],
            [[rank, list(of_rank.items())] for rank, of_rank in self.groups.items()],
            [[group, list(members)] for group, members in self.members.items()],
        ]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> Awaited:
        """Return what `packed` was made of."""
        ranks, groups, members = packed
        return cls(
            {rank: dict(of_rank) for rank, of_rank in ranks},
            {rank: dict(of_rank) for rank, of_rank in groups},
            dict(members),
        )


class WaitSums(NamedTuple):
    """For whom a rank has waited, by its notes alone.

    Attributes:
        ranks: seconds in shared memory, by the rank for which.
        groups: seconds that collectives by messages have taken, by communicator.
        messages: with whom it has exchanged messages, and how many, by whom it may wait for.
    """

    ranks: dict[int, float]
    groups: dict[int, float]
    messages: dict[int, float]

    def packed(self) -> list[list[tuple[int, float]]]:
        """Return it as an agent sends it."""
        return [list(each.items()) for each in self]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> WaitSums:
        """Return what `packed` was made of."""
        return cls(*map(dict, packed))


def of_notes(notes: bytes, ranks: Sequence[int], size: int, most: int, now_ns: int) -> WaitSums:
    """Return for whom a rank has waited.

    Args:
        notes: the rank's.
        ranks: of its host.
        size: of the job.
        most: so many of the last notes of each kind count.
        now_ns: of CLOCK_MONOTONIC there.
    """
    return WaitSums(
        _waits(notes, now_ns, most, ranks),
        _calls(notes, now_ns, most),
        _messages(notes, most, size),
    )


def of_job(found: Mapping[int, WaitSums], tallies: Sequence[Tally | None]) -> Awaited:
    """Return for whom the ranks of a job have waited.

    Args:
        found: of each rank.
        tallies: by rank what it has done.
    """
    members: dict[int, list[int]] = defaultdict(list)
    ranks: dict[int, Mapping[int, float]] = {}
    groups: dict[int, Mapping[int, float]] = {}
    for rank, tally in enumerate(tallies):
        waits, calls, messages = dict(found[rank].ranks), found[rank].groups, found[rank].messages
        for ident in calls:
            members[ident].append(rank)
        known_s = sum(waits.values()) + sum(calls.values())
        rest_s = max(0.0, tally.waited_s - known_s) if tally is not None else 0.0
        if messages:
            of_each = rest_s / sum(messages.values())
            for peer, count in messages.items():
                waits[peer] = waits.get(peer, 0.0) + of_each * count
        total_s = (sum(waits.values()) + sum(calls.values())) or 1.0
        waits.pop(rank, None)  # for itself nobody waits
        ranks[rank] = {peer: waited_s / total_s for peer, waited_s in waits.items()}
        groups[rank] = {ident: waited_s / total_s for ident, waited_s in calls.items()}
    return Awaited(ranks, groups, members)


def _waits(notes: bytes, now_ns: int, most: int, ranks: Sequence[int]) -> dict[int, float]:
    """Return the seconds for which a rank has waited in shared memory, by the rank for which."""
    seconds: dict[int, float] = defaultdict(float)
    found = list(WAITS.newest(notes, most))
    for _, (_, call, since, until, peer, *_) in found:
        if call and peer < len(ranks):
            seconds[ranks[peer]] += max(0, (until or now_ns) - since) * 1e-9
    return _of_all(seconds, found)


def _calls(notes: bytes, now_ns: int, most: int) -> dict[int, float]:
    """Return the seconds that collectives by messages have taken, by communicator."""
    seconds: dict[int, float] = defaultdict(float)
    found = list(CALLS.newest(notes, most))
    for _, (ordinal, ident, _, begun, ended, *_) in found:
        if ordinal:
            seconds[ident] += max(0, (ended or now_ns) - begun) * 1e-9
    return _of_all(seconds, found)


def _of_all(
    seconds: Mapping[int, float], found: Sequence[tuple[int, tuple[Any, ...]]]
) -> dict[int, float]:
    """Return the seconds of all that was noted, if it was like what of it is left."""
    times = found[-1][0] / len(found) if found else 0.0
    return {key: times * value for key, value in seconds.items()}


def _messages(notes: bytes, most: int, size: int) -> dict[int, float]:
    """Return with whom a rank has exchanged messages, and how many, by whom it may wait for."""
    counts: dict[int, float] = defaultdict(float)
    for _, (_, _, _, peer, what) in MESSAGES.newest(notes, most):
        if 0 <= peer < size:
            counts[peer] += 1.0 if what & 15 == _RECEIVE else _OF_A_SEND
    return dict(counts)
