"""What holds for every test: it uses the installed pycoll, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import hypothesis
import pytest
from patience import PATIENCE
from pool_scripts import Scripts
from ranks_pool import POOL, Pools
from script_jobs import Jobs

# Asserts in what tests share say what they compared, as those in tests do.
HELPERS = Path(fake_cuda.__file__).parent
pytest.register_assert_rewrite(*{file.stem for file in HELPERS.glob("*.py")} - sys.modules.keys())

# Every process a test starts inherits this variable, and keeps it when its parent has died and
# init has adopted it, so survivors are found without walking a process tree that no longer exists.
# Not named PYCOLL_*: a launcher replaces those.
MARK = ("TEST_RUN_OF_PYCOLL", uuid.uuid4().hex)
os.environ.update([MARK])

# Examples of a property; more with --hypothesis-profile many. Some tests say themselves how many.
# No deadlines: on a busy machine they fail what is well.
hypothesis.settings.register_profile("few", max_examples=30, deadline=None)
hypothesis.settings.register_profile("many", max_examples=300, deadline=None)
hypothesis.settings.load_profile("few")

SHM = Path("/dev/shm")

TESTS = Path(__file__).resolve().parent

# Marks of tests that run where what they test was changed or they are named, and the beginnings of
# their files' paths.
BY_PATH = {
    "gpu": ("cuda/", "gpu/"),
    "rdma": ("transports/test_rdma", "transports/test_simulated", "transports/test_registrations"),
    "launchers": (
        "functions/test_pool",
        "functions/test_run_",
        "launcher/test_agent",
        "launcher/test_encryption",
        "launcher/test_engine_nodes",
        "launcher/test_first_cause",
        "launcher/test_foreign",
        "launcher/test_grace",
        "launcher/test_kept_calls",
        "launcher/test_leftovers",
        "launcher/test_lost_launcher",
        "launcher/test_nodes",
        "launcher/test_open_ports",
        "launcher/test_recorder",
        "launcher/test_restarts",
        "launcher/test_secrets",
        "launcher/test_status",
        "launcher/test_survive",
        "launcher/test_top",
        "launcher/test_trace.py",
        "launcher/test_user_signals",
        "launcher/test_waiting",
    ),
    "tools": (
        "drawing/test_pictures",
        "schedules/test_simulate",
        "tools/test_bench.py",
        "tools/test_info",
        "tools/test_pytest_",
        "tools/test_simulate.py",
        "tools/test_tune",
        "topology/test_links",
        "topology/test_machine",
        "topology/test_search",
    ),
    "core": (
        "core/test_alias",
        "core/test_core_channel",
        "core/test_core_drive",
        "core/test_core_engine",
        "core/test_core_link",
        "core/test_core_match",
        "core/test_core_protocols",
        "core/test_core_run",
        "core/test_core_scratch",
        "core/test_core_tcp",
    ),
}

# A job's last processes may still be ending when its test has read the job's status: SIGKILL comes
# 4 s after a failure, and a killed process needs a moment on a busy machine.
GRACE_S = 6.0 * PATIENCE

# Else each of the interpreters that tests start, and these are thousands, compiles the pycoll of a
# checkout, and each process of pytest-xdist rewrites all asserts for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Else each that imports NumPy starts threads on all cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# pytest-timeout's limit for one test: it ends one that hangs, with every thread's stack.
os.environ.setdefault("PYTEST_TIMEOUT", str(120 * PATIENCE))

# Under nohup, or in the background of a shell, signals are ignored, which programs inherit: ranks
# would, too. What is caught they do not inherit. So this process catches and does nothing.
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)

# pytest-xdist begins with these modules, which take longest: one of them alone at the end would
# have one process busy. What `pytest --durations=0` says, summed by module, orders them.
LONGEST = (
    "test_failure_of_calls",
    "test_failure",
    "test_deadlines",
    "test_join",
    "test_shared_memory_waits",
    "test_shared_arrays_of_others",
    "test_shared_arrays",
    "test_last_calls",
    "test_groups",
    "test_core_requests",
    "test_shared_memory",
    "test_transports",
    "test_requests_end",
    "test_uneven",
    "test_uneven_out",
    "test_finalize",
    "test_core_bindings",
    "test_tcp",
    "test_core_objects",
    "test_launcher_output",
    "test_collectives",
    "test_fork_threads",
    "test_rendezvous_strangers",
    "test_launcher",
    "test_packaging",
    # of other tiers
    "test_pytest_plugin",
    "test_foreign",
    "test_waiting",
    "test_status",
    "test_agents",
    "test_nodes",
    "test_run_function_errors",
    "test_bench",
    "test_core_run",
)


# The folders whose tests come first, and whose failures are printed as they happen; see .ci/run.
FIRST = os.environ.get("TEST_FIRST_OF_PYCOLL", "").split()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores for whole runs: tests wait a lot. None for a few files."""
    few = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return 0 if few else min(len(os.sched_getaffinity(0)) + 1, 5)


def runs_all(config: pytest.Config) -> bool:
    """Whether no file or folder is named."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the cyclic garbage collector away from all tests and their modules.

    There are so many that a search among them takes a quarter of a second. Tests search often, and
    so does each pytest that runs in one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def place(stem: str) -> int:
    """A module's place in the order in which pytest-xdist hands them out."""
    return LONGEST.index(stem) if stem in LONGEST else len(LONGEST)


def pytest_itemcollected(item: pytest.Item) -> None:
    name = item.path.relative_to(TESTS).as_posix()
    for mark, beginnings in BY_PATH.items():
        if name.startswith(beginnings):
            item.add_marker(mark)


