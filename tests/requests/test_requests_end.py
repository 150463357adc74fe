"""Requests: cancelled, in error, at the end of a job, and over networks."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from pool_scripts import Scripts
from request_cases import LARGE, Comm
from script_jobs import all_well
from tiers import few, sizes

import pycoll
from pycoll import PROC_NULL, Status


@sizes(2)
def test_a_cancelled_receive_leaves_the_message_to_the_next(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            first, status = comm.irecv(1), Status()
            assert first.cancel()
            assert first.cancelled
            assert not first.cancel()
            for call in (first.wait, lambda: first.result):
                with pytest.raises(pycoll.Error, match="was cancelled"):
                    call()
            comm.send("now", 1)
            second = comm.irecv(1, status=status)
            assert second.wait()[0] == 7
            assert status == Status(1, 0, 8 * LARGE)
            assert not second.cancel()
            assert not second.cancelled
        else:
            comm.recv(0)
            comm.send(np.full(LARGE, 7), 0)
        request = comm.iall_reduce(1)
        with pytest.raises(TypeError, match="only a receive can be cancelled, not iall_reduce"):
            request.cancel()
        assert request.wait() == 2

    ranks(program)


@sizes(2)
def test_wrong_arguments_are_found_at_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = np.ones(4)
        for kind, text, call in (
            (ValueError, "root", lambda: comm.ibroadcast(x, 2)),
            (ValueError, "dest", lambda: comm.isend(x, 2)),
            (ValueError, "out", lambda: comm.iall_reduce(x, out=np.ones(5))),
            (TypeError, "avg", lambda: comm.iall_reduce(np.ones(2, int), "avg")),
            (ValueError, "takes all ranks", lambda: comm.iall_reduce(x, algorithm="shared_memory")),
            (ValueError, "takes all ranks", lambda: comm.iscan(x, algorithm="shared_memory")),
            (ValueError, "has no algorithm", lambda: comm.iall_reduce(x, algorithm="rong")),
            (TypeError, "timeout", lambda: comm.iall_reduce(x, timeout=1)),
            (TypeError, "number of seconds", lambda: comm.isend(x, comm.rank).wait("soon")),
        ):
            with pytest.raises(kind, match=text):
                call()
        comm.recv(comm.rank)
        assert comm.isend(x, PROC_NULL).wait() is None
        status = Status()
        assert comm.irecv(PROC_NULL, status=status).wait() is None
        assert status.source == PROC_NULL
        assert comm.isendrecv(x, PROC_NULL, PROC_NULL).wait() is None
        assert comm.all_reduce(1) == 2

    ranks(program)


@sizes(2)
def test_calls_that_differ_are_found_on_every_rank(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for mine in (
            (lambda c: c.iall_reduce(np.ones(3)), lambda c: c.iall_reduce(np.ones(4))),
            (lambda c: c.iall_reduce(np.ones(LARGE)), lambda c: c.iall_gather(np.ones(LARGE))),
            (lambda c: c.iall_reduce(np.ones(3)), lambda c: c.all_reduce(np.ones(3))),
            (lambda c: c.ibarrier(), lambda c: c.barrier()),
        ):
            group = comm.dup()
            with pytest.raises(pycoll.MismatchError, match="different calls") as found:
                run(mine[comm.rank], group)
            assert "rank 0: i" in str(found.value)
            with pytest.raises(pycoll.MismatchError):
                group.iall_reduce(1)
            group.close()
        assert comm.all_reduce(1) == 2

    def run(call: Any, group: Comm) -> None:
        call(group).wait(10 * PATIENCE)

    ranks(program)


@sizes(2)
def test_an_operator_that_raises_breaks_the_communicator(ranks: Any) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise AttributeError("no text")

    def program(comm: Comm, error: type[Exception]) -> None:
        def bad(a: Any, b: Any) -> Any:
            raise error("no")

        def start(group: Comm) -> Any:
            return group.iall_reduce(np.ones(3), pycoll.Op(bad)).wait()

        def block(group: Comm) -> Any:
            return group.all_reduce(np.ones(3), pycoll.Op(bad), algorithm="tree")

        for call in (start, block):
            group = comm.dup()
            with pytest.raises((error, pycoll.PeerFailed)):
                call(group)
            with pytest.raises(
                pycoll.PeerFailed, match=f"gave up i?all_reduce #0 .*{error.__name__}"
            ):
                group.barrier()
            group.close()
        assert comm.iall_reduce(1).wait() == 2

    for error in (ZeroDivisionError, pycoll.Error, pycoll.TruncationError, Unspeakable):
        ranks(program, error)


@sizes(2)
def test_out_that_does_not_fit_a_scatter_is_told_by_the_request(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        rows = np.arange(4.0).reshape(2, 2)
        out = np.empty(2 if comm.rank == 0 else 3)
        request = comm.iscatter(rows if comm.rank == 0 else None, out=out)
        if comm.rank == 0:
            assert request.wait() is out
        else:
            with pytest.raises(ValueError, match="out"):
                request.wait()
            assert "failed" in repr(request)
        assert comm.iall_reduce(1).wait() == 2  # the communicator is whole

    ranks(program)


@sizes(2)
def test_one_that_fails_ends_wait_all_at_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            never, short = comm.irecv(1, tag=1), comm.irecv(1, tag=2, out=np.empty(1))
            comm.send(None, 1)
            with pytest.raises(pycoll.TruncationError):
                pycoll.wait_all([never, short])
            assert never.cancel()
            assert comm.recv(1, tag=2).shape == (2,)  # it stayed in the queue
        else:
            comm.recv(0)
            comm.send(np.ones(2), 0, tag=2)

    ranks(program)


def test_a_dead_rank_fails_what_waits_for_it_while_nobody_waits(job: Any) -> None:
    done = job(
        3,
        """
