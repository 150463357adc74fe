"""The fake CUDA driver, and the GPU arrays over it, do the worst that they may, and find faults."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from patience import PATIENCE
from tiers import exhaustive

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu
from cuda.bindings import driver
from fake_cuda_calls import (
    HELPERS,
    ILLEGAL,
    NBYTES,
    NOT_READY,
    OK,
    START,
    R,
    check,
    device_memory,
    python,
    value,
)

pytestmark = exhaustive  # a test double


INVALID = R.CUDA_ERROR_INVALID_VALUE


def recorded(stream: Any) -> Any:
    event = value(driver.cuEventCreate(2))
    check(driver.cuEventRecord(event, stream))
    return event


def test_a_host_that_touches_device_memory_dies(library: Path) -> None:
    touch = "ctypes.string_at(int(driver.cuMemAlloc(64)[1]), 1)"
    assert python(library, touch).returncode == -signal.SIGSEGV


def test_fresh_memory_is_no_zeros(cuda: None) -> None:
    pointer = value(driver.cuMemAlloc(NBYTES))
    assert fake_cuda.peek(pointer, NBYTES) == bytes([fake_cuda.FRESH]) * NBYTES


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d", "set"])
def test_nothing_runs_when_it_is_enqueued_and_the_destination_is_rubbish(
    stream: Any, direction: str
) -> None:
    data = bytes(range(256)) * 4
    host, source, target = np.zeros(NBYTES, np.uint8), device_memory(data), device_memory()
    if direction == "h2d":
        check(driver.cuMemcpyHtoDAsync(target, data, NBYTES, stream))
    elif direction == "d2h":
        check(driver.cuMemcpyDtoHAsync(host.ctypes.data, source, NBYTES, stream))
    elif direction == "d2d":
        check(driver.cuMemcpyDtoDAsync(target, source, NBYTES, stream))
    else:
        check(driver.cuMemsetD32Async(target, 0x03020100, NBYTES // 4, stream))
        data = bytes(range(4)) * 256

    def written() -> bytes:
        return host.tobytes() if direction == "d2h" else fake_cuda.peek(target, NBYTES)

    assert written() == bytes([fake_cuda.UNDONE]) * NBYTES
    check(driver.cuStreamSynchronize(stream))
    assert written() == data
    assert fake_cuda.stats()[f"{direction}_bytes"] == NBYTES


def test_what_an_earlier_copy_still_reads_is_not_made_rubbish(stream: Any) -> None:
    a, b, c = device_memory(b"a" * NBYTES), device_memory(b"b" * NBYTES), device_memory()
    check(driver.cuMemcpyDtoDAsync(c, a, NBYTES, stream))
    check(driver.cuMemcpyDtoDAsync(a, b, NBYTES, stream))
    check(driver.cuStreamSynchronize(stream))
    assert fake_cuda.peek(c, 1) + fake_cuda.peek(a, 1) == b"ab"


def test_a_copy_is_rubbish_as_soon_as_it_may_have_begun(stream: Any) -> None:
    a, b, c = device_memory(b"a"), device_memory(b"b"), device_memory(b"c")
    seen = []
    for seed in range(20):
        fake_cuda.seed(seed)
        check(driver.cuMemcpyDtoDAsync(c, a, 1, stream))
        held = fake_cuda.hold(stream)
        check(driver.cuMemcpyDtoDAsync(c, b, 1, stream))
        fake_cuda.run_all()
        assert fake_cuda.peek(c, 1) == b"a"
        fake_cuda.release(held)
        while driver.cuStreamQuery(stream) == (NOT_READY,):
            seen.append(fake_cuda.peek(c, 1))
        assert fake_cuda.peek(c, 1) == b"b"
    assert set(seen) == {b"a", bytes([fake_cuda.UNDONE])}


def relay(seed: int, *, ordered: bool) -> bytes:
    """A byte goes from memory to memory, each time on another of three streams."""
    fake_cuda.seed(seed)
    streams = [value(driver.cuStreamCreate(1)) for _ in range(3)]
    memory = [device_memory(bytes([i]) * 4) for i in range(4)]
    for i, (source, target) in enumerate(itertools.pairwise(memory)):
        check(driver.cuMemcpyDtoDAsync(target, source, 4, streams[i % 3]))
        if ordered:
            event = recorded(streams[i % 3])
            check(driver.cuStreamWaitEvent(streams[(i + 1) % 3], event, 0))
            check(driver.cuEventDestroy(event))
    for stream in streams:
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuStreamDestroy(stream))
    last = fake_cuda.peek(memory[-1], 1)
    for pointer in memory:
        check(driver.cuMemFree(pointer))
    return last


def test_streams_overtake_each_other_unless_events_order_them(cuda: None) -> None:
    assert {relay(seed, ordered=True) for seed in range(50)} == {b"\0"}
    assert {relay(seed, ordered=False) for seed in range(50)} == {b"\0", bytes([0xDB])}
    assert [relay(s, ordered=False) for s in range(9)] == [
        relay(s, ordered=False) for s in range(9)
    ]


def test_an_event_means_its_last_record(stream: Any) -> None:
    other = value(driver.cuStreamCreate(1))
    event = value(driver.cuEventCreate(0))
    check(driver.cuEventQuery(event))  # never recorded: nothing to wait for
    held = fake_cuda.hold(stream)
    check(driver.cuEventRecord(event, stream))
    check(driver.cuStreamWaitEvent(other, event, 0))  # of the first record, also later
    check(driver.cuEventRecord(event, value(driver.cuStreamCreate(1))))
    check(driver.cuEventSynchronize(event))
    assert driver.cuStreamQuery(other) == (NOT_READY,)
    fake_cuda.release(held)
    check(driver.cuStreamSynchronize(other))


def test_queries_advance_and_say_not_ready(stream: Any) -> None:
    held = fake_cuda.hold(stream)
    event = recorded(stream)
    for _ in range(100):
        assert driver.cuEventQuery(event) == driver.cuStreamQuery(stream) == (NOT_READY,)
    fake_cuda.release(held)
    answers = {driver.cuEventQuery(event) for _ in range(100)}
    assert answers <= {(NOT_READY,), (OK,)}
    check(driver.cuEventQuery(event))
    assert fake_cuda.stats()["busy_streams"] == 0


def test_waiting_for_what_is_held_lets_other_threads_call(stream: Any) -> None:
    held = fake_cuda.hold(stream)
    event = recorded(stream)
    ended = []
    context = value(driver.cuCtxGetCurrent())

    def wait() -> None:
        driver.cuCtxPushCurrent(context)
        ended.append(driver.cuEventSynchronize(event))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not fake_cuda.stats()["waiting"]:
        assert driver.cuEventQuery(event) == (NOT_READY,)
        assert not ended
    fake_cuda.release(held)
    waiter.join(30 * PATIENCE)
    assert ended == [(OK,)]


@pytest.mark.parametrize("wrong", ["freed", "outside", "host", "freed and made again"])
def test_an_illegal_address_shows_when_the_copy_runs_and_sticks(stream: Any, wrong: str) -> None:
    target, nbytes = device_memory(), NBYTES
    host = np.zeros(NBYTES, np.uint8)
    if wrong == "freed":
        check(driver.cuMemFree(target))
    if wrong == "outside":
        nbytes += 1
    pointer = host.ctypes.data if wrong == "host" else target
    check(driver.cuMemsetD8Async(pointer, 1, nbytes, stream))
    if wrong == "freed and made again":
        check(driver.cuMemFree(target))
        device_memory()
    assert driver.cuStreamSynchronize(stream) == (ILLEGAL,)
    assert driver.cuMemAlloc(1) == (ILLEGAL, None)
    assert not host.any()
    assert fake_cuda.stats()["illegal_accesses"] == 1


def test_registrations(stream: Any) -> None:
    page = os.sysconf("SC_PAGESIZE")
    room = np.zeros(4 * page, np.uint8)
    base = -(-room.ctypes.data // page) * page + 64
    target = device_memory()
    check(driver.cuMemHostRegister(base, 100, 0))
    taken, unknown = (
        (R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,),
        (R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,),
    )
    assert driver.cuMemHostRegister(base + 200, 8, 0) == taken  # of its page
    assert driver.cuMemHostRegister(base - 8, 8, 0) == taken
    check(driver.cuMemHostRegister(base + page, 100, 0))
    assert driver.cuMemHostUnregister(base + 8) == unknown
    assert driver.cuMemHostRegister(8, 100, 0) == (INVALID,)  # no memory of this process
    check(driver.cuMemcpyDtoHAsync(base, target, 100, stream))
    assert driver.cuMemcpyDtoHAsync(base, target, 101, stream) == (INVALID,)
    assert fake_cuda.stats()["pageable_copies"] == 0
    check(driver.cuMemcpyDtoHAsync(base + 2 * page, target, 100, stream))
    assert fake_cuda.stats()["pageable_copies"] == 1
    check(driver.cuStreamSynchronize(stream))
    assert fake_cuda.stats()["registered"] == 2
    check(driver.cuMemHostUnregister(base))
    assert driver.cuMemHostUnregister(base) == unknown
    check(driver.cuMemHostUnregister(base + page))


def test_memory_of_a_pool_is_there_when_its_stream_comes_to_it(stream: Any) -> None:
    other = value(driver.cuStreamCreate(1))
    pointer = value(driver.cuMemAllocAsync(NBYTES, stream))
    assert driver.cuIpcGetMemHandle(pointer)[0] == INVALID
    check(driver.cuMemsetD8Async(pointer, 1, NBYTES, stream))
    check(driver.cuMemFreeAsync(pointer, stream))
    assert driver.cuMemFreeAsync(pointer, stream) == (INVALID,)
    check(driver.cuStreamSynchronize(stream))
    assert fake_cuda.stats()["illegal_accesses"] == 0
    held = fake_cuda.hold(stream)
    early = value(driver.cuMemAllocAsync(NBYTES, stream))
    check(driver.cuMemsetD8Async(early, 1, NBYTES, other))
    assert driver.cuStreamSynchronize(other) == (ILLEGAL,)
    fake_cuda.release(held)


def test_calls_need_cuinit_and_a_context_and_not_a_fork(library: Path) -> None:
    program = """
