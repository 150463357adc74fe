"""What tests of ranks over a real RDMA device share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

Array = Any


Comm = Any


RDMA = ("--transport", "rdma")


TWO, FOUR = (2, RDMA), (4, RDMA)


def jobs(*worlds: tuple[int, tuple[str, str]]) -> pytest.MarkDecorator:
    """Run a test on such jobs."""
    return pytest.mark.parametrize(
        "ranks", worlds, indirect=True, scope="module", ids=[f"{n}-{way[-1]}" for n, way in worlds]
    )


def pattern(seed: int, nbytes: int) -> Array:
    """Bytes that differ from place to place and from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def check(got: Any, want: Any, *where: object) -> None:
    if want is None:
        assert got is None, where
    else:
        np.testing.assert_array_equal(got, want, str(where))
