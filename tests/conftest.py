"""What holds for every test: it uses the installed pycoll, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Every process a test starts inherits this variable, and keeps it when its parent has died and
# init has adopted it, so survivors are found without walking a process tree that no longer exists.
# Not named PYCOLL_*: a launcher replaces those.
MARK = ("TEST_RUN_OF_PYCOLL", uuid.uuid4().hex)
os.environ.update([MARK])

SHM = Path("/dev/shm")

# A job's last processes may still be ending when its test has read the job's status: SIGKILL comes
# 4 s after a failure, and a killed process needs a moment on a busy machine.
GRACE_S = 6.0


def survivors() -> set[int]:
    """Pids of living processes, zombies aside, that this test run started."""
    mark, found = "=".join(MARK).encode(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended, or belongs to somebody else
                continue
            if mark in environment.split(b"\0"):
                found.add(int(entry.name))
    return found


def ended(pid: int, deadline: float) -> bool:
    """Wait until `deadline` (of time.monotonic) for the process to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
    finally:
        os.close(descriptor)


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(has ended)"
    return " ".join(word.decode(errors="replace") for word in words).strip()[:200]


def shm_entries() -> dict[str, int]:
    """Name and inode of each file of this user in /dev/shm."""
    found = {}
    with os.scandir(SHM) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if status.st_uid == os.getuid():
                found[entry.name] = status.st_ino
    return found


def held_by_others() -> set[int]:
    """Inodes in /dev/shm that a running process has open or mapped.

    Browsers and sound servers come and go there. What a test has left is held by nobody: its
    processes have ended by the time this is asked.
    """
    device = SHM.stat().st_dev
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for folder in ("fd", "map_files"):
                try:
                    links = list((process / folder).iterdir())
                except OSError:
                    continue
                for link in links:
                    try:
                        status = link.stat()
                    except OSError:
                        continue
                    if status.st_dev == device:
                        found.add(status.st_ino)
    return found


def neighbor(name: str) -> ModuleType:
    """Import a file of this folder, which is on no path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A job of `request.param` ranks: ``ranks(program, *args)`` runs ``program(comm, *args)``.

    The parameter may also be a tuple of the number, a tuple of options, and an environment.
    See ranks_pool.py. Parametrized with scope="module", the tests of one size come one after the
    other, and share the job.
    """
    job = request.param if isinstance(request.param, tuple) else (request.param,)
    pool = neighbor("ranks_pool").Pool(*job)
    yield pool
    pool.close()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Runs a script on ranks: ``job(n, text, *options)``; see script_jobs.py."""
    return neighbor("script_jobs").Jobs(tmp_path)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up CUDA driver, compiled; see fake_cuda.py."""
    fake_cuda = neighbor("fake_cuda")
    try:
        path: Path = fake_cuda.build(tmp_path_factory.mktemp("cuda"))
    except RuntimeError as exc:
        if "needs gcc" not in str(exc):
            raise
        pytest.skip(str(exc))
    return path


@pytest.fixture(autouse=True, scope="session")
def away_from_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests start in an empty folder.

    `python -m` and `python -c` look into the working directory first: in the repository root every
    process that a test starts would run the checkout's pycoll, and not the installed one.
    """
    with contextlib.chdir(tmp_path_factory.mktemp("away")):
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_behind() -> Iterator[None]:
    """Fails the module's last test if a process it started lives on, or /dev/shm has grown."""
    files_before, processes_before = shm_entries(), survivors()
    yield
    deadline = time.monotonic() + GRACE_S
    leftovers = []
    for pid in sorted(survivors() - processes_before):
        if not ended(pid, deadline):
            leftovers.append(f"process {pid}: {command_of(pid)}")
            os.kill(pid, signal.SIGKILL)  # or the next module would be blamed
    grown = {n: i for n, i in shm_entries().items() if files_before.get(n) != i}
    if grown:
        held = held_by_others()
        leftovers += [f"/dev/shm/{n}" for n, i in sorted(grown.items()) if i not in held]
    assert not leftovers, "left behind by this module: " + "; ".join(leftovers)
