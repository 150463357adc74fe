"""Collectives by messages that the compiled core runs: what a program sees."""

from __future__ import annotations

import pytest
from core_counting import COUNTING
from pool_scripts import Scripts
from script_jobs import Jobs, all_well
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = few(["shm", "tcp"], ["zmq"])

IN_CORE = TRANSPORTS[:2]
"""Those that are in C themselves: nothing of Python is called, and the kernel has what was sent."""


@pytest.mark.parametrize("transport", IN_CORE)
def test_collectives_of_arrays_run_without_python(scripts: Scripts, transport: str) -> None:
    text = """
import sys
from pycoll._requests.core_collectives import CoreCollective

size = comm.size
x, rows = np.arange(4.0) + rank, np.arange(size * 4).reshape(size, 4) * (rank + 1)
every, copied = size * (size - 1) // 2, np.zeros(4)

def start():
    return [
        comm.ibarrier(),
        comm.ireduce(x, "max", 1),
        comm.iall_reduce(x),
        comm.igather(x[:1], root=2),
        comm.iall_gather(x),
        comm.ireduce_scatter(rows),
        comm.iall_to_all(rows),
        comm.iscan(x, "prod"),
        comm.iexscan(x),
        comm.iall_reduce(x, "avg"),
        comm.iscan(x, "avg"),
        comm.iall_reduce(x, algorithm="double_tree"),
        comm.ibroadcast(x if rank == 1 else copied, 1, algorithm="tree"),
    ]

def check(results):
    nothing, most, total, gathered, all_of, mine, turned, before, *more = results
    below, mean, mean_so_far, again, sent = more
    assert again.tolist() == total.tolist()
    assert sent is (x if rank == 1 else copied) and sent.tolist() == (np.arange(4.0) + 1).tolist()
    assert mean.tolist() == (total / size).tolist()
    so_far = sum(np.arange(4.0) + r for r in range(rank + 1))
    assert mean_so_far.tolist() == (so_far / (rank + 1)).tolist()
    assert (below is None) if rank == 0 else below.tolist() == (so_far - x).tolist()
    assert nothing is None
    assert (most is None) if rank != 1 else most.tolist() == (np.arange(4.0) + size - 1).tolist()
    assert total.tolist() == (np.arange(4.0) * size + every).tolist()
    assert (gathered is None) if rank != 2 else gathered[:, 0].tolist() == list(range(size))
    assert all_of.tolist() == [(np.arange(4.0) + r).tolist() for r in range(size)]
    assert mine.tolist() == (rows[rank] // (rank + 1) * (every + size)).tolist()
    row = np.arange(size * 4).reshape(size, 4)[rank]
    assert turned.tolist() == [(row * (r + 1)).tolist() for r in range(size)]
    expected = np.prod([np.arange(4.0) + r for r in range(rank + 1)], axis=0)
    assert before.tolist() == expected.tolist()

pycoll.wait_all(start())  # the first use imports modules
requests = start()
assert all(isinstance(request, CoreCollective) for request in requests), requests
check(pycoll.wait_all(requests))

calls = []
def note(frame, event, arg):
    if event == "call":
        calls.append(frame.f_code.co_name)
sys.setprofile(note)
for _ in range(50):  # a wait of more than a moment is Python's
    calls.clear()
    requests = start()
    results = [request.wait() for request in requests]
    again = [name for name in calls if name != "<listcomp>"] == ["start"]
    if comm.iall_reduce(np.array([again]), "land").wait()[0]:
        break
sys.setprofile(None)
assert again, calls
check(results)

out = np.empty(4)
assert comm.iall_reduce(x, out=out).wait() is out
assert comm.iall_reduce(out, "min", out=out).wait() is out  # in place
assert out.tolist() == total.tolist() if (total := comm.iall_reduce(x).wait()) is not None else 0
error_like(ValueError, "overlap", comm.iall_reduce, rows[0], out=rows[0][::-1])
error_like(TypeError, "timeout", comm.iall_reduce, x, timeout=None)
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", IN_CORE)
def test_a_named_algorithm_runs_without_python(scripts: Scripts, transport: str) -> None:
    """Also where blocking calls go by shared memory, and some of them do between."""
    text = (
        COUNTING
        + """
