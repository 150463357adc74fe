"""Requests: what goes on while its caller computes, waits for something else, or sleeps."""

from __future__ import annotations

import inspect
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from request_cases import LARGE, Comm
from script_jobs import all_well
from tiers import few, sizes

import pycoll
from pycoll._calls.calls import Calls
from pycoll._communicator.communicator import Communicator
from pycoll._requests.nonblocking import NonBlocking, Persistent


def twins() -> list[str]:
    """Blocking methods that have a non-blocking twin."""
    return [name[1:] for name in vars(NonBlocking) if hasattr(Calls, name[1:])]


def test_every_collective_and_send_recv_sendrecv_has_both_twins() -> None:
    probes = {"probe", "iprobe", "mprobe", "improbe", "receive_held"}
    named = {name for name in dir(Calls) if not name.startswith("_")} - probes
    assert set(twins()) == named
    assert set(twins()) | {"allreduce"} == {n for n in dir(Persistent) if not n.startswith("_")}


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
            with pytest.raises(TypeError, match="takes a list of requests, not one with an int"):
                wait([1])
        with pytest.raises(TypeError, match="give it to its wait"):
            comm.persistent.recv(other, timeout=1)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(request)

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

def sleep_soon(most, text):
    "Within a few tries the other threads wake no more than `most` times in half a second."
    for _ in range(10):  # what was begun before ends late where others compute
        before, cpu = sum(switches()), time.process_time() - time.thread_time()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        woken = sum(switches()) - before
        spent = time.process_time() - time.thread_time() - cpu
        if woken <= most and spent < 0.05:
            return
    raise AssertionError((text, woken, spent))

assert threading.active_count() == 1
comm.iall_reduce(np.ones(100_000)).wait()
comm.barrier()
sleep_soon(0, "no request is pending")
request = comm.irecv(1 - rank)
comm.barrier()
sleep_soon(9, "one is pending")
comm.barrier()
comm.send(None, 1 - rank)
request.wait()
ok()
""",
    )
    all_well(done, 2)


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
