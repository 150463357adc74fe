"""GPUDirect RDMA: whole ranks over simulated RDMA devices and the fake CUDA driver."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from rdma_job import Job
from rdma_world import LARGE
from simulated_device import DmaBufRegion, Fabric, SimulatedPair

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

import pycoll
from pycoll import agreed, copies, cuda, engine, gpudirect
from pycoll.cuda import Direct
from pycoll.transports.rdma_lane import SEGMENT

DEADLINE_S = 20.0
LONG = LARGE + 1000
FLUSH_OPTIONS, ORDERING, DMA_BUF = 117, 118, 124  # CU_DEVICE_ATTRIBUTE_...
OWNER, ALL_DEVICES = 100, 200


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        path = fake_cuda.build(tmp_path_factory.mktemp("cuda"))
    except RuntimeError as exc:
        if "needs gcc" not in str(exc):
            raise
        pytest.skip(str(exc))
    fake_cuda.load(path)
    return path


@pytest.fixture
def gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPUs on which nothing is under way, and ranks that do not lend each other their memory."""
    monkeypatch.setenv("PYCOLL_CUDA_IPC", "0")
    monkeypatch.delenv("PYCOLL_GPUDIRECT", raising=False)
    gc.collect()
    fake_cuda.reset()
    yield
    fake_cuda.fail("")
    fake_cuda.run_all()
    assert fake_cuda.stats()["illegal_accesses"] == 0


@pytest.fixture(params=[1, 2])
def job(gpu: None, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Two ranks, of which each has tried what its device can do."""
    before = agreed.current()
    made = Job(2, seed=request.param, op_timeout=DEADLINE_S)
    made.run(greet)
    yield made
    regions = gpu_regions(made)
    made.close()
    assert regions == [0, 0]
    agreed.settle(before)


def gpu_regions(job: Job) -> list[int]:
    """How much of GPUs' memory each rank's device has registered."""
    return [
        sum(isinstance(region, DmaBufRegion) for region in device.regions.values())
        for device in job.fabric.devices
    ]


def greet(comm: Any) -> None:
    """Send a large array both ways, so that links and lanes are there and all has been tried."""
    x = on_gpu(np.full(LONG, comm.rank, np.uint8))
    comm.sendrecv(x, 1 - comm.rank, out=fakegpu.empty((LONG,), np.uint8))


def on_gpu(values: Any, **options: Any) -> Any:
    """An array on the GPU, whose upload is over."""
    array = fakegpu.array(values, **options)
    array.get()
    return array


def data(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Cost:
    """What has been copied, written and registered since this was made."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = self._now()

    def _now(self) -> Counter[str]:
        stats = fake_cuda.stats()
        names = ("h2d_bytes", "d2h_bytes", "d2d_bytes", "flushes")
        return Counter({name: stats[name] for name in names}) + self._job.fabric.counts

    def __getitem__(self, name: str) -> int:
        return self._now()[name] - self._before[name]


# --- which way ---------------------------------------------------------------------------------

PLACES = {
    "gpu": (on_gpu, lambda nbytes: fakegpu.empty((nbytes,), np.uint8), lambda x: x.get()),
    "host": (np.copy, lambda nbytes: np.empty(nbytes, np.uint8), lambda x: x),
}


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("has_out", [True, False])
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
    [0, 1, gpudirect.MIN_NBYTES - 1, gpudirect.MIN_NBYTES, SEGMENT + 1, 5 * SEGMENT - 3],
)
@pytest.mark.parametrize("offset", [0, 1, 4095, 5000])
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


@pytest.mark.parametrize("dtype", ["<f2", "<i4", "<f8", "<c16", "?"])
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


@contextlib.contextmanager
def held_stream() -> Iterator[Callable[[], None]]:
    """A stream of fakegpu that a kernel holds up; gives the function that ends the kernel."""
    stream = fakegpu.new_stream()
    with fakegpu.context(0):
        number = fake_cuda.hold(stream)
    released: list[bool] = []

    def release() -> None:
        if not released:
            released.append(True)
            fake_cuda.release(number)

    before = fakegpu.use_stream(stream)
    try:
        yield release
    finally:
        fakegpu.use_stream(before)
        release()


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
    with held_stream() as release:
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
    with held_stream() as release:
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
    with held_stream() as release:
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


