"""pycoll.run: what it raises, and what it leaves."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from last_calls import beside_requests, of_requests
from patience import PATIENCE
from run_cases import LIMIT_S, ROOT, rank_plus
from tiers import exhaustive, smoke

import pycoll
from pycoll.errors import Error, MismatchError, OperationTimeout, PeerFailed, TransportError


class LabError(Exception):
    """Has an attribute `rank` of its own."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.rank = "mine"


class TwoArgumentsError(Exception):
    """Can be pickled but not unpickled: it gives its base one argument and takes two."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_on(rank: int, error: BaseException) -> Callable[[Any], None]:
    """A function that raises on one rank while the others wait for it."""

    def fn(comm: Any) -> None:
        if comm.rank == rank:
            raise error
        comm.barrier()

    return fn


def open_files() -> set[str]:
    """What the descriptors of this process stand for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def test_an_exception_is_not_printed_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError):
        pycoll.run(raise_on(1, KeyError("gone")), 3)
    assert capfd.readouterr() == ("", "")


@smoke
def test_the_culprits_exception_is_raised_again_with_its_rank_and_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        pycoll.run(lambda comm: 1 // (comm.rank - 2) if comm.rank == 2 else comm.barrier(), 3)
    where, trace = caught.value.__notes__
    assert where == "raised on rank 2 of 3"
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("\nZeroDivisionError: integer division or modulo by zero")
    assert "test_run_function_errors.py" in trace
    assert "call.py" not in trace


def test_the_traceback_shows_lines_of_files_that_exist_in_this_process_only() -> None:
    name, text = "<cell 1>", "def divide(comm):\n    return 1 // comm.rank  # by rank\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        pycoll.run(namespace["divide"], 1)
    assert "return 1 // comm.rank  # by rank" in caught.value.__notes__[1]


def test_an_exception_keeps_its_class_and_its_attributes() -> None:
    with pytest.raises(LabError, match="spilled") as caught:
        pycoll.run(raise_on(1, LabError("spilled")), 2)
    assert caught.value.rank == "mine"
    assert "raised on rank 1 of 2" in caught.value.__notes__


def test_an_exception_that_cannot_be_pickled_becomes_an_error_with_its_text() -> None:
    def fail(comm: Any) -> None:
        raise ValueError("a lock", threading.Lock())

    with pytest.raises(Error, match=r"ValueError: \('a lock'.*ValueError, cannot be pickled"):
        pycoll.run(fail, 1)


def test_an_exception_that_cannot_be_unpickled_becomes_an_error_with_its_text() -> None:
    with pytest.raises(Error, match=r"1 and 2.*TwoArgumentsError, cannot be unpickled") as caught:
        pycoll.run(lambda comm: comm.barrier() if comm.rank else throw_two(), 2)
    assert "raised on rank 0 of 2" in caught.value.__notes__
    assert "in throw_two" in caught.value.__notes__[1]


def throw_two() -> None:
    raise TwoArgumentsError(1, 2)


def test_errors_of_pycoll_are_raised_again_as_they_are() -> None:
    with pytest.raises(MismatchError):
        pycoll.run(lambda comm: comm.all_reduce(1.0) if comm.rank else comm.all_reduce(1), 2)
    with pytest.raises(TransportError, match="carrier-pigeon"):
        pycoll.run(rank_plus, 2, 0, transport="carrier-pigeon")


LAST_CALLS: dict[str, Callable[[Any], object]] = {
    "broadcast": lambda comm: comm.broadcast(np.full(1, comm.rank), root=comm.rank),
    "scatter": lambda comm: comm.scatter(np.ones((2, 2)), root=comm.rank),
    "of requests": lambda comm: len(of_requests(comm)),
    "beside requests": lambda comm: len(beside_requests(comm)),
    "gather": lambda comm: comm.gather(1, root=1) if comm.rank else comm.broadcast(1),
}


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        ("shm", "broadcast"),
        ("tcp", "beside requests"),
        # test_pool.py has these, too.
        *(pytest.param("shm", name, marks=exhaustive) for name in [*LAST_CALLS][1:]),
        *(pytest.param("tcp", name, marks=exhaustive) for name in [*LAST_CALLS][:3]),
    ],
)
def test_a_mismatch_in_the_last_call_is_raised(
    transport: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MismatchError, match="ranks made different calls") as caught:
        pycoll.run(LAST_CALLS[name], 2, transport=transport)
    assert caught.value.__notes__[0] in ("raised on rank 0 of 2", "raised on rank 1 of 2")
    assert capfd.readouterr() == ("", "")


