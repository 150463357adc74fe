"""What tests of messages share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Comm = Any


MiB = 2**20


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


def in_threads(*functions: Callable[[], object]) -> None:
    """Run them at once; raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
