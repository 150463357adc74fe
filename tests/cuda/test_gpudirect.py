"""GPUDirect RDMA: whole ranks over simulated RDMA devices and the fake CUDA driver."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import fake_cuda
import fakegpu
import gpudirect_job
import numpy as np
import pytest
from gpudirect_job import DEADLINE_S, LONG, PLACES, Cost, data, gpu_regions, on_gpu
from rdma_job import Job
from simulated_device import DmaBufRegion, SimulatedPair
from tiers import few

import pycoll
from pycoll._cuda import copies, cuda
from pycoll._gpu import gpudirect
from pycoll._runtime import engine
from pycoll._transports.core import CoreReceive
from pycoll._transports.rdma_lane import SEGMENT

gpu, job = gpudirect_job.gpu, gpudirect_job.job


# --- which way ---------------------------------------------------------------------------------


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
        [gpudirect.MIN_NBYTES - 1, 5 * SEGMENT - 3],
        [0, 1, gpudirect.MIN_NBYTES, SEGMENT + 1],
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


# --- when --------------------------------------------------------------------------------------


class Stall:
    """Writes stop when some of them is written, until `go_on`."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self._fabric = job.fabric
        self._stops = True
        advance = SimulatedPair.advance

        def stalling(pair: SimulatedPair) -> bool:
            work = pair.queue[0] if pair.queue else None
            if self._stops and pair.state == "connected" and work is not None and work.written:
                self.begun.set()
                return False
            return advance(pair)

        monkeypatch.setattr(SimulatedPair, "advance", stalling)

    def go_on(self) -> None:
        with self._fabric.lock:
            self._stops = False
            self._fabric.wake()


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
    lanes = copies.side(cuda.device(0)).pulls
    lanes.pick()
    with fakegpu.context(0):
        held = [fake_cuda.hold(lane.stream) for lane in lanes._lanes]
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


# --- giving up ---------------------------------------------------------------------------------


