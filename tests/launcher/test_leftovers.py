"""Nothing of a job stays behind: not at its end, not after a failure, not after kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_jobs import assert_ended
from patience import PATIENCE
from tiers import smoke

from pycoll._launcher import guardian

RUN = [sys.executable, "-m", "pycoll._launcher"]
LIMIT_S = 60 * PATIENCE

# Starts a daemon as daemons do (a session of its own, adopted by init, no open files), which tells
# its number through a file, and ignores whatever may be ignored.
DAEMON = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.closerange(0, 3)
    folder, rank = sys.argv[1], os.environ["PYCOLL_RANK"]
    with open(f"{folder}/{rank}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}")
    while True:
        signal.pause()
os.wait()
"""
STUBBORN = "trap '' TERM INT HUP; echo $$; while :; do sleep 0.01; done"


class Started:
    """A launcher in a session of its own, whose ranks print the numbers of processes."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*RUN, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def read_pids(self, count: int) -> list[int]:
        assert self.process.stdout is not None
        return [int(self.process.stdout.readline()) for _ in range(count)]

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def guardian(self) -> int:
        (found,) = (
            pid
            for pid in self.children()
            if guardian.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return found


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    with contextlib.ExitStack() as stack:

        def started(*args: str) -> Started:
            launcher = Started(*args)
            stack.enter_context(launcher.process)
            stack.callback(launcher.kill)
            return launcher

        yield started


def shell(n: int, text: str, *options: str) -> list[str]:
    return ["-n", str(n), *options, "--", "sh", "-c", text]


def daemons(folder: Path, count: int) -> list[int]:
    return [int((folder / str(rank)).read_text()) for rank in range(count)]


@pytest.fixture
def daemonize(tmp_path: Path) -> str:
    """A shell command that starts a daemon, which has written its number when the command ends."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    os.mkdir(tmp_path / "pids")
    wait = f"until [ -e {tmp_path}/pids/$PYCOLL_RANK ]; do sleep 0.01; done"
    return f"{sys.executable} {tmp_path}/daemon.py {tmp_path}/pids; {wait}"


# After kill -9 of the launcher.


@pytest.mark.parametrize(
    ("text", "count"),
    [("sleep 1000 & echo $!; echo $$; wait", 4), (STUBBORN, 2), ("echo $$; kill -STOP $$", 2)],
    ids=["children", "ranks that ignore signals", "stopped ranks"],
)
def test_killing_the_launcher_ends_ranks_and_their_children(
    start: Callable[..., Started], text: str, count: int
) -> None:
    launcher = start(*shell(2, text))
    pids = launcher.read_pids(count)
    launcher.kill()
    assert_ended(pids)


@smoke
def test_killing_the_launcher_ends_daemons(
    start: Callable[..., Started], daemonize: str, tmp_path: Path
) -> None:
    launcher = start(*shell(2, f"{daemonize}; echo $$; exec sleep 1000"))
    pids = launcher.read_pids(2) + daemons(tmp_path / "pids", 2)
    launcher.kill()
    assert_ended(pids)


def test_killing_the_launcher_ends_daemons_of_ranks_that_have_ended(
    start: Callable[..., Started], daemonize: str, tmp_path: Path
) -> None:
    rest = '[ "$PYCOLL_RANK" = 1 ] || { echo $$; exec sleep 1000; }'
    launcher = start(*shell(2, f"{daemonize}; {rest}"))
    pids = launcher.read_pids(1)
    while not (tmp_path / "pids" / "1").exists():
        pass
    pids += daemons(tmp_path / "pids", 2)
    launcher.kill()
    assert_ended(pids)


def test_killing_the_launcher_while_it_starts_ranks_ends_those_it_started(
    start: Callable[..., Started],
) -> None:
    launcher = start(*shell(40, "echo $$; exec sleep 1000"))
    started = set[int]()
    while len(started) < 5:
        with contextlib.suppress(FileNotFoundError):
            started.update(launcher.children())
    launcher.kill()
    started.update(launcher.read_pids(0))
    assert launcher.process.stdout is not None
    # The end of the pipe: nothing that inherited it lives. Then what the ranks had printed.
    started.update(int(line) for line in launcher.process.stdout.read().split())
    assert_ended(started)


def test_killing_the_whole_process_group_spares_only_the_guardian_which_ends_the_ranks(
    start: Callable[..., Started],
) -> None:
    launcher = start(*shell(2, "echo $$; exec sleep 1000"))
    pids = launcher.read_pids(2)
    guard = launcher.guardian()
    os.killpg(launcher.pid, signal.SIGKILL)
    assert_ended([*pids, guard])