def test_a_receive_that_is_given_up_before_the_array_may_be_written(job: Job) -> None:
    values, out = data(LONG), on_gpu(np.zeros(LONG, np.uint8))
    x = on_gpu(values)
    with held_stream() as release:
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
    with held_stream() as release:
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
    with held_stream() as release:
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
                survivor.peer_failed(pycoll.PeerFailed(dead, "it was killed"))
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
    assert [rank.transports[1 - r]._links[1 - r]._epoch for r, rank in enumerate(job.ranks)] == [
        2,
        2,
    ]


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


# --- when it cannot be -------------------------------------------------------------------------


def exchange(job: Job, put: Any = on_gpu) -> Cost:
    """Have rank 0 send an array to a GPU of rank 1; returns what that took."""
    values = data(LONG)
    x, out = put(values), fakegpu.empty((LONG,), np.uint8)
    cost = Cost(job)
    job.run(lambda comm: comm.send(x, 1) if comm.rank == 0 else comm.recv(0, out=out))
    np.testing.assert_array_equal(out.get(), values)
    return cost


def check_staged(cost: Cost, sender: bool = True, receiver: bool = True) -> None:
    assert cost["d2h_bytes"] == LONG * sender
    assert cost["h2d_bytes"] == LONG * receiver
    assert cost["register_dmabuf"] == 2 - sender - receiver


def test_it_can_be_turned_off(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOLL_GPUDIRECT", "0")
    check_staged(exchange(job))


def test_memory_that_the_driver_does_not_export_is_staged(job: Job) -> None:
    fake_cuda.fail("cuMemGetHandleForAddressRange:*:801")
    check_staged(exchange(job))


@pytest.mark.parametrize("refusing", [0, 1])
def test_memory_that_the_device_does_not_register_is_staged(job: Job, refusing: int) -> None:
    job.fabric.devices[refusing].refuses_dmabufs = True
    check_staged(exchange(job), sender=refusing == 0, receiver=refusing == 1)


def test_an_array_with_gaps_is_staged(job: Job) -> None:
    def put(values: np.ndarray) -> Any:
        return on_gpu(np.stack([values, values], 1))[:, 0]

    cost = exchange(job, put)
    assert cost["register_dmabuf"] == 1
    assert cost["d2h_bytes"] == LONG


def test_writes_that_nobody_could_see_are_not_made(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.device(0), "direct", Direct(True, False, True))
    check_staged(exchange(job), sender=False)


def test_a_gpu_without_dma_bufs_is_staged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.device(0), "direct", Direct(False, False, False))
    check_staged(exchange(job))


@pytest.fixture
def fresh_job(gpu: None) -> Iterator[Job]:
    """Two ranks that have not talked yet."""
    before = agreed.current()
    made = Job(2, op_timeout=DEADLINE_S)
    yield made
    made.close()
    agreed.settle(before)


@pytest.mark.filterwarnings("error")
def test_a_device_without_dma_bufs_is_asked_once(fresh_job: Job) -> None:
    for device in fresh_job.fabric.devices:
        device.knows_dmabufs = False
    check_staged(exchange(fresh_job))


def test_a_device_that_cannot_reach_the_gpu_is_tried_once(fresh_job: Job) -> None:
    fresh_job.fabric.devices[0].reaches_gpus = False
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cost = exchange(fresh_job)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 1
    assert "rank 0: the RDMA device cannot reach the GPU's memory (memory that is not" in texts[0]
    assert cost["register_dmabuf"] == 3  # two trials, and the message at rank 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_staged(exchange(fresh_job), receiver=False)


