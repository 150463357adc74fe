"""SIGUSR1 and SIGUSR2, by which batch systems warn: they are for the ranks, of all hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher_jobs import shell
from tiers import smoke

import pycoll

Run = Callable[..., subprocess.CompletedProcess[str]]

# The parent is a shell, as in a wrapper, and BY is what has started that. A rank says by a file
# that it has got both signals, and waits in pycoll meanwhile, but for rank 0.
HEED = """
import os, pathlib, signal, subprocess, sys, time
import pycoll
folder = pathlib.Path(sys.argv[1])
got = set()

def heed(signum, frame):
    got.add(signum)
    if len(got) == 2:
        (folder / f"got.{comm.rank}").touch()

child = subprocess.Popen(["sleep", "1000"])
comm = pycoll.init()
signal.signal(signal.SIGUSR1, heed)
signal.signal(signal.SIGUSR2, heed)
comm.barrier()
if comm.rank == 0:
    os.kill(int(os.environ["BY"]), signal.SIGUSR1)
if comm.rank == comm.size - 1:
    os.kill(int(os.environ["BY"]), signal.SIGUSR2)
if comm.rank == 0:
    while len(list(folder.glob("got.*"))) < comm.size:
        time.sleep(0.01)
comm.broadcast("all have got both" if comm.rank == 0 else None)
assert child.poll() is None
print(comm.node)
"""


def test_they_reach_the_ranks_of_all_hosts_and_nothing_else(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "heed.py"
    script.write_text(HEED)
    # The first goes to pycoll-run, the second to its launcher on the other host.
    wrapper = f"BY=$PPID {sys.executable} {script} {tmp_path}; exit $?"
    done = run("-H", "localhost:1,other:2", "--", "sh", "-c", wrapper, PYCOLL_ENCRYPT="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == ["0", "1", "1"]


@smoke
def test_a_rank_without_a_handler_ends_and_is_told_why() -> None:
    done = shell(2, "[ $PYCOLL_RANK = 0 ] && kill -USR1 $PPID; while :; do sleep 0.01; done")
    assert done.returncode == 128 + signal.SIGUSR1
    assert b"killed by signal 10 (SIGUSR1)\n" in done.stderr
    assert b"pycoll-run: SIGUSR1 was passed on to all ranks, and ends a program" in done.stderr


def test_before_there_are_ranks_they_end_nothing(run: Run) -> None:
    done = run("-H", "other:2", script="print('well')", before="kill -USR2 $PPID")
    assert (done.returncode, done.stdout) == (0, "well\nwell\n")
    assert "pycoll-run: SIGUSR2 came before the ranks had started: nobody got it\n" in done.stderr


def test_those_of_a_program_that_runs_a_function_on_ranks_stay_its_own() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: got.append(signum))
    try:
        parent = os.getpid()

        def warn(comm: Any) -> int:
            os.kill(parent, signal.SIGUSR1)
            return int(comm.rank)

        assert pycoll.run(warn, 2) == [0, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(got) == {signal.SIGUSR1}
