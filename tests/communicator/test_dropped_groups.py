"""Communicators that nobody closes: what they held comes back once nobody can use them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiers import few, sizes

Comm = Any

on_both_ways = pytest.mark.parametrize(
    "ranks",
    few([(2, ("--op-timeout", "inf")), (2, ("--transport", "tcp"))], [(3, ("--transport", "zmq"))]),
    indirect=True,
    scope="module",
    ids=["shm", "tcp", "zmq"],
)


def num_open(comm: Comm) -> int:
    """Return how many communicators are open here, after a call that closes what was dropped."""
    comm.iprobe(tag=1)
    return len(comm._group.engine.contexts)


def use(made: Comm) -> None:
    """Call all kinds of methods, those that the core does and those that it leaves to Python."""
    right, left = (made.rank + 1) % made.size, (made.rank - 1) % made.size
    assert made.all_reduce(np.ones(3))[0] == made.size
    assert made.all_reduce(1, timeout=50.0) == made.size
    assert made.iall_reduce(np.ones(3)).wait()[0] == made.size
    assert made.all_gather({"a": 1}) == [{"a": 1}] * made.size
    assert made.sendrecv("x", right, left) == "x"
    assert len(made.all_gatherv(np.ones(made.rank + 1))) == made.size
    received, sent = made.irecv(left), made.isend([1], right)
    received._task, sent._task  # noqa: B018  as a wait of more than 100 ms makes them
    assert received.wait() == [1]
    sent.wait()
    again = made.persistent.all_reduce(np.ones(3))
    assert again.start().wait()[0] == made.size


MAKERS: dict[str, Callable[[Comm], Comm]] = {
    "split": lambda comm: comm.split(0),
    "dup": lambda comm: comm.dup(),
    "sub": lambda comm: comm.sub(range(comm.size)),
    "split_by_host": lambda comm: comm.split_by_host(),
    "grid": lambda comm: comm.grid((comm.size, 1)),
    "axis": lambda comm: comm.grid((comm.size, 1)).axis(0),
}


@on_both_ways
def test_what_was_dropped_is_closed_by_the_next_call_without_a_search_for_cycles(
    ranks: Any,
) -> None:
    def program(comm: Comm) -> None:
        comm.barrier()
        before = num_open(comm)
        gc.disable()
        try:
            for name, make in MAKERS.items():
                made = make(comm)
                use(made)
                del made
                assert num_open(comm) == before, name
        finally:
            gc.enable()

    ranks(program)


@sizes(2)
def test_memory_of_dropped_communicators_comes_back(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        def taken() -> int:
            files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
            shared = [file for file in files if "memfd:" in os.path.realpath(file)]
            return max(os.stat(file).st_blocks for file in shared) * 512

        comm.barrier()
        before = taken()
        kept = [comm.dup() for _ in range(20)]
        for made in kept:
            made.all_gather(np.ones(1000))
        comm.barrier()
        grown = taken() - before
        assert grown > 20 * comm.size * 8000
        while kept:  # the ranks drop them in another order
            del kept[0 if comm.rank == 0 else -1]
            num_open(comm)
        del made
        num_open(comm)
        comm.barrier()
        assert taken() - before < grown / 10
        # What is new reads no old memory.
        for i in range(20):
            assert comm.dup().all_reduce(i) == i * comm.size

    ranks(program)


@on_both_ways
def test_what_can_still_use_a_communicator_keeps_it(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.barrier()
        before = num_open(comm)
        assert comm.dup().all_reduce(np.ones(2))[0] == comm.size  # only its method is held
        kept: dict[str, Any] = {
            "method": comm.dup().all_reduce,
            "receive": comm.dup().irecv(left, 5),
            "persistent": comm.dup().persistent.all_reduce(np.ones(2)),
        }
        made = comm.dup()
        made.send("held", right)
        kept["message"] = made.mprobe(left)
        del made
        gc.collect()
        assert num_open(comm) == before + 4
        assert kept["method"](1) == comm.size
        assert kept["method"](np.ones(1))[0] == comm.size
        assert kept["receive"].cancel()
        assert kept["persistent"].start().wait()[0] == comm.size
        assert kept["message"].recv() == "held"
        while kept:
            kept.popitem()
            assert num_open(comm) == before + len(kept)

    ranks(program)


@on_both_ways
def test_messages_of_a_dropped_communicator_reach_who_still_holds_it(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        long = np.arange(1 << 18)
        ways: list[Callable[[Comm], object]] = [
            lambda made: made.send(long[:50], 0),
            lambda made: made.isend(long, 0),
            lambda made: made.isend({"a": long}, 0),
            lambda made: made.bsend(long, 0),
            lambda made: made.issend(long[:50], 0),
        ]
        comm.barrier()
        before = num_open(comm)
        for send in ways:
            made = comm.dup()
            if comm.rank == 1:
                send(made)  # nobody keeps the request either
            if comm.rank != 0:
                del made
            num_open(comm)
            comm.barrier()
            if comm.rank == 0:
                got = made.recv(1)
                got = got["a"] if isinstance(got, dict) else got
                assert (got == long[: len(got)]).all()
                del made
            comm.barrier()  # rank 1 hears of it
            while num_open(comm) > before:
                pass

    ranks(program)


@on_both_ways
def test_calls_under_way_go_on_when_everything_is_dropped(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        starts: list[Callable[[Comm, Any], object]] = [
            lambda made, out: made.iall_reduce(np.ones(len(out)), out=out),
            lambda made, out: made.persistent.all_reduce(np.ones(len(out)), out=out).start(),
        ]
        comm.barrier()
        before = num_open(comm)
        for start in starts:
            out = np.zeros(1 << 18)
            if comm.rank == 0:
                comm.recv(1)
            start(comm.sub(range(comm.size)), out)
            if comm.rank == 1:
                comm.send(None, 0)
            while num_open(comm) > before:
                pass
            assert (out == comm.size).all()

    ranks(program)


@pytest.mark.parametrize("transport", few(["shm"], ["tcp"]))
def test_the_last_call_of_a_dropped_communicator_is_compared(job: Any, transport: str) -> None:
    done = job(
        2,
        """
made = comm.dup()
made.barrier()
if rank == 1:
    comm.recv(0)
made.broadcast(np.full(3, rank), root=rank)
del made
if rank == 0:
    comm.iprobe()
    comm.send(None, 1)
""",
        *("--transport", transport),
    )
    assert done.status == 1
    text = "MismatchError: ranks made different calls as collective number 1 of dup of world:\n"
    assert text + "    rank 0: broadcast(root=0)" in done.stderr
    assert "rank 1: broadcast(root=1)" in done.stderr


def test_memory_that_a_failed_rank_holds_is_told_of_once(job: Any) -> None:
    done = job(
        3,
        """
import contextlib, warnings
warnings.simplefilter("always", ResourceWarning)
made = [comm.dup(), comm.dup()]
for each in made:
    each.barrier()
if rank == 2:
    os.kill(os.getpid(), 9)
for each in made:
    with contextlib.suppress(pycoll.PeerFailed):
        each.barrier()
del each
made.clear()
ok()
""",
    )
    assert done.content == [0, 1], done.stderr
    warned = [line for line in done.stderr.splitlines() if "ResourceWarning: rank " in line]
    text = "2 communicators that are closed or were dropped keep"
    assert len(warned) == 2, done.stderr
    assert all(text in line for line in warned), warned
