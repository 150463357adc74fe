"""Arrays on a GPU, staged, over the fake CUDA driver."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed", allow_module_level=True)

import fakegpu

from pycoll._cuda import cuda
from pycoll._cuda.staging import Stage

NBYTES = 8192


class Staged:
    """A stage with its staging buffer."""

    def __init__(self, *args: Any) -> None:
        self.stage = Stage(*args)
        self.buffer = self.stage.make_buffer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


def stage_of_array(device: cuda.Device, x: fakegpu.Array) -> Staged:
    """A stage of an array, after what its library has under way on it."""
    ready = device.mark(x.stream)
    return Staged(device, x.pointer, x.dtype, x.shape, x.strides, ready, x, not x.readonly)
