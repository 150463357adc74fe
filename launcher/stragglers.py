"""Which rank makes the others wait, as far as that shows in how long each has waited. Pure.

Who comes late to a collective waits for nobody there, and all others wait for it. So the rank that
waits least while the others wait is the one that they wait for, whatever moves the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycoll._launcher.host_memory import Tally

COSTLY = 0.2
"""A rank that costs the others more than that of their time is pointed out."""
LONG_S = 60.0
"""In a job that takes so long, also without being asked."""


class Straggler(NamedTuple):
    """A rank, and the shares of the time for which it waits, and for which the others do."""

    rank: int
    own: float
    others: float

    @property
    def cost(self) -> float:
        """The share of their time that the others would have, were it as quick as they are."""
        return self.others - self.own

    def text(self, *, was: bool = False) -> str:
        """Say so; `was`: of a job that has ended."""
        makes, wait = ("made", "waited") if was else ("makes", "wait")
        return (
            f"rank {self.rank} {makes} the others wait: they {wait} for {self.others:.0%} of the "
            f"time, it for {self.own:.0%}"
        ).replace("%", " %")


def find(shares: Mapping[int, float]) -> Straggler | None:
    """Return the rank for which the others wait; None: there is no other, or all wait alike.

    Args:
        shares: of each rank for which share of the time it waits.
    """
    if len(shares) < 2:
        return None
    rank = min(shares, key=lambda each: shares[each])
    others = [share for each, share in shares.items() if each != rank]
    found = Straggler(rank, shares[rank], sum(others) / len(others))
    return found if found.cost > 0 else None


def of_job(
    tallies: Sequence[Tally | None], seconds: float, *, verbose: bool, is_well: bool
) -> list[str]:
    """Return what is to be said at the end of a job: lines.

    Args:
        tallies: of each rank what it has done.
        seconds: from when all had joined to the end.
        verbose: say how it was; else only that a rank has cost the others much.
        is_well: no rank has failed.
    """
    known = {rank: tally for rank, tally in enumerate(tallies) if tally is not None}
    if len(known) < 2 or seconds <= 0 or not any(tally.waited_s for tally in known.values()):
        return []
    shares = {rank: min(1.0, tally.waited_s / seconds) for rank, tally in known.items()}
    found = find(shares)
    if found is not None and found.cost > COSTLY and (verbose or (is_well and seconds >= LONG_S)):
        return [found.text(was=True)]
    if not verbose:
        return []
    low, high = min(shares.values()), max(shares.values())
    return [f"ranks waited in pycoll for {low:.0%} to {high:.0%} of the time".replace("%", " %")]
