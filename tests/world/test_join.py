"""Worlds of `pycoll.join`: in ranks that have one already, and in processes that have none."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from port_strangers import Strangers
from tiers import exhaustive, sizes

import pycoll

LIMIT_S = 60 * PATIENCE
SOON_S = 10 * PATIENCE

Comm = pycoll.Communicator


@sizes(3)
def test_a_world_has_its_own_ranks_and_leaves_that_of_the_job_alone(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        mine = comm.size - 1 - comm.rank

        def share(text: str | None) -> str:
            assert (text is None) == (mine != 0)
            return comm.broadcast(text, root=comm.size - 1)

        world = pycoll.join(mine, comm.size, share, name="turned", op_timeout=40.0)
        assert (world.rank, world.size, world.local_size) == (mine, comm.size, comm.size)
        assert world.name == "turned"
        assert "shared_memory" in str(world.explain("all_reduce", 8))
        large = np.full(300_000, 2.0**mine)
        assert (world.all_reduce(large) == 7.0).all()
        assert world.all_gather(mine) == [0, 1, 2]
        assert comm.all_gather(mine) == [2, 1, 0]
        assert world.sendrecv(mine, (mine + 1) % 3, (mine - 1) % 3) == (mine - 1) % 3
        part = world.sub([0, 2])
        requests = [world.iall_reduce(large), comm.iall_reduce(comm.rank)]
        first, second = pycoll.wait_all(requests, timeout=30.0)
        assert (first[-1], second) == (7.0, 3)
        world.close()
        world.close()
        for closed in (world, part):
            if closed is not None:
                with pytest.raises(pycoll.Error, match="closed"):
                    closed.barrier()
        assert comm.all_reduce(1) == 3

    ranks(program)


@sizes(3)
def test_threads_join_and_use_worlds_at_the_same_time(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        ways = [comm.dup(), comm.dup()]
        sums: list[int] = []

        def work(way: Comm) -> None:
            with pycoll.join(way.rank, way.size, way.broadcast) as world:
                for _ in range(20):
                    total = world.all_reduce(world.rank)
                    assert total == 3
                sums.append(total)

        threads = [threading.Thread(target=work, args=(way,)) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == [3, 3]
        for way in ways:
            way.close()

    ranks(program)


def used() -> tuple[int, int, int]:
    """Descriptors, mappings of shared memory and threads of this process."""
    maps = Path("/proc/self/maps").read_text()
    tasks = os.listdir("/proc/self/task")
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:"), len(tasks)


def until_no_helpers(job: str) -> None:
    """Wait for the end of all meetings and agents that ranks of a job have started."""
    deadline = time.monotonic() + SOON_S
    while left := [
        folder.name
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and is_helper(folder, job)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_helper(process: Path, job: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().decode().split("\0")
        helps = "pycoll._launcher.meeting" in words or "pycoll._launcher.adopting" in words
        return helps and job.encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def joined_and_closed(comm: Comm, cycles: int, transport: str) -> None:
    import gc

    after: list[tuple[int, int, int]] = []
    gc.disable()  # so that what is counted does not depend on when it runs
    try:
        for cycle in range(cycles):
            mine = (comm.rank + cycle) % comm.size
            root = -cycle % comm.size

            def share(text: str | None, root: int = root) -> str:
                return comm.broadcast(text, root=root)

            world = pycoll.join(mine, comm.size, share, transport=transport)
            assert world.all_reduce(np.full(100_000, 1.0))[0] == comm.size
            assert world.iall_reduce(mine).wait() == 3
            assert world.split(mine % 2).size in (1, 2)
            world.close()
            del world
            comm.barrier()  # rank 0 of the next one forgets the meeting of this one
            after.append(used())
        # Who was rank 0 last may still have a descriptor for the end of the meeting.
        most = (after[1][0] + 1, *after[1][1:])
        deadline = time.monotonic() + SOON_S
        while any(now > limit for now, limit in zip(used(), most, strict=True)):
            assert time.monotonic() < deadline, (after, used())
            time.sleep(0.01)
    finally:
        gc.enable()
    if comm.rank == 0:
        until_no_helpers(os.environ["PYCOLL_JOB"])
    comm.barrier()


@sizes(3)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_world_leaves_nothing_in_the_process(ranks: Any, transport: str) -> None:
    ranks(joined_and_closed, 5, transport)


@exhaustive
@sizes(3)
def test_a_hundred_worlds_leave_nothing_in_the_process(ranks: Any) -> None:
    ranks(joined_and_closed, 100, "auto")


# Joins as a rank of a world of three, and dies in the middle of a call.
DIES = """
import random, signal, sys
import numpy as np, pycoll

def share(text):
    if text is None:
        return sys.stdin.readline().strip()
    print(text, flush=True)

