"""Leaving a job, and what is refused afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from patience import PATIENCE
from script_jobs import all_well


def alone(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that no launcher started."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("size", [1, 3])
def test_after_finalize_every_call_is_refused_and_a_second_init_too(job: Any, size: int) -> None:
    done = job(
        size,
        """
other = comm.dup()
assert pycoll.init() is comm is pycoll.init(timeout=300.0)
for options in {"timeout": 5.0}, {"op_timeout": 1.0}, {"transport": "tcp"}:
    error_like(ValueError, "called before", pycoll.init, **options)
comm.barrier()
pycoll.finalize()
pycoll.finalize()
for c in comm, other:
    for call, *args in (
        (c.send, 1, 0), (c.recv,), (c.probe,), (c.iprobe,), (c.sendrecv, 1, 0, 0), (c.barrier,),
        (c.broadcast, 1), (c.reduce, 1), (c.all_reduce, 1), (c.gather, 1), (c.all_gather, 1),
        (c.scatter, [1] * size), (c.reduce_scatter, np.ones(size)), (c.all_to_all, [1] * size),
        (c.dup,), (c.split, 0),
    ):
        error_like(pycoll.Error, r"finalize\\(\\) was called", call, *args, within=0.5)
    c.close()
    assert (c.rank, c.size) == (rank, size)
error_like(pycoll.Error, r"finalize\\(\\) was called", pycoll.init, within=0.5)
ok()
""",
    )
    all_well(done, size)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_long_copies_are_delivered_though_their_sender_ends_first(job: Any, transport: str) -> None:
    done = job(
        2,
        """
x = np.arange(1 << 20)
part = comm.dup()
if rank == 0:
    comm.bsend(x, 1, tag=1)
    comm.ibsend({"long": x}, 1, tag=2).wait()
    part.bsend(x[::-1], 1)
    part.close()
    pycoll.finalize()
else:
    comm.probe(0, 1)  # it is here, but for its content
    np.testing.assert_array_equal(part.recv(0), x[::-1])
    np.testing.assert_array_equal(comm.recv(0, 2)["long"], x)
    np.testing.assert_array_equal(comm.recv(0, 1), x)
ok()
""",
        "--transport",
        transport,
    )
    all_well(done, 2)


@pytest.mark.parametrize("where", ["with comm", "if comm"])
def test_who_fails_waits_for_no_copy_to_be_received(job: Any, where: str) -> None:
    done = job(
        2,
        f"""
if rank == 0:
    {where}:
        comm.bsend(np.arange(1 << 20), 1)
        raise ValueError("it fails")
peer_failed(0, "raised ValueError", comm.barrier, within=4)
ok()
""",
    )
    assert done.content == [1], done.stderr


def test_copies_that_wait_for_their_turn_are_delivered_too(job: Any) -> None:
    done = job(
        2,
        """
x = np.arange(1 << 20)
if rank == 0:
    context, engine = comm._group.context, comm._group.engine
    with engine.locked():
        before, turn = context.turns.get(1), context.take_turn(1)  # as one that comes from a GPU
    request = comm.ibsend(x, 1)
    drive = engine._drive

    def driven(operation, until):
        if not turn.done:
            context.end_turn(1, turn, before)
        drive(operation, until)

    engine._drive = driven
    pycoll.finalize()
else:
    np.testing.assert_array_equal(comm.recv(0), x)
ok()
""",
    )
    all_well(done, 2)


def test_the_end_of_a_with_block_is_finalize_whether_it_raises_or_not(job: Any) -> None:
    done = job(
        2,
        """
with pycoll.init() as comm:
    rank = comm.rank
    with comm.dup() as other:
        assert other.all_reduce(1) == 2
    error_like(pycoll.Error, "this communicator is closed", other.barrier)
    error_like(pycoll.Error, "this communicator is closed", other.recv, within=0.5)
    error_like(pycoll.Error, "this communicator is closed", other.dup)
    if rank == 1:
        comm.send("the last word", 0)
    if rank == 0:
        assert comm.recv(1) == "the last word"
error_like(pycoll.Error, "block has ended", comm.barrier)
ok()
""",
        init="",
    )
    all_well(done, 2)
    done = job(
        2,
        """
with pycoll.init() as comm:
    if comm.rank == 1:
        raise ValueError("the cause")
    comm.barrier()
""",
        init="",
    )
    assert done.status == 1
    assert "ValueError: the cause" in done.stderr
    assert "rank 1 failed after" in done.stderr


def test_threads_blocked_in_calls_end_when_another_one_finalizes(job: Any) -> None:
    done = job(
        3,
        """
