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
from tiers import smoke

from pycoll._launcher.awaited import Awaited
from pycoll._launcher.host_memory import Tally
from pycoll._launcher.stragglers import find, of_job

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


@smoke
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


APART = """
import sys, time
begun = time.monotonic()
import numpy as np
import pycoll
comm = pycoll.init(transport=sys.argv[1])
late_s = max(0.05, (time.monotonic() - begun) / 4)  # the end of a busy machine's job is long
apart = comm.split(int(comm.rank == 0))
x = np.ones(1000)
for step in range(30):
    if comm.rank < 2:
        time.sleep(late_s)
    if sys.argv[2] == "messages":  # 1 is late, 2 waits for it, and 3 for that
        comm.recv(comm.rank - 1) if comm.rank > 1 else None
        comm.send(x, comm.rank + 1) if 0 < comm.rank < 3 else None
    else:
        apart.all_reduce(x)
"""
"""Rank 0 has nothing to do with the others."""


@pytest.mark.parametrize(
    ("transport", "what"),
    [
        ("shm", "messages"),
        pytest.param("shm", "calls", marks=pytest.mark.exhaustive),
        pytest.param("tcp", "calls", marks=pytest.mark.exhaustive),
        pytest.param("tcp", "messages", marks=pytest.mark.exhaustive),
    ],
)
def test_verbose_says_at_the_end_who_was_waited_for(
    tmp_path: Path, transport: str, what: str
) -> None:
    program = tmp_path / "script.py"
    program.write_text(APART)
    done = run_job("-n", "4", "--verbose", str(program), transport, what)
    assert done.returncode == 0, done.stderr
    assert b"pycoll-run: rank 1 made the others wait: they waited for " in done.stderr
    quiet = run_job("-n", "4", str(program), transport, what)
    assert quiet.stderr == b""


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["messages", "calls"])
def test_a_rank_of_another_host_is_named_that_the_others_have_waited_for(
    run: Callable[..., subprocess.CompletedProcess[str]], what: str
) -> None:
    script = APART.replace("sys.argv[1]", '"auto"').replace("sys.argv[2]", repr(what))
    done = run("-H", "localhost:1,other:3", "--verbose", script=script)
    assert done.returncode == 0, done.stderr
    assert "pycoll-run: rank 1 made the others wait: they waited for " in done.stderr


LOOKED_AT = """
import json, os, subprocess, sys, time
import pycoll
comm = pycoll.init()
done = sys.argv[0] + ".done"
if comm.rank == 0:  # it has nothing to do with the others
    top = [sys.executable, "-m", "pycoll", "top", os.environ["PYCOLL_JOB"], "--once", "--json"]
    said = ""
    while "rank 1 makes the others wait" not in said:
        found = subprocess.run([*top, "--interval", "0.5"], capture_output=True, text=True)
        said = json.loads(found.stdout)["straggler"] or ""
    open(done, "w").close()
    comm.barrier()
    sys.exit()
is_over = False
while not is_over:
    if comm.rank == 1:
        time.sleep(0.05)
        is_over = os.path.exists(done)
    else:
        is_over = comm.recv(comm.rank - 1)
    comm.send(is_over, comm.rank + 1) if comm.rank < 3 else None
comm.barrier()
"""


@pytest.mark.exhaustive
def test_top_knows_for_whom_ranks_of_other_hosts_wait(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    words = ["-H", "localhost:1,other:3", "-x", "XDG_RUNTIME_DIR", "--timeout", str(LIMIT_S / 2)]
    done = run(*words, script=LOOKED_AT)
    assert done.returncode == 0, done.stderr


def ring(size: int) -> dict[int, dict[int, float]]:
    """Each waits for the rank before it."""
    return {rank: {(rank - 1) % size: 1.0} for rank in range(size)}


@pytest.mark.parametrize(
    ("waiting", "awaited", "found"),
    [
        # Where it is not known for whom, it may have been for any.
        ([0.5, 0.125, 0.75], None, ((1,), 0.125, 0.625, 0.5)),
        ([0.6], None, None),
        ([0.5, 0.5], None, None),
        ([0.0, 0.0, 0.9, 0.0], None, None),  # three may be the cause
        # All waits go back to rank 1, on whatever way.
        ([0.5, 0.0, 0.5, 0.5], Awaited(ring(4), {}, {}), ((1,), 0.0, 0.5, 0.5)),
        # Rank 2 waits for 1; the others have nothing to do with it.
        ([0.0, 0.0, 0.9, 0.0], Awaited({2: {1: 1.0}}, {}, {}), ((1,), 0.0, 0.3, 0.3)),
        # A pipeline whose first rank hardly makes the second wait.
        (
            [0.0, 0.05, 0.9, 0.9],
            Awaited({1: {0: 1.0}, 2: {1: 1.0}, 3: {2: 1.0}}, {}, {}),
            ((1,), 0.05, 0.6, 1.7 / 3),
        ),
        # Ranks 1 and 2 are late in turn.
        (
            [1.0, 0.5, 0.5, 1.0],
            Awaited({0: {1: 0.5, 2: 0.5}, 1: {2: 1.0}, 2: {1: 1.0}, 3: {1: 0.5, 2: 0.5}}, {}, {}),
            ((1, 2), 0.5, 1.0, 1.0 / 3),
        ),
        # Calls by messages of ranks 1 and 2; rank 0 makes none.
        (
            [0.0, 0.1, 0.8],
            Awaited({}, {1: {7: 1.0}, 2: {7: 1.0}}, {7: [1, 2]}),
            ((1,), 0.1, 0.4, 0.35),
        ),
        # Rank 0 hands out tasks, and waits for each of three that compute.
        ([0.9, 0.0, 0.0, 0.0], Awaited({0: dict.fromkeys([1, 2, 3], 1 / 3)}, {}, {}), None),
    ],
)
def test_who_waits_least_of_those_that_the_others_wait_for_makes_them_wait(
    waiting: list[float], awaited: Awaited | None, found: tuple[Any, ...] | None
) -> None:
    said = find(dict(enumerate(waiting)), awaited)
    if found is None:
        assert said is None
    else:
        ranks, *numbers = found
        assert said is not None
        assert said.ranks == ranks
        assert said[1:] == pytest.approx(numbers)
    if awaited is not None:
        assert Awaited.unpacked(json.loads(json.dumps(awaited.packed()))) == awaited


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
