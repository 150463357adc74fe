"""Every algorithm among ranks in any order: proved as those in the order of their numbers are."""

from __future__ import annotations

import random

import pytest

from pycoll.schedule import Send
from pycoll.schedules import ROOTED, TABLE, Algorithm, find, steps_of
from pycoll.schedules.check import placements
from pycoll.schedules.program import Program
from pycoll.schedules.proof import Execution
from pycoll.schedules.reordered import keeps_rank_order, reordered

ROWS = [algorithm for row in TABLE.values() for algorithm in row.values()]


@pytest.mark.parametrize("algorithm", ROWS, ids=lambda row: f"{row.collective}-{row.name}")
def test_what_is_promised_holds_in_any_order(algorithm: Algorithm) -> None:
    rng = random.Random(1)
    for size in range(1, 9):
        for hosts in placements(size) if algorithm.hosts else [None]:
            order = rng.sample(range(size), size)
            # Its cost is that of the algorithm if all hosts have as many ranks.
            placed = reordered(algorithm, order)._replace(cost=None)
            for root in range(size) if algorithm.collective in ROOTED else (0,):
                Execution(Program(placed, size, root, hosts), window=1).prove()


def test_neighbors_in_the_ring_are_neighbors_in_the_order() -> None:
    order = (2, 0, 3, 1)
    placed = reordered(find("all_gather", "ring"), order)
    first = [next(iter(steps_of(placed, rank, 4))) for rank in order]
    assert first == [Send(0, 2), Send(3, 0), Send(1, 3), Send(2, 1)]


def test_what_combines_in_rank_order_runs_as_it_is() -> None:
    kept = {(row.collective, row.name) for row in ROWS if keeps_rank_order(row)}
    assert {("scan", "linear"), ("exscan", "linear"), ("all_reduce", "tree")} <= kept
    assert not {("all_reduce", "ring"), ("all_gather", "ring"), ("broadcast", "chain")} & kept
    for row in ROWS:
        assert (reordered(row, (1, 0)) is row) == keeps_rank_order(row)
        assert reordered(row, ()) is row