def test_a_debugger_says_that_a_rank_has_no_terminal_and_nobody_else_imports_one() -> None:
    def stop(comm: Any) -> tuple[bool, list[str]]:
        imported_before = "pdb" in sys.modules
        import pdb

        said = []
        for call in (breakpoint, pdb.set_trace):
            try:
                call()
            except RuntimeError as exc:
                said.append(str(exc))
        return imported_before, said

    ((imported_before, said),) = pycoll.run(stop, 1)
    assert not imported_before
    assert len(said) == 2
    assert all(text.startswith("a debugger on rank 0: a rank has no terminal.") for text in said)


def test_a_ranks_exception_shows_no_frame_of_pycoll() -> None:
    with pytest.raises(KeyError) as caught:
        pycoll.run(raise_on(1, KeyError("gone")), 2)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == [__file__]


def test_a_forgotten_argument_is_found_before_ranks_start() -> None:
    def work(comm: Any, table: object) -> object:
        return os.kill(os.getppid(), signal.SIGKILL)

    with pytest.raises(TypeError, match=r"work\(comm, table\) is called .*argument: 'table'"):
        pycoll.run(work, 2)
    with pytest.raises(TypeError, match="with 1 argument after comm: too many positional"):
        pycoll.run(lambda comm: None, 2, 3)


def test_lines_of_a_notebook_are_named_as_ipython_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Compiler:
        """IPython's, as far as it names files."""

        def format_code_name(self, name: str) -> tuple[str, str] | None:
            return ("Cell", "In[11]") if name == "/tmp/ipykernel_1/5.py" else None

    ipython = types.ModuleType("IPython")
    shell = types.SimpleNamespace(compile=Compiler())
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    text = "def divide(comm):\n    return 1 // comm.rank\n"
    name = "/tmp/ipykernel_1/5.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        pycoll.run(namespace["divide"], 1)
    assert (
        "  Cell In[11], line 2, in divide\n    return 1 // comm.rank" in (caught.value.__notes__[1])
    )


DEATHS: list[tuple[Callable[[], object], str]] = [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by signal 9 (SIGKILL)"),
    (lambda: sys.exit(3), "exit status 3"),
]


@smoke
@pytest.mark.parametrize(("die", "reason"), DEATHS)
def test_a_rank_that_dies_raises_peer_failed(die: Callable[[], object], reason: str) -> None:
    with pytest.raises(PeerFailed) as caught:
        pycoll.run(lambda comm: die() if comm.rank == 1 else comm.barrier(), 3)
    assert (caught.value.rank, caught.value.reason) == (1, reason)
    assert str(caught.value) == f"rank 1 failed: {reason}"


def test_a_rank_that_leaves_without_a_result_raises_peer_failed() -> None:
    with pytest.raises(PeerFailed, match="exited with status 0 before fn had returned") as caught:
        pycoll.run(lambda comm: os._exit(0) if comm.rank == 1 else None, 2)
    assert caught.value.rank == 1


def test_sys_exit_with_a_text_prints_and_tells_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerFailed, match="rank 0 failed: exit status 1: no data"):
        pycoll.run(lambda comm: sys.exit("no data"), 1)
    assert capfd.readouterr().err == "no data\n"


def test_abort_raises_peer_failed() -> None:
    with pytest.raises(PeerFailed) as caught:
        pycoll.run(lambda comm: comm.abort(0) if comm.rank == 1 else comm.barrier(), 2)
    assert (caught.value.rank, caught.value.reason) == (1, "called abort(0)")


