"""Which signals end the ranks of a job, and when each is due."""

from __future__ import annotations

import signal
from collections.abc import Mapping

_TERM_S, _KILL_S = 2.0, 4.0  # from the first failure to SIGTERM, and to SIGKILL
_KILL_AGAIN_S, _MAX_KILLS = 0.5, 10  # for what is still there; after the last it is given up


class SignalPlan:
    """Signals for the ranks: each is sent once, at the earliest time that was planned for it.

    SIGKILL alone is repeated until all ranks have ended, or it was sent so often that it is
    useless. All times are of time.monotonic().
    """

    def __init__(self) -> None:
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
        """A rank failed: the others have some seconds to end by themselves."""
        self._add({signal.SIGTERM: now + _TERM_S, signal.SIGKILL: now + _KILL_S})

    def end(self, now: float) -> None:
        """All ranks shall end: SIGTERM, 2 s later SIGKILL."""
        self._add({signal.SIGTERM: now, signal.SIGKILL: now + _TERM_S})

    def pass_on(self, signum: int, now: float) -> None:
        """The launcher got a signal: the ranks get it, too; the second Ctrl-C kills them."""
        if signum == signal.SIGINT and self._is_interrupted:
            self._add({signal.SIGKILL: now})
        elif signum == signal.SIGTERM:
            self._add({signum: now, signal.SIGKILL: now + _KILL_S})
        else:
            self._add({signum: now, signal.SIGTERM: now + _TERM_S, signal.SIGKILL: now + _KILL_S})
        self._is_interrupted = self._is_interrupted or signum == signal.SIGINT

    def _add(self, plan: Mapping[int, float]) -> None:
        for signum, at in plan.items():
            self._due[signum] = min(at, self._due.get(signum, at))
