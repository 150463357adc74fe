"""Staging buffers of GPU arrays: in whose memory they are, and until when."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import weakref
from collections import deque
from typing import Any, cast

import fake_cuda
import numpy as np
import pytest
from tiers import smoke

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu
from staged_arrays import NBYTES, Staged, stage_of_array

from pycoll._cuda import copies, cuda, pinned, staging
from pycoll.errors import TransportError


def address(stage: Staged) -> int:
    result: int = stage.buffer.__array_interface__["data"][0]
    return result


def test_memory_is_used_again(device: cuda.Device) -> None:
    x = fakegpu.array(np.zeros(NBYTES, np.uint8))
    places = set()
    for _ in range(10):
        stage = stage_of_array(device, x)
        stage.pull(None).wait()
        places.add(address(stage))
        del stage
        gc.collect()
    assert len(places) == 1


@smoke
def test_memory_is_not_used_again_while_a_copy_is_under_way(device: cuda.Device) -> None:
    with fakegpu.held_stream() as (_, release):
        x = fakegpu.array(np.full(NBYTES, 1, np.uint8))
        stage = stage_of_array(device, x)
        place = address(stage)
        stage.pull(None)
        del stage, x  # the call was given up
        gc.collect()
        fakegpu.use_stream(fakegpu.LEGACY)
        y = fakegpu.array(np.full(NBYTES, 2, np.uint8))
        other = stage_of_array(device, y)
        assert address(other) != place
        release()
        fake_cuda.run_all()
        gc.collect()
        third = stage_of_array(device, y)
        assert address(third) == place


def test_memory_is_not_used_again_while_somebody_sees_it(device: cuda.Device) -> None:
    x = fakegpu.array(np.zeros(NBYTES, np.uint8))
    stage = stage_of_array(device, x)
    view, place = stage.buffer[5:10], address(stage)
    stage.pull(None).wait()
    del stage
    gc.collect()
    assert address(stage_of_array(device, x)) != place
    assert (view == 0).all()


def test_a_block_serves_what_is_not_much_smaller(device: cuda.Device) -> None:
    def place(nbytes: int) -> int:
        stage = stage_of_array(device, fakegpu.array(np.zeros(nbytes, np.uint8)))
        stage.pull(None).wait()
        return address(stage)

    large = place(1 << 20)
    gc.collect()
    assert place(1 << 19) == large
    gc.collect()
    assert place(1 << 12) != large


def test_no_more_is_kept_than_the_limit(
    device: cuda.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fake_cuda.stats()["registered"]
    monkeypatch.setattr(pinned, "KEPT_NBYTES", 3 * NBYTES)
    x = fakegpu.array(np.zeros(NBYTES, np.uint8))
    stages = [stage_of_array(device, x) for _ in range(10)]
    for stage in stages:
        stage.pull(None).wait()
    assert fake_cuda.stats()["registered"] == before + 10
    del stages, stage
    gc.collect()
    stage = stage_of_array(device, x)
    assert fake_cuda.stats()["registered"] <= before + 3
    del stage


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_memory_that_cannot_be_page_locked_serves_all_the_same(
    device: cuda.Device, direction: str
) -> None:
    fake_cuda.fail("cuMemHostRegister:*:2")
    x = fakegpu.array(np.arange(256, dtype=np.uint8))
    before = fake_cuda.stats()["pageable_copies"]
    stage = stage_of_array(device, x)
    if direction == "pull":
        stage.pull(None).wait()
        assert (stage.buffer == np.arange(256)).all()
    else:
        x.get()
        stage.buffer[:] = 9
        stage.flush()
        assert fake_cuda.peek(x.pointer, 256) == bytes([9]) * 256
    assert fake_cuda.stats()["pageable_copies"] == before + 1


@pytest.mark.parametrize("name", ["cuEventCreate", "cuEventRecord"])
def test_memory_is_safe_after_a_copy_that_could_not_be_begun_whole(
    device: cuda.Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = fakegpu.array(np.zeros((4, 100), np.uint8))[::-1]  # a copy for each row
    stage = stage_of_array(device, x)
    own = copies.streams_of(device).device
    monkeypatch.setattr(own, "_idle", deque(maxlen=0))  # so that an event must be made
    fake_cuda.fail(f"{name}:1:2")
    with pytest.raises(TransportError):
        stage.pull(None)
    fake_cuda.fail("")
    del stage, x
    gc.collect()
    pinned.pool.take(400)
    fake_cuda.run_all()
    assert fake_cuda.stats()["illegal_accesses"] == 0


def test_memory_for_a_result_dies_with_it(device: cuda.Device) -> None:
    before = fake_cuda.stats()["allocations"]
    memory = staging.DeviceMemory(device, 100)
    assert fake_cuda.stats()["allocations"] == before + 1
    del memory
    assert fake_cuda.stats()["allocations"] == before
    assert math.isfinite(
        staging.DeviceMemory(device, 0).pointer
    )  # also without bytes it has an address


@pytest.mark.parametrize("way", ["wait", "settle"])
def test_a_copy_whose_end_cannot_be_asked_keeps_its_array_until_all_has_ended(
    way: str,
) -> None:
    class Array:
        pass

    class Unknown:
        def is_done(self) -> bool:
            return False

        def wait(self) -> None:
            raise TransportError("CUDA: unknown")

    class SideStream:
        drained = False

        def drain(self) -> None:
            self.drained = is_kept() is not None

    array: Any = Array()
    is_kept, side_stream, mark = weakref.ref(array), SideStream(), Unknown()
    copy = copies.GpuCopy(None, cast(Any, side_stream), cast(Any, mark), array)
    del array
    with pytest.raises(TransportError) if way == "wait" else contextlib.nullcontext():
        getattr(copy, way)()
    assert side_stream.drained
    assert is_kept() is None
