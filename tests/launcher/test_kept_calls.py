"""What ranks had called last when one failed: `--log-dir` has it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from launcher_jobs import LIMIT_S, run, started
from tiers import smoke

from pycoll._dtypes import TABLE
from pycoll._launcher.kept_calls import DTYPES, KeptCall, RankCalls, first_difference
from pycoll._tools import jobs
from pycoll._transports._core import METHODS, PARTS
from pycoll.errors import Error

DIES = """
import time
import numpy as np
import pycoll
comm = pycoll.init()
other = comm.split(None if comm.rank == 1 else 0, name="but one")
for step in range(1100):
    comm.all_reduce(np.ones(10))
comm.all_reduce(2)
comm.gather({"rank": comm.rank})
comm.broadcast(np.ones(3, np.int16), root=2)
if comm.rank == 1:
    time.sleep(1000)
comm.all_reduce(np.ones(100, np.float32), op="max")
"""


def test_the_numbers_of_types_are_those_of_the_core() -> None:
    assert {dtype.code: dtype.name for dtype in TABLE} == dict(enumerate(DTYPES[1:], 1))


def test_the_last_calls_of_a_rank_that_was_killed_are_written_beside_those_of_the_others(
    tmp_path: Path, sockets: Path
) -> None:
    program = tmp_path / "script.py"
    program.write_text(DIES)
    with started("-n", "3", "--log-dir", str(tmp_path / "logs"), str(program)) as process:
        deadline, waiting = time.monotonic() + LIMIT_S, 0
        while waiting < 2:
            assert time.monotonic() < deadline
            with contextlib.suppress(Error):  # it has not begun
                ranks = jobs.find(str(process.pid)).ask("status")["ranks"]
                waiting = sum(rank["waits_in"] is not None for rank in ranks)
        os.kill(ranks[1]["process"], signal.SIGKILL)
        assert process.wait(LIMIT_S) == 128 + 9
        assert process.stderr is not None
        report = process.stderr.read().decode()
    said = (tmp_path / "logs/calls.txt").read_text()
    assert "when rank 1 had failed" in said
    world = said[said.index("in shared memory on world, ranks 0-2:") :]
    lines = [line.strip() for line in world.splitlines()]
    assert lines[1].startswith("the first in which they differ is call ")
    number = int(lines[1].removesuffix(":").split()[-1])
    assert number > 1101
    differ = lines[2:4]
    assert "rank 1: has not made it" in differ
    differ.remove("rank 1: has not made it")
    call = "all_reduce, 400 bytes of float32, op=max at script.py:14"
    assert differ == [f"ranks 0, 2: {call}"]
    for rank in 0, 2:
        of_other = lines[lines.index(f"the last calls of rank {rank}:") + 20]
        assert re.fullmatch(
            rf"{number}  {re.escape(call)}, waits for rank 1, \d+\.\d\d\d s", of_other
        )
    assert "pycoll-run: the first call in which ranks differ, on world:\n" in report
    of_killed = lines[lines.index("the last calls of rank 1:") :]
    of_killed = of_killed[: of_killed.index("the last calls of rank 2:")]
    assert of_killed[-1].startswith(f"{number - 1}  broadcast, ")
    assert ", root=2" in of_killed[-1]
    for text in (
        "all_reduce, 80 bytes of float64, op=sum",
        "all_reduce of Python ints, op=sum",
        "gather of Python objects",
    ):
        assert any(re.match(rf"\d+  {re.escape(text)}(?!,)", line) for line in of_killed), text


@smoke
def test_calls_by_messages_are_written_with_their_lines_and_whether_they_have_ended(
    tmp_path: Path,
) -> None:
    program = tmp_path / "script.py"
    program.write_text(
        "import numpy as np, pycoll\n"
        "comm = pycoll.init(transport='tcp')\n"
        "for step in range(1500):\n"
        "    comm.all_reduce(np.ones(10))\n"
        "if comm.rank == 1:\n"
        "    raise SystemExit(3)\n"
        "comm.all_gather(np.ones(4))\n"
    )
    done = run("-n", "2", "--log-dir", str(tmp_path / "logs"), str(program))
    assert done.returncode == 3, done.stderr
    said = (tmp_path / "logs/calls.txt").read_text()
    world = said[said.index("by messages on world, ranks 0-1:") :]
    lines = [line.strip() for line in world.splitlines()]
    of_ended = lines[lines.index("the last calls of rank 1:") + 1 :]
    assert of_ended[19].startswith("1500  all_reduce(float64[10], op=sum")
    took = r" at script\.py:4, begun \d+\.\d+ s before, took \d+\.\d+ s"
    assert re.search(f"{took}$", of_ended[19])
    assert not any(of_ended[20:])


def test_without_a_folder_for_logs_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("-n", "1", "--", "false")
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []


A, B = KeptCall(3, 8), KeptCall(5, 8)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ({0: RankCalls(2, [A, B]), 1: RankCalls(2, [A, B])}, (0, {})),
        ({0: RankCalls(2, [A, B]), 1: RankCalls(1, [A])}, (2, {0: B, 1: None})),
        ({0: RankCalls(2, [A, B]), 1: RankCalls(2, [B, B])}, (1, {0: A, 1: B})),
        # Of one only the second is kept, so that only from there on they can be compared.
        ({0: RankCalls(2, [B]), 1: RankCalls(2, [B, B])}, (0, {})),
        ({}, (0, {})),
    ],
)
def test_the_first_call_that_differs_is_found_in_what_is_kept_of_all(
    ranks: dict[int, RankCalls], found: tuple[int, dict[int, KeptCall | None]]
) -> None:
    assert first_difference(ranks) == found


@pytest.mark.parametrize(
    ("part", "signature", "method", "text"),
    [
        ("", 3 | 1 << 4 | 13 << 8, "all_reduce", "all_reduce, 24 bytes of float64, op=prod"),
        ("", 2 | 4 << 8 | 5 << 13, "", "reduce, 24 bytes of int32, op=sum, root=5"),
        ("operator", 5 | 4 << 8, "scan", "scan with an operator of the program's own"),
        ("operator", 5 | 4 << 8, "", "a reduction with an operator of the program's own"),
        ("ints", 3 | 2 << 4 | 5 << 8, "reduce", "reduce of Python ints, op=min"),
        ("ints", 5, "scan", "scan of Python ints"),
        ("many", 3 | 1 << 4, "", "all_reduce_many, op=prod"),
        ("objects", 5, "gather", "gather of Python objects"),
        ("uneven", 5, "gatherv", "gatherv"),
        ("uneven", 6 | 2 << 13, "", "scatterv(root=2)"),
    ],
)
def test_a_call_that_runs_in_parts_is_shown_as_the_programs(
    part: str, signature: int, method: str, text: str
) -> None:
    number = METHODS.index(method) if method else 0
    assert KeptCall(signature | PARTS.index(part) << 29, 24 | number << 56).text == text