other, large = comm.dup(), np.ones(1 << 20)
after, anyone = (rank + 1) % 3, pycoll.ANY_SOURCE
calls = [  # nothing with tag 7 is ever sent
    (comm.recv, anyone, 7), (comm.recv, after, 7), (comm.recv, rank, 7), (comm.probe, anyone, 7),
    (comm.send, large, after), (comm.sendrecv, large, after, anyone, 0, 7),
    (comm.split(rank).recv,),
]
if rank != 1:  # 1 never comes
    calls.append((other.barrier,))
contents, calling = [], threading.Semaphore(0)

def blocked(call, *args):
    calling.release()
    text = "finalize.. was called" if rank == 0 else "finalize.. was called|rank . is needed"
    error = error_of(call, *args, within=60)
    assert re.search(text, str(error)), repr(error)
    contents.append(call)

threads = [threading.Thread(target=blocked, args=call) for call in calls]
for thread in threads:
    thread.start()
for _ in threads:
    calling.acquire()
if rank == 0:
    await_table((0, ".* for .* s"), (1, ".* for .* s"), (2, ".* for .* s"))
    comm.send("all are blocked", 1, 9)
    comm.send("all are blocked", 2, 9)
else:
    comm.recv(0, 9)
start = time.monotonic()
pycoll.finalize()
for thread in threads:
    thread.join(2)
assert len(contents) == len(calls), contents
assert time.monotonic() - start < 5
ok()
""",
    )
    all_well(done, 3)


def test_messages_of_a_thread_are_delivered_though_main_only_ends(job: Any) -> None:
    done = job(
        2,
        """
if rank == 0:
    def work():
        for i in range(100):
            comm.send(i, 1)
        comm.recv(1)
    threading.Thread(target=work).start()  # the interpreter ends after it, and finalizes then
if rank == 1:
    assert [comm.recv(0) for _ in range(100)] == [*range(100)]
    comm.send("enough", 0)
ok()
""",
    )
    all_well(done, 2)


def test_leaving_does_not_wait_for_a_peer_that_is_stopped_longer_than_5_s(job: Any) -> None:
    # Nothing was ever sent to rank 1 when it is stopped: its link cannot even be made.
    done = job(
        3,
        """
if rank == 0:
    pid = comm.recv(1)
    os.kill(pid, signal.SIGSTOP)
    comm.send("stopped", 2)
    peer_failed(2, "exit status 0", comm.recv, 2, within=60)
    comm.send("continued", 1)
    os.kill(pid, signal.SIGCONT)
    ok()
if rank == 1:
    comm.send(os.getpid(), 0)
    assert comm.recv(0) == "continued"
    peer_failed(2, "exit status 0", comm.recv, 2)
    ok()
if rank == 2:
    assert comm.recv(0) == "stopped"
    comm.send("you will not get this", 1)
    start = time.monotonic()
    pycoll.finalize()
    took = time.monotonic() - start
    assert 4.5 < took < 6.5, took
    ok()
""",
        "--transport",
        "tcp",
    )
    all_well(done, 3)


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
def test_a_rank_that_computes_hears_who_has_sent_for_the_first_time_and_left(
    job: Any, transport: str
) -> None:
    # Rank 1 is in no call, from before the link is wanted until long after its peer has ended.
    done = job(
        2,
        """
file = os.path.join(sys.argv[1], "sender")
if rank == 0:
    with open(file + ".part", "w") as part:
        part.write(str(os.getpid()))
    os.rename(file + ".part", file)
    comm.send("on its own", 1)
    comm.isend(np.arange(5000.0), 1)
    pycoll.finalize()
    ok()
if rank == 1:
    while not os.path.exists(file):
        pass
    with open(file) as whole:
        await_end(int(whole.read()))
    assert comm.recv(0) == "on its own"
    assert (comm.recv(0) == np.arange(5000.0)).all()
    peer_failed(0, "exit status 0", comm.recv, 0)
    ok()
""",
        "--transport",
        transport,
    )
    all_well(done, 2)


def test_what_is_in_shared_memory_outlives_its_sender(job: Any) -> None:
    done = job(
        3,
        """
if rank == 0:
    pid = comm.recv(1)
    os.kill(pid, signal.SIGSTOP)
    comm.send("stopped", 2)
    peer_failed(2, "exit status 0", comm.recv, 2, within=60)
    os.kill(pid, signal.SIGCONT)
if rank == 1:
    comm.send(os.getpid(), 0)
    assert comm.recv(2) == "sent while you were stopped"
    peer_failed(2, "exit status 0", comm.recv, 2)
if rank == 2:
    assert comm.recv(0) == "stopped"
    comm.send("sent while you were stopped", 1)
    start = time.monotonic()
    pycoll.finalize()
    assert time.monotonic() - start < 4.5
ok()
""",
        "--transport",
        "shm",
    )
    all_well(done, 3)
