"""The tests of this folder need a GPU; where there is none, test_cuda.py takes a made-up one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Never

import pytest
from gpu_world import no_gpu

NEEDS = {
    "test_cuda": "cuda",
    "test_cupy": "cupy",
    "test_examples": "torch",
    "test_jax": "jax",
    "test_reductions": "torch",
    "test_torch": "torch",
}


def missing(name: str) -> str | None:
    """What a test module would miss on this machine."""
    if not importlib.util.find_spec(NEEDS[name]):
        return f"needs {NEEDS[name].replace('cuda', 'cuda-bindings')}"
    return None if name == "test_cuda" or no_gpu() is None else f"needs a GPU: {no_gpu()}"


class Skipped(pytest.Module):
    """A module that is not even imported, for its library may be missing."""

    def collect(self) -> Never:
        pytest.skip(str(missing(self.path.stem)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    if missing(module_path.stem) is None:
        return None
    return Skipped.from_parent(parent, path=module_path)
