"""`pycoll bench --alias`: results at chosen distances from what is sent, modulo a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiers import exhaustive

from pycoll._tools import bench, bench_report
from pycoll._tools.bench_report import Row, Spread
from pycoll._tools.bench_worker import Array, Call, Case, Library


class Placed(Library):
    """Keeps the arrays that it is to be timed with."""

    in_place = frozenset({"broadcast"})

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.addresses: tuple[int, int] = (0, 0)

    def call(self, collective: str, source: Array, target: Array) -> Call:
        self.addresses = source.ctypes.data, target.ctypes.data
        return lambda: None

    def barrier(self) -> None: ...

    def largest(self, value: float) -> float:
        return value

    def close(self) -> None: ...

    def versions(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("collective", ["send", "all_reduce", "all_to_all", "broadcast"])
@pytest.mark.parametrize("alias", [0, 16, 4092])
def test_the_result_lies_at_the_distance_from_what_is_sent(collective: str, alias: int) -> None:
    sides = [Placed(rank) for rank in range(2)]
    for side in sides:
        Case(side, collective, 5000, np.dtype("float32"), alias)
    sent, result = sides[0].addresses[0], sides[1].addresses[1]
    assert sent % 4096 == 0
    assert (result - sent) % 4096 == alias


def test_distances_are_read_as_documented() -> None:
    assert bench.parse_aliases("0,16, 32,16", 4) == (0, 16, 32)
    assert bench.parse_aliases("1", 1) == (1,)


@pytest.mark.parametrize(("text", "why"), [("1", "uint8"), ("4096", "4095"), ("-1", "between")])
def test_what_is_no_distance_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bench.parse_aliases(text, 4)


def test_the_table_has_a_column_of_distances_if_there_are_any() -> None:
    times = {"pycoll shm": Spread(1e-6, 1e-6, 1e-6)}
    rows = [Row("send", 2, 8, times, None, alias) for alias in (0, 16)]
    table = bench_report.table(rows)
    assert table.heads[:3] == ["size", "alias", ""]
    assert [line[1] for line in table.cells] == ["0", "16"]
    assert "alias" not in bench_report.table(rows[:1]).heads


@exhaustive
def test_every_size_is_measured_at_every_distance(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "pycoll._tools.cli", "bench", "send", "--rounds", "1"]
    command += ["--sizes", "8,64K", "--alias", "0,16", "--json", str(file)]
    done = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert [(row["nbytes"], row["alias"]) for row in results] == [
        (8, 0),
        (8, 16),
        (64 << 10, 0),
        (64 << 10, 16),
    ]