print(int(driver.cuDeviceGetCount()[0]), int(driver.cuMemAlloc(1)[0]))
driver.cuInit(0)
print(int(driver.cuMemAlloc(1)[0]), fake_cuda.stats()["calls_without_context"])
context = driver.cuDevicePrimaryCtxRetain(0)[1]
driver.cuCtxSetCurrent(context)
print(int(driver.cuMemAlloc(1)[0]), flush=True)  # or the child says it, too
if os.fork() == 0:
    print(int(driver.cuInit(0)[0]), int(driver.cuMemAlloc(1)[0]), flush=True)
    os._exit(0)
os.wait()
driver.cuDevicePrimaryCtxRelease(0)
print(int(driver.cuMemAlloc(1)[0]), fake_cuda.stats()["allocations"])
"""
    done = python(library, program, start=False)
    lines = done.stdout.split("\n")
    assert sorted(lines) == sorted(["3 3", "201 1", "0", "3 3", "709 0", ""]), done.stderr


def test_calls_fail_as_told(library: Path, cuda: None) -> None:
    fake_cuda.fail("cuMemAlloc_v2:2:2,cuStreamCreate:*:719")
    results = [driver.cuMemAlloc(1)[0] for _ in range(3)]
    assert results == [OK, R.CUDA_ERROR_OUT_OF_MEMORY, OK]
    assert {driver.cuStreamCreate(0)[0] for _ in range(3)} == {R.CUDA_ERROR_LAUNCH_FAILED}
    fake_cuda.fail("")
    check((driver.cuStreamCreate(0)[0],))
    with pytest.raises(ValueError, match="name:number:error"):
        fake_cuda.fail("cuInit:once:3")
    done = python(library, "print(int(driver.cuInit(0)[0]))", start=False, fail="cuInit:1:100")
    assert done.stdout == "100\n"


def test_devices_are_numbered_anew_where_some_are_hidden(library: Path) -> None:
    program = """
