"""`pycoll top` of jobs that run, and what the launcher says at the end of who was waited for."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher_jobs import run as run_job
from launcher_jobs import started
from patience import PATIENCE

from pycoll._launcher.host_memory import Tally
from pycoll._launcher.stragglers import Straggler, find, of_job

LIMIT_S = 60 * PATIENCE

STEPS = """
import sys, time
import numpy as np
import pycoll
comm = pycoll.init(transport=sys.argv[1])
x = np.ones(125_000)
while True:
    if comm.rank == 1:
        time.sleep(0.05)
    comm.all_reduce(x)
"""

COUNTED = """
import sys
import numpy as np
import pycoll
comm = pycoll.init(transport=sys.argv[1])
for step in range(300):
    comm.all_reduce(np.ones(1000))
for step in range(200):
    comm.send(np.ones(100), 1) if comm.rank == 0 else comm.recv(0)
comm.barrier()
print(comm.rank, flush=True)
sys.stdin.read() if comm.rank == 0 else None
comm.recv(1 - comm.rank)
"""


pytestmark = pytest.mark.usefixtures("sockets")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:

        def start(size: int, script: str, *words: str) -> subprocess.Popen[bytes]:
            program = tmp_path / "script.py"
            program.write_text(script)
            return stack.enter_context(started("-n", str(size), str(program), *words))

        yield start


Start = Callable[..., subprocess.Popen[bytes]]


def top(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pycoll", "top", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def once(process: int) -> dict[str, Any]:
    done = top(str(process), "--once", "--json")  # which fails before the job has begun
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_rank_that_the_others_wait_for_is_shown_with_what_each_does(
    job: Start, transport: str
) -> None:
    process = job(3, STEPS, transport)
    deadline = time.monotonic() + LIMIT_S
    while not (found := once(process.pid)).get("straggler"):
        assert time.monotonic() < deadline, found
    first, late, _ = found["ranks"]
    assert found["straggler"].startswith("rank 1 makes the others wait: they wait for ")
    assert late["waiting"] < 0.5 < first["waiting"]
    # A step takes 0.05 s at least, and each has one call, of a million bytes or a part of it.
    assert 0 < first["calls"] < 21
    assert 0 < first["nbytes"] < 45e6
    said = top(str(process.pid), "--once").stdout.splitlines()
    assert said[0].startswith("job ")
    assert re.split("  +", said[1]) == [
        *("rank", "process", "state"),
        *("calls/s", "messages/s", "MB/s", "waiting"),
    ]
    assert [line.split()[0] for line in said[2:6]] == ["0", "1", "2", "all"]


def tallies(process: int) -> list[dict[str, Any]]:
    from pycoll._launcher import job_socket

    (path,) = (f"{f}/{name}" for f in job_socket.folders()[:1] for name in os.listdir(f))
    answer = job_socket.ask(path, {"want": "tallies"}, LIMIT_S)
    ranks: list[dict[str, Any]] = answer["ranks"]
    return ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_calls_messages_and_bytes_are_counted_as_they_are(job: Start, transport: str) -> None:
    process = job(2, COUNTED, transport)
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {b"0\n", b"1\n"}
    sender, receiver = tallies(process.pid)
    in_collectives = 300 * 8000  # at least: by messages an all_reduce of two sends that much
    assert sender["calls"] == receiver["calls"] == 301
    if transport == "shm":
        assert (sender["messages"], receiver["messages"]) == (200, 0)
        assert sender["nbytes"] == receiver["nbytes"] + 200 * 800
        assert 0 <= receiver["nbytes"] - in_collectives < 64  # ranks have met there, too
    else:
        assert sender["messages"] >= receiver["messages"] + 200 > 300
        assert sender["nbytes"] - receiver["nbytes"] == 200 * 800


def test_a_wait_that_goes_on_counts(job: Start) -> None:
    process = job(2, "import pycoll\ncomm = pycoll.init()\ncomm.recv(1 - comm.rank)\n")
    deadline = time.monotonic() + LIMIT_S
    waiting: list[float] = []
    while not waiting or min(waiting) < 0.9:
        waiting = [rank["waiting"] or 0.0 for rank in once(process.pid).get("ranks", ())]
        assert time.monotonic() < deadline, waiting


def test_on_a_terminal_the_table_is_shown_again_in_its_place_until_the_job_ends(
    job: Start,
) -> None:
    process = job(2, COUNTED, "shm")
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {b"0\n", b"1\n"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pycoll", "top", str(process.pid), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE) as shown:
        os.close(theirs)
        said, deadline = b"", time.monotonic() + LIMIT_S
        while said.count(b"waiting") < 3:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], said
            said += os.read(ours, 65536)
        process.kill()
        with contextlib.suppress(OSError):  # of a terminal that nobody has open any more
            while os.read(ours, 65536):
                pass
        assert shown.stderr is not None
        errors = shown.stderr.read()
        assert shown.wait(LIMIT_S) == 0
    os.close(ours)
    assert re.fullmatch(rb"pycoll top: job [0-9a-f]{8} has ended\n", errors)
    # A title, heads, two ranks, their sum, and that rank 1 waits for rank 0.
    assert b"\x1b[6A\r\x1b[J" in said


def test_verbose_says_at_the_end_who_was_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "script.py"
    program.write_text(STEPS.replace("while True", "for step in range(30)"))
    done = run_job("-n", "3", "--verbose", str(program), "auto")
    assert done.returncode == 0, done.stderr
    assert b"pycoll-run: rank 1 made the others wait: they waited for " in done.stderr
    quiet = run_job("-n", "3", str(program), "auto")
    assert quiet.stderr == b""


@pytest.mark.exhaustive
def test_a_rank_of_another_host_is_named_that_the_others_have_waited_for(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    script = STEPS.replace("while True", "for step in range(60)").replace("sys.argv[1]", '"auto"')
    script = script.replace("comm.rank == 1", "comm.rank == 2")
    done = run("-H", "localhost:1,other:2", "--verbose", script=script)
    assert done.returncode == 0, done.stderr
    assert "pycoll-run: rank 2 made the others wait: they waited for " in done.stderr


def test_who_waits_least_is_the_one_that_the_others_wait_for() -> None:
    assert find({0: 0.5, 1: 0.125, 2: 0.75}) == Straggler(1, 0.125, 0.625)
    assert find({0: 0.6}) is None
    assert find({0: 0.5, 1: 0.5}) is None


def test_a_costly_rank_is_pointed_out_without_being_asked_if_the_job_was_long() -> None:
    tallies = [Tally(1, 0, 8, 30.0), Tally(1, 0, 8, 0.6), Tally(1, 0, 8, 24.0)]
    said = ["rank 1 made the others wait: they waited for 45 % of the time, it for 1 %"]
    assert of_job(tallies, 60.0, verbose=False, is_well=True) == said
    assert of_job(tallies, 60.0, verbose=False, is_well=False) == []
    assert of_job(tallies, 59.0, verbose=False, is_well=True) == []
    assert of_job(tallies, 59.0, verbose=True, is_well=False) != []
    even = [Tally(1, 0, 8, 6.0), Tally(1, 0, 8, 6.6), None]
    assert of_job(even, 60.0, verbose=False, is_well=True) == []
    assert of_job(even, 60.0, verbose=True, is_well=True) == [
        "ranks waited in pycoll for 10 % to 11 % of the time"
    ]
