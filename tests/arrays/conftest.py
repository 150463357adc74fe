"""Libraries of arrays, which need not be installed."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(scope="session")
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is not installed")


@pytest.fixture(scope="session")
def ml_dtypes() -> Any:
    return pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
