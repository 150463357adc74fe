"""Pools of ranks (tests/helpers/ranks_pool.py): a test that fails on one rank fails, and soon."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any

import pytest
from patience import PATIENCE
from ranks_pool import ANSWER_S, Pool
from tiers import few

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
    raise_on_one: "ValueError: the one that fails.*rank 2: barrier.*test_ranks_pool.py",
    die_on_one: "--- rank 4 ---\nits process has ended\n.*rank 4 failed.*exit status 3",
    end_on_one: "deadlock: .*recv.source=4, tag=ANY.*barrier",
    wait_in_a_circle: "deadlock: .*recv.source=1, tag=ANY",
}


@pytest.mark.parametrize("program", few([raise_on_one], [die_on_one, end_on_one, wait_in_a_circle]))
def test_a_test_that_fails_on_one_rank_says_so_and_where_the_others_are(program: Any) -> None:
    pool = Pool(5)
    try:
        started = time.monotonic()
        with pytest.raises(AssertionError) as caught:
            pool(program)
        assert re.search(CASES[program], str(caught.value), re.DOTALL), str(caught.value)
        assert time.monotonic() - started < ANSWER_S - 20 * PATIENCE
        assert pool(lambda comm: comm.all_reduce(1)) == [5] * 5
    finally:
        pool.close()
