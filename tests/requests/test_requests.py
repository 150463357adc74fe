"""Requests: what goes on while its caller computes, waits for something else, or sleeps."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import signal
import threading
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from tiers import few, sizes

import pycoll
from pycoll import PROC_NULL, Status
from pycoll._calls.calls import Calls
from pycoll._communicator.communicator import Communicator
from pycoll._requests.nonblocking import NonBlocking, Persistent

Comm = Any

LARGE = 300_000
"""Elements of a value that waits for its receiver."""


# --- the twins -------------------------------------------------------------------------------


def twins() -> list[str]:
    """Blocking methods that have a non-blocking twin."""
    return [name[1:] for name in vars(NonBlocking) if hasattr(Calls, name[1:])]


def test_every_collective_and_send_recv_sendrecv_has_both_twins() -> None:
    probes = {"probe", "iprobe", "mprobe", "improbe", "receive_held"}
    named = {name for name in vars(Calls) if not name.startswith("_")} - probes
    assert set(twins()) == named
    assert set(twins()) | {"allreduce"} == {n for n in vars(Persistent) if not n.startswith("_")}


@pytest.mark.parametrize("name", twins())
def test_a_twin_takes_what_its_method_takes_but_a_timeout(name: str) -> None:
    blocking = inspect.signature(getattr(Communicator, name)).parameters
    wanted = [(p.name, p.kind, p.default) for p in blocking.values() if p.name != "timeout"]
    for twin in (getattr(Communicator, f"i{name}"), getattr(Persistent, name)):
        found = inspect.signature(twin).parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == wanted
        assert f"`Communicator.{name}`" in (twin.__doc__ or "")


@sizes(1, 3, more=(2, 4))
def test_every_twin_gives_what_its_method_gives(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        rows = np.arange(size * 6.0).reshape(size, 2, 3) + 100 * me
        uneven = [np.full(r + me, float(me)) for r in range(size)]
        right, left = (me + 1) % size, (me - 1) % size
        calls: dict[str, tuple[Any, ...]] = {
            "barrier": (),
            "broadcast": (rows if me == 0 else None,),
            "reduce": (rows, "max", size - 1),
            "all_reduce": (rows,),
            "all_reduce_many": ([rows, rows[0], np.arange(3) + me],),
            "gather": (rows, size - 1),
            "all_gather": (rows,),
            "scatter": (rows if me == 0 else None,),
            "reduce_scatter": (rows,),
            "all_to_all": (rows,),
            "scan": (rows,),
            "exscan": (rows,),
            "gatherv": (uneven[0],),
            "all_gatherv": (uneven[0],),
            "scatterv": (uneven if me == 0 else None,),
            "all_to_allv": (uneven,),
            "reduce_scatterv": (rows.reshape(2 * size, 3), [2] * size),
            "sendrecv": (rows, right, left),
        }
        assert set(calls) | {"send", "ssend", "bsend", "recv"} == set(twins())
        for name, args in calls.items():
            wanted = getattr(comm, name)(*args)
            got = getattr(comm, f"i{name}")(*args).wait()
            request = getattr(comm.persistent, name)(*args)
            for result in (got, request.start().wait(), request.start().wait()):
                np.testing.assert_equal(result, wanted)
                assert type(result) is type(wanted)

    ranks(program)


@sizes(2, 3)
def test_objects_and_numbers_travel_too(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        names = [f"rank {rank}" for rank in range(size)]
        requests = [
            comm.ibroadcast({"a": [1]} if me == 0 else None),
            comm.iall_gather(names[me]),
            comm.iall_reduce(me + 0.5),
            comm.iall_reduce(names[me], op=lambda a, b: f"{a}, {b}"),
            comm.iscatter(names if me == 1 else None, root=1),
            comm.igather(names[me], root=1),
            comm.iall_to_all(names),
            comm.iexscan(me),
        ]
        got = pycoll.wait_all(requests)
        assert got == [
            {"a": [1]},
            names,
            sum(range(size)) + size / 2,
            ", ".join(names),
            names[me],
            names if me == 1 else None,
            [names[me]] * size,
            sum(range(me)) if me else None,
        ]
        assert type(got[2]) is float

    ranks(program)


# --- waiting ---------------------------------------------------------------------------------


@sizes(2, 4)
def test_requests_complete_in_any_order_and_beside_blocking_calls(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        other = comm.dup()
        counts = [1, 100, LARGE, 7, 0, 20_000] * 2
        inputs = [np.arange(n, dtype="f8") + me for n in counts]
        requests = [comm.iall_reduce(x) for x in inputs]
        later = [other.iall_gather(np.array([i, me])) for i in range(20)]
        assert comm.all_reduce(1) == size
        comm.barrier()
        assert other.all_reduce(np.ones(LARGE))[-1] == size
        order = np.random.default_rng(me).permutation(len(counts))
        for i in order:
            wanted = np.arange(counts[i]) * size + sum(range(size))
            np.testing.assert_array_equal(requests[i].wait(), wanted)
        for i, got in enumerate(pycoll.wait_all(later)):
            np.testing.assert_array_equal(got, [[i, rank] for rank in range(size)])
        other.close()

    ranks(program)


@sizes(2)
def test_a_wait_that_times_out_leaves_request_and_communicator_as_they_are(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        if comm.rank == 0:
            receive, reduce = comm.irecv(1), comm.iall_reduce(1)
            for request in (receive, reduce):
                for _ in range(2):
                    with pytest.raises(pycoll.OperationTimeout, match=r"irecv|iall_reduce"):
                        request.wait(0.05)
                with pytest.raises(pycoll.Error, match="not done yet"):
                    _ = request.result
                assert not request.test()
            with pytest.raises(pycoll.OperationTimeout, match="wait_all of 2 requests"):
                pycoll.wait_all([receive, reduce], timeout=0.05)
            with pytest.raises(pycoll.OperationTimeout, match="wait_any of 2 requests"):
                pycoll.wait_any([receive, reduce], timeout=0)
            comm.send("go", 1)
            assert receive.wait() == "message"
            assert reduce.wait(5 * PATIENCE) == 2
        else:
            assert comm.recv(0) == "go"
            comm.send("message", 0)
            assert comm.iall_reduce(1).wait() == 2
        large = np.full(LARGE, comm.rank)
        send = comm.isend(large, other)
        with pytest.raises(pycoll.OperationTimeout):
            send.wait(0.05)
        assert comm.sendrecv(comm.rank, other, other, recvtag=5, sendtag=5) == other
        assert comm.recv(other)[-1] == other
        assert send.wait() is None

    ranks(program)


@sizes(2)
def test_test_and_done_tell_when_it_is_over(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 0:
            request = comm.irecv(1, tag=1)
            assert not request.test()
            assert not request.done
            comm.send(None, 1)
            while not request.test():
                pass
            assert request.done
            assert request.result == request.wait() == request.wait(0) == "now"
        else:
            comm.recv(0)
            comm.send("now", 0, tag=1)

    ranks(program)


@sizes(2)
def test_wait_any_and_wait_some_give_each_request_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count = 40
        other = 1 - comm.rank
        tags = np.random.default_rng(comm.rank).permutation(count).tolist()
        for wait in (pycoll.wait_any, pycoll.wait_some):
            requests = [comm.irecv(other, tag=i) for i in range(count)]
            for tag in tags:
                comm.send(10 * tag, other, tag)
            got: dict[int, int] = {}
            while len(got) < count:
                found, values = wait(requests)
                if wait is pycoll.wait_any:
                    found, values = [found], [values]
                assert found
                assert not set(found) & set(got)
                got.update(zip(found, values, strict=True))
            assert got == {i: 10 * i for i in range(count)}
            with pytest.raises(ValueError, match="no request is left"):
                wait(requests)
            assert pycoll.wait_all(requests) == [10 * i for i in range(count)]
            comm.barrier()
        with pytest.raises(ValueError, match="no request is left"):
            pycoll.wait_any([])
        assert pycoll.wait_all([]) == []

    ranks(program)


@pytest.mark.parametrize("count", few([1000], [10_000]))
@sizes(2)
def test_thousands_of_requests_are_in_flight_at_once(ranks: Any, count: int) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        receives = [comm.irecv(other, tag=i) for i in range(count)]
        comm.barrier()
        sends = [comm.isend(i, other, tag=count - 1 - i) for i in range(count)]
        assert pycoll.wait_all(receives) == list(range(count))[::-1]
        assert pycoll.wait_all(sends) == [None] * count
        reductions = [comm.iall_reduce(np.array([i, comm.rank])) for i in range(count)]
        for i, got in enumerate(pycoll.wait_all(reductions)):
            assert got.tolist() == [2 * i, 1]

    ranks(program)


@sizes(2)
def test_the_same_request_twice_a_generator_and_what_is_no_request(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        request = comm.irecv(other)
        comm.isend(7, other)
        assert pycoll.wait_all([request, request]) == [7, 7]
        assert pycoll.wait_all(comm.iall_reduce(i) for i in range(3)) == [0, 2, 4]
        assert pycoll.wait_any(comm.iall_reduce(i) for i in range(3))[1] in (0, 2, 4)
        for wait in (pycoll.wait_all, pycoll.wait_any, pycoll.wait_some):
            with pytest.raises(TypeError, match="takes requests, not a int"):
                wait([1])
        with pytest.raises(TypeError, match="give it to its wait"):
            comm.persistent.recv(other, timeout=1)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(request)

    ranks(program)


@sizes(2)
def test_threads_that_share_a_list_get_each_request_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        count, other = 200, 1 - comm.rank
        requests = [comm.irecv(other, tag=i) for i in range(count)]
        got: list[tuple[int, Any]] = []

        def take() -> None:
            with contextlib.suppress(ValueError):  # no request is left
                while True:
                    got.append(pycoll.wait_any(requests))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for i in range(count):
            comm.send(10 * i, other, tag=i)
        for thread in threads:
            thread.join()
        assert sorted(got) == [(i, 10 * i) for i in range(count)]

    ranks(program)


@sizes(2)
def test_wait_some_gives_what_went_well_before_it_raises(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me = comm.rank
        requests = [comm.irecv(me, tag=1, out=np.empty(1)), comm.irecv(me, tag=2)]
        comm.send(np.ones(2), me, tag=1)
        comm.send("well", me, tag=2)
        while not all(request.test() for request in requests):
            pass
        assert pycoll.wait_some(requests) == ([1], ["well"])
        with pytest.raises(pycoll.TruncationError) as found:
            pycoll.wait_some(requests)
        assert found.value.__notes__[0].startswith("request 0 of 2: <pycoll.Request irecv")
        with pytest.raises(ValueError, match="no request is left"):
            pycoll.wait_some(requests)
        assert len(comm.recv(me, tag=1)) == 2

    ranks(program)


# --- progress --------------------------------------------------------------------------------


@sizes(2, 3)
def test_it_goes_on_while_the_caller_computes(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for _ in range(3):
            x = np.full(2_000_000, comm.rank)
            requests = [comm.irecv(left), comm.iall_reduce(x), comm.isend(x, right)]
            while not all(request.done for request in requests):  # looks, and does nothing
                sum(range(1000))
            assert requests[0].result[-1] == left
            assert requests[1].result[-1] == sum(range(comm.size))

    ranks(program)


def test_nothing_runs_when_no_request_is_pending(job: Any) -> None:
    done = job(
        2,
        """
