"""The straggler report names the rank that others wait for."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
from tiers import sizes

Comm = Any
PROGRAM = str(Path(__file__).resolve().parents[2] / "examples/parallel/stragglers.py")


@sizes(3)
def test_the_slow_rank_is_named_and_the_others_waited_for_it(ranks: Any) -> None:
    def program(comm: Comm, path: str) -> None:
        program = runpy.run_path(path)
        clock, other = program["Clock"](), program["Clock"]()
        watched = other.watch(clock.watch(comm))
        assert watched.rank == comm.rank
        for i in range(4):
            time.sleep(0.1 if comm.rank == 1 else 0.0)  # computes longer
            if i % 2:
                total = watched.all_reduce(np.ones(3))
            else:
                total = watched.iall_reduce(np.ones(3)).wait()
            assert total.tolist() == [comm.size] * 3
        report = program["find_stragglers"](comm, *clock.read(), slower=2.0)
        # Two waits of each kind, of which scheduling takes something away.
        assert report.computing_s[1] >= 0.4
        assert min(report.waiting_s[0], report.waiting_s[2]) > 0.2
        assert max(report.waiting_s) > report.waiting_s[1]
        assert clock.waiting_s == 0.0
        assert (
            report.waiting_s[comm.rank] <= other.waiting_s < 2 * report.waiting_s[comm.rank] + 0.1
        )

    ranks(program, PROGRAM)


@sizes(3)
def test_stragglers_are_those_far_from_the_median(ranks: Any) -> None:
    def program(comm: Comm, path: str) -> None:
        find_stragglers = runpy.run_path(path)["find_stragglers"]
        report = find_stragglers(comm, [1.0, 1.3, 1.1][comm.rank], [0.3, 0.0, 0.2][comm.rank])
        assert report == ([1.0, 1.3, 1.1], [0.3, 0.0, 0.2], [])
        report = find_stragglers(comm, [1.0, 1.4, 1.1][comm.rank], 0.25)
        assert report.ranks == [1]
        assert str(report).splitlines() == [
            "rank  computing  waiting",
            "   0     1.00 s   0.25 s",
            "   1     1.40 s   0.25 s  the others wait for it",
            "   2     1.10 s   0.25 s",
        ]
        assert find_stragglers(comm, 1.0, 0.0).ranks == []

    ranks(program, PROGRAM)
