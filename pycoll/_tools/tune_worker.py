"""What a rank does while algorithms are timed, for `pycoll tune` and benchmarks/selection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycoll._communicator.communicator import Communicator

SPLITTING = frozenset({"scatter", "reduce_scatter", "all_to_all"})
STACKING = frozenset({"gather", "all_gather", "all_to_all"})

BUDGET_S = 0.1
"""About so long each variant to run a call is timed in a round, but at least once,"""

MAX_CALLS = 15
"""and at most so many times."""

LONG_S = 1e-3
MOST_IN_A_ROW = 8
"""Calls are timed in rows that take about so long, of at most so many: ranks do not leave a barrier
together, which in a single short call counts more than the algorithm.
"""


class Variant(NamedTuple):
    """A variant to run a collective.

    Attributes:
        algorithm: None for the one that is chosen.
        segment_nbytes: length of segments; 0: chunks are not cut; None: as is chosen.
    """

    algorithm: str | None = None
    segment_nbytes: int | None = None


class Comparison(NamedTuple):
    """Calls of one collective and length, to be run in several variants."""

    collective: str
    nbytes: int
    variants: tuple[Variant, ...]


def measure(comm: Communicator, comparisons: Sequence[Comparison]) -> list[list[list[float]]]:
    """Time the calls of every comparison; returns of each variant the seconds of every call.

    Calls are timed in rows, from a barrier until the slowest rank has returned, and the seconds are
    those of one. Variants take turns, so that what disturbs one disturbs all.
    """
    return [_measure(comm, comparison) for comparison in comparisons]


def measure_send(comm: Communicator, nbytes: int, count: int) -> list[float]:
    """Time messages of so many bytes from rank 0 to rank 1, each until it is answered."""
    x = np.zeros(nbytes, np.uint8)
    answer = np.zeros(1, np.uint8)
    seconds = []
    for _ in range(count + 1):
        start = time.perf_counter()
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(1, out=answer)
        else:
            comm.recv(0, out=x)
            comm.send(answer, 0)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]  # the first makes the connections


def _measure(comm: Communicator, comparison: Comparison) -> list[list[float]]:
    lengths = {
        variant.segment_nbytes
        for variant in comparison.variants
        if variant.segment_nbytes is not None
    }
    cutting = {nbytes: _cutting(comm, nbytes) for nbytes in sorted(lengths)}
    call = _Calls(comparison.collective, comparison.nbytes, comm.rank, comm.size)
    calls = [
        call.on(
            comm if variant.segment_nbytes is None else cutting[variant.segment_nbytes],
            variant.algorithm,
        )
        for variant in comparison.variants
    ]
    for make in calls:  # connections, schedules, pages
        make()
    first = np.array([_time(comm, make, 1) for make in calls])
    slowest = comm.all_reduce(first, "max")
    # All have the same number of turns: the quicker are not judged by more of them.
    row = max(1, min(MOST_IN_A_ROW, int(LONG_S / max(slowest.max(), 1e-9))))
    count = max(1, min(MAX_CALLS, int(BUDGET_S * len(calls) / max(row * slowest.sum(), 1e-9))))
    seconds = np.array([[_time(comm, make, row) for make in calls] for _ in range(count)])
    for other in cutting.values():
        other.close()
    found: list[list[float]] = comm.all_reduce(seconds, "max").T.tolist()
    return found


def _time(comm: Communicator, make: Callable[[], object], row: int) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in range(row):
        make()
    return (time.perf_counter() - start) / row


def _cutting(comm: Communicator, segment_nbytes: int) -> Communicator:
    """Return a communicator of the same ranks, on which segments have this length."""
    other = comm.dup()
    agreed = other._group.engine.agreed
    other._group.go_by(agreed._replace(segment_nbytes=segment_nbytes))
    return other


class _Calls:
    """Calls of one collective, with memory for what they take and give."""

    def __init__(self, collective: str, nbytes: int, rank: int, size: int) -> None:
        count = max(1, nbytes // 4)
        rows, row = (size, count), (count,)
        self._collective, self._rank = collective, rank
        self._source = np.ones(rows if collective in SPLITTING else row, np.float32)
        self._target = np.zeros(rows if collective in STACKING else row, np.float32)

    def on(self, comm: Communicator, algorithm: str | None) -> Callable[[], object]:
        """Return the call on a communicator."""
        method: Any = getattr(comm, self._collective)
        options: dict[str, Any] = {"algorithm": algorithm} if algorithm else {}
        source, target = self._source, self._target
        match self._collective:
            case "barrier":
                return lambda: method(**options)
            case "broadcast" | "scan" | "exscan":
                return lambda: method(source, **options)
            case "scatter" if self._rank != 0:
                return lambda: method(None, out=target, **options)
        return lambda: method(source, out=target, **options)
