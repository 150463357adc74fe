"""`pycoll status` of jobs whose ranks are in every state that it can tell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher_jobs import started
from patience import PATIENCE
from tiers import smoke

from pycoll._tools import jobs
from pycoll.errors import Error

LIMIT_S = 60 * PATIENCE

SCRIPT = """
import ctypes, os, signal, sys, threading, time
import pycoll

def nap():
    time.sleep(1000)

def count():
    return sum(range(10**15))  # holds Python's lock

comm = pycoll.init()
comm.barrier()
if comm.rank == 0:
    sys.stdin.read()
elif comm.rank == 1:
    comm.recv(0)
elif comm.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
elif comm.rank == 3:
    count()
elif comm.rank == 4:
    threading.Thread(target=nap, name="napper").start()
elif comm.rank == 5:
    while True:
        pass
elif comm.rank == 6:
    threading.Thread(target=nap).start()
    exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    ctypes.CDLL(None).syscall(exit_thread, 0)
"""

WAITS = """
import pycoll
comm = pycoll.init()
print(comm.rank, flush=True)
comm.recv(0, tag=comm.rank)
"""

REMOTE = """
import os, subprocess, sys
import pycoll
comm = pycoll.init()
if comm.rank == 0:
    job = os.environ["PYCOLL_JOB"][:8]
    command = [sys.executable, "-m", "pycoll", "status", job, "--json"]
    while True:  # until the launcher has heard that rank 1 waits
        found = subprocess.run(command, capture_output=True, text=True).stdout
        if '"which": "#0"' in found:
            break
    print(found)
comm.barrier()
"""


def status(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pycoll", "status", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def of(process: int, *words: str) -> dict[str, Any]:
    done = status(str(process), "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def until(process: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that is as wanted: ranks come to where they stay at their own time."""
    deadline = time.monotonic() + LIMIT_S
    found: dict[str, Any] = {}
    while True:
        with contextlib.suppress(Error):  # the job has not begun
            found = jobs.find(str(process)).ask("status")
            if wanted(found):
                return of(process)
        assert time.monotonic() < deadline, json.dumps(found, indent=1)
        time.sleep(0.05)


def innermost(rank: dict[str, Any], name: str = "main thread") -> list[str]:
    """The functions of a thread of a rank, the innermost first."""
    (thread,) = [each for each in rank["threads"] if each["name"] == name]
    return [what for _, _, what in thread["frames"]]


@pytest.fixture(autouse=True)
def folder(sockets: Path) -> Path:
    return sockets


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int, str], subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as stack:

        def start(size: int, script: str) -> subprocess.Popen[bytes]:
            program = tmp_path / "script.py"
            program.write_text(script)
            return stack.enter_context(started("-n", str(size), str(program)))

        yield start


Start = Callable[[int, str], subprocess.Popen[bytes]]


def test_every_rank_is_shown_as_it_is_whatever_its_main_thread_does(job: Start) -> None:
    process = job(7, SCRIPT)

    def are_there(found: dict[str, Any]) -> bool:
        states = [rank["state"] for rank in found["ranks"]]
        return (
            len(states) == 7
            and states[0] == "reads standard input"
            and found["ranks"][1]["waits_in"] is not None
            and states[2] == "stopped"
            and states[3] == "running"
            and found["ranks"][3]["threads"] is None
            and "its main thread has ended" in states[4]
            and states[5] == "running"
            and states[6] == "running on without its main thread"
        )

    found = until(process.pid, are_there)
    ranks = found["ranks"]
    assert found["heading"] == "waiting for rank 0, which reads standard input"
    assert ranks[1]["waits_in"]["call"].startswith("recv(")
    assert ranks[1]["waits_in"]["where"] == "script.py:16"
    assert ranks[1]["waits_in"]["for"] == [0]
    assert innermost(ranks[0])[-1] == "<module>"
    assert ranks[2]["threads"] is None
    assert innermost(ranks[4], "thread napper")[0] == "nap"
    assert innermost(ranks[5]) == ["<module>"]
    assert not found["deadlock"]

    said = status(str(process.pid)).stdout
    assert "waiting for rank 0, which reads standard input\n    rank  waits for  in\n" in said
    assert "rank 2:\n    no stacks: it is stopped" in said
    assert "rank 3:\n    no stacks: it is running, in something that does not let go of" in said
    assert ":9 count" not in said  # as nobody can look
    assert "    thread napper\n" in said
    assert re.search(r"script.py:2[45] <module>\n", said)


def test_a_deadlock_is_told_at_once_and_ranks_that_do_the_same_are_shown_once(job: Start) -> None:
    process = job(2, "import pycoll\ncomm = pycoll.init()\ncomm.recv(1 - comm.rank)\n")
    found = until(process.pid, lambda found: bool(found["deadlock"]))
    assert found["heading"] == "deadlock: rank 0 waits for 1, which waits for 0"
    said = status(str(process.pid)).stdout
    assert said.count("script.py:3 <module>") == 1
    assert "\nranks 0-1:\n    main thread\n        (in pycoll)\n" in said


def test_a_rank_that_has_not_joined_is_shown_too(job: Start) -> None:
    process = job(1, "import time\ntime.sleep(1000)\n")
    found = until(process.pid, lambda found: "asleep" in json.dumps(found["ranks"]))
    assert found["ranks"][0]["state"].endswith("has not called pycoll.init()")
    assert found["ranks"][0]["threads"] is None