world = pycoll.join(int(sys.argv[1]), 3, share)
x = np.full(100_000, 1.0)
world.all_reduce(x)
signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.02))  # nothing handles this alarm
while True:
    world.all_reduce(x)
"""


def reduce_for_ever(world: Comm) -> None:
    while True:
        assert world.all_reduce(np.full(100_000, 1.0))[-1] == world.size


def joined_with_one_who_dies(comm: Comm, cycles: int) -> None:
    import gc

    after: list[tuple[int, int, int]] = []
    steady = pycoll.join(comm.rank, 2, comm.broadcast, name="steady")
    gc.disable()
    try:
        for cycle in range(cycles):
            victim = cycle % 3
            mine = [rank for rank in range(3) if rank != victim][comm.rank]
            with contextlib.ExitStack() as stack:
                child = None
                if comm.rank == 0:
                    words = [sys.executable, "-c", DIES, str(victim)]
                    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                    child = stack.enter_context(subprocess.Popen(words, text=True, **pipes))

                def share(text: str | None, child: Any = child, victim: int = victim) -> str:
                    if child and victim == 0:
                        text = child.stdout.readline().strip()
                    text = comm.broadcast(text)
                    if child and victim:
                        child.stdin.write(f"{text}\n")
                        child.stdin.flush()
                    return text

                world = pycoll.join(mine, 3, share)
                with pytest.raises(pycoll.PeerFailed) as caught:
                    reduce_for_ever(world)
                assert caught.value.rank == victim
                world.close()
            assert child is None or child.returncode == -signal.SIGALRM
            del world, caught
            assert steady.all_reduce(1) == 2  # another world goes on
            comm.barrier()
            gc.collect()  # of the traceback
            after.append(used())
        most = (after[2][0] + 1, *after[2][1:])  # each rank was the victim once
        deadline = time.monotonic() + SOON_S
        while any(now > limit for now, limit in zip(used(), most, strict=True)):
            assert time.monotonic() < deadline, (after, used())
            time.sleep(0.01)
    finally:
        gc.enable()
    steady.close()
    if comm.rank == 0:
        until_no_helpers(os.environ["PYCOLL_JOB"])
    comm.barrier()


@exhaustive
@sizes(2)
def test_worlds_of_which_ranks_die_leave_nothing_in_the_others(ranks: Any) -> None:
    ranks(joined_with_one_who_dies, 9)


def test_after_finalize_worlds_can_be_joined() -> None:
    script = """
import pycoll
world = pycoll.join(0, 1, None.__class__)
assert world.all_reduce(5) == 5 and world.size == 1
pycoll.finalize()
try:
    world.barrier()
except pycoll.Error as error:
    assert "finalize" in str(error), error
world.close()
again = pycoll.join(0, 1, print, name="again")
print(again, again.all_reduce(7))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("<pycoll.Communicator 'again' rank 0 of 1> 7\n", "")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((0, 0, print), ValueError, "a world has at least one rank, not 0"),
        ((3, 3, print), ValueError, "rank 3 is none of a world of 3: they are 0 to 2"),
        (("0", 3, print), TypeError, "rank is an int, not a str"),
        ((0, 3, "text"), TypeError, "share is a function that hands on rank 0's text, not a str"),
        ((1, 3, lambda text: 7), TypeError, "share(None) returns the text of rank 0, not an int"),
        ((1, 3, lambda text: "none of ours"), pycoll.BootstrapError, "is not of pycoll"),
        ((1, 3, lambda text: b"!no memory"), pycoll.BootstrapError, "no memory"),
    ],
)
def test_what_is_wrong_is_said_at_the_callers_line(
    arguments: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)) as caught:
        pycoll.join(*arguments)
    assert [entry.path.name for entry in caught.traceback] == [Path(__file__).name]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_share_raises_is_raised_and_the_meeting_ends(rank: int) -> None:
    def share(text: str | None) -> str:
        raise FileNotFoundError("no store")

    with pytest.raises(FileNotFoundError, match="no store") as caught:
        pycoll.join(rank, 2, share, timeout=20.0)
    names = [entry.name for entry in caught.traceback]
    assert names == ["test_what_share_raises_is_raised_and_the_meeting_ends", "share"]
    assert f"which rank {rank} of 2 has called" in caught.value.__notes__[0]


