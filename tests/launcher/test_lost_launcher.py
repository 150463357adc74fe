"""A launcher that is stopped, or killed together with its guardian: what its ranks say."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiers import few, smoke

from pycoll._launcher import guardian


def guardian_of(launcher: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (found,) = (
        int(pid)
        for pid in children
        if guardian.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


@smoke
@pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))
def test_communicators_made_after_launcher_and_guardian_were_killed_fail_too(
    job: Any, tmp_path: Path, transport: str
) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    command = job.command(
        2,
        f"""
told = open({str(told)!r}, "w")
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
print("ready", flush=True)
gone = "the connection to pycoll-run is gone"
call = (comm.agree, True) if rank else (comm.recv, 1)
error_like(pycoll.Error, gone, *call, timeout=40, within=30)
for call in (comm.agree, True), (comm.shrink,):
    error_like(pycoll.Error, gone, *call, timeout=20, within=15)
after = comm.sub(range(size))
error_like(pycoll.Error, gone, after.barrier, timeout=20, within=15)
error_like(pycoll.Error, gone, after.recv, 1 - rank, timeout=20, within=15)
error_like(pycoll.Error, gone, after.iall_reduce, 1)
told.write(f"{{rank}} ok\\n")
told.close()
os._exit(0)
""",
        "--transport",
        transport,
    )
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout is not None
        with told.open() as reading:
            assert [launcher.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
            os.kill(guardian_of(launcher.pid), signal.SIGKILL)
            launcher.kill()
            assert sorted(reading.read().splitlines()) == ["0 ok", "1 ok"]


def test_a_stopped_launcher_makes_nobody_blame_a_rank_that_is_not_the_cause(job: Any) -> None:
    # Rank 2 dies, and rank 1 gives up for that reason: rank 0, whose only link is that to rank 1,
    # does not know more.
    done = job(
        3,
        """
import pycoll._runtime.membership
pycoll._runtime.membership.VERDICT_S = 0.3
silent = "lost its link to rank %d .*pycoll-run has not answered.*Only pycoll-run knows which rank"
if rank == 0:
    comm.recv(1)  # all have heard from pycoll-run that they are here
    os.kill(os.getppid(), signal.SIGSTOP)
    comm.send(None, 1)
    error = error_of(comm.recv, 1)
    os.kill(os.getppid(), signal.SIGCONT)
    assert type(error) is not pycoll.PeerFailed and isinstance(error, pycoll.Error), repr(error)
    assert re.search(silent % 1, str(error)), str(error)
    error_like(type(error), silent % 1, comm.sub([0, 1]).recv, 1)
    ok()
elif rank == 1:
    comm.send(comm.recv(2), 0)
    comm.send(comm.recv(0), 2)
    comm.recv(2)
else:
    comm.send(None, 1)
    comm.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        "--transport",
        "tcp",
    )
    assert done.content == [0], done.stderr
    assert done.status == 128 + signal.SIGKILL, done.stderr
    assert "pycoll-run: rank 2 failed" in done.stderr
    assert "has lost its link to rank 2" in done.stderr
    assert "rank 1 failed" not in done.stderr


def test_a_timeout_says_that_the_launcher_does_not_answer(job: Any) -> None:
    done = job(
        1,
        """
os.kill(os.getppid(), signal.SIGSTOP)
error = error_of(comm.recv, 0, timeout=0.0)
os.kill(os.getppid(), signal.SIGCONT)
assert type(error) is pycoll.OperationTimeout, repr(error)
assert "pycoll-run, which knows what the others do, does not answer" in str(error), str(error)
ok()
""",
    )
    assert (done.status, done.content) == (0, [0]), done.stderr
