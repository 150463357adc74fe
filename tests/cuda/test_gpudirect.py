"""GPUDirect RDMA: whole ranks over simulated RDMA devices and the fake CUDA driver."""

from __future__ import annotations

import threading
from typing import Any

import fake_cuda
import fakegpu
import gpudirect_job
import numpy as np
import pytest
from gpudirect_job import DEADLINE_S, LONG, PLACES, Cost, data, on_gpu
from rdma_job import Job
from tiers import few

import pycoll
from pycoll._cuda import copies, cuda
from pycoll._gpu import gpudirect
from pycoll._transports.rdma_lane import FRAGMENT

gpu, job = gpudirect_job.gpu, gpudirect_job.job


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("has_out", few([True], [False]))
def test_what_is_on_a_gpu_travels_without_a_copy(
    job: Job, source: str, target: str, has_out: bool
) -> None:
    if not has_out and source != target:
        pytest.skip("what is received is where it was at the sender")
    values = data(LONG)
    put, make, get = PLACES[source][0], PLACES[target][1], PLACES[target][2]
    x = put(values)
    out = make(LONG) if has_out else None
    cost = Cost(job)

    def program(comm: Any) -> Any:
        return comm.send(x, 1) if comm.rank == 0 else comm.recv(0, out=out)

    got = job.run(program)[1]
    assert (cost["h2d_bytes"], cost["d2h_bytes"], cost["d2d_bytes"]) == (0, 0, 0)
    assert cost["register_dmabuf"] == (source, target).count("gpu")
    assert cost["flushes"] == (target == "gpu")
    assert cost["bytes_written"] == LONG
    assert out is None or got is out
    np.testing.assert_array_equal(get(got), values)


@pytest.mark.parametrize(
    "nbytes",
    few(
        [gpudirect.MIN_NBYTES - 1, 5 * FRAGMENT - 3],
        [0, 1, gpudirect.MIN_NBYTES, FRAGMENT + 1],
    ),
)
@pytest.mark.parametrize("offset", few([4095], [0, 1, 5000]))
def test_any_part_of_an_allocation_of_any_length(job: Job, nbytes: int, offset: int) -> None:
    values = data(nbytes)
    sent = on_gpu(np.concatenate([data(offset, 1), values, data(77, 2)]))
    received = on_gpu(np.full(len(sent.get()) + 13, 0x11, np.uint8))
    out = received[offset + 3 : offset + 3 + nbytes]
    cost = Cost(job)

    def program(comm: Any) -> None:
        if comm.rank == 0:
            comm.send(sent[offset : offset + nbytes], 1)
        else:
            comm.recv(0, out=out)

    job.run(program)
    is_direct = nbytes >= gpudirect.MIN_NBYTES
    assert cost["register_dmabuf"] == 2 * is_direct
    assert cost["d2h_bytes"] == (0 if is_direct else nbytes)
    found = received.get()
    np.testing.assert_array_equal(found[offset + 3 : offset + 3 + nbytes], values)
    assert (found[: offset + 3] == 0x11).all()
    assert (found[offset + 3 + nbytes :] == 0x11).all()