@smoke
def test_ranks_in_init_wait_for_those_that_have_not_called_it(job: Start) -> None:
    late = "import os, time\nif os.environ['PYCOLL_RANK'] == '1':\n    time.sleep(1000)\n"
    process = job(3, f"{late}import pycoll\npycoll.init()\n")

    def have_joined(found: dict[str, Any]) -> bool:
        return sum(bool(rank["process"]) for rank in found["ranks"]) == 2

    found = until(process.pid, have_joined)
    assert found["heading"] == "waiting for rank 1, which has not called pycoll.init()"
    assert [rank["state"].rpartition(", ")[2] for rank in found["ranks"]] == [
        "in pycoll.init()",
        "has not called pycoll.init()",
        "in pycoll.init()",
    ]
    assert found["table"][0] == found["heading"]


def test_ranks_of_other_hosts_answer_through_their_agents(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run("-x", "XDG_RUNTIME_DIR", "-H", "localhost:1,other:1", script=REMOTE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["host"] for rank in found["ranks"]] == ["localhost", "other"]
    assert "run" in innermost(found["ranks"][0])
    assert innermost(found["ranks"][1])[-1] == "<module>"
    assert found["ranks"][1]["waits_in"]["for"] == [0]


def test_jobs_are_listed_and_named_by_their_process_or_the_beginning_of_their_id(
    job: Start,
) -> None:
    first, second = job(1, WAITS), job(1, WAITS)
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
    done = status("--json")
    assert done.returncode == 0, done.stderr
    listed = {each["process"]: each for each in json.loads(done.stdout)}
    assert {first.pid, second.pid} <= listed.keys()
    assert listed[first.pid]["size"] == 1
    assert listed[first.pid]["command"][-1].endswith("script.py")
    assert of_id(listed[second.pid]["job"][:6])["process"] == second.pid
    done = status("none")
    assert done.returncode == 1
    assert done.stderr == "pycoll status: no job none of this user runs on this machine\n"


def of_id(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(status(name, "--json").stdout)
    return found


def gone(path: Path) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


def test_nothing_is_left_of_a_job_whose_launcher_is_killed(job: Start, folder: Path) -> None:
    process = job(1, WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    (path,) = folder.iterdir()
    assert path.name.startswith(f"{process.pid}.")
    assert folder.stat().st_mode & 0o777 == 0o700
    process.kill()
    assert gone(path)
    assert gone(folder)


def test_what_a_job_leaves_that_is_killed_with_its_guardian_is_removed_by_who_looks(
    job: Start, folder: Path
) -> None:
    process = job(1, WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in map(int, children):
        if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
        else:
            rank = pid
    process.kill()
    process.wait(LIMIT_S)
    os.kill(rank, signal.SIGKILL)
    assert list(folder.iterdir())
    assert status(str(process.pid)).returncode == 1
    assert not folder.exists()


def test_a_folder_that_others_may_enter_is_not_used(job: Start, folder: Path) -> None:
    folder.mkdir(mode=0o755)
    process = job(1, WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    assert list(folder.iterdir()) == []
    assert of(process.pid)["size"] == 1  # in the next folder


def test_who_names_a_job_waits_for_no_other(job: Start, folder: Path) -> None:
    process = job(1, WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(folder / "1.0123abcd"))
        silent.listen()
        silent.setblocking(False)
        assert of(process.pid)["size"] == 1
        with pytest.raises(BlockingIOError):
            silent.accept()
        assert status().returncode == 0
        silent.accept()[0].close()  # where none is named all are asked


def test_native_stacks_without_py_spy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = status("--native")
    assert done.returncode == 2
    assert "--native needs py-spy" in done.stderr


FAKE = """#!/bin/sh
[ "$1 $2 $4" = "dump --pid --native" ] || exit 9
case $0 in
*good*) echo 'Thread 1 (idle): "MainThread"'; echo; echo "    work (lib.c:7)" ;;
*denied*) echo "Error: Permission denied (os error 13)" >&2; exit 1 ;;
*) printf 'Error: it has gone\\nStack backtrace:\\n  0: main\\n' >&2; exit 1 ;;
esac
"""


def test_native_stacks_are_those_of_py_spy_or_why_it_has_none(
    job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = job(
        2,
        "import os, pycoll, signal\ncomm = pycoll.init()\ncomm.barrier()\n"
        "os.kill(os.getpid(), signal.SIGSTOP) if comm.rank else comm.recv(1)\n",
    )
    until(process.pid, lambda found: found["ranks"] and found["ranks"][1]["state"] == "stopped")
    for kind, wanted in {
        "good": [
            "by py-spy, with frames in C:",
            'Thread 1 (idle): "MainThread"',
            "    work (lib.c:7)",
        ],
        "denied": [
            "py-spy may not look into process {0}: call pycoll status as root, or see",
            "docs/status.md (Frames in C)",
        ],
        "gone": ["py-spy: Error: it has gone"],
    }.items():
        (tmp_path / kind).mkdir()
        fake = tmp_path / kind / "py-spy"
        fake.write_text(FAKE)
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / kind}:/usr/bin:/bin")
        waiting, stopped = of(process.pid, "--native")["ranks"]
        assert waiting["native"] == [line.format(waiting["process"]) for line in wanted]
        assert "native" not in stopped