def switches():
    "How often the threads of this process were put to sleep."
    others = [int(t) for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
    texts = [open(f"/proc/self/task/{t}/status").read() for t in others]
    return [int(re.search(r"voluntary_ctxt_switches:\\s+(\\d+)", text)[1]) for text in texts]

assert threading.active_count() == 1
comm.iall_reduce(np.ones(100_000)).wait()
comm.barrier()
until = time.monotonic() + 0.2  # what was begun for that request ends
while time.monotonic() < until:
    pass
before = switches()
until = time.monotonic() + 0.5
while time.monotonic() < until:
    pass
assert switches() == before, (before, switches())
# A pending one sleeps, too.
request = comm.irecv(1 - rank)
comm.barrier()
until = time.monotonic() + 0.2
while time.monotonic() < until:
    pass
before, until = sum(switches()), time.monotonic() + 0.5
cpu = time.process_time() - time.thread_time()
while time.monotonic() < until:
    pass
assert sum(switches()) - before < 10, (before, switches())
assert time.process_time() - time.thread_time() - cpu < 0.05
comm.barrier()
comm.send(None, 1 - rank)
request.wait()
ok()
""",
    )
    assert (done.status, done.stderr) == (0, "")


@sizes(2)
def test_several_threads_wait_for_their_own(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        groups = [comm.dup() for _ in range(3)]
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                group = groups[index]
                for i in range(60):
                    x = np.full((i * 997) % 40_000, i + index)
                    requests = [
                        group.iall_reduce(x),
                        comm.irecv(other, tag=index),
                        comm.isend(x, other, tag=index),
                    ]
                    if i % 3 == 0:
                        assert group.all_reduce(1) == 2
                    total, received, _ = pycoll.wait_all(requests)
                    np.testing.assert_array_equal(total, 2 * x)
                    np.testing.assert_array_equal(received, x)
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for group in groups:
            group.close()

    ranks(program)


# --- persistent ------------------------------------------------------------------------------


@sizes(2, 3)
def test_a_persistent_request_looks_at_its_arrays_anew(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        x, out = np.zeros(10), np.empty(10)
        strided = np.zeros((10, 2))[:, 0]
        requests = [
            comm.persistent.all_reduce(x, out=out),
            comm.persistent.send(strided, (me + 1) % size),
            comm.persistent.recv((me - 1) % size, out=np.empty(10)),
        ]
        with pytest.raises(pycoll.Error, match="was not started"):
            requests[0].wait()
        assert "not started" in repr(requests[0])
        for i in range(20):
            x[:] = me + i
            strided[:] = 10 * me + i
            for request in requests:
                assert request.start() is request
            results = pycoll.wait_all(requests)
            assert results[0] is out
            assert out[-1] == sum(range(size)) + i * size
            assert results[2][-1] == 10 * ((me - 1) % size) + i
        if me == 0:
            receive = comm.persistent.recv(1, tag=3)
            receive.start()
            with pytest.raises(pycoll.Error, match="still under way"):
                receive.start()
            assert receive.cancel()
            assert receive.start().cancel()
        with pytest.raises(ValueError, match="root"):
            comm.persistent.reduce(x, root=size)

    ranks(program)


# --- cancelling ------------------------------------------------------------------------------


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


# --- arguments and errors --------------------------------------------------------------------


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
            return group.all_reduce(np.ones(3), pycoll.Op(bad))

        for call in (start, block):
            group = comm.dup()
            with pytest.raises((error, pycoll.PeerFailed)):
                call(group)
            with pytest.raises(pycoll.PeerFailed, match=f"gave up a collective .{error.__name__}"):
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


# --- the end ---------------------------------------------------------------------------------


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
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1])


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
        pages = int(statm.read().split()[1])
        return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), len(maps.readlines()), pages

use(ROUNDS // 3)
before = taken()
use(ROUNDS)
after = taken()
assert after[0] <= before[0] + 100, (before, after)
assert after[1] <= before[1] + 1, (before, after)  # the timer of a first long wait
assert after[2] <= before[2] + 8, (before, after)
assert after[3] <= before[3] + 1024, (before, after)  # 4 MiB
assert threading.active_count() <= 2
assert never.cancel()
ok()
""",
        "--timeout",
        "120",
    )
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1])


