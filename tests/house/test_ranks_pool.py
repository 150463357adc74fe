"""Pools of ranks (tests/helpers/ranks_pool.py): a test that fails on one rank fails, and soon."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ranks_pool
from patience import PATIENCE
from pool_scripts import run
from ranks_pool import ANSWER_S, RanksOfTests
from tiers import exhaustive

Comm = Any


def raise_on_one(comm: Comm) -> None:
    """The others wait for it in every way that there is."""
    half = comm.split(comm.rank // 2)
    if comm.rank == 0:
        comm.barrier()
    elif comm.rank == 1:
        comm.irecv(4).wait()
    elif comm.rank == 2:
        half.barrier()
    elif comm.rank == 3:
        threading.Thread(target=half.recv, args=(0,)).start()
    else:
        raise ValueError("the one that fails")


def die_on_one(comm: Comm) -> None:
    if comm.rank == 4:
        os._exit(3)
    comm.split(0)


def end_on_one(comm: Comm) -> None:
    if comm.rank != 4:
        comm.recv(4)


def wait_in_a_circle(comm: Comm) -> None:
    if comm.rank < 2:
        comm.recv(1 - comm.rank)


CASES = {
    raise_on_one: r"ValueError: the one that fails.*rank 2 ---.*half.barrier\(\).*rank 4 ---",
    die_on_one: "PeerFailed: rank 4 failed: .*exit status 3",
    end_on_one: r"rank 4 is needed in recv.source=4, tag=ANY.*rank 3 ---.*comm.recv\(4\)",
    wait_in_a_circle: r"deadlock: .*recv.source=1, tag=ANY.*rank 1 ---.*comm.recv\(1 -",
}


@exhaustive
@pytest.mark.parametrize("program", list(CASES))
def test_a_test_that_fails_on_one_rank_says_so_and_where_the_others_are(program: Any) -> None:
    pool = RanksOfTests(5)
    try:
        started = time.monotonic()
        with pytest.raises(AssertionError) as caught:
            pool(program)
        assert re.search(CASES[program], str(caught.value), re.DOTALL), str(caught.value)
        assert time.monotonic() - started < ANSWER_S - 20 * PATIENCE
        assert pool(lambda comm: comm.all_reduce(1)) == [5] * 5
    finally:
        pool.close()


@exhaustive
def test_a_test_that_takes_too_long_shows_where_each_rank_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def hang(comm: Comm) -> None:
        threading.Event().wait() if comm.rank else comm.recv(1)

    pool = RanksOfTests(2)
    try:
        monkeypatch.setattr(ranks_pool, "ANSWER_S", 3.0)
        with pytest.raises(AssertionError, match=r"took longer than 3 s(.*\n)*.*rank 0: recv"):
            pool(hang)
    finally:
        pool.close()
    stack = r"\[1\] +File .*threading.py.* in wait\n(.*\n)*?\[1\] +File .*ranks_pool.* in hang\n"
    assert re.search(stack, capfd.readouterr().err)


@exhaustive
def test_after_a_test_that_failed_the_next_one_has_new_ranks() -> None:
    def fail(comm: Comm) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 1))
        assert comm.rank

    pool = RanksOfTests(2)
    try:
        pids = pool(lambda comm: os.getpid())
        assert pool(lambda comm: os.getpid()) == pids
        with pytest.raises(AssertionError):
            pool(fail)
        after = pool(lambda comm: (os.getpid(), resource.getrlimit(resource.RLIMIT_CORE)))
        assert not {pid for pid, _ in after} & set(pids)
        assert all(limit != (0, 1) for _, limit in after)
    finally:
        pool.close()


def test_tests_do_not_see_what_others_have_made_global() -> None:
    pool = RanksOfTests(1)
    try:
        pool(make_global)
        assert pool(lambda comm: "made_global" in globals()) == [False]
    finally:
        pool.close()


def make_global(comm: Comm) -> None:
    global made_global
    made_global = comm.rank


@pytest.mark.parametrize(
    "text",
    [
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); ok()",
        "type('Freed', (), {'__del__': lambda self: 1 / 0})(); ok()",
    ],
    ids=["thread", "finalizer"],
)
def test_what_a_script_raises_where_nobody_catches_it_fails_the_test(text: str) -> None:
    with pytest.raises(AssertionError, match=r"where nobody catches it:(.|\n)*ZeroDivisionError"):
        run(SimpleNamespace(rank=0, size=1), text)
    assert run(SimpleNamespace(rank=0, size=1), "ok()")