def test_a_device_that_writes_something_else_is_not_used(
    fresh_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DmaBufRegion, "write", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="what it has written is not there"):
        check_trial = exchange(fresh_job)
    assert check_trial["register_dmabuf"] == 2
    monkeypatch.undo()
    monkeypatch.setenv("PYCOLL_CUDA_IPC", "0")
    check_staged(exchange(fresh_job))


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
@pytest.mark.parametrize("refusing", [0, 1])
def test_what_the_other_end_cannot_register_goes_through_the_image(job: Job, refusing: int) -> None:
    """The other end's array is in host memory, so all goes in pieces, by processors."""
    values = data(LONG)
    job.fabric.refuse_registration(
        lambda device, _, nbytes: device is job.fabric.devices[refusing] and nbytes >= LONG
    )
    x = values.copy() if refusing == 0 else on_gpu(values)
    out = fakegpu.empty((LONG,), np.uint8) if refusing == 0 else np.empty(LONG, np.uint8)
    cost = Cost(job)
    job.run(lambda comm: comm.send(x, 1) if comm.rank == 0 else comm.recv(0, out=out))
    np.testing.assert_array_equal(out.get() if refusing == 0 else out, values)
    assert cost["bytes_written"] == 0
    assert cost["h2d_bytes"] == LONG * (refusing == 0)
    assert cost["d2h_bytes"] == LONG * (refusing == 1)
    assert cost["register_dmabuf"] == 1


@pytest.mark.filterwarnings("ignore:rdma. rank .* cannot register:RuntimeWarning")
def test_an_image_that_cannot_be_filled_fails_the_send_alone(job: Job) -> None:
    x, y, out = on_gpu(data(LONG)), on_gpu(data(LONG, 1)), np.empty(LONG, np.uint8)
    job.fabric.refuse_registration(
        lambda device, _, nbytes: device is job.fabric.devices[1] and nbytes >= LONG
    )
    fake_cuda.fail("cuMemcpyDtoHAsync:1:2")

    def program(comm: Any) -> None:
        if comm.rank == 1:
            comm.recv(0, out=out)
            return
        with pytest.raises(pycoll.TransportError, match="OUT_OF_MEMORY"):
            comm.send(x, 1)
        comm.send(y, 1)

    job.run(program)
    np.testing.assert_array_equal(out, data(LONG, 1))


# --- the driver --------------------------------------------------------------------------------


@pytest.fixture
def attributes(gpu: None) -> Iterator[Callable[[int, int, int], None]]:
    """Sets what GPUs say of dma-bufs, of how writes are flushed, and of their order."""

    def choose(exports: int, options: int, ordering: int) -> None:
        fake_cuda.attribute(DMA_BUF, exports)
        fake_cuda.attribute(FLUSH_OPTIONS, options)
        fake_cuda.attribute(ORDERING, ordering)

    yield choose
    choose(1, 1, 0)


@pytest.mark.parametrize(
    ("exports", "options", "ordering", "expected"),
    [
        (0, 1, ALL_DEVICES, Direct(False, False, False)),
        (1, 0, ALL_DEVICES, Direct(True, True, False)),
        (1, 1, ALL_DEVICES, Direct(True, True, False)),
        (1, 1, OWNER, Direct(True, True, True)),
        (1, 3, 0, Direct(True, True, True)),
        (1, 2, OWNER, Direct(True, False, True)),
        (1, 0, 0, Direct(True, False, True)),
    ],
)
def test_what_a_gpu_allows_is_what_its_driver_says(
    attributes: Callable[[int, int, int], None],
    exports: int,
    options: int,
    ordering: int,
    expected: Direct,
) -> None:
    attributes(exports, options, ordering)
    assert cuda.describe()[0].direct == cuda.Device(0).direct == expected


def test_an_old_driver_that_does_not_know_the_attributes_allows_nothing(gpu: None) -> None:
    fake_cuda.fail("cuDeviceGetAttribute:*:1")
    assert cuda.Device(0).direct == Direct(False, False, True)