def test_a_receive_that_is_given_up_goes_on_elsewhere(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, out = data(LONG), on_gpu(np.zeros(LONG, np.uint8))
    x, stall = on_gpu(values), Stall(job, monkeypatch)
    left: list[Any] = []

    def program(comm: Any) -> Any:
        if comm.rank == 0:
            return comm.send(x, 1)
        with pytest.raises(pycoll.OperationTimeout):
            comm.recv(0, out=out, timeout=0.3)
        assert stall.begun.is_set()
        left.append(gpu_regions(job)[1])
        out.fill(0x77)
        out.get()
        stall.go_on()
        return comm.recv(0)

    got = job.run(program)[1]
    assert left == [0]
    np.testing.assert_array_equal(got.get(), values)
    with fakegpu.context(0):
        cuda.device(0).flush()
    assert (out.get() == 0x77).all()


def test_a_receive_that_is_given_up_when_all_is_there_but_not_told(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, out = data(LONG), on_gpu(np.zeros(LONG, np.uint8))
    x = on_gpu(values)
    untold: list[CoreReceive] = []
    monkeypatch.setattr(CoreReceive, "ended", lambda receive, status: untold.append(receive))

    def program(comm: Any) -> Any:
        if comm.rank == 0:
            return comm.send(x, 1)
        with pytest.raises(pycoll.OperationTimeout):
            comm.recv(0, out=out, timeout=0.3)
        out.fill(0x77)
        out.get()
        monkeypatch.undo()
        (receive,) = untold
        receive.ended(0)
        return comm.recv(0)

    np.testing.assert_array_equal(job.run(program)[1].get(), values)
    assert (out.get() == 0x77).all()


def test_a_handle_forgets_the_array_on_a_gpu_that_it_was_to_fill_first(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, out = data(LONG), on_gpu(np.zeros(LONG, np.uint8))
    x = on_gpu(values)
    untold: list[CoreReceive] = []
    with fakegpu.held_stream() as (_, release):
        copy = fakegpu.empty((LONG,), np.uint8)
        copy.copy_from(out)  # held up

        def program(comm: Any) -> Any:
            if comm.rank == 0:
                return comm.send(x, 1)
            handle = comm.mprobe(0)
            with pytest.raises(pycoll.OperationTimeout):
                handle.recv(out, timeout=0.3)  # it may not be written yet
            release()
            ended = CoreReceive.ended
            monkeypatch.setattr(CoreReceive, "ended", lambda receive, _: untold.append(receive))
            with pytest.raises(pycoll.OperationTimeout):
                handle.recv(np.zeros(LONG, np.uint8), timeout=0.3)
            monkeypatch.undo()
            (receive,) = untold
            ended(receive, 0)
            return handle.recv(np.zeros(LONG, np.uint8))

        np.testing.assert_array_equal(job.run(program)[1], values)


def test_a_receive_that_is_given_up_before_the_array_may_be_written(job: Job) -> None:
    values, out = data(LONG), on_gpu(np.zeros(LONG, np.uint8))
    x = on_gpu(values)
    with fakegpu.held_stream() as (_, release):
        copy = fakegpu.empty((LONG,), np.uint8)
        copy.copy_from(out)  # held up

        def program(comm: Any) -> Any:
            if comm.rank == 0:
                return comm.send(x, 1)
            comm.probe(0)  # or both might share a stream, and wait together
            with pytest.raises(pycoll.OperationTimeout):
                comm.recv(0, out=out, timeout=0.3)
            assert gpu_regions(job)[1] == 0
            assert comm.probe(0).nbytes == LONG
            release()
            return comm.recv(0, out=out)

        job.run(program)
    np.testing.assert_array_equal(out.get(), values)


def test_a_send_that_is_given_up_before_its_array_is_computed(job: Job) -> None:
    values = data(LONG)
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(data(LONG, 1))  # its upload is held up

        def program(comm: Any) -> Any:
            if comm.rank == 1:
                return comm.recv(0)
            with pytest.raises(pycoll.OperationTimeout):
                comm.send(x, 1, timeout=0.1)
            assert gpu_regions(job)[0] == 0
            release()
            return comm.send(on_gpu(values), 1)

        got = job.run(program)[1]
    np.testing.assert_array_equal(got.get(), values)


def test_a_message_that_is_withdrawn_while_its_receiver_waits_for_the_array(job: Job) -> None:
    values, out = data(LONG), on_gpu(np.zeros(LONG, np.uint8))
    x, y = on_gpu(data(LONG, 9)), on_gpu(values)
    withdrawn = threading.Event()
    with fakegpu.held_stream() as (_, release):
        copy = fakegpu.empty((LONG,), np.uint8)
        copy.copy_from(out)  # held up

        def program(comm: Any) -> Any:
            if comm.rank == 0:
                with pytest.raises(pycoll.OperationTimeout):
                    comm.send(x, 1, timeout=0.3)
                comm.send("withdrawn", 1, tag=1)
                return comm.send(y, 1)
            comm.probe(0)
            request = comm.irecv(0, tag=0, out=out)
            comm.recv(0, tag=1)
            release()
            withdrawn.set()
            return request.wait()

        job.run(program)
    assert withdrawn.is_set()
    np.testing.assert_array_equal(out.get(), values)


def test_a_send_that_is_given_up_leaves_its_array_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall, out = Stall(job, monkeypatch), on_gpu(np.zeros(LONG, np.uint8))
    monkeypatch.setattr(engine, "CONFIRM_S", 0.1)
    values = data(LONG)

    def program(comm: Any) -> Any:
        if comm.rank == 1:
            return comm.recv(0, out=out)
        x = on_gpu(data(LONG, 5))
        with pytest.raises(pycoll.OperationTimeout):
            comm.send(x, 1, timeout=0.3)
        assert stall.begun.is_set()
        assert gpu_regions(job)[0] == 0
        del x
        gc.collect()
        stall.go_on()
        return comm.send(on_gpu(values), 1)

    job.run(program)
    np.testing.assert_array_equal(out.get(), values)


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_the_other_end_dies(job: Job, monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    stall, dead = Stall(job, monkeypatch), ["sender", "receiver"].index(dies)
    alive, array = 1 - dead, on_gpu(data(LONG))
    ended = threading.Event()

    def program(comm: Any) -> None:
        if comm.rank == dead:
            other = on_gpu(data(LONG))
            request = comm.isend(other, alive) if dies == "sender" else comm.irecv(alive, out=other)
            assert stall.begun.wait(DEADLINE_S)
            job.fabric.kill(job.fabric.devices[dead])
            survivor = job.ranks[alive]
            with survivor.locked():
                reason = "it was killed"
                survivor.peer_failed(dead, pycoll.PeerFailed(dead, reason), reason)
            assert ended.wait(DEADLINE_S)
            stall.go_on()
            job.ranks[dead].close("it is dead", 0.0)
            del request
            return
        try:
            with pytest.raises(pycoll.PeerFailed):
                comm.recv(dead, out=array) if dies == "sender" else comm.send(array, dead)
            assert gpu_regions(job)[alive] == 0
        finally:
            ended.set()

    job.run(program)


def test_the_lane_is_made_anew_and_all_starts_again(job: Job) -> None:
    values, x = data(LONG), on_gpu(data(LONG))
    cost = Cost(job)
    write, patch = DmaBufRegion.write, pytest.MonkeyPatch()

    def failing(region: DmaBufRegion, address: int, some: bytes) -> None:
        patch.undo()
        job.fabric.fail_next(job.fabric.devices[0], 10)
        write(region, address, some)

    patch.setattr(DmaBufRegion, "write", failing)

    def program(comm: Any) -> Any:
        return comm.send(x, 1) if comm.rank == 0 else comm.recv(0)

    got = job.run(program)[1]
    np.testing.assert_array_equal(got.get(), values)
    assert cost["register_dmabuf"] == 2
    assert cost["d2h_bytes"] == cost["h2d_bytes"] == 0
    assert [device._links[1 - rank]._epoch for rank, device in enumerate(job.devices)] == [2, 2]


# --- whose memory ------------------------------------------------------------------------------


def test_memory_is_let_go_when_the_request_is_done_though_it_was_dropped(job: Job) -> None:
    arrays: list[Any] = []
    values = data(LONG)

    def program(comm: Any) -> Any:
        if comm.rank == 1:
            comm.recv(0, tag=1)
            return comm.recv(0, tag=0)
        x = on_gpu(values)
        arrays.append(weakref.ref(x.memory))
        comm.isend(x, 1)  # nobody keeps the request
        del x
        gc.collect()
        assert arrays[0]() is not None
        comm.send("go", 1, tag=1)
        comm.send("last", 1, tag=2)
        return None

    got = job.run(program)[1]
    np.testing.assert_array_equal(got.get(), values)
    deadline = threading.Event()
    while arrays[0]() is not None and not deadline.wait(0.01):
        gc.collect()
    assert gpu_regions(job) == [0, 0]


def test_several_messages_of_one_array_at_once(job: Job) -> None:
    x, outs = on_gpu(data(LONG)), [fakegpu.empty((LONG,), np.uint8) for _ in range(3)]

    def program(comm: Any) -> None:
        if comm.rank == 0:
            pycoll.wait_all([comm.isend(x, 1, tag=tag) for tag in range(3)])
        else:
            pycoll.wait_all([comm.irecv(0, tag=tag, out=outs[tag]) for tag in (2, 0, 1)])

    job.run(program)
    for out in outs:
        np.testing.assert_array_equal(out.get(), x.get())
