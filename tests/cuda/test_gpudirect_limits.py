"""GPUDirect RDMA: where it cannot be, what the driver says, and all of it at random."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import fakegpu
import gpudirect_job
import numpy as np
import pytest
from gpudirect_job import LONG, PLACES, Cost, data, gpu_regions, on_gpu
from rdma_job import Job
from simulated_device import Fabric
from simulated_regions import DmaBufRegion
from tiers import few

import pycoll
from pycoll._cuda import cuda
from pycoll._cuda.cuda import DirectAccess
from pycoll._gpu import gpudirect

FLUSH_OPTIONS, ORDERING, DMA_BUF = 117, 118, 124  # CU_DEVICE_ATTRIBUTE_...
OWNER, ALL_DEVICES = 100, 200

gpu, job, fresh_job = gpudirect_job.gpu, gpudirect_job.job, gpudirect_job.fresh_job


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
    monkeypatch.setattr(cuda.device(0), "direct", DirectAccess(True, False, True))
    check_staged(exchange(job), sender=False)


def test_a_gpu_without_dma_bufs_is_staged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.device(0), "direct", DirectAccess(False, False, False))
    check_staged(exchange(job))


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
def test_what_the_other_end_cannot_register_goes_through_the_staging_buffer(
    job: Job, refusing: int
) -> None:
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
def test_a_staging_buffer_that_cannot_be_filled_fails_the_send_alone(job: Job) -> None:
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
        (0, 1, ALL_DEVICES, DirectAccess(False, False, False)),
        (1, 0, ALL_DEVICES, DirectAccess(True, True, False)),
        (1, 1, ALL_DEVICES, DirectAccess(True, True, False)),
        (1, 1, OWNER, DirectAccess(True, True, True)),
        (1, 3, 0, DirectAccess(True, True, True)),
        (1, 2, OWNER, DirectAccess(True, False, True)),
        (1, 0, 0, DirectAccess(True, False, True)),
    ],
)
def test_what_a_gpu_allows_is_what_its_driver_says(
    attributes: Callable[[int, int, int], None],
    exports: int,
    options: int,
    ordering: int,
    expected: DirectAccess,
) -> None:
    attributes(exports, options, ordering)
    assert cuda.describe()[0].direct == cuda.Device(0).direct == expected


def test_an_old_driver_that_does_not_know_the_attributes_allows_nothing(gpu: None) -> None:
    fake_cuda.fail("cuDeviceGetAttribute:*:1")
    assert cuda.Device(0).direct == DirectAccess(False, False, True)


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
        # Who gives up a receive may have to ask its peer whether that has all it was sent: a rank
        # answers while it is in a call.
        comm.barrier()

    @staticmethod
    def check(got: Any, values: np.ndarray) -> None:
        np.testing.assert_array_equal(got if isinstance(got, np.ndarray) else got.get(), values)


@pytest.mark.parametrize("seed", few(range(2), range(2, 20)))
def test_random_messages_between_whole_ranks(fresh_job: Job, seed: int) -> None:
    fake_cuda.seed(seed)
    exchange = Exchange(seed)
    fresh_job.run(exchange.run)
    assert gpu_regions(fresh_job) == [0, 0]