pair = comm.split(0 if rank < 2 else 1)
if rank == 2:
    comm.recv(0), comm.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
requests = [comm.iall_reduce(np.ones(100_000)), comm.irecv(2)]
comm.send(None, 2)
fine = pair.iall_reduce(np.ones(100_000))
until = time.monotonic() + 5
while not all(r.done for r in requests):
    assert time.monotonic() < until
peer_failed(2, SIGKILL, pycoll.wait_any, requests)
for request in requests:
    peer_failed(2, SIGKILL, request.wait)
assert fine.wait()[0] == 2
ok()
""",
    )
    assert (done.status, done.content) == (128 + signal.SIGKILL, [0, 1]), done.stderr


@pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))
def test_a_send_that_a_broken_communicator_dropped_is_no_success(job: Any, transport: str) -> None:
    done = job(
        3,
        """
large = np.ones(1_000_000)
comm.barrier()
if rank == 0:
    comm.recv(1, tag=1)  # its messages are under way
    os.kill(comm.recv(2), signal.SIGKILL)
    peer_failed(2, SIGKILL, comm.recv, 2)
elif rank == 1:
    requests = [comm.isend(large, 0), comm.isend(large, 0)]
    comm.send(None, 0, tag=1)
    for call in (*[request.wait for request in requests], lambda: comm.send(large, 0)):
        peer_failed(2, SIGKILL, call)
else:
    comm.send(os.getpid(), 0)
    comm.recv(0)
ok()
""",
        "--transport",
        transport,
    )
    assert (done.status, done.content) == (128 + signal.SIGKILL, [0, 1]), done.stderr


def test_what_was_sent_before_the_end_is_delivered(job: Any) -> None:
    done = job(
        2,
        """
pids = comm.all_gather(os.getpid())
if rank == 0:
    for i in range(100):
        comm.isend(i, 1)
    pending = comm.irecv(1, tag=9)
    pycoll.finalize()
    error_like(pycoll.Error, "finalize", pending.wait)
    error_like(pycoll.Error, "finalize", comm.iall_reduce, 1)
    assert pending.test()
else:
    assert [comm.recv(0) for _ in range(100)] == list(range(100))
    await_end(pids[0])  # or the receive of rank 0 would fail because this one has ended
ok()
""",
    )
    all_well(done, 2)


@pytest.mark.parametrize("rounds", few([300], [3000]))
def test_many_rounds_leave_nothing(job: Any, rounds: int) -> None:
    done = job(
        2,
        f"ROUNDS = {rounds}"
        """
import asyncio, gc
other, x, large = 1 - rank, np.ones(100), np.ones(20_000)
never = comm.irecv(other, tag=99)

async def wait(request):
    return await request

def use(rounds):
    for i in range(rounds):
        requests = [comm.iall_reduce(x), comm.irecv(other, tag=1), comm.isend(x, other, tag=1)]
        if i % 10 == 0:
            requests += [comm.irecv(other, tag=2), comm.isend(large, other, tag=2)]
            cancelled = comm.irecv(other, tag=3)
            error_like(pycoll.OperationTimeout, "", pycoll.wait_any, [never, cancelled], timeout=0)
            assert cancelled.cancel()
        if i % 100 == 0:
            asyncio.run(wait(requests[0]))
        pycoll.wait_all(requests)
    comm.barrier()
    gc.collect()