def test_a_result_that_cannot_be_pickled_names_its_rank_and_type() -> None:
    def lock_on_one(comm: Any) -> object:
        return threading.Lock() if comm.rank == 1 else 0

    with pytest.raises(
        TypeError, match=r"the result of rank 1, of type _thread\.lock, cannot be"
    ) as caught:
        pycoll.run(lock_on_one, 2)
    assert caught.value.__notes__ == ["raised on rank 1 of 2"]
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_timeout_says_what_each_rank_was_doing() -> None:
    def stuck(comm: Any) -> None:
        if comm.rank == 0:
            threading.Event().wait()
        comm.recv(0)

    with pytest.raises(OperationTimeout) as caught:
        pycoll.run(stuck, 2, timeout=4)
    text = str(caught.value)
    assert "took longer than 4 s" in text
    assert "rank 0: not waiting in pycoll" in text
    assert "rank 1: recv(source=0" in text


def test_a_deadlock_is_an_error_that_says_who_waits_for_whom(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYCOLL_WARN_AFTER", "0.3")
    with pytest.raises(Error) as caught:
        pycoll.run(lambda comm: comm.recv(1 - comm.rank), 2, timeout=LIMIT_S)
    assert type(caught.value) is Error
    text = str(caught.value)
    assert text.startswith("pycoll.run on 2 ranks: deadlock: rank 0 waits for 1, which waits for 0")
    assert re.search(r"\n    1     0          recv\(source=0, tag=ANY\) at .*errors\.py:\d+", text)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("n", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_n_is_a_whole_number_of_at_least_one(n: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="n is the number of ranks"):
        pycoll.run(rank_plus, n, 1)


def test_n_may_be_any_integer() -> None:
    assert pycoll.run(rank_plus, np.int64(2), 1) == [1, 2]  # type: ignore[arg-type]


def test_fn_must_be_callable() -> None:
    with pytest.raises(TypeError, match="fn must be callable"):
        pycoll.run(3, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("1", TypeError)],
)
def test_timeout_is_a_number_of_seconds(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout is a number of seconds"):
        pycoll.run(rank_plus, 2, 1, timeout=timeout)


def test_transport_is_a_name() -> None:
    with pytest.raises(TypeError, match="transport is the name of one"):
        pycoll.run(rank_plus, 2, 1, transport=1)  # type: ignore[arg-type]


def test_arguments_that_cannot_be_pickled_start_nothing() -> None:
    before = open_files()
    with pytest.raises(TypeError, match="fn and its arguments cannot be pickled"):
        pycoll.run(rank_plus, 2, threading.Lock())
    assert open_files() == before


def test_no_descriptor_stays_open() -> None:
    pycoll.run(rank_plus, 2, 0)  # libzmq and Python open what they keep
    before = open_files()
    arrays = pycoll.run(lambda comm: np.zeros(100_000), 3)
    with pytest.raises(ValueError, match="bad"):
        pycoll.run(raise_on(0, ValueError("bad")), 2)
    assert len(arrays) == 3
    assert open_files() == before


def test_ranks_do_not_hold_the_memory_of_the_others_reports() -> None:
    count = lambda comm: sum("memfd:pycoll" in file for file in open_files())  # noqa: E731
    assert pycoll.run(count, 3) == [1, 1, 1]


SLEEPER = """
import os, pycoll, threading
def sleep(comm):
    print(os.getpid(), flush=True)
    threading.Event().wait()
try:
    pycoll.run(sleep, 2)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("signum", "said", "status"),
    [(signal.SIGINT, "interrupted\n", 0), (signal.SIGTERM, "", -signal.SIGTERM)],
)
def test_a_signal_ends_the_ranks_and_then_takes_its_course(
    signum: int, said: str, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLEEPER)
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        ranks = [int(program.stdout.readline()) for _ in range(2)]
        program.send_signal(signum)
        rest = program.stdout.read()
        assert program.wait(LIMIT_S) == status
    assert rest == said
    deadline = time.monotonic() + 5 * PATIENCE
    for pid in ranks:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"rank with process {pid} is still there"
