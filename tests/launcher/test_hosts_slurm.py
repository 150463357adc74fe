"""`pycoll-run` in allocations of a real Slurm on pretended hosts: `pytest -m hosts`, as root."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hosts_bed
import pytest
import slurm_bed
from hosts_bed import PYCOLL_RUN
from hosts_jobs import EMPTY_S, LOOP, NAMED_S, ORACLE, Running, job, until_empty
from patience import PATIENCE
from slurm_bed import Slurm

pytestmark = pytest.mark.hosts

Script = Callable[[str], str]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := hosts_bed.why_not() or slurm_bed.why_not():
        pytest.skip(why)
    with hosts_bed.bed(tmp_path_factory.mktemp("hosts"), 3, decoy=True) as bed:
        running = Slurm(bed)
        running.start()
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(slurm: Slurm) -> Iterator[None]:
    yield
    for name in slurm.bed.names:
        until_empty(slurm.bed, name, 10.0)


def where(output: str) -> list[str]:
    """By rank, the host that it has printed."""
    found = {
        int(words[0]): words[4] for line in output.splitlines() if len(words := line.split()) == 5
    }
    return [found[rank] for rank in sorted(found)]


def test_salloc_needs_no_option(slurm: Slurm, script: Script) -> None:
    words = ["salloc", "-Q", "-N2", "--ntasks-per-node=2", *PYCOLL_RUN, script(ORACLE)]
    done = slurm.run(*words, timeout=PATIENCE * 60)
    assert done.returncode == 0, done.stderr
    assert where(done.stdout) == ["hosta", "hosta", "hostb", "hostb"]


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [("block", ["hosta", "hosta", "hostb", "hostb"]), ("cyclic", ["hosta", "hostb"] * 2)],
)
def test_a_batch_script_needs_no_option(
    slurm: Slurm, script: Script, tmp_path: Path, distribution: str, hosts: list[str]
) -> None:
    batch = tmp_path / "batch.sh"
    head = f"#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=2 --distribution={distribution}\n"
    batch.write_text(f"{head}{' '.join(PYCOLL_RUN)} {script(ORACLE)}\n")
    out = tmp_path / "out"
    done = slurm.run("sbatch", "-W", "-o", str(out), str(batch), timeout=PATIENCE * 60)
    assert done.returncode == 0, out.read_text()
    assert where(out.read_text()) == hosts


def test_n_may_be_more_or_less_than_tasks(slurm: Slurm, script: Script) -> None:
    for ranks, hosts in (
        ("1", ["hosta"]),
        ("6", ["hosta", "hosta", "hostb", "hostb", "hostc", "hostc"]),
    ):
        words = ["salloc", "-Q", "-N3", "--ntasks-per-node=1", *PYCOLL_RUN, "-n", ranks]
        done = slurm.run(*words, script(WHERE), timeout=PATIENCE * 60)
        assert done.returncode == 0, done.stderr
        assert where(done.stdout) == hosts


WHERE = """
import os, pycoll
comm = pycoll.init()
print(comm.rank, comm.node, comm.local_rank, comm.local_size, os.uname().nodename)
"""


def test_each_task_of_srun_may_start_a_job_of_its_own(slurm: Slurm, script: Script) -> None:
    words = ["srun", "-Q", "-N2", "--ntasks-per-node=1", *PYCOLL_RUN, "-n", "2", script(WHERE)]
    done = slurm.run(*words, timeout=PATIENCE * 60)
    assert done.returncode == 0, done.stderr
    assert (
        sorted(line.split()[4] for line in done.stdout.splitlines())
        == ["hosta"] * 2 + ["hostb"] * 2
    )
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"0"}


def in_allocation(slurm: Slurm) -> list[str]:
    return ["env", f"SLURM_CONF={slurm.conf}", "salloc", "-Q", "-N2", "--ntasks-per-node=2"]


def test_a_rank_that_dies_gives_the_status(slurm: Slurm, script: Script) -> None:
    program = script("import os; print('pid', os.environ['RANK'], os.getpid(), flush=True)" + LOOP)
    with job(slurm.bed, program, under=in_allocation(slurm)) as running:
        pid = next(line.split()[-1] for line in running.lines if "pid 3 " in line)
        slurm.bed.run("hostb", "kill", "-9", pid)
        assert running.end(NAMED_S) == 137
        assert "rank 3 failed after" in running.said
        told = [line for line in running.lines if line.startswith("PeerFailed: rank 3 failed")]
        assert len(told) >= 3


def test_nothing_outlives_the_launcher_and_no_one_can_read_the_key(
    slurm: Slurm, script: Script
) -> None:
    program = script("import os; print('key', os.environ['PYCOLL_KEY'])\n" + LOOP)
    with job(slurm.bed, program, under=in_allocation(slurm)) as running:
        key = next(line.split()[-1] for line in running.lines if "key " in line)
        for host in slurm.bed.names:
            assert key not in "".join(slurm.bed.processes(host))
        slurm.bed.signal("hosta", signal.SIGKILL, "pycoll._launcher ")
        for host in slurm.bed.names:
            until_empty(slurm.bed, host, EMPTY_S)


def test_a_host_without_a_cable_is_named(slurm: Slurm, script: Script) -> None:
    with job(slurm.bed, script(LOOP), under=in_allocation(slurm)) as running:
        slurm.bed.cut("hostb")
        try:
            took = running.until("lost with its host hostb: no sign of life for", NAMED_S)
            assert took < PATIENCE * NAMED_S
            assert running.end(EMPTY_S) == 1
            until_empty(slurm.bed, "hostb", EMPTY_S)
        finally:
            slurm.bed.heal("hostb")


# Without pycoll-run: tasks of srun join by themselves.

KINDS = {"munge": [], "PMI": ["--mpi=pmi2"]}


AS_SLURM_SAYS = """
own = [int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NODEID", "LOCALID")]
assert own == [comm.rank, comm.node, comm.local_rank], own
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words", [["-N2", "--ntasks-per-node=2"], ["-N2", "-n4", "-m", "cyclic"], ["-N2", "-n4"]]
)
def test_tasks_of_srun_are_ranks(slurm: Slurm, script: Script, kind: str, words: list[str]) -> None:
    program = script(ORACLE + AS_SLURM_SAYS)
    done = slurm.run(
        "srun", "-Q", *KINDS[kind], *words, sys.executable, program, timeout=PATIENCE * 60
    )
    assert done.returncode == 0, done.stderr
    assert len(where(done.stdout)) == 4


