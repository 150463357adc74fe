"""Two ranks with GPUs over simulated RDMA devices, for the tests of GPUDirect RDMA.

A module of tests takes the fixtures by name: ``gpu, job = gpudirect_job.gpu, gpudirect_job.job``.
"""

from __future__ import annotations

import gc
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from patience import PATIENCE
from rdma_job import Job
from rdma_world import LARGE
from simulated_regions import DmaBufRegion

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

DEADLINE_S = 20.0 * PATIENCE
LONG = LARGE + 1000


@pytest.fixture
def gpu(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPUs on which nothing is under way, and ranks that do not lend each other their memory."""
    fake_cuda.load(fake_driver)
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
    made = Job(2, seed=request.param, op_timeout=DEADLINE_S)
    made.run(greet)
    yield made
    regions = gpu_regions(made)
    made.close()
    assert regions == [0, 0]


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


@pytest.fixture
def fresh_job(gpu: None) -> Iterator[Job]:
    """Two ranks that have not talked yet."""
    made = Job(2, op_timeout=DEADLINE_S)
    yield made
    made.close()


PLACES = {
    "gpu": (on_gpu, lambda nbytes: fakegpu.empty((nbytes,), np.uint8), lambda x: x.get()),
    "host": (np.copy, lambda nbytes: np.empty(nbytes, np.uint8), lambda x: x),
}