def share_rewriting(config: pytest.Config, number: int, count: int) -> None:
    """Have each process of pytest-xdist begin to collect in another folder.

    All of them import all modules. Who imports one first rewrites its asserts, for all: that takes
    longer than all else, and where every process has the same order, each does it for itself.
    """
    ignored = [Path(path).absolute() for path in config.option.ignore or ()]
    folders = sorted(
        {
            path.parent
            for path in TESTS.rglob("test_*.py")
            if not any(map(path.is_relative_to, ignored))  # pytest does not where it is named
        }
    )
    first = number * len(folders) // count
    config.args = [str(folder) for folder in folders[first:] + folders[:first]]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[bool, int, Path]:
        return item.path.parent.name not in FIRST, place(item.path.stem), item.path

    items.sort(key=order)
    words = re.findall(r"\w+", config.option.markexpr)
    unnamed = [mark for mark in BY_PATH if mark not in words]
    here = config.invocation_params.dir
    named = [here / argument.partition("::")[0] for argument in config.args]
    named = [path for path in named if TESTS in path.parents and not runs_all(config)]
    left_out = []
    for item in items:
        by_path = any(item.get_closest_marker(mark) for mark in unnamed)
        is_smoke = item.get_closest_marker("smoke")
        if by_path and not is_smoke and not any(map(item.path.is_relative_to, named)):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


# Where the tools of a tier were installed, a test that is skipped for want of one has not shown
# what it should. The variable says which reasons are good ones; see .ci/run.
SKIPS = "TEST_SKIPS_OF_PYCOLL"
SKIPPED_WITHOUT_NEED = 10  # an exit status that pytest itself does not use
skipped_without_need: list[str] = []

# What fails before or after a test, or ends a worker, may be another test's doing: it says nothing
# if the same test passes alone.
FAILED_BESIDE = 11
failed_beside: list[str] = []


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed and getattr(report, "when", "collect") != "call":
        failed_beside.append(report.nodeid)
    allowed = os.environ.get(SKIPS)
    if allowed is not None and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not hasattr(report, "wasxfail") and not re.search(allowed, reason):
            skipped_without_need.append(f"{report.nodeid}: {reason}")


pytest_runtest_logreport = pytest_collectreport = note


class EarlyFailures:
    """Prints each failure at once, and not only at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid}\n{report.longreprtext}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if worker and runs_all(config):
        share_rewriting(config, int(worker["workerid"][len("gw") :]), worker["workercount"])
    if FIRST and not hasattr(config, "workerinput"):
        config.pluginmanager.register(EarlyFailures(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if failed_beside:
        session.exitstatus = FAILED_BESIDE
    if skipped_without_need:
        session.exitstatus = SKIPPED_WITHOUT_NEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in skipped_without_need:
        terminalreporter.write_line(f"skipped, though its tools should be here: {line}", red=True)


def survivors(but: tuple[str, str] | None = None) -> set[int]:
    """Pids of living processes, zombies aside, that this test run started.

    Args:
        but: without those that have this variable.
    """
    mark, found = "=".join(MARK).encode(), set()
    other = "=".join(but).encode() if but else None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended, or belongs to somebody else
                continue
            variables = environment.split(b"\0")
            if mark in variables and other not in variables:
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


def left_in_shm(before: dict[str, int]) -> list[str]:
    """Files in /dev/shm that were not there before, which nobody has, and which stay.

    Another worker's process that has just ended may have had one: who started it removes it soon.
    """
    deadline = time.monotonic() + GRACE_S
    while True:
        grown = {name: inode for name, inode in shm_entries().items() if before.get(name) != inode}
        held = held_by_others() if grown else set()
        left = sorted(name for name, inode in grown.items() if inode not in held)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def end(pids: set[int]) -> list[str]:
    """Give processes time to end, then kill them; say which had to be killed."""
    deadline = time.monotonic() + GRACE_S
    killed = []
    for pid in sorted(pids):
        if not ended(pid, deadline):
            killed.append(f"process {pid}: {command_of(pid)}")
            os.kill(pid, signal.SIGKILL)  # or the next module would be blamed
    return killed


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Jobs that stay up from module to module; see ranks_pool.py."""
    kept = Pools()
    yield kept
    kept.close()
    left = end(survivors())
    assert not left, "left behind by programs on pools of ranks: " + "; ".join(left)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, pools: Pools) -> Any:
    """A job of `request.param` ranks: ``ranks(program, *args)`` runs ``program(comm, *args)``.

    The parameter may also be a tuple of the number, a tuple of options, and an environment.
    See ranks_pool.py. Parametrized with scope="module", the tests of one size come one after the
    other.
    """
    return pools(*(request.param if isinstance(request.param, tuple) else (request.param,)))


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Runs a script on ranks: ``job(n, text, *options)``; see script_jobs.py."""
    return Jobs(tmp_path)


@pytest.fixture
def scripts(pools: Pools) -> Scripts:
    """Runs a script on a pool of ranks: ``scripts(n, text, transport)``; see pool_scripts.py."""
    return Scripts(pools)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up CUDA driver, compiled; see fake_cuda.py."""
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
    files_before, processes_before = shm_entries(), survivors(but=POOL)
    yield
    leftovers = end(survivors(but=POOL) - processes_before)
    leftovers += [f"/dev/shm/{name}" for name in left_in_shm(files_before)]
    assert not leftovers, "left behind by this module: " + "; ".join(leftovers)
