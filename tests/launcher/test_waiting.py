"""What the launcher says of ranks that wait long, without being asked.

The jobs run side by side, each until it has said what its test wants to see.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tiers import few, smoke

LIMIT_S = 60

ARRAYS = {
    *("sends", "tags", "collective and receive", "broadcast and receive"),
    *("a part of a call", "wait_all", "passed"),
}
"""The kinds of jobs that need an array, and so NumPy."""

BUSY = {"computes", "a part of a call"}
"""The kinds of which a rank computes until the job is ended."""

SCRIPT = f"""
ARRAYS = {ARRAYS}
import asyncio, os, signal, sys, threading, time
import pycoll

kind = sys.argv[1]
comm = pycoll.init()
rank, size = comm.rank, comm.size
other = (rank + 1) % size
if kind in ARRAYS:
    import numpy as np
    large = np.zeros(500_000)
comm.barrier()

if kind == "sends":
    comm.send(large, other)
elif kind == "tags":
    comm.recv(other, tag=1) if rank else comm.send(large, other, tag=2)
elif kind == "collective and receive":
    comm.all_reduce(large) if rank else comm.recv(1)
elif kind == "broadcast and receive":
    comm.broadcast(large if rank == 0 else None) if rank != 1 else comm.recv(0)
elif kind == "a part of a call":  # of a 56th call of this size all tell how long the trial took
    part = large[:100_000]
    for _ in range(55):
        comm.reduce(part)
    comm.gather(large[:9], root=2) if rank else None  # rank 2 is one behind
    comm.reduce(part) if rank == 1 else None
    while True:
        pass
elif kind == "two dups":
    first, second = comm.dup(), comm.dup()
    (first if rank else second).barrier()
elif kind == "agreement of some":
    comm.agree(True) if rank != 2 else comm.barrier()
elif kind == "closed":
    closed = comm.dup()
    closed.barrier()
    if rank == 0:
        closed.close()
    (comm if rank == 0 else closed).barrier()
elif kind == "two communicators":
    first, second = comm.dup(name="dp"), comm.dup(name="tp")
    (first if rank else second).barrier()
elif kind == "any source":
    comm.recv()
elif kind == "wait":
    comm.ibarrier().wait() if rank else comm.recv(1)
elif kind == "wait_all":
    comm = comm.dup(name="dp")
    pycoll.wait_all([comm.isend(large, other, tag=1), comm.irecv(other, tag=2)])
elif kind == "wait_any":
    pycoll.wait_any([comm.irecv(other, tag=1), comm.irecv(other, tag=2)])
elif kind == "wait_all of many":
    pycoll.wait_all([comm.irecv(other, tag=tag) for tag in range(40)])
elif kind == "persistent":
    request = comm.persistent.recv(other)
    request.start()
    request.wait()
elif kind == "polls":
    while rank == 0 and comm.iprobe(other) is None:
        time.sleep(0.01)
    comm.barrier()
elif kind == "awaits":
    async def receive():
        await comm.irecv(other, tag=3)
    asyncio.run(receive()) if rank == 0 else comm.recv(0)
elif kind == "in threads":
    threads = [threading.Thread(target=comm.recv, args=(other,), name="taker")]
    threads[0].start()
elif kind == "pipe":
    comm.recv(1) if rank == 0 else os.read(os.pipe()[0], 1)
elif kind == "splits":
    half = comm.split(rank % 2, name="half")
    quarter = half.split(0, name="quarter")
    (quarter if rank == 0 else half if rank == 2 else comm).barrier()
elif kind == "deadline":
    comm.recv(other, timeout=1000)
elif kind == "alarm":
    signal.alarm(1000)
    comm.recv(other)
elif kind == "itself":
    comm.recv(0) if rank == 0 else comm.barrier()
elif kind == "threads":
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    comm.recv(other)
elif kind == "two threads":
    threading.Thread(target=comm.recv, args=(other, 1), daemon=True).start()
    comm.recv(other, 2)
elif kind == "passed":  # rank 0 has been through the call in which rank 2 waits
    if rank == 1:
        while True:
            pass
    comm.broadcast(large[:10] if rank == 0 else None, algorithm="chain")
    comm.recv(2)
elif kind == "reads":
    sys.stdin.read() if rank == 0 else comm.recv(0)
