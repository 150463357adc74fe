"""pycoll.Pool: runs on ranks that stay."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from last_calls import beside_requests, of_requests
from patience import PATIENCE
from run_cases import LIMIT_S, ROOT
from tiers import few, smoke

import pycoll
from pycoll.errors import Error, MismatchError, OperationTimeout, PeerFailed

LOST = "the pool's ranks have ended, and what they held is lost: the next run has new ones"


@pytest.fixture(scope="module", params=few(["shm"], ["tcp"]))
def pool(request: pytest.FixtureRequest) -> Iterator[pycoll.Pool]:
    with pycoll.Pool(2, transport=request.param, timeout=LIMIT_S) as made:
        yield made


on_both = pytest.mark.parametrize("pool", ["shm", "tcp"], indirect=True, scope="module")


def pids(pool: pycoll.Pool) -> list[int]:
    return pool.run(lambda comm: os.getpid())


@contextlib.contextmanager
def same_ranks(pool: pycoll.Pool) -> Iterator[None]:
    before = pids(pool)
    yield
    assert pids(pool) == before
    assert pool.run(lambda comm: comm.all_reduce(1)) == [2, 2]


def remember(comm: Any, value: object) -> None:
    global remembered
    remembered = (value, comm.rank)


def recall(comm: Any) -> object:
    return remembered


@smoke
def test_ranks_keep_what_functions_make_global_and_what_they_import(pool: pycoll.Pool) -> None:
    with same_ranks(pool):
        pool.run(remember, "it")
        assert pool.run(recall) == [("it", 0), ("it", 1)]
        pool.run(lambda comm: setattr(__import__("colorsys"), "seen", comm.rank))
        assert pool.run(lambda comm: __import__("colorsys").seen) == [0, 1]


def test_results_and_arguments_of_any_size_travel(pool: pycoll.Pool) -> None:
    x = np.arange(1_000_000.0)
    for rank, result in enumerate(pool.run(lambda comm, x: x + comm.rank, x)):
        np.testing.assert_array_equal(result, x + rank)


def test_output_is_written_where_standard_output_is_now(
    pool: pycoll.Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in ("one", "two"):
        pool.run(lambda comm, word: print(word, comm.rank), word)
        assert sorted(capfd.readouterr().out.splitlines()) == [f"{word} 0", f"{word} 1"]


@smoke
@pytest.mark.parametrize("waits", ["barrier", "split"])
def test_an_exception_ends_the_run_and_the_ranks_stay(pool: pycoll.Pool, waits: str) -> None:
    def fail(comm: Any) -> None:
        part = comm if waits == "barrier" else comm.split(0)
        if comm.rank:
            raise KeyError("gone")
        part.barrier()

    with same_ranks(pool):
        with pytest.raises(KeyError) as caught:
            pool.run(fail)
        where, trace = caught.value.__notes__
        assert where == "raised on rank 1 of 2"
        assert trace.endswith("KeyError: 'gone'")
        assert "serving.py" not in trace


LAST_CALLS = {
    "broadcast": lambda comm: comm.broadcast(np.full(1, comm.rank), root=comm.rank),
    "scatter": lambda comm: comm.scatter(np.ones((2, 2)), root=comm.rank),
    # An array goes through shared memory, an object by a message.
    "of an array and an object": lambda comm: comm.gather(1) if comm.rank else comm.reduce(1),
    "after a barrier": lambda comm: (
        comm.barrier(),
        comm.gather(1) if comm.rank else comm.broadcast(1),
    ),
    "of requests": lambda comm: len(of_requests(comm)),
    "beside requests": lambda comm: len(beside_requests(comm)),
    "of a part": lambda comm: comm.split(0).broadcast(1, root=comm.rank),
}


@on_both
@pytest.mark.parametrize("name", LAST_CALLS)
def test_a_mismatch_in_the_last_call_is_raised(pool: pycoll.Pool, name: str) -> None:
    with same_ranks(pool), pytest.raises(MismatchError, match="ranks made different calls"):
        pool.run(LAST_CALLS[name])


@on_both
@pytest.mark.parametrize("call", ["recv(1)", "barrier()", "all_reduce([1], op=max)"])
def test_who_waits_for_a_rank_that_has_returned_is_told(pool: pycoll.Pool, call: str) -> None:
    with same_ranks(pool):
        with pytest.raises(PeerFailed, match=r"rank 1 is needed in .*has returned") as caught:
            pool.run(lambda comm: eval(f"comm.{call}") if comm.rank == 0 else None)
        assert (caught.value.rank, caught.value.reason) == (1, "has returned")


def test_who_waits_for_a_rank_is_told_that_it_has_returned_however_late(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYCOLL_WARN_AFTER", "0.3")
    with pycoll.Pool(2, timeout=LIMIT_S) as pool, pytest.raises(PeerFailed, match="has returned"):
        pool.run(lambda comm: comm.recv(1) if comm.rank == 0 else time.sleep(3))
    assert "waiting for rank 1" in capfd.readouterr().err  # it had been told of before


@pytest.mark.parametrize("pool", ["tcp"], indirect=True)
def test_who_waits_is_told_after_an_operator_has_asked_for_its_thread(pool: pycoll.Pool) -> None:
    def ask_and_wait(comm: Any) -> object:
        seen, called = [], threading.Event()

        def add(left: Any, right: Any) -> Any:
            seen.append(threading.current_thread())  # as logging does
            called.set()
            return left + right

        for _ in range(20):
            called.clear()
            request = comm.ireduce(np.ones(3), add)
            assert comm.rank or called.wait(60)  # until then nobody waits in a call
            request.wait()
        assert comm.rank or set(seen) - {threading.current_thread()}
        return comm.rank or comm.recv(1)

    with same_ranks(pool), pytest.raises(PeerFailed, match="has returned"):
        pool.run(ask_and_wait, timeout=30)


def test_a_rank_that_goes_on_is_waited_for_by_ranks_that_have_returned(pool: pycoll.Pool) -> None:
    def late(comm: Any) -> object:
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
            return None
        time.sleep(1.5)  # computes: longer than it takes to tell who waits for a returned rank
        return comm.recv(0).sum()

    assert pool.run(late) == [None, 3.0]


def test_a_rank_that_computes_is_interrupted_when_another_has_failed(pool: pycoll.Pool) -> None:
    def fail(comm: Any) -> None:
        if comm.rank:
            threading.Event().wait()
        raise OSError("disk")

    with same_ranks(pool), pytest.raises(OSError, match="disk"):
        pool.run(fail)


@pytest.mark.parametrize("raises", [False, True])
def test_ranks_are_replaced_when_a_function_leaves_the_job(raises: bool) -> None:
    def leave(comm: Any) -> int:
        total = comm.all_reduce(1)
        pycoll.finalize()
        if raises:
            raise LookupError("after the end")
        return int(total)

    with pycoll.Pool(2) as pool:
        before = pids(pool)
        with pytest.raises(LookupError, match="after") if raises else contextlib.nullcontext():
            assert pool.run(leave) == [2, 2]
        assert not set(pids(pool)) & set(before)
        assert pool.run(lambda comm: comm.all_reduce(1)) == [2, 2]


@smoke
@pytest.mark.parametrize("case", few(["kill", "hang"], ["exit", "slow"]))
def test_ranks_are_replaced_when_one_is_lost(case: str) -> None:
    def end(comm: Any) -> None:
        if comm.rank == 1:
            if case == "exit":
                sys.exit("no data")
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        if case != "slow":
            comm.barrier() if case != "hang" else comm.recv(1 - comm.rank)
        elif comm.rank == 0:
            threading.Event().wait()

    with pycoll.Pool(2) as pool:
        before = pids(pool)
        timeout = 2 if case in ("hang", "slow") else None
        with pytest.raises(OperationTimeout if timeout else PeerFailed) as caught:
            pool.run(end, timeout=timeout)
        assert LOST in caught.value.__notes__
        said = {
            "exit": "exit status 1: no data",
            "kill": "SIGKILL",
            "hang": r"rank 0: recv\(source=1",
            "slow": r"rank 0: not waiting in pycoll, or for less than 0\.2 s; asleep \(futex.*\)\n"
            "    rank 1: fn has returned; waits for the next run",
        }
        assert re.search(said[case], str(caught.value))
        assert not set(pids(pool)) & set(before)


def test_a_deadlock_ends_the_run_and_the_ranks_stay(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait(comm: Any) -> None:
        if comm.rank == 2:
            time.sleep(1000)  # what it computes changes nothing
        comm.recv(1 - comm.rank)

    monkeypatch.setenv("PYCOLL_WARN_AFTER", "0.3")
    with pycoll.Pool(3, timeout=LIMIT_S) as pool:
        before = pids(pool)
        for _ in range(2):
            with pytest.raises(Error) as caught:
                pool.run(wait)
            heading, *table = str(caught.value).splitlines()
            assert heading == (
                "pycoll.Pool.run on 3 ranks: deadlock: rank 0 waits for 1, which waits for 0"
            )
            assert table[0].split() == ["rank", "waits", "for", "in"]
            assert "recv(source=1, tag=ANY) at test_pool.py:" in table[1]
            assert type(caught.value) is Error
            assert capfd.readouterr() == ("", "")  # the table is in the exception
            assert pids(pool) == before
            assert pool.run(lambda comm: comm.all_reduce(1)) == [3, 3, 3]
            capfd.readouterr()


def test_a_circle_that_a_thread_or_a_signal_may_break_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def helped(comm: Any) -> object:
        thread = threading.Timer(2, comm.send, (comm.rank, 1 - comm.rank))
        thread.start()
        received = comm.recv(1 - comm.rank)
        thread.join()
        return received

    def wait(comm: Any) -> None:
        def end(signum: int, frame: object) -> None:
            raise LookupError("it takes too long")

        signal.signal(signal.SIGALRM, end)
        signal.alarm(4)  # the launcher has said that ranks wait for each other before
        comm.recv(1 - comm.rank)

    monkeypatch.setenv("PYCOLL_WARN_AFTER", "0.3")
    with pycoll.Pool(2, timeout=LIMIT_S) as pool:
        assert pool.run(helped) == [1, 0]
        with pytest.raises(LookupError, match="too long"):
            pool.run(wait)


def test_a_rank_that_dies_between_runs_fails_the_next(pool: pycoll.Pool) -> None:
    os.kill(pids(pool)[1], signal.SIGKILL)
    with pytest.raises(PeerFailed, match="rank 1 failed: killed by signal 9") as caught:
        pool.run(lambda comm: comm.barrier())
    assert LOST in caught.value.__notes__
    assert pool.run(lambda comm: comm.all_reduce(1)) == [2, 2]


def test_what_is_wrong_starts_nothing(pool: pycoll.Pool) -> None:
    with pytest.raises(ValueError, match="n is the number of ranks") as raised:
        pycoll.Pool(0)
    assert [entry.name for entry in raised.traceback] == ["test_what_is_wrong_starts_nothing"]
    with pytest.raises(Error, match="carrier-pigeon"):
        pycoll.Pool(2, transport="carrier-pigeon")
    with same_ranks(pool):
        with pytest.raises(ValueError, match="timeout is a number of seconds above 0"):
            pool.run(recall, timeout=0)
        with pytest.raises(TypeError, match=r"fn must be callable: .* not an int"):
            pool.run(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="missing a required argument: 'value'"):
            pool.run(remember)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pool.run(lambda comm: pool)


def test_a_closed_pool_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pycoll.Pool(2) as pool:
        ranks = pids(pool)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(Error, match="this pool is closed"):
        pids(pool)
    pool.close()
    assert capfd.readouterr() == ("", "")


INTERRUPTED = """
import os, pycoll, signal, threading

def hold(comm):
    global held
    held = comm.rank

def wait(comm):
    if comm.rank:
        os.kill(os.getppid(), signal.SIGINT)
    comm.recv(1 - comm.rank)

pool = pycoll.Pool(2)
pool.run(hold)
try:
    pool.run(wait)
except KeyboardInterrupt as exc:
    assert exc.__traceback__.tb_next is None  # this line, and none of pycoll
    print("interrupted", pool.run(lambda comm: held), flush=True)
print(*pool.run(lambda comm: os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_interrupt_keeps_the_ranks_and_the_parents_death_ends_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        timeout=LIMIT_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    said, ranks = done.stdout.splitlines()
    assert said == "interrupted [0, 1]"
    deadline = time.monotonic() + 5 * PATIENCE
    for pid in ranks.split():
        with contextlib.suppress(OSError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < deadline, f"rank with process {pid} is still there"