def test_closing_a_communicator_ends_its_requests(job: Any) -> None:
    done = job(
        2,
        """
other = comm.dup()
pending = [other.irecv(1 - rank), other.irecv(1 - rank, tag=3)]
other.close()
for request in pending:
    error_like(pycoll.Error, "is closed", request.wait)
error_like(pycoll.Error, "is closed", other.iall_reduce, 1)
assert comm.iall_reduce(1).wait() == 2
ok()
""",
    )
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1])


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
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1])


def test_control_c_in_a_wait_leaves_the_request(job: Any) -> None:
    done = job(
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
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1])


# --- over networks ---------------------------------------------------------------------------


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


OTHERS = ("--transport", "tcp"), ("--transport", "zmq"), ("--transport", "zmq", "--encrypt")


@pytest.mark.parametrize("options", few(OTHERS, [("--emulate-hosts", "2")]))
def test_over_other_transports(job: Any, options: tuple[str, ...]) -> None:
    done = job(4, PROGRAM, *options)
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1, 2, 3])


@pytest.mark.parametrize("transport", few(["shm", "tcp"], ["zmq"]))
def test_a_message_that_is_taken_back_leaves_receives_in_their_order(
    job: Any, transport: str
) -> None:
    done = job(
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
        "--transport",
        transport,
    )
    assert (done.status, done.stderr, done.content) == (0, "", [0, 1])
