"""CuPy's arrays: every method, views, and streams."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from gpu_world import Library, every_method, jobs

Comm = Any

auto = jobs(())


def library(comm: Comm, dtype: str) -> Library:
    device = comm.rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(device).use()

    def get(x: Any) -> Any:
        assert (type(x), x.dtype, x.device.id) == (cupy.ndarray, dtype, device)
        return x.get()

    return Library(lambda x: cupy.asarray(x.astype(dtype)), get)


@auto
@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32", "complex128"])
def test_every_method(ranks: Any, dtype: str) -> None:
    assert ranks(lambda comm: every_method(comm, library(comm, dtype), 1000)) == [4 * 17] * 2


@auto
@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, 1:3], np.s_[::3, ::-2]], ids=str)
def test_views_are_read_and_filled(ranks: Any, index: Any) -> None:
    def program(comm: Comm) -> None:
        host = np.arange(400.0).reshape(100, 4)
        x = library(comm, "float64").put(host)
        total = comm.all_reduce(x[index])
        np.testing.assert_array_equal(total.get(), 2 * host[index])
        seen = x[index]
        assert comm.all_reduce(seen, out=seen) is seen
        host[index] *= 2
        np.testing.assert_array_equal(x.get(), host)

    ranks(program)


@auto
def test_what_the_current_stream_is_about_to_write_is_waited_for(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = library(comm, "float32").put(np.zeros(5_000_000))
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(200):
                cupy.sin(x, out=x)
            x.fill(comm.rank + 1)
            total = comm.all_reduce(x)
        with cupy.cuda.Stream(non_blocking=True):
            assert bool((total == 3).all())

    ranks(program)
