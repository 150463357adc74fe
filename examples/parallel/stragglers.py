"""The rank for which the others wait: what transformer.py reports.

In a synchronous program every rank takes as long as the slowest. The slowest is the one that
computes longest and waits least: all others wait for it (MegaScale, Jiang et al. 2024, section 5,
compares the ranks' computing times in the same way).
"""

import statistics
import time
from contextlib import contextmanager
from typing import NamedTuple

from pycoll import Request


class Stragglers(NamedTuple):
    """What each rank did with its time, in seconds, by rank. `str` of it is a table."""

    computing_s: list
    waiting_s: list
    ranks: list  # those that computed much longer than the median rank

    def __str__(self):
        lines = ["rank  computing  waiting"]
        for rank, times in enumerate(zip(self.computing_s, self.waiting_s, strict=True)):
            mark = "  the others wait for it" if rank in self.ranks else ""
            lines.append(f"{rank:4}  {times[0]:7.2f} s  {times[1]:5.2f} s{mark}")
        return "\n".join(lines)


def find_stragglers(comm, computing_s, waiting_s, slower=1.2):
    """Compare the times of ranks that have equal work to do; every rank gets the same result.

    A straggler is who computed longer than `slower` times the median.
    """
    times = comm.all_gather((float(computing_s), float(waiting_s)))
    computing, waiting = [c for c, _ in times], [w for _, w in times]
    limit = slower * statistics.median_low(computing)
    ranks = [rank for rank, seconds in enumerate(computing) if seconds > limit]
    return Stragglers(computing, waiting, ranks)


class Clock:
    """Tells a rank's waiting from its computing: all that is not waiting."""

    def __init__(self):
        self.waiting_s = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def waiting(self):
        """Count the time in the ``with`` block as waiting."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_s += time.perf_counter() - before

    def watch(self, comm):
        """Return what is used as `comm` is, and counts the time in its calls as waiting.

        So do the requests that it returns. Another clock may watch it, too.
        """
        return Watched(comm, self)

    def read(self):
        """Return the seconds of computing and of waiting since the last call, and begin anew."""
        now = time.perf_counter()
        waiting, self.waiting_s = self.waiting_s, 0.0
        computing, self._since = now - self._since - waiting, now
        return computing, waiting


class Watched:
    """A communicator, or a request, whose calls a clock counts as waiting."""

    def __init__(self, watched, clock):
        self._watched, self._clock = watched, clock

    def __getattr__(self, name):
        """Return the attribute; a method so that its time is counted."""
        attribute = getattr(self._watched, name)
        if not callable(attribute):
            return attribute

        def call(*args, **kwargs):
            with self._clock.waiting():
                result = attribute(*args, **kwargs)
            again = isinstance(result, Request | Watched)
            return Watched(result, self._clock) if again else result

        return call
