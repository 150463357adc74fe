"""Values and algorithms for tests of collectives."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

import pycoll

Array = Any


Comm = Any


INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


FLOATS = ("float16", "bfloat16", "float32", "float64")


COMPLEXES = ("complex64", "complex128")


DTYPES = ("bool", *INTS, *FLOATS, *COMPLEXES)


ORDERED = ("bool", *INTS, *FLOATS)


REDUCTIONS = {
    "sum": (np.add, DTYPES),
    "prod": (np.multiply, DTYPES),
    "min": (np.minimum, ORDERED),
    "max": (np.maximum, ORDERED),
    "avg": (np.add, (*FLOATS, *COMPLEXES)),
    "band": (np.bitwise_and, ("bool", *INTS)),
    "bor": (np.bitwise_or, ("bool", *INTS)),
    "bxor": (np.bitwise_xor, ("bool", *INTS)),
    "land": (np.logical_and, DTYPES),
    "lor": (np.logical_or, DTYPES),
    "lxor": (np.logical_xor, DTYPES),
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def draw(seed: int, dtype: str, shape: tuple[int, ...], op: str = "sum") -> Array:
    """Random values whose reduction by `op` is exact in every order."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5 if shape else np.array(rng.random() < 0.5)
    if dtype in INTS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True).reshape(shape)
    if op == "prod":
        factors = [1, -1, 2, 0.5] + [1j] * (dtype in COMPLEXES)
        return rng.choice(factors, shape).astype(dtype_of(dtype)).reshape(shape)
    values = rng.integers(-9, 10, shape).reshape(shape)
    if dtype in COMPLEXES:
        values = values + 1j * rng.integers(-9, 10, shape).reshape(shape)
    values = values.astype(dtype_of(dtype))
    if op in ("min", "max") and values.size > 4:
        values.flat[seed % values.size] = np.nan
    return values


def draw_all(seed: int, size: int, *args: Any) -> list[Array]:
    """The arrays of all ranks."""
    return [draw(1000 * seed + rank, *args) for rank in range(size)]


def reduced(op: str, operands: list[Array]) -> Array:
    """What NumPy makes of them: dtypes are kept, integers wrap."""
    dtype = operands[0].dtype
    with np.errstate(all="ignore"):
        if op in ("land", "lor", "lxor"):
            operands = [x.astype(bool) for x in operands]
        total = np.asarray(functools.reduce(REDUCTIONS[op][0], operands))
        if op == "avg" and dtype.kind == "c":
            return (total.real / len(operands) + 1j * (total.imag / len(operands))).astype(dtype)
        if op == "avg":
            total = total / len(operands)
        return total.astype(dtype)


def check(actual: Any, expected: Array) -> None:
    """The same values (NaN equals NaN), the same dtype, the same shape; an array of one's own."""
    assert type(actual) is np.ndarray
    assert actual.flags.writeable
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(plain(actual), plain(expected), strict=True)


def plain(x: Array) -> Array:
    """As float32 if it is bfloat16, whose NaN NumPy does not know for one."""
    return x.astype("f4") if x.dtype == dtype_of("bfloat16") else x


def algorithms(collective: str) -> list[str | None]:
    return [None, *pycoll.algorithms(collective)]
