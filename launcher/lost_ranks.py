"""The ranks that are lost while their job goes on: each is ended, with what it has started."""

from __future__ import annotations

import signal
from collections.abc import Callable

from pycoll._launcher.outcome import RankState
from pycoll._launcher.signal_plan import SignalPlan


class LostRanks:
    """Ends ranks one by one, where others would have the whole job ended.

    Args:
        grace_s: see `SignalPlan`.
        send: sends a signal to a rank, and to what it has started: rank and signal.
    """

    def __init__(self, grace_s: float, send: Callable[[int, int], object]) -> None:
        self._grace_s, self._send = grace_s, send
        self._plans: dict[RankState, SignalPlan] = {}

    def add(self, rank: RankState, now: float, at_once: bool = False) -> None:
        """A rank has failed: it has some seconds to end by itself, or none."""
        plan = self._plans[rank] = SignalPlan(self._grace_s)
        (plan.end if at_once else plan.fail)(now)

    def update(self, now: float) -> list[float]:
        """Send what is due; returns when more will be."""
        for rank, plan in list(self._plans.items()):
            for signum in plan.take(now):
                rank.signalled = rank.signalled or rank.status is None
                self._send(rank.rank, signum)
                if signum == signal.SIGKILL and (rank.status is not None or plan.is_given_up):
                    del self._plans[rank]
                    if rank.status is None:  # nothing ends it: the job must not wait for it
                        rank.status = -signal.SIGKILL
        return [at for plan in self._plans.values() for at in plan.times]
