"""GPUDirect RDMA: receives and sends that are given up, and whose memory it is."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import fakegpu
import gpudirect_job
import numpy as np
import pytest
from gpudirect_job import DEADLINE_S, LONG, Cost, data, gpu_regions, on_gpu
from rdma_job import Job
from simulated_queue_pair import SimulatedPair
from simulated_regions import DmaBufRegion

import pycoll
from pycoll._cuda import cuda
from pycoll._runtime import engine
from pycoll._transports.core import CoreReceive

gpu, job = gpudirect_job.gpu, gpudirect_job.job


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
    epochs = [device._links[1 - rank].lanes.epoch for rank, device in enumerate(job.devices)]
    assert epochs == [2, 2]


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