def taken():
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as statm:
        return {
            "objects": len(gc.get_objects()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": len(maps.readlines()),
            "pages": int(statm.read().split()[1]),
            "threads": threading.active_count(),
        }

use(ROUNDS // 3)
before = taken()
use(ROUNDS)
after = taken()
most = {"objects": 100, "descriptors": 0, "mappings": 8, "pages": 1024, "threads": 0}  # 4 MiB
grown = {name: after[name] - before[name] for name in most}
assert all(grown[name] <= most[name] for name in most), f"{grown} more, from {before}"
assert before["threads"] == 1, before
assert never.cancel(), repr(never)
comm.barrier()  # or the other would end before this rank has looked, and `never` would fail
ok()
""",
        "--timeout",
        "120",
    )
    all_well(done, 2)


def test_a_fork_beside_pending_requests_harms_nobody(job: Any) -> None:
    done = job(
        2,
        """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
large = np.ones(2_000_000)
for _ in range(5):
    request, receive = comm.iall_reduce(large), comm.irecv(1 - rank)
    pid = os.fork()
    if pid == 0:
        calls = [lambda: comm.isend(1, 0)]
        calls += [] if request.done else [request.wait]
        calls += [] if receive.done else [receive.wait, receive.cancel]  # the other was quicker
        for call in calls:
            error_like(pycoll.Error, "was forked from a rank", call, within=0.5)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    comm.send(None, 1 - rank)
    assert pycoll.wait_all([request, receive])[0][-1] == 2
ok()
""",
    )
    all_well(done, 2)


def test_control_c_in_a_wait_leaves_the_request(scripts: Scripts) -> None:
    scripts(
        2,
        """
if rank == 0:
    comm.send(os.getpid(), 1)
    request, collective = comm.irecv(1), comm.iall_reduce(np.ones(100_000))
    for pending in request, collective:
        error_like(KeyboardInterrupt, "", pending.wait, within=10)
    comm.send(None, 1)
    assert request.wait() == "still"
else:
    pid = comm.recv(0)
    for what in "irecv", "iall_reduce":
        await_table((0, what))
        os.kill(pid, signal.SIGINT)
    comm.recv(0)
    comm.send("still", 0)
    collective = comm.iall_reduce(np.ones(100_000))
assert collective.wait()[0] == 2
ok()
""",
    )


PROGRAM = """
x = [np.full(n, rank + 1.0) for n in (0, 1, 1000, 20_000, 300_000)]
for _ in range(5):
    requests = [comm.iall_reduce(each) for each in x] + [comm.iall_gather(each) for each in x]
    requests += [comm.irecv((rank - 1) % size, tag=i) for i in range(50)]
    requests += [comm.isend(x[i % 5], (rank + 1) % size, tag=i) for i in range(50)]
    comm.barrier()
    got = pycoll.wait_all(requests)
    for each, total, everyone in zip(x, got[:5], got[5:10]):
        assert (total == size * (size + 1) / 2).all() and total.shape == each.shape
        assert everyone.shape == (size, *each.shape)
        assert (everyone.T == np.arange(1, size + 1)).all()
    for i, received in enumerate(got[10:60]):
        assert received.shape == x[i % 5].shape and (received == (rank - 1) % size + 1).all()
request, t = comm.iall_reduce(x[-1]), time.monotonic()
while not request.done:
    sum(range(1000))
    assert time.monotonic() < t + 20
ok()
"""


OTHERS = (("tcp",),)
MORE_OTHERS = ("zmq",), ("zmq", "--encrypt"), ("shm", "--emulate-hosts", "2")


@pytest.mark.parametrize("words", few(OTHERS, MORE_OTHERS))
def test_over_other_transports(scripts: Scripts, words: tuple[str, ...]) -> None:
    scripts(4, PROGRAM, *words)


@pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))
def test_a_message_that_is_taken_back_leaves_receives_in_their_order(
    scripts: Scripts, transport: str
) -> None:
    scripts(
        2,
        """
def stopped(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"

pids, n = comm.all_gather(os.getpid()), 4 << 20
for _ in range(5):
    if rank == 1:
        receives = [comm.irecv(0, 1, out=np.zeros(n, "u1")) for _ in range(3)]
    comm.barrier()
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        while not stopped(pids[1]):
            pass
        error_like(pycoll.OperationTimeout, "send", comm.send, np.ones(n, "u1"), 1, 1, timeout=0.01)
        os.kill(pids[1], signal.SIGCONT)
        for value in 1, 2, 3:
            comm.send(np.full(n, value, "u1"), 1, 1)
    else:
        assert [got[0] for got in pycoll.wait_all(receives)] == [1, 2, 3]
    comm.barrier()
ok()
""",
        transport,
    )


def test_what_was_passed_is_let_go_when_its_wait_has_returned(scripts: Scripts) -> None:
    text = """
import gc, weakref

def of(name, x):
    match name:
        case "all_to_allv": return [x] * size,
        case "scatter" | "broadcast": return x if rank == 0 else None,
        case "scatterv": return [x] * size if rank == 0 else None,
        case "reduce_scatterv": return x, [1] * size
        case "sendrecv": return x, 1 - rank, 1 - rank
    return x,

names = (
    "broadcast reduce all_reduce gather all_gather scatter reduce_scatter all_to_all scan exscan "
    "gatherv all_gatherv scatterv all_to_allv reduce_scatterv sendrecv"
).split()
comm.barrier()
gc.collect()
cleanup.callback(gc.enable)
gc.disable()  # a cycle would keep it
for name in names:
    for turn in range(20):
        x = np.ones((size, 3))
        alive = weakref.ref(x)
        repeated = getattr(comm.persistent, name)(*of(name, x))
        for _ in range(2):
            repeated.start()
            repeated.wait()
        getattr(comm, "i" + name)(*of(name, x)).wait()
        getattr(comm, name)(*of(name, x))
        del x, repeated
        assert alive() is None, (name, turn)
ok()
"""
    scripts(2, text)