def test_nothing_is_flushed_where_all_is_seen(
    job: Job, attributes: Callable[[int, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes(1, 1, ALL_DEVICES)
    monkeypatch.setattr(cuda.device(0), "direct", cuda.Device(0).direct)
    cost = exchange(job)
    assert cost["register_dmabuf"] == 2
    assert cost["flushes"] == 0


def test_an_export_has_the_whole_pages_of_the_memory(gpu: None) -> None:
    values = data(20_000)
    x = on_gpu(values)
    before = len(os.listdir("/proc/self/fd"))
    exported = cuda.device(0).export(x.pointer + 4097, 8000)
    assert exported is not None
    descriptor, offset = exported
    memory = fake_cuda.DmaBuf(descriptor)
    os.close(descriptor)
    assert (offset, memory.nbytes) == (1, 8192)
    assert memory.read(offset, 8000) == values[4097:12097].tobytes()
    assert cuda.device(0).export(x.pointer, 30_000) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_cudas_pools_is_not_exported(gpu: None) -> None:
    from cuda.bindings import driver

    with cuda.device(0):
        _, pointer = driver.cuMemAllocAsync(1 << 20, fakegpu.LEGACY)
        fake_cuda.run_all()
        assert cuda.device(0).export(int(pointer), 1 << 20) is None
        driver.cuMemFreeAsync(pointer, fakegpu.LEGACY)


def test_memory_that_is_freed_while_it_is_registered_is_a_fault(gpu: None) -> None:
    fabric = Fabric()
    device = fabric.device(1, 1)
    x = on_gpu(data(4096))
    exported = cuda.device(0).export(x.pointer, 4096)
    assert exported is not None
    region = device.register_dmabuf(exported[0], 0, 4096)
    os.close(exported[0])
    del x
    gc.collect()
    region.write(0, b"late")
    with pytest.raises(AssertionError, match="not there any more"):
        fabric.check()
    device.close()


# --- all of it ---------------------------------------------------------------------------------

SIZES = [100, 70_000, gpudirect.MIN_NBYTES - 1, gpudirect.MIN_NBYTES + 7, LONG]


class Exchange:
    """Messages of two ranks to each other, at random, the same for both."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.messages = [self.message(number) for number in range(16)]

    def message(self, number: int) -> tuple[int, int, int, str, str]:
        chance = self.random
        source, nbytes = chance.randrange(2), chance.choice(SIZES)
        return number, source, nbytes, chance.choice(list(PLACES)), chance.choice(list(PLACES))

    def run(self, comm: Any) -> None:
        """Send and receive what is this rank's, in any order; some receives are given up."""
        chance = random.Random(self.random.random() + comm.rank)
        other, sending, receiving, late = 1 - comm.rank, [], [], []
        for number, source, nbytes, place, target in chance.sample(self.messages, 16):
            values = data(nbytes, number)
            if source == comm.rank:
                # Of a library's arrays some are still on their way to the GPU.
                put = (
                    fakegpu.array if place == "gpu" and chance.random() < 0.5 else PLACES[place][0]
                )
                sending.append(comm.isend(put(values), other, tag=number))
                continue
            out = PLACES[target][1](nbytes) if chance.random() < 0.7 else None
            if chance.random() < 0.3:
                late.append((number, values, target, out))
            else:
                receiving.append((comm.irecv(other, tag=number, out=out), values))
        for number, values, target, out in late:
            while True:
                try:
                    got = comm.recv(other, tag=number, out=out, timeout=chance.choice([0, 0.01, 5]))
                    break
                except pycoll.OperationTimeout:
                    if out is not None:
                        out = PLACES[target][1](len(values))
            self.check(got, values)
        for request, values in receiving:
            self.check(request.wait(), values)
        pycoll.wait_all(sending)

    @staticmethod
    def check(got: Any, values: np.ndarray) -> None:
        np.testing.assert_array_equal(got if isinstance(got, np.ndarray) else got.get(), values)


@pytest.mark.parametrize("seed", range(20))
def test_random_messages_between_whole_ranks(fresh_job: Job, seed: int) -> None:
    fake_cuda.seed(seed)
    exchange = Exchange(seed)
    fresh_job.run(exchange.run)
    assert gpu_regions(fresh_job) == [0, 0]
