"""GPU arrays over the fake CUDA driver do what tests of pycoll rely on."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import ml_dtypes
import numpy as np
import pytest
from tiers import exhaustive

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu
from cuda.bindings import driver
from fake_cuda_calls import NOT_READY, check, device_memory, python

pytestmark = exhaustive  # a test double


def test_a_trace_is_a_line_a_call_and_otherwise_there_is_none(library: Path) -> None:
    assert python(library, "").stderr == ""
    traced = python(library, "", trace=True)
    assert [line.split()[2].split("(")[0] for line in traced.stderr.splitlines()] == [
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
    ]
    assert traced.stdout == ""


DTYPES = [np.dtype(char) for char in "?bhilBHILefdFD"] + [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
]


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


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_views_are_what_numpy_says(gpu: None) -> None:
    source = numbers((4, 5, 6))
    whole = fakegpu.array(source)
    for index in (
        np.s_[1],
        np.s_[1:3, ::-2],
        np.s_[..., 2, None],
        np.s_[::-1, ::2, 1:4],
        np.s_[1, 2, 3],
    ):
        assert (whole[index].get() == source[index]).all()
        assert whole[index].shape == np.shape(source[index])
    assert (whole.T[2].get() == source.T[2]).all()
    assert (whole[0, 0].broadcast_to((3, 6)).get() == source[0, 0]).all()
    assert whole[2:2].get().shape == (0, 5, 6)


def test_kernels_run_on_the_current_stream(gpu: None) -> None:
    a, b = fakegpu.array(numbers((4, 6))), fakegpu.empty((6, 4))
    before = fakegpu.use_stream(fakegpu.new_stream())
    try:
        b.copy_from(a.T)
        b[::2].fill(0)
        assert b.stream != a.stream
    finally:
        fakegpu.use_stream(before)
    expected = numbers((4, 6)).T.copy()
    expected[::2] = 0
    assert (b.get() == expected).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", [None, (1, 1)], ids=["unversioned", "versioned"])
def test_dlpack_there_and_back(gpu: None, dtype: Any, version: Any) -> None:
    class Old:  # knows no max_version
        def __init__(self, array: fakegpu.Array) -> None:
            self.array = array
            self.__dlpack_device__ = array.__dlpack_device__

        def __dlpack__(self, *, stream: Any) -> object:
            return self.array.__dlpack__(stream=stream)

    source = numbers((3, 4), dtype)
    array = fakegpu.array(source, device=1)[::2, ::-1]
    taken = fakegpu.from_dlpack(array if version else Old(array))
    assert (taken.dtype, taken.shape, taken.strides) == (dtype, array.shape, array.strides)
    assert taken.pointer == array.pointer
    view = taken[1:]
    del array, taken
    assert len(fakegpu.exported) == 1
    assert (view.get().view(np.uint8) == source[::2, ::-1][1:].copy().view(np.uint8)).all()
    del view
    assert not fakegpu.exported


def test_a_capsule_that_nobody_takes_gives_its_memory_back(gpu: None) -> None:
    capsule = fakegpu.array(numbers((3,))).__dlpack__(max_version=(1, 0))
    assert len(fakegpu.exported) == 1
    del capsule
    assert not fakegpu.exported


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


def test_dlpack_says_what_it_cannot_do(gpu: None) -> None:
    array = fakegpu.array(numbers((3,)))
    with pytest.raises(ValueError, match="ambiguous"):
        array.__dlpack__(stream=0)
    with pytest.raises(BufferError, match="not on"):
        array.__dlpack__(dl_device=(1, 0))
    array.readonly = True
    with pytest.raises(BufferError, match="read-only"):
        array.__dlpack__()
    assert fakegpu.from_dlpack(array[1:]).readonly
    copy = array.__dlpack__(max_version=(1, 0), copy=True)
    assert copy is not None


def test_the_array_interface(gpu: None) -> None:
    array = fakegpu.array(numbers((3, 4)))
    told = fakegpu.InterfaceArray(array[:, ::2]).__cuda_array_interface__
    assert told == {
        "version": 3,
        "shape": (3, 2),
        "typestr": "<f4",
        "data": (array.pointer, False),
        "strides": (16, 8),
        "stream": 1,
    }
    assert fakegpu.InterfaceArray(array).__cuda_array_interface__["strides"] is None
    brain = fakegpu.InterfaceArray(fakegpu.empty((3,), ml_dtypes.bfloat16))
    assert not hasattr(brain, "__cuda_array_interface__")


def test_memory_goes_with_its_last_view_when_its_work_is_done(gpu: None) -> None:
    before = fake_cuda.stats()["allocations"]
    array = fakegpu.array(numbers((100,)))
    view = array[10:20]
    del array
    assert fake_cuda.stats()["allocations"] == before + 1
    del view
    assert fake_cuda.stats()["allocations"] == before
    assert fake_cuda.stats()["illegal_accesses"] == 0