print([driver.cuDeviceGetUuid(d)[1].bytes for d in range(driver.cuDeviceGetCount()[1])])
"""
    all_of = eval(python(library, program, devices=3).stdout)
    some = eval(python(library, program, devices=3, environ={"CUDA_VISIBLE_DEVICES": "2,0"}).stdout)
    assert len(set(all_of)) == 3
    assert some == [all_of[2], all_of[0]]


def text_of(handle: Any) -> str:
    return ctypes.string_at(handle.getPtr(), 64).hex()


IMPORTER = """
handle = driver.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), bytes.fromhex(sys.argv[1]), 64)
result, pointer = driver.cuIpcOpenMemHandle(handle, 1)
print(int(result))
if result == 0:
    again = driver.cuIpcOpenMemHandle(handle, 1)[1]
    assert int(again) == int(pointer)
    print(driver.cuMemGetAddressRange(pointer)[2], fake_cuda.peek(pointer, 3))
    assert int(driver.cuIpcGetMemHandle(pointer)[0]) == 1
    assert int(driver.cuMemFree(pointer)[0]) == 1
    driver.cuMemsetD8Async(pointer, ord("y"), 1, 0)
    print(int(driver.cuStreamSynchronize(0)[0]), flush=True)
    driver.cuIpcCloseMemHandle(pointer)
    input()
    driver.cuMemsetD8Async(pointer, ord("z"), 1, 0)
    print(int(driver.cuStreamSynchronize(0)[0]), flush=True)
    fake_cuda.reset()
    print(int(driver.cuIpcCloseMemHandle(pointer)[0]), int(driver.cuIpcCloseMemHandle(pointer)[0]))