def test_the_guardian_is_not_ended_by_polite_signals(start: Callable[..., Started]) -> None:
    launcher = start(*shell(1, "echo $$; exec sleep 1000"))
    pids = launcher.read_pids(1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(launcher.guardian(), signum)
    launcher.kill()
    assert_ended(pids)


def test_killing_the_launcher_of_an_outer_job_ends_the_ranks_of_an_inner_one(
    start: Callable[..., Started],
) -> None:
    inner = " ".join([*RUN, "-n", "2", "--", "sh", "-c", "'echo $$; exec sleep 1000'"])
    launcher = start(*shell(2, inner))
    pids = launcher.read_pids(4)
    launcher.kill()
    assert_ended(pids)


def test_the_guardian_notices_the_death_of_a_program_whose_fork_lives_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys
from pycoll._launcher.job_spec import Options
from pycoll._launcher.spawn import Job

def fork(rank, data):
    if (child := os.fork()) == 0:
        signal.pause()
    print(data.decode().strip(), child, flush=True)

Job(["sh", "-c", "echo $$; exec sleep 1000"], Options(1), stdout=fork).run()
""")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        rank, child = (int(pid) for pid in program.stdout.readline().split())
        try:
            program.kill()
            assert_ended([rank])
        finally:
            os.kill(child, signal.SIGKILL)


# At the end of a job.


@smoke
def test_the_end_of_a_job_ends_children_and_daemons(
    start: Callable[..., Started], daemonize: str, tmp_path: Path
) -> None:
    launcher = start(*shell(2, f"{daemonize}; sleep 1000 & echo $!"))
    pids = launcher.read_pids(2)
    assert launcher.wait() == 0
    # The launcher itself has seen to it: they are gone when it is.
    assert_ended(pids + daemons(tmp_path / "pids", 2), limit_s=0.0)


def test_the_guardian_ends_with_the_job(start: Callable[..., Started]) -> None:
    launcher = start(*shell(1, "echo $$; exec sleep 1000"))
    (pid,) = launcher.read_pids(1)
    guard = launcher.guardian()
    os.kill(pid, signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGTERM
    assert_ended([guard], limit_s=0.0)


def test_a_failure_kills_ranks_and_children_that_ignore_the_request_to_end(
    start: Callable[..., Started],
) -> None:
    rest = f'sh -c "{STUBBORN.replace("$", chr(92) + "$")}" & {STUBBORN}'
    launcher = start(*shell(2, f'if [ "$PYCOLL_RANK" = 0 ]; then read x; exit 3; fi; {rest}'))
    before = time.monotonic()
    pids = launcher.read_pids(2)
    assert launcher.wait() == 3
    assert_ended(pids, limit_s=0.0)
    assert time.monotonic() - before < 15


def test_a_failure_asks_children_to_end_before_it_kills_them(start: Callable[..., Started]) -> None:
    polite = "trap 'echo $$; exit 0' TERM; while :; do sleep 0.01; done"
    launcher = start(*shell(2, f'[ "$PYCOLL_RANK" = 1 ] || exit 3; ({polite}) & {polite}'))
    assert launcher.wait() == 3
    assert len(launcher.read_pids(2)) == 2


def test_a_job_that_cannot_start_leaves_nothing(start: Callable[..., Started]) -> None:
    launcher = start("-n", "4", "--", "/no/such/program")
    assert launcher.wait() == 127
    assert launcher.process.stdout is not None
    assert launcher.process.stdout.read() == b""


# The sweep itself.


def test_a_sweep_takes_the_processes_of_the_job_and_no_other() -> None:
    job = "0123456789abcdef"
    environment = {name: text for name, text in os.environ.items() if name != "PYCOLL_JOB"}
    marked, other, session = (
        subprocess.Popen(["sleep", "1000"], env=environment | more, start_new_session=True)
        for more in ({"PYCOLL_JOB": job}, {"PYCOLL_JOB": job + "0"}, {})
    )
    try:
        assert guardian.sweep({session.pid}, job) == {marked.pid, session.pid}
        assert other.poll() is None
        assert marked.wait(LIMIT_S) == session.wait(LIMIT_S) == -signal.SIGKILL
        assert guardian.sweep({session.pid}, job) == set()
    finally:
        for process in (marked, other, session):
            process.kill()
            process.wait(LIMIT_S)
