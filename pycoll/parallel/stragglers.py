"""The rank for which the others wait.

In a synchronous program every rank takes as long as the slowest. The slowest is the one that
computes longest and waits least: all others wait for it (MegaScale, Jiang et al. 2024, section 5,
compares the ranks' computing times in the same way).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from pycoll import Communicator, Request
from pycoll._support.public_edge import edge, edges

T = TypeVar("T")


class Stragglers(NamedTuple):
    """What each rank did with its time. `str` of it is a table.

    Attributes:
        computing_s: seconds, by rank.
        waiting_s: seconds, by rank.
        ranks: those that computed much longer than the median rank.
    """

    computing_s: list[float]
    waiting_s: list[float]
    ranks: list[int]

    def __str__(self) -> str:
        lines = ["rank  computing  waiting"]
        for rank, times in enumerate(zip(self.computing_s, self.waiting_s, strict=True)):
            mark = "  the others wait for it" if rank in self.ranks else ""
            lines.append(f"{rank:4}  {times[0]:7.2f} s  {times[1]:5.2f} s{mark}")
        return "\n".join(lines)


@edge
def find_stragglers(
    comm: Communicator, computing_s: float, waiting_s: float, *, slower: float = 1.2
) -> Stragglers:
    """Compare the ranks' times. Collective; every rank gets the same result.

    Args:
        comm: ranks that have equal work to do, for example those of one pipeline stage.
        computing_s: how long this rank has computed, in seconds.
        waiting_s: how long it has waited for others.
        slower: a straggler is who computed longer than this multiple of the median.
    """
    times = comm.all_gather((float(computing_s), float(waiting_s)))
    computing, waiting = [c for c, _ in times], [w for _, w in times]
    limit = slower * statistics.median_low(computing)
    ranks = [rank for rank, seconds in enumerate(computing) if seconds > limit]
    return Stragglers(computing, waiting, ranks)


@edges
class Clock:
    """Tells a rank's waiting from its computing: all that is not waiting.

    Attributes:
        waiting_s: seconds of waiting since the clock was made, or last read.
    """

    def __init__(self) -> None:
        self.waiting_s = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the ``with`` block as waiting."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_s += time.perf_counter() - before

    def watch(self, comm: T) -> T:
        """Return what is used as `comm` is, and counts the time in its calls as waiting.

        So do the requests that it returns. It is no instance of Communicator.
        """
        return cast("T", _Watched(comm, self))

    def read(self) -> tuple[float, float]:
        """Return the seconds of computing and of waiting since the last call, and begin anew."""
        now = time.perf_counter()
        waiting, self.waiting_s = self.waiting_s, 0.0
        computing, self._since = now - self._since - waiting, now
        return computing, waiting


class _Watched:
    def __init__(self, watched: Any, clock: Clock) -> None:
        self._watched, self._clock = watched, clock

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._watched, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._clock.waiting():
                result = attribute(*args, **kwargs)
            return _Watched(result, self._clock) if isinstance(result, Request) else result

        return call
