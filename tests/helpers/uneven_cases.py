"""Blocks of several shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = Any


Comm = Any


Call = Callable[..., Any]


DTYPES = ("bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "complex128")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def draw(seed: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """Random bits, but of numbers small ones: their sums are exact in every order."""
    rng = np.random.default_rng(seed)
    wanted = dtype_of(dtype)
    if wanted.kind in "biufc" or dtype == "bfloat16":
        return np.asarray(rng.integers(0, 4, shape)).astype(wanted)
    count = int(np.prod(shape))
    bits = rng.integers(0, 100, count * wanted.itemsize).astype(np.uint8)
    return bits.view(wanted).reshape(shape)


def plain(x: Array) -> Array:
    """As bits if NumPy cannot compare it."""
    return x.view(np.uint16) if x.dtype == dtype_of("bfloat16") else x


def check(actual: Any, expected: Array) -> None:
    """The same values, dtype and shape; an array that its owner may write to."""
    assert type(actual) is np.ndarray
    assert actual.flags.writeable
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(plain(actual), plain(expected), strict=True)


def check_list(actual: Any, expected: Sequence[Array]) -> None:
    assert type(actual) is list
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        check(one, other)


def both_ways(comm: Comm, name: str) -> list[Call]:
    """The blocking method, and its non-blocking twin with its wait."""
    twin = getattr(comm, f"i{name}")
    return [getattr(comm, name), lambda *args, **kwargs: twin(*args, **kwargs).wait()]