@pytest.mark.parametrize("dtype", few(["<f2", "<c16"], ["<i4", "<f8", "?"]))
def test_arrays_of_any_dtype_and_shape(job: Job, dtype: str) -> None:
    shape = (2, 3, (1 << 20) // np.dtype(dtype).itemsize)
    values = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    x, cost = on_gpu(values), Cost(job)

    def program(comm: Any) -> Any:
        return comm.send(x, 1) if comm.rank == 0 else comm.recv(0)

    got = job.run(program)[1]
    assert isinstance(got, fakegpu.Array)
    np.testing.assert_array_equal(got.get(), values)
    assert (cost["h2d_bytes"], cost["d2h_bytes"]) == (0, 0)


def test_a_message_fills_the_front_of_a_longer_array(job: Job) -> None:
    values, out = data(LONG), on_gpu(np.full(LONG + 5000, 7, np.uint8))
    x = on_gpu(values)
    job.run(lambda comm: comm.send(x, 1) if comm.rank == 0 else comm.recv(0, out=out))
    np.testing.assert_array_equal(out.get()[:LONG], values)
    assert (out.get()[LONG:] == 7).all()


def test_every_call_that_sends_or_receives(job: Job) -> None:
    xs = [on_gpu(data(LONG, rank)) for rank in range(2)]
    outs = [fakegpu.empty((LONG,), np.uint8) for _ in range(2)]
    cost = Cost(job)

    def program(comm: Any) -> None:
        me, other = comm.rank, 1 - comm.rank
        x, out, want = xs[me], outs[me], xs[other].get()

        def check(got: Any) -> None:
            assert (got.get() == want).all()
            out.fill(0)
            out.get()

        check(comm.sendrecv(x, other))
        check(comm.sendrecv(x, other, out=out))
        check(comm.isendrecv(x, other, out=out).wait())
        requests = [comm.irecv(other, out=out), comm.isend(x, other)]
        check(pycoll.wait_all(requests)[0])
        sending, receiving = comm.persistent.send(x, other), comm.persistent.recv(other, out=out)
        for _ in range(3):
            receiving.start()
            sending.start().wait()
            check(receiving.wait())

    job.run(program)
    assert (cost["h2d_bytes"], cost["d2h_bytes"]) == (0, 0)
    assert cost["register_dmabuf"] == 2 * 2 * 7


def test_in_place_what_is_sent_is_staged_and_read_first(job: Job) -> None:
    xs = [on_gpu(data(LONG, rank)) for rank in range(2)]
    wanted = [x.get() for x in xs][::-1]
    cost = Cost(job)
    job.run(lambda comm: comm.sendrecv(xs[comm.rank], 1 - comm.rank, out=xs[comm.rank]))
    for x, want in zip(xs, wanted, strict=True):
        np.testing.assert_array_equal(x.get(), want)
    assert cost["register_dmabuf"] == 2
    assert cost["d2h_bytes"] == 2 * LONG


def test_nothing_is_read_before_it_is_computed(job: Job) -> None:
    values, begun = data(LONG), threading.Event()
    cost = Cost(job)
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(values)  # its upload is held up

        def program(comm: Any) -> Any:
            if comm.rank == 1:
                return comm.recv(0)
            request = comm.isend(x, 1)
            begun.set()
            return request.wait()

        def later() -> None:
            assert begun.wait(DEADLINE_S)
            fake_cuda.run_all()
            written.append(cost["bytes_written"])
            release()

        written: list[int] = []
        releasing = threading.Thread(target=later)
        releasing.start()
        got = job.run(program)[1]
        releasing.join()
    assert written == [0]
    np.testing.assert_array_equal(got.get(), values)
    assert cost["register_dmabuf"] == 2


def test_nothing_is_written_before_it_has_been_read(job: Job) -> None:
    old, new = data(LONG, 1), data(LONG, 2)
    out, sent = on_gpu(old), on_gpu(new)
    cost = Cost(job)
    with fakegpu.held_stream() as (_, release):
        copy = fakegpu.empty((LONG,), np.uint8)
        copy.copy_from(out)  # held up
        begun, posted = threading.Event(), threading.Event()

        def program(comm: Any) -> None:
            if comm.rank == 0:
                request = comm.isend(sent, 1)
                begun.set()
                request.wait()
                return
            assert begun.wait(DEADLINE_S)  # or both might share a stream, and wait together
            comm.probe(0)
            request = comm.irecv(0, out=out)
            posted.set()
            request.wait()

        def later() -> None:
            assert posted.wait(DEADLINE_S)
            written.append(cost["bytes_written"])
            release()

        written: list[int] = []
        releasing = threading.Thread(target=later)
        releasing.start()
        job.run(program)
        releasing.join()
    assert written == [0]
    np.testing.assert_array_equal(copy.get(), old)
    np.testing.assert_array_equal(out.get(), new)
    assert cost["register_dmabuf"] == 2


def test_in_place_nothing_is_written_before_it_has_been_read(job: Job) -> None:
    """The other's message is there long before this rank's array has been pulled."""
    theirs, mine = data(LONG, 1), data(LONG, 2)
    x, y, cost = on_gpu(mine), on_gpu(theirs), Cost(job)
    pulls = copies.streams_of(cuda.device(0)).pulls
    with pulls.pick(), fakegpu.context(0):
        held = [fake_cuda.hold(stream.handle) for stream in pulls._streams]
    written: list[int] = []

    def program(comm: Any) -> Any:
        requests = []
        if comm.rank == 0:
            requests = [comm.isend(y, 1), comm.irecv(1, tag=0)]
        else:
            comm.probe(0)
            requests = [comm.isendrecv(x, 0, out=x, recvtag=0)]
        if comm.rank == 1:
            with pytest.raises(pycoll.OperationTimeout):
                comm.recv(0, tag=7, timeout=0.3)  # time for what must not happen
            written.append(cost["bytes_written"])
            for number in held:
                fake_cuda.release(number)
        return pycoll.wait_all(requests)[-1]

    got, _ = job.run(program)
    assert written == [0]
    np.testing.assert_array_equal(got.get(), mine)
    np.testing.assert_array_equal(x.get(), theirs)
    assert cost["d2h_bytes"] == LONG


def test_messages_keep_their_order_behind_an_array_that_is_still_computed(job: Job) -> None:
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.ones(LONG, np.uint8))

        def program(comm: Any) -> Any:
            if comm.rank == 0:
                requests = [comm.isend(x, 1), comm.isend("next", 1)]
                release()
                return pycoll.wait_all(requests)
            return comm.recv(0), comm.recv(0)

        first, second = job.run(program)[1]
    assert (first.get() == 1).all()
    assert second == "next"