def test_a_task_that_dies_is_told_to_the_others(slurm: Slurm, script: Script) -> None:
    told = "print('pid', os.environ['SLURM_PROCID'], os.uname().nodename, os.getpid())\n"
    program = script("import os\n" + told + LOOP)
    command = ["srun", "-Q", "-N2", "--ntasks-per-node=2", sys.executable, "-u", program]
    running = Running(slurm.bed, "env", f"SLURM_CONF={slurm.conf}", *command)
    running.until("ready", 30.0, 4)
    host, pid = next(line.split()[-2:] for line in running.lines if "pid 3 " in line)
    assert slurm.bed.run(host, "kill", "-9", pid).returncode == 0
    running.until("PeerFailed: rank 3 failed: its process ended", NAMED_S, 3)
    assert running.end(NAMED_S) != 0


def test_no_one_can_read_the_key_of_tasks(slurm: Slurm, script: Script) -> None:
    command = ["srun", "-Q", "-N2", "--ntasks-per-node=2", sys.executable, script(KEY + LOOP)]
    running = Running(slurm.bed, "env", f"SLURM_CONF={slurm.conf}", *command)
    running.until("ready", 30.0, 4)
    keys = {line.split()[-1] for line in running.lines if line.startswith("key ")}
    assert len(keys) == 1
    key = keys.pop()
    for host in slurm.bed.names:
        assert key not in "".join(slurm.bed.processes(host))
    for log in slurm.bed.folder.glob("*.log"):
        assert key not in log.read_text(errors="replace")
    slurm.bed.signal("hosta", signal.SIGTERM, "^srun")
    running.end(EMPTY_S)


KEY = """
import pycoll._world.session
join = pycoll._world.session.join
def tell(place, *more):
    print("key", place.key.hex(), flush=True)
    return join(place, *more)
pycoll._world.session.join = tell
"""