ALLOWED = set()
x, out, rows = np.arange(4.0) + rank, np.zeros(4), np.arange(size * 4.0).reshape(size, 4)

def step():
    comm.barrier(algorithm="dissemination")
    assert comm.all_reduce(x, out=out, algorithm="ring") is out
    assert out.tolist() == (np.arange(4.0) * 2 + 1).tolist()
    assert comm.allreduce(x).tolist() == out.tolist()
    assert comm.all_reduce(x, algorithm="ring", timeout=None).tolist() == out.tolist()
    assert comm.all_gather(x, algorithm="bruck").tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert comm.reduce_scatter(rows, algorithm="ring").tolist() == (rows[rank] * 2).tolist()
    given = x if rank == 1 else out
    assert comm.broadcast(given, 1, algorithm="tree") is given
    assert given.tolist() == [1, 2, 3, 4]
    total = comm.reduce(x, "max", 1, algorithm="tree")
    assert (total is None) if rank == 0 else total.tolist() == [1, 2, 3, 4]
    for name in None, "ring":
        assert comm.all_reduce(2**62, algorithm=name) == 2**63
        assert comm.all_reduce(1.5, algorithm=name) == 3.0
        assert comm.reduce(rank, "max", 1, algorithm=name and "tree") == (1 if rank else None)
        assert comm.iall_reduce(-rank).wait() == -1

goes_without_python(step)
if comm.size == 2:
    error = error_of(lambda: comm.all_reduce(x, algorithm="ring" if rank == 0 else None))
    assert type(error) is pycoll.MismatchError, repr(error)
ok()
"""
    )
    scripts(2, text, transport)


def test_without_an_algorithm_calls_go_by_shared_memory_however_they_are_made(
    scripts: Scripts,
) -> None:
    text = """
x, out = np.arange(4.0), np.zeros(4)

def calls(on):
    # The core's own methods take those with a deadline, and not the first, nor what has gaps.
    assert on.all_reduce(x, out=out)[1] == 2
    assert on.all_reduce(x, timeout=60)[1] == 2
    assert on.all_gather(x[::2])[1].tolist() == [0, 2]
    assert on.all_reduce(x, algorithm="shared_memory")[1] == 2
    assert on.broadcast(x.copy() if rank == 0 else np.zeros(4)).tolist() == x.tolist()
    before = on.exscan(x, out=out)
    assert (before is None) if rank == 0 else (before is out and out.tolist() == x.tolist())
    on.barrier()

part = comm.dup()
part.barrier(algorithm="tree")  # it exists on all ranks
before = part.counters().sent_messages.tolist()
for _ in range(2):
    calls(part)
assert part.counters().sent_messages.tolist() == before != [0, 0]
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_start_different_collectives_hear_of_it(
    scripts: Scripts, transport: str
) -> None:
    text = """
comm.iall_reduce(np.ones(3)).wait()
request = comm.iall_reduce(np.ones(3)) if rank == 0 else comm.iall_gather(np.ones(3))
error = error_of(request.wait)
assert type(error) is pycoll.MismatchError, repr(error)
assert "rank 0: iall_reduce(float64[3]" in str(error) and "at script.py:" in str(error), error
assert "rank 1: iall_gather(float64[3]" in str(error), error
error_like(pycoll.MismatchError, "different calls", comm.ibarrier)
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_they_hear_where_calls_were_made_that_wait_for_one_another(
    scripts: Scripts, transport: str
) -> None:
    text = """
part = comm.dup(name="part")
request = part.igatherv(np.ones(3), root=rank)  # line 3
error = str(error_of(request.wait))
for each in 0, 1:
    assert f"rank {each}: igatherv(float64, root={each}) at script.py:3\\n" in error, error
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_of_an_earlier_number_is_named(scripts: Scripts, transport: str) -> None:
    text = """
world = comm.dup()
part = comm.dup(name="part")
if rank == 0:  # done at once: it only sends
    assert part.ireduce(np.ones(2), root=1).wait() is None
    error = error_of(lambda: part.iall_reduce(np.ones(2)).wait())
else:
    error = error_of(lambda: part.igather(np.ones(2), root=1).wait())
assert type(error) is pycoll.MismatchError, repr(error)
assert "collective number 0 of part" in str(error), error
world.barrier()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_under_way_ends_with_its_communicator(scripts: Scripts, transport: str) -> None:
    text = """
