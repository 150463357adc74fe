"""What tests of messages share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

Comm = Any


SMALL = 1000
"""Bytes of a message that is buffered."""


LARGE = 300_000
"""Bytes of a message that waits for its receive."""


def on(size: int) -> pytest.MarkDecorator:
    """Run a test on so many ranks, over shared memory and over tcp."""
    jobs = [size, (size, ("--transport", "tcp"))]
    ids = [f"{size} ranks, {name}" for name in ("shm", "tcp")]
    return pytest.mark.parametrize("ranks", jobs, indirect=True, scope="module", ids=ids)


def numbered(i: int, nbytes: int) -> Any:
    """An array that tells which message it is."""
    return np.full(nbytes, i % 251, "u1")


def check(got: Any, i: int, nbytes: int) -> None:
    # np.testing.assert_array_equal takes a hundred times as long.
    assert (type(got), got.dtype, got.shape) == (np.ndarray, np.uint8, (nbytes,))
    assert (got == i % 251).all(), f"not message {i}: {got}"
