"""pycoll._cuda.cuda against the driver: a GPU's, or the made-up one where there is no GPU.

Host memory is the caller's here, a NumPy array over an anonymous mapping.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import fake_cuda
import numpy as np
import pytest
from gpu_world import RANKS, no_gpu
from ranks_pool import Pools
from tiers import smoke

from pycoll._cuda import cuda
from pycoll.errors import Error, TransportError

Array = Any
Comm = Any
MANY = 32 << 20  # bytes: copies of so many take milliseconds


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, pools: Pools) -> Any:
    environment: dict[str, str] = {}
    if no_gpu() is not None:
        driver = request.getfixturevalue("fake_driver")
        environment = fake_cuda.environment(driver, devices=2)
    return pools(RANKS, (), environment)


def here(comm: Comm) -> cuda.Device:
    """This rank's GPU."""
    return cuda.device(comm.rank % cuda.count())


def pages(nbytes: int) -> Array:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def pattern(nbytes: int) -> Array:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def whole(nbytes: int) -> list[cuda.Rows]:
    return [cuda.Rows(0, 0, nbytes, 1, nbytes, nbytes)]


def upload(device: cuda.Device, data: Array) -> int:
    """Return new memory of the GPU with these bytes."""
    pointer, stream = device.allocate(data.nbytes), device.stream()
    device.copy(stream, whole(data.nbytes), pointer, address(data), False)
    device.mark(stream).wait()
    return pointer


def download(device: cuda.Device, pointer: int, nbytes: int) -> Array:
    data, stream = np.empty(nbytes, np.uint8), device.stream()
    device.copy(stream, whole(nbytes), pointer, address(data), True)
    device.mark(stream).wait()
    return data