elif rank == 1:
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "computes":
        pass
    time.sleep(1000)
else:
    while True:  # a table for each: the first may be of a rank on its way
        try:
            comm.recv(1, timeout=1.0)
        except pycoll.OperationTimeout:
            pass
"""

TWO = r"rank 0 waits for 1, which waits for 0\n    rank  waits for  in\n"


class Case(NamedTuple):
    """A job, and what is wanted of the table."""

    kind: str
    size: int
    heading: str
    rows: tuple[str, ...] = ()
    transport: str = "shm"


def deadlock(kind: str, *rows: str, size: int = 2, transport: str = "shm") -> Case:
    return Case(kind, size, "deadlock: " + TWO, rows, transport)


SHM = [
    Case("computes", 2, "waiting for rank 1, which is running"),
    Case(
        "a part of a call",
        3,
        "waiting for rank 0, which is running",
        (
            r"reduce\(float64\[100000\].*root=0.*\) #57 at script",
            r"gather\(.*root=2.*\) #56 at script",
        ),
    ),
    deadlock(
        "sends",
        r"    0     1          send\(float64\[500000\], dest=1, tag=0\) at script.py:\d+, ",
        r"    world: ranks 0-1",
    ),
    deadlock("tags", r"    1     0          recv\(source=0, tag=1\) "),
    deadlock("collective and receive", r"    1     0          all_reduce\(.*, op=sum\) #1 at "),
    deadlock("broadcast and receive", size=3),
    deadlock("two communicators", r"barrier\(\) #0 on tp at", r"(dp|tp): ranks 0-1; .p: ranks 0-1"),
    deadlock(
        "two dups",
        r"barrier\(\) #0 on dup of world \(1\) at",
        r"barrier\(\) #0 on dup of world \(2\) at",
        r"    dup of world \(1\): ranks 0-1; dup of world \(2\): ranks 0-1",
    ),
    Case(
        "agreement of some",
        4,
        "deadlock: rank 0 waits for 2, which waits for 0",
        (r"    0-1, 3  2          agree\(\) at", r"    2       0-1, 3     barrier\(\) #1 at"),
    ),
    deadlock("closed", r"    1     0          barrier\(\) #1 on dup of world at"),
    deadlock("any source", r"    0     1-2        recv\(source=ANY", size=3),
    deadlock("wait", r"ibarrier\(\) #1 at"),
    deadlock(
        "wait_all", r"wait_all of 2 requests, first i[^ ]*(, [^ ]*)* on dp at script.py:\d+, "
    ),
    deadlock("wait_all of many", "wait_all of 40 requests, first irecv"),
    deadlock("persistent", r"irecv\(source=1, .*\) at script.py"),
    Case(
        "polls",
        2,
        "waiting for rank 0, which is (asleep|running)",
        (r"    0     -          (asleep|running)\b.*, process ",),
    ),
    Case(
        "awaits",
        2,
        "waiting for rank 0, which is asleep",
        (
            r"    0     -          asleep \(.*: for files or sockets\), process \d+\n"
            r"                     not finished: recv from rank 1, tag 3, of any length, on world",
        ),
    ),
    Case(
        "in threads",
        2,
        "perhaps a deadlock .*: rank 0 waits for 1, which waits for 0",
        (r"    0     1          recv\(.*\) at the start of thread taker, ",),
    ),
    Case("pipe", 2, r"waiting for rank 1, which is asleep \(.*: reads a pipe\)"),
    Case(
        "splits",
        4,
        "deadlock: rank 0 waits for 2, which waits for 0",
        (
            r"    0     2          barrier\(\) #0 on quarter at",
            r"    2     0          barrier\(\) #\d on half at",
            r"    1, 3  0, 2       barrier\(\)",
        ),
    ),
    deadlock("wait_any", "wait_any of 2 requests, first irecv"),
    Case("itself", 2, "deadlock: rank 0 waits for itself"),
    Case("deadline", 2, "deadlock until a deadline passes: " + TWO),
    Case("alarm", 2, "deadlock until a deadline passes: " + TWO),
    Case("threads", 2, r"perhaps a deadlock \(ranks 0-1 have other threads\): " + TWO),
    Case("two threads", 2, r"perhaps a deadlock \(ranks 0-1 have other threads\): " + TWO),
    Case("passed", 3, "waiting for rank 1, which is running", (), "tcp"),
    Case(
        "stopped", 2, "waiting for rank 1, which is stopped", (r"    1     -          stopped, ",)
    ),
    Case(
        "reads",
        2,
        "waiting for rank 0, which reads standard input",
        ("    0     -          reads standard input, process",),
    ),
    Case("sleeps", 2, "waiting for rank 1, which is asleep", ("-          asleep.*, process",)),
]
TCP = [
    case._replace(transport="tcp")
    for case in SHM
    if case.kind in ("sends", "collective and receive", "broadcast and receive", "any source")
    or case.kind == "two communicators"
]
MORE = [
    case
    for case in [*SHM, *TCP]
    if case.kind in ("tags", "closed", "wait", "wait_any", "alarm", "persistent", "splits", "pipe")
    or case.kind in ("sleeps", "threads", "two communicators", "collective and receive")
    or (case.kind != "sends" and case in TCP)
]
"""Like others: of the exhaustive tier."""
SMOKE = [case for case in SHM if case.kind in ("sends", "wait_all", "awaits", "stopped")]
CASES = [
    *(pytest.param(case, marks=smoke) for case in SMOKE),
    *few([case for case in [*SHM, *TCP] if case not in MORE + SMOKE], MORE),
]


def start(script: Path, case: Case, after_s: float, limit_s: float) -> subprocess.Popen[str]:
    options = ["-n", str(case.size), "--transport", case.transport, "--timeout", str(limit_s)]
    return subprocess.Popen(
        [sys.executable, "-m", "pycoll._launcher", *options, script, case.kind],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYCOLL_WARN_AFTER": str(after_s)},
        text=True,
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def jobs(
    script: Path, request: pytest.FixtureRequest
) -> Iterator[dict[Case, subprocess.Popen[str]]]:
    """Those whose tests will run, but for those that take a processor."""
    own = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in own if hasattr(item, "callspec")]
    with contextlib.ExitStack() as stack:
        started = {}
        for case in [each["case"] for each in parameters if each["case"].kind not in BUSY]:
            started[case] = stack.enter_context(start(script, case, 0.3, LIMIT_S))
            stack.callback(started[case].terminate)
        yield started


def said(job: subprocess.Popen[str], case: Case) -> str:
    """Read what a launcher says up to the table of a case, end it, and return the table.

    Who waits in something else may be told of before, in a table of its own.
    """
    assert job.stderr is not None

    def wanted() -> str | None:
        for found in re.finditer(f"^pycoll-run: {case.heading}.*\n(    .*\n)+", text, re.MULTILINE):
            if all(re.search(row, found[0]) for row in case.rows):
                return found[0]
        return None

    text = ""
    for line in job.stderr:
        text += line
        if wanted():
            break
    job.terminate()
    text += job.stderr.read()  # the rest of the table
    table = wanted()
    assert table is not None, text
    return table


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}, {case.transport}")
def test_the_table_says_who_waits_for_whom(
    case: Case, jobs: dict[Case, subprocess.Popen[str]], script: Path
) -> None:
    with contextlib.ExitStack() as stack:
        job = jobs.get(case) or stack.enter_context(start(script, case, 0.3, LIMIT_S))
        table = said(job, case)
    assert max(map(len, table.splitlines())) <= 100


def test_zero_seconds_are_never(script: Path) -> None:
    with start(script, Case("any source", 2, ""), 0.0, 2.0) as silent:
        assert "deadlock" not in silent.communicate()[1]


def test_what_is_no_number_of_seconds_is_refused(script: Path) -> None:
    job = start(script, Case("sends", 2, ""), float("nan"), LIMIT_S)
    error = job.communicate()[1]
    assert job.returncode == 2
    assert "PYCOLL_WARN_AFTER is 'nan', but must be seconds (0: never)" in error


def test_a_process_that_is_alone_says_that_nobody_will_come() -> None:
    program = """
import pycoll
try:
    pycoll.init().recv(0, timeout=0.3)
except pycoll.OperationTimeout:
    print("late")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYCOLL_WARN_AFTER": "0.1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "late\n"
    assert re.search(r"^pycoll: recv\(source=0.* has waited for .*is alone", done.stderr)
