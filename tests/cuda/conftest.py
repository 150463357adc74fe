"""The fake CUDA driver in this process, for tests of it and of what stands right above it.

Without cuda-bindings these tests are skipped: what needs them is imported by the fixtures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

from pycoll._cuda import cuda as gpus
from pycoll._cuda import pinned


@pytest.fixture(scope="module")
def library(fake_driver: Path) -> Path:
    """The driver of this process."""
    fake_cuda.load(fake_driver)
    return fake_driver


@pytest.fixture
def cuda(library: Path) -> Iterator[None]:
    """The context of device 0 is current."""
    from cuda.bindings import driver
    from fake_cuda_calls import check, value

    check(driver.cuInit(0))
    check(driver.cuCtxPushCurrent(value(driver.cuDevicePrimaryCtxRetain(0))))
    fake_cuda.reset()
    yield
    fake_cuda.reset()
    value(driver.cuCtxPopCurrent())
    check(driver.cuDevicePrimaryCtxRelease(0))


@pytest.fixture
def stream(cuda: None) -> Any:
    """A stream of device 0, whose context is current."""
    from cuda.bindings import driver
    from fake_cuda_calls import value

    return value(driver.cuStreamCreate(1))


@pytest.fixture
def device(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gpus.Device]:
    """GPU 0, when nothing is in the pool."""
    fake_cuda.reset()
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(pinned, "KEPT_NBYTES", 0)
        pinned.pool._collect()
    yield gpus.device(0)
    fake_cuda.fail("")
    fake_cuda.run_all()
    assert fake_cuda.stats()["illegal_accesses"] == 0