# Three processes, in two worlds at once; process 2 dies. `share` goes by named pipes. Processes 1
# and 2 have memory for arrays in the file of "two", process 0 in that of "all".
DEATH = """
import os, resource, signal, sys
import numpy as np, pycoll

process, folder = int(sys.argv[1]), sys.argv[2]
if process == 1:  # descriptors of numbers that select.select does not take
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kept = [open(os.devnull) for _ in range(1100)]

def by_pipes(world, rank, size):
    def share(text):
        if text is None:
            return open(f"{folder}/{world}-{rank}").read()
        for other in range(1, size):
            with open(f"{folder}/{world}-{other}", "w") as pipe:
                pipe.write(text)
    return share

two = None
if process > 0:
    two = pycoll.join(2 - process, 2, by_pipes("b", 2 - process, 2), name="two")
all_three = pycoll.join(process, 3, by_pipes("a", process, 3), name="all")
x = pycoll.empty(300_000)
x[:] = process + 1
for comm, values in (two, [3, 2]), (all_three, [1, 2, 3]):
    if comm is not None:
        rows = comm.all_gather(x)
        assert (rows == np.array(values)[:, None]).all(), rows
        assert comm.broadcast(x.copy() if comm.rank == 0 else None)[-1] == values[0]
        assert comm.all_reduce(x)[7] == sum(values)
        for _ in range(3):
            everyone = [comm.sendrecv(x, to, to)[-1] for to in range(comm.size)]
            assert everyone == values, everyone
try:
    all_three.share(x)
except ValueError as error:
    assert "rank 1: share(): the arrays of this process lie in the memory of another" in str(error)
all_three.barrier()
if process == 2:
    two.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
if two is not None:
    two.barrier()
for comm in (all_three, two):
    if comm is not None:
        try:
            comm.barrier(timeout=30)
        except pycoll.PeerFailed as error:
            print(comm.name, error.rank, flush=True)
"""


def test_a_rank_that_dies_is_named_in_every_world_that_it_is_in(tmp_path: Path) -> None:
    for name in ("a-1", "a-2", "b-1"):
        os.mkfifo(tmp_path / name)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DEATH, str(number), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    said = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, -signal.SIGKILL], said
    assert said == [("all 2\n", ""), ("all 2\ntwo 0\n", ""), ("", "")]


@sizes(2)
def test_strangers_at_the_meeting_of_a_world_do_no_harm_and_its_key_is_not_to_be_seen(
    ranks: Any,
) -> None:
    def program(comm: Comm) -> None:
        tickets: list[str] = []

        def share(text: str | None) -> str:
            tickets.append(comm.broadcast(text))
            if text is not None:
                strangers.append(Strangers(int(text.split(";")[1])))
                strangers[0].come()
            comm.barrier()
            return tickets[0]

        strangers: list[Strangers] = []
        with pycoll.join(comm.rank, comm.size, share) as world:
            key = tickets[0].partition(";")[0].encode()
            assert len(key) == 64
            for each in strangers:
                each.come()
            for process in filter(str.isdigit, os.listdir("/proc")):
                for name in ("cmdline", "environ"):
                    with contextlib.suppress(OSError):
                        assert key not in Path("/proc", process, name).read_bytes()
            assert world.all_reduce(np.full(100_000, 1.0))[-1] == 2
            for each in strangers:
                each.__exit__()

    ranks(program)


@sizes(3)
def test_a_forked_child_cannot_use_the_world_but_can_join_another(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        with pycoll.join(comm.rank, comm.size, comm.broadcast) as world:
            world.barrier()
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    with pytest.raises(pycoll.Error, match="forked"):
                        world.barrier()
                    alone = pycoll.join(0, 1, print)
                    os.write(writing, b"%d" % alone.all_reduce(4))
                finally:
                    os._exit(0)
            os.close(writing)
            assert os.read(reading, 10) == b"4"
            os.close(reading)
            os.waitpid(child, 0)
            assert world.all_reduce(1) == 3

    ranks(program)


FORKS = """
import multiprocessing
import pycoll

def work(rank, tickets, ended):
    world = pycoll.join(rank, 2, lambda text: tickets.put(text) if text else tickets.get())
    if rank == 1:
        return world.send("the last word", 0)
    ended.get()
    print(world.recv(1), flush=True)
    try:
        world.barrier()
    except pycoll.PeerFailed as error:
        print(str(error).partition(":")[0], flush=True)

context = multiprocessing.get_context("fork")
tickets, ended = context.Queue(), context.Queue()
ranks = [context.Process(target=work, args=(rank, tickets, ended)) for rank in range(2)]
for rank in ranks:
    rank.start()
ranks[1].join()
ended.put(True)
ranks[0].join()
print([rank.exitcode for rank in ranks])
"""


def test_a_rank_that_multiprocessing_has_forked_leaves_at_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    left = "rank 1 is needed, but has left without calling barrier()"
    assert (done.stdout, done.stderr) == (f"the last word\n{left}\n[0, 0]\n", "")


@sizes(3)
def test_who_needs_a_rank_that_has_left_hears_of_its_exception(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        world = pycoll.join(comm.rank, comm.size, comm.broadcast)
        world.barrier()
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError), world:
                raise ZeroDivisionError
        else:
            with pytest.raises(pycoll.PeerFailed, match="ZeroDivisionError") as caught:
                world.barrier()
            assert caught.value.rank == 1
            world.close()
        comm.barrier()

    ranks(program)