"""


@pytest.mark.parametrize("freed", [False, True])
def test_another_process_opens_memory(library: Path, cuda: None, freed: bool) -> None:
    pointer = device_memory(b"abc" + bytes(5000))
    handle = value(driver.cuIpcGetMemHandle(pointer + 2))  # any address in it
    assert driver.cuIpcOpenMemHandle(handle, 1)[0] == R.CUDA_ERROR_INVALID_CONTEXT
    with subprocess.Popen(
        [sys.executable, "-c", START + IMPORTER, text_of(handle)],
        env=os.environ | {"PYTHONPATH": str(HELPERS)} | fake_cuda.environment(library),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "0\n"
        assert process.stdout.readline() == "5003 b'abc'\n"
        assert process.stdout.readline() == "0\n"
        assert fake_cuda.peek(pointer, 3) == b"ybc"
        if freed:
            check(driver.cuMemFree(pointer))
        rest, _ = process.communicate("\n", timeout=60 * PATIENCE)
    assert rest == ("700\n0 1\n" if freed else "0\n0 1\n")


def test_memory_that_has_gone_cannot_be_opened(library: Path, cuda: None) -> None:
    pointer = device_memory()
    handle = value(driver.cuIpcGetMemHandle(pointer))
    check(driver.cuMemFree(pointer))
    device_memory()  # its file has the number that the other one's had
    program = IMPORTER.replace("sys.argv[1]", repr(text_of(handle)))
    assert python(library, program).stdout == "400\n"
    done = python(
        library,
        "handle = driver.cuIpcGetMemHandle(driver.cuMemAlloc(9)[1])[1]\n"
        "print(ctypes.string_at(handle.getPtr(), 64).hex())",
    )
    ctypes.memmove(handle.getPtr(), bytes.fromhex(done.stdout), 64)
    assert driver.cuIpcOpenMemHandle(handle, 1)[0] == R.CUDA_ERROR_INVALID_HANDLE


@pytest.fixture
def gpu(library: Path) -> Iterator[None]:
    """No context is current; all memory has been given back at the end."""
    fake_cuda.reset()
    before = fake_cuda.stats()["allocations"]
    yield
    gc.collect()
    assert fake_cuda.stats()["allocations"] == before
    assert not fakegpu.exported
    fake_cuda.reset()


@pytest.mark.parametrize("asked", ["none", "stream", "-1"])
def test_dlpack_lets_the_consumers_stream_wait(gpu: None, asked: str) -> None:
    ours, theirs = fakegpu.new_stream(), fakegpu.new_stream()
    before = fakegpu.use_stream(ours)
    array = fakegpu.empty((4,), np.uint8)
    with fakegpu.context(0):
        held = fake_cuda.hold(ours)
    array.fill(7)
    fakegpu.use_stream(before)
    option = {"none": None, "stream": theirs, "-1": -1}[asked]
    stream = fakegpu.LEGACY if asked == "none" else theirs
    capsule = array.__dlpack__(stream=option, max_version=(1, 0))
    with fakegpu.context(0):
        target = device_memory()
        check(driver.cuMemcpyDtoDAsync(target, array.pointer, 1, stream))
        fake_cuda.run_all()
        if asked == "-1":
            assert fake_cuda.peek(target, 1) == bytes([fake_cuda.UNDONE])  # too early
        else:
            assert driver.cuStreamQuery(stream) == (NOT_READY,)
        fake_cuda.release(held)
        check(driver.cuStreamSynchronize(stream))
        if asked != "-1":
            assert fake_cuda.peek(target, 1) == b"\7"
        check(driver.cuMemFree(target))
    del capsule
