"""Which rank makes the others wait, as far as that shows in how long each has waited. Pure.

Who comes late to a collective waits for nobody there, and all others wait for it. So the rank that
waits least while the others wait is the one that they wait for, whatever moves the bytes: they may
wait for each other, but the time goes back to it. What it must not be is a rank with which they
have nothing to do. So only those count that have waited for it: for itself, or for somebody who has
(`awaited`); not for longer than on the way from them to it one rank has waited for the next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycoll._launcher.awaited import Awaited
from pycoll._launcher.host_memory import Tally
from pycoll._support.wording import ranks_text

COSTLY = 0.2
"""A rank that costs the others more than that of their time is pointed out."""
LONG_S = 60.0
"""In a job that takes so long, also without being asked."""

_SMALL = 0.01  # a share of the time for which it is not looked who was waited for
_ALIKE = 0.75  # a rank that costs that part of what another one costs is named with it


class Straggler(NamedTuple):
    """Ranks that make others wait.

    Attributes:
        ranks: those that cost the others about the same.
        own: for which share of the time each of them waits, on average.
        others: for which share the others do.
        cost: the share of their time that the others would have, were one of these as quick as
            they are.
    """

    ranks: tuple[int, ...]
    own: float
    others: float
    cost: float

    def text(self, *, was: bool = False) -> str:
        """Say so; `was`: of a job that has ended."""
        is_one = len(self.ranks) == 1
        if was:
            make, wait = "made", "waited"
        else:
            make, wait = "makes" if is_one else "make", "wait"
        return (
            f"{ranks_text(self.ranks)} {make} the others wait: they {wait} for {self.others:.0%} "
            f"of the time, {'it' if is_one else 'these'} for {self.own:.0%}"
        ).replace("%", " %")


def find(shares: Mapping[int, float], awaited: Awaited | None = None) -> Straggler | None:
    """Return the ranks for which the others wait; None: there is no other, or all wait alike.

    Args:
        shares: of each rank for which share of the time it waits.
        awaited: for whom; None: that is not known, and they may all have waited for each.
    """
    if len(shares) < 2:
        return None
    costs: dict[int, float] = {}
    into = _into(shares, awaited) if awaited is not None else None
    for rank, most in sorted(_most(shares, into).items(), key=lambda each: -each[1]):
        if most <= _ALIKE * max(costs.values(), default=0.0):
            break  # nor do those that come after it cost so much
        costs[rank] = most if into is None else _cost(rank, shares, into)
    highest = max(costs.values(), default=0.0)
    ranks = sorted(rank for rank, cost in costs.items() if cost > _ALIKE * highest)
    others = [share for rank, share in shares.items() if rank not in ranks]
    if highest <= 0 or len(ranks) > len(others):
        return None
    own = sum(shares[rank] for rank in ranks) / len(ranks)
    return Straggler(tuple(ranks), own, sum(others) / len(others), highest)


Node = tuple[str, int]
"""A rank, or a group of ranks of which it waits for some other."""


def _into(shares: Mapping[int, float], awaited: Awaited) -> dict[Node, dict[Node, float]]:
    """Return who waits for each, and for which share of the time."""
    into: dict[Node, dict[Node, float]] = defaultdict(dict)
    for rank, share in shares.items():
        for peer, part in awaited.ranks.get(rank, {}).items():
            if share * part > _SMALL:
                into["rank", peer]["rank", rank] = share * part
        for group, part in awaited.groups.get(rank, {}).items():
            if share * part > _SMALL:
                into["group", group]["rank", rank] = share * part
    for group, members in awaited.members.items():
        for rank in members:
            into["rank", rank]["group", group] = 1.0
    return into


def _most(
    shares: Mapping[int, float], into: Mapping[Node, Mapping[Node, float]] | None
) -> dict[int, float]:
    """Return what each rank may cost the others at most: had all of them waited for it alone."""
    found = {}
    for rank, own in shares.items():
        if into is None or into.get(("rank", rank)):
            found[rank] = sum(max(0.0, share - own) for share in shares.values())
    return {rank: cost / (len(shares) - 1) for rank, cost in found.items()}


def _cost(
    rank: int, shares: Mapping[int, float], into: Mapping[Node, Mapping[Node, float]]
) -> float:
    """Return which share of their time the others would have, were a rank as quick as they are."""
    widest: dict[Node, float] = {}
    left: list[tuple[float, Node]] = [(-1.0, ("rank", rank))]
    while left:
        width, node = heapq.heappop(left)
        if node not in widest:
            widest[node] = -width
            for other, share in into.get(node, {}).items():
                heapq.heappush(left, (-min(-width, share), other))
    own = shares[rank]
    costs = [
        max(0.0, min(share - own, widest.get(("rank", other), 0.0)))
        for other, share in shares.items()
    ]
    return sum(costs) / (len(shares) - 1)


def of_job(
    tallies: Sequence[Tally | None],
    seconds: float,
    *,
    verbose: bool,
    is_well: bool,
    awaited: Awaited | None = None,
) -> list[str]:
    """Return what is to be said at the end of a job: lines.

    Args:
        tallies: of each rank what it has done.
        seconds: from when all had joined to the end.
        verbose: say how it was; else only that a rank has cost the others much.
        is_well: no rank has failed.
        awaited: see `find`.
    """
    known = {rank: tally for rank, tally in enumerate(tallies) if tally is not None}
    if len(known) < 2 or seconds <= 0 or not any(tally.waited_s for tally in known.values()):
        return []
    shares = {rank: min(1.0, tally.waited_s / seconds) for rank, tally in known.items()}
    found = find(shares, awaited)
    if found is not None and found.cost > COSTLY and (verbose or (is_well and seconds >= LONG_S)):
        return [found.text(was=True)]
    if not verbose:
        return []
    low, high = min(shares.values()), max(shares.values())
    return [f"ranks waited in pycoll for {low:.0%} to {high:.0%} of the time".replace("%", " %")]
