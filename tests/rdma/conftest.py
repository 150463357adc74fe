"""The tests of this folder need an RDMA device: `tests/rdma/run` runs them where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Never

import pytest


def nothing_to_test_with() -> str | None:
    """What an RDMA test would miss on this machine."""
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        return f"pyverbs cannot be imported ({error})"
    try:
        devices = os.listdir("/sys/class/infiniband")
    except FileNotFoundError:
        devices = []
    return None if devices else "there is no RDMA device"


class Skipped(pytest.Module):
    """A module that is not even imported, for pyverbs may be missing."""

    def collect(self) -> Never:
        pytest.skip(
            f"{nothing_to_test_with()}: run `tests/rdma/run`, which tests in a virtual machine",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    if nothing_to_test_with() is None:
        return None
    return Skipped.from_parent(parent, path=module_path)