@pytest.mark.parametrize("nbytes", [1, 4097, 5_000_000])
@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_come_back_as_they_went(ranks: Any, nbytes: int, pinned: bool) -> None:
    def program(comm: Comm) -> None:
        device, host = here(comm), pages(nbytes)
        if pinned:
            device.pin(address(host), mmap.PAGESIZE * -(-nbytes // mmap.PAGESIZE))
        host[:] = pattern(nbytes)
        pointer = upload(device, host)
        host[:] = 0
        stream = device.stream()
        device.copy(stream, whole(nbytes), pointer, address(host), True)
        mark = device.mark(stream)
        mark.wait()
        assert mark.is_done()
        np.testing.assert_array_equal(host, pattern(nbytes))
        if pinned:
            device.unpin(address(host))
        device.free(pointer)

    ranks(program)


# The last has rows that overlap each other on the GPU, as an expanded array's.
@pytest.mark.parametrize("pitch", [24, 25, 1000, 7, 0])
def test_rows_are_gathered_and_spread(ranks: Any, pitch: int) -> None:
    width, height, first = 24, 50, 16

    def program(comm: Comm) -> None:
        device = here(comm)
        data = pattern(first + pitch * (height - 1) + width)
        pointer = upload(device, data)
        rows = [cuda.Rows(first, 8, width, height, pitch, width)]
        host, stream = np.zeros(8 + width * height, np.uint8), device.stream()
        device.copy(stream, rows, pointer, address(host), True)
        device.mark(stream).wait()
        places = [slice(first + i * pitch, first + i * pitch + width) for i in range(height)]
        assert not host[:8].any()
        np.testing.assert_array_equal(host[8:].reshape(height, width), [data[p] for p in places])
        if pitch >= width:
            host[8:] += 1
            device.copy(stream, rows, pointer, address(host), False)
            device.mark(stream).wait()
            for place in places:
                data[place] += 1
            np.testing.assert_array_equal(download(device, pointer, data.nbytes), data)
        device.free(pointer)

    ranks(program)


def test_a_stream_follows_a_mark_of_another(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        device, source, target = here(comm), pages(MANY), pages(MANY)
        for host in (source, target):
            device.pin(address(host), MANY)
        pointer = device.allocate(MANY)
        into, out_of = device.stream(), device.stream()
        for turn in range(1, 6):
            source[:] = turn
            device.copy(into, whole(MANY), pointer, address(source), False)
            device.follow(out_of, device.mark(into))
            device.copy(out_of, whole(MANY), pointer, address(target), True)
            device.mark(out_of).wait()
            assert (target == turn).all()
        for host in (source, target):
            device.unpin(address(host))
        device.free(pointer)

    ranks(program)


@smoke
def test_a_copy_within_a_gpu(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        device, stream = here(comm), here(comm).stream()
        first = upload(device, pattern(MANY))
        second = device.allocate(MANY)
        device.copy_within(stream, second, first, MANY)
        device.mark(stream).wait()
        np.testing.assert_array_equal(download(device, second, MANY), pattern(MANY))
        device.free(first)
        device.free(second)

    ranks(program)


@smoke
def test_what_fails_says_what_it_was(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        device, host = here(comm), pages(mmap.PAGESIZE)
        device.pin(address(host), host.nbytes)
        with pytest.raises(TransportError, match=r"cuMemHostRegister failed: .*ALREADY_REG"):
            device.pin(address(host), host.nbytes)
        device.unpin(address(host))
        with pytest.raises(TransportError, match="cuMemHostUnregister failed"):
            device.unpin(address(host))
        with pytest.raises(TransportError, match=r"cuMemAlloc failed: .*OUT_OF_MEMORY"):
            device.allocate(1 << 50)
        with pytest.raises(TransportError, match=r"cuDeviceGet failed: .*INVALID_DEVICE"):
            cuda.device(cuda.count())
        pointer = upload(device, pattern(100))  # none of this has done harm
        np.testing.assert_array_equal(download(device, pointer, 100), pattern(100))
        device.free(pointer)

    ranks(program)


def test_the_threads_own_context_stays(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        from cuda.bindings import driver

        before = int(driver.cuCtxGetCurrent()[1])
        for number in range(cuda.count()):
            device = cuda.device(number)
            pointer = upload(device, pattern(100))
            assert cuda.owner(pointer) == number
            with device:
                assert cuda.current() == number
            device.free(pointer)
        assert int(driver.cuCtxGetCurrent()[1]) == before

    ranks(program)


def test_what_a_gpu_is_for_people_is_what_it_is(ranks: Any) -> None:
    def program(comm: Comm) -> list[bytes]:
        gpus = cuda.describe()
        devices = [cuda.device(number) for number in range(cuda.count())]
        assert [(g.number, g.name) for g in gpus] == [(d.number, d.name) for d in devices]
        assert all(gpu.nbytes > 1 << 30 and gpu.state.startswith("usable") for gpu in gpus)
        return [device.uuid for device in devices]

    one, other = ranks(program)
    assert one == other
    assert len(set(one)) == len(one)


def test_a_forked_child_is_refused(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        device = here(comm)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads
            child = os.fork()
        if not child:
            try:
                device.stream()
            except Error as exc:
                os._exit(7 if "forked child" in str(exc) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    ranks(program)


# --- memory of another process -------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_memory_is_opened_by_another_process(ranks: Any, offset: int) -> None:
    nbytes = 3 << 20

    def program(comm: Comm) -> None:
        device = cuda.device(0)
        if comm.rank == 0:
            pointer = upload(device, pattern(nbytes))
            comm.send(device.ipc_handle(pointer + offset), 1)
            comm.recv(1)  # it has finished with the memory
            assert (download(device, pointer, nbytes)[offset : offset + 100] == 5).all()
            device.free(pointer)
            return
        handle, place, *_ = comm.recv(0)
        base = device.open_ipc(handle)
        got = download(device, base + place, nbytes - offset)
        stream = device.stream()
        device.copy(stream, whole(100), base + place, address(np.full(100, 5, np.uint8)), False)
        device.mark(stream).wait()
        device.close_ipc(base)
        comm.send("done", 0)
        np.testing.assert_array_equal(got, pattern(nbytes)[offset:])

    ranks(program)


def test_memory_of_a_pool_is_not_offered(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        from cuda.bindings import driver

        device = here(comm)
        stream = driver.CUstream(device.stream())
        with device:
            result, pointer = driver.cuMemAllocAsync(1 << 20, stream)
            assert result == driver.CUresult.CUDA_SUCCESS
            device.mark(int(stream)).wait()
            assert device.ipc_handle(int(pointer)) is None
            assert driver.cuMemFreeAsync(pointer, stream) == (driver.CUresult.CUDA_SUCCESS,)

    ranks(program)
