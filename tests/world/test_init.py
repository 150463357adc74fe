"""Joining a job: what keeps it from meeting is told to everybody, and nobody is silently alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from patience import PATIENCE

# For each (variables, whether init() should fail): what became of it, then a job that is fine.
TRY = """
import json, os, sys
import pycoll
for variables in json.load(sys.stdin):
    os.environ.update(variables)
    try:
        comm = pycoll.init(timeout=1.0)
    except pycoll.Error as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
    else:
        print(json.dumps(f"rank {comm.rank} of {comm.size}"))
    for name in variables:
        del os.environ[name]
comm = pycoll.init()
print(json.dumps([comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node]))
"""

KEY = "0123456789abcdef" * 4
NOWHERE = {"PYCOLL_RENDEZVOUS": "tcp://127.0.0.1:9", "PYCOLL_KEY": KEY}


def try_init(*cases: dict[str, str]) -> list[str]:
    """What init() says in a process that no launcher started, for each set of variables."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRY],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *said, last = map(json.loads, done.stdout.splitlines())
    assert last == [0, 1, 0, 1, 0]
    return said


def place(rank: object, size: object, **more: str) -> dict[str, str]:
    return {"PYCOLL_RANK": str(rank), "PYCOLL_SIZE": str(size)} | NOWHERE | more


def test_without_a_launcher_or_as_its_only_process_a_process_is_a_job_of_its_own() -> None:
    assert try_init() == []
    # Inside a batch job of Slurm, but not in a step of it: srun has not started this process.
    assert try_init({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == [
        "rank 0 of 1"
    ]
    assert try_init({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == ["rank 0 of 1"]


def test_variables_of_another_launcher_or_without_sense_are_an_error() -> None:
    cases = {
        "mpirun .* rank 1 of 4": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        "PMI.* rank 0 of 2": {"PMI_SIZE": "2", "PMI_RANK": "0"},
        "srun .* rank 3 of 8": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"},
        "torchrun .* rank 1 of 2": {"WORLD_SIZE": "2", "RANK": "1"},
        "torchrun .* of two": {"WORLD_SIZE": "two", "RANK": "1"},
        "srun .* rank [?] of 8": {"SLURM_STEP_NUM_TASKS": "8"},
        "PYCOLL_RANK set, but not PYCOLL_SIZE, PYCOLL_R.*, PYCOLL_KEY": {"PYCOLL_RANK": "0"},
        "PYCOLL_SIZE set, but not PYCOLL_RANK, ": {"PYCOLL_SIZE": "1"},
        "KEY set, but not .*, PYCOLL_RENDEZVOUS:": {"PYCOLL_KEY": KEY},
        "PYCOLL_RANK is 7.* PYCOLL_SIZE is 4": place(7, 4),
        "PYCOLL_RANK is 4.* PYCOLL_SIZE is 4": place(4, 4),
        "PYCOLL_RANK is '-1'": place(-1, 4),
        "PYCOLL_RANK is 0.* PYCOLL_SIZE is 0": place(0, 0),
        "PYCOLL_RANK is 'x'": place("x", 4),
        "PYCOLL_SIZE is '1e3'": place(1, "1e3"),
        "PYCOLL_LOCAL_RANK is 2, PYCOLL_LOCAL_SIZE 2": place(
            1, 4, PYCOLL_LOCAL_RANK="2", PYCOLL_LOCAL_SIZE="2"
        ),
        "PYCOLL_KEY is not a hexadecimal key": place(0, 2, PYCOLL_KEY="garbage"),
        "PYCOLL_KEY cannot be the key of a job": place(0, 2, PYCOLL_KEY="abcd"),
        "PYCOLL_RENDEZVOUS is 'garbage', not as tcp:": place(0, 2, PYCOLL_RENDEZVOUS="garbage"),
        "rank 1 cannot join.* cannot reach rank 0: 127.0.0.1 port 9: Connection refused": place(
            1, 2
        ),
        "PYCOLL_OP_TIMEOUT is 'soon'": {"PYCOLL_OP_TIMEOUT": "soon"},
        "PYCOLL_OP_TIMEOUT is '-1'": {"PYCOLL_OP_TIMEOUT": "-1"},
    }
    for expected, said in zip(cases, try_init(*cases.values()), strict=True):
        assert re.match(f"BootstrapError: .*{expected}", said, re.DOTALL), said


def test_a_rank_that_ends_before_it_joins_ends_the_meeting_at_once(job: Any) -> None:
    for ending, reason, status in (
        ("sys.exit(0)", "exit status 0", 0),
        ("sys.exit(4)", "exit status 4", 4),
        ("os.kill(os.getpid(), 9)", "SIGKILL", 137),
    ):
        done = job(
            3,
            f"""
rank = int(os.environ["PYCOLL_RANK"])
if rank == 1:
    {ending}
error_like(pycoll.BootstrapError, "rank 1 ended before it joined.*{reason}", pycoll.init)
ok()
""",
            init="",
        )
        assert done.status == status, done.stderr
        assert done.content == [0, 2], done.stderr


def test_a_rank_that_never_joins_is_named_when_the_time_is_over(job: Any) -> None:
    started = time.monotonic()
    for rank in 0, 1, 3:
        os.mkfifo(job.folder / f"gave up {rank}")
        os.mkfifo(job.folder / f"go on {rank}")
    done = job(
        4,
        """
rank = int(os.environ["PYCOLL_RANK"])
if rank == 2:  # computes until the others have given up
    for name, mode in ("gave up", "r"), ("go on", "w"):
        for other in 0, 1, 3:
            open(f"{sys.argv[1]}/{name} {other}", mode).close()
    sys.exit()
missing = "1[.][5-9] s for the job to meet: .*2.* of 4"
error_like(pycoll.BootstrapError, missing, pycoll.init, timeout=1.5)
ok()
open(f"{sys.argv[1]}/gave up {rank}", "w").close()
open(f"{sys.argv[1]}/go on {rank}").close()
""",
        init="",
    )
    assert done.content == [0, 1, 3], done.stderr
    assert done.status == 0, done.stderr
    assert time.monotonic() - started < 10


def test_a_process_with_the_wrong_key_or_size_is_refused(job: Any) -> None:
    for change, said in (
        ('PYCOLL_KEY="00" * 32', "key"),
        ('PYCOLL_SIZE="3"', "rank 1 of 3.*2 ranks"),
    ):
        done = job(
            2,
            f"""
if os.environ["PYCOLL_RANK"] == "1":
    os.environ.update({change})
    error_like(pycoll.BootstrapError, "{said}", pycoll.init)
else:
    error_like(pycoll.BootstrapError, "rank 1 ended before it joined", pycoll.init, within=20)
rank = os.environ["PYCOLL_RANK"]
ok()
""",
            init="",
        )
        assert done.status == 0, done.stderr
        assert done.content == [0, 1], done.stderr