part = comm.dup()
part.iall_reduce(np.ones(3)).wait()
if rank == 0:
    x = np.ones(300_000)
    requests = [part.iall_reduce(x), part.irecv(1), part.irecv(1, tag=3)]
    part.close()
    for request in requests:
        error_like(pycoll.Error, "is closed", request.wait)
    error_like(pycoll.Error, "is closed", part.iall_reduce, x)
comm.barrier()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_how_a_call_goes_is_asked_once_until_an_algorithm_is_registered(
    job: Jobs, transport: str
) -> None:
    text = """
from pycoll._requests.core_collectives import CompiledPlans
from pycoll.schedule import Recv, Send

made, make = [], CompiledPlans.__call__
def note(self, kind, *rest):
    made.append(kind)
    return make(self, kind, *rest)
CompiledPlans.__call__ = note

def start():
    made.clear()
    for _ in range(3):
        for count in range(1, 6):
            comm.iall_reduce(np.ones(count)).wait()
            comm.igather(np.ones(count)).wait()
    return len(made)

comm.ibarrier().wait()
assert start() == 10
assert start() == 0

@pycoll.register_algorithm("all_gather", "swap")
def swap(rank, size):
    yield Send(1 - rank, rank)
    yield Recv(1 - rank, 1 - rank)

assert start() == 10
ok()
"""
    all_well(job(2, text, "--transport", transport), 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_values_go_in_segments(scripts: Scripts, transport: str) -> None:
    text = """
import os
for count in (1, 7, 100_003):
    x = np.arange(count, dtype=np.int32) * (rank + 1)
    for _ in range(2):
        request = comm.iall_reduce(x)
        assert "segments" in repr(request) or count < 1000, request
        assert (request.wait() == np.arange(count) * 6).all()
ok()
"""
    scripts(3, text, transport, PYCOLL_ALGORITHM="all_reduce:ring", PYCOLL_SEGMENT="64K")


@pytest.mark.parametrize("transport", IN_CORE)
def test_persistent_collectives_and_waits_for_several_run_in_the_core(
    scripts: Scripts, transport: str
) -> None:
    text = """
import sys
x, out = np.arange(4.0), np.empty(4)
again = comm.persistent.all_reduce(x, out=out)
again.start().wait()
again.start().wait()
calls, ways = [], ("__main__", "pycoll._requests.core_requests", "pycoll._requests.nonblocking")
def note(frame, event, arg):
    if event == "call" and frame.f_globals["__name__"] not in ways:
        calls.append(frame.f_code.co_qualname)
for _ in range(50):  # a wait of more than a moment is Python's
    calls.clear()
    sys.setprofile(note)
    assert again.start().wait() is out
    requests = [comm.irecv(1 - rank, 0, np.empty(4)), comm.iall_reduce(x), again.start()]
    results = pycoll.wait_all([*requests, comm.isend(x, 1 - rank)])
    sys.setprofile(None)
    well = set(calls) <= {"wait_all", "edge.<locals>.call"}
    if comm.iall_reduce(np.array([well]), "land").wait()[0]:
        break
assert well, calls
assert results[0].tolist() == x.tolist() and results[3] is None
assert results[1].tolist() == results[2].tolist() == (2 * x).tolist() == out.tolist()
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_result_that_does_not_fit_is_no_failed_call_for_who_waits_late(
    scripts: Scripts, transport: str
) -> None:
    """It may have ended before somebody in Python waits for it."""
    text = """
for turn in range(3):
    if rank == 0:
        comm.iscatterv([np.arange(3), np.arange(4)]).wait()
    else:
        request = comm.iscatterv(None, 0, out=np.zeros(3, int))
        while not request.done:
            comm.iprobe(0)
        task = request._task
        assert task.done and task.error is None and isinstance(task.unfit, ValueError)
        error_like(ValueError, "the block is", request.wait)
    comm.barrier()
ok()
"""
    scripts(2, text, transport)
