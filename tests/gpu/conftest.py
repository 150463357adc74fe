"""The tests of this folder need a GPU; those of pycoll.cuda take a made-up one where there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Never

import pytest
from gpu_world import no_gpu

NEEDS = {"test_torch": "torch", "test_cupy": "cupy", "test_jax": "jax", "test_examples": "torch"}


class Skipped(pytest.Module):
    """A module that is not even imported, for its library may be missing."""

    def collect(self) -> Never:
        library = NEEDS[self.path.stem]
        missing = not importlib.util.find_spec(library)
        pytest.skip(
            f"needs {library}" if missing else f"needs a GPU: {no_gpu()}", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    library = NEEDS.get(module_path.stem)
    if library is None or (importlib.util.find_spec(library) and no_gpu() is None):
        return None
    return Skipped.from_parent(parent, path=module_path)
