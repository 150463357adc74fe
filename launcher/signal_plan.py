"""Which signals end the ranks of a job, and when each is due."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from pycoll._launcher.outcome import RankState

_KILL_AGAIN_S, _MAX_KILLS = 0.5, 10  # for what is still there; after the last it is given up


class SignalPlan:
    """Signals for the ranks: each is sent once, at the earliest time that was planned for it.

    SIGKILL alone is repeated until all ranks have ended, or it was sent so often that it is
    useless. All times are of time.monotonic().

    Args:
        grace_s: how long ranks have each time: to end by themselves before SIGTERM, and after that
            before SIGKILL; infinity: as long as they want.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._due: dict[int, float] = {}
        self._num_kills = 0
        self._is_interrupted = False  # by Ctrl-C, once

    def __bool__(self) -> bool:
        return bool(self._due)

    @property
    def times(self) -> list[float]:
        """When signals are due."""
        return list(self._due.values())

    @property
    def is_given_up(self) -> bool:
        """Whether ranks have outlived all that could end them."""
        return self._num_kills >= _MAX_KILLS

    def take(self, now: float) -> list[int]:
        """Return the signals that are due, to be sent now."""
        signals = [signum for signum, at in self._due.items() if now >= at]
        for signum in signals:
            del self._due[signum]
            if signum == signal.SIGKILL:
                self._num_kills += 1
                if not self.is_given_up:
                    self._due[signum] = now + _KILL_AGAIN_S
        return signals

    def fail(self, now: float) -> None:
        """A rank failed: the others may end by themselves, before SIGTERM comes."""
        self._end_after(now + self._grace_s)

    def end(self, now: float) -> None:
        """All ranks shall end: SIGTERM now."""
        self._end_after(now)

    def pass_on(self, signum: int, now: float) -> None:
        """The launcher got a signal: the ranks get it, too; the second Ctrl-C kills them."""
        if signum == signal.SIGINT and self._is_interrupted:
            self._add({signal.SIGKILL: now})
        elif signum == signal.SIGTERM:
            self._end_after(now)
        else:
            self._add({signum: now})
            self._end_after(now + self._grace_s)
        self._is_interrupted = self._is_interrupted or signum == signal.SIGINT

    def _end_after(self, at: float) -> None:
        self._add({signal.SIGTERM: at, signal.SIGKILL: at + self._grace_s})

    def _add(self, plan: Mapping[int, float]) -> None:
        for signum, at in plan.items():
            self._due[signum] = min(at, self._due.get(signum, at))


class LostRanks:
    """The ranks that are lost while their job goes on: each is ended, with what it has started.

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
