"""Random values and operators, and what NumPy makes of them: scripts compare results with that.

It uses nothing of pycoll but `Op`, so that no fault of pycoll is in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import pycoll

try:
    import ml_dtypes
except ImportError:
    BFLOAT16 = None
else:
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Array = Any
Random = np.random.Generator


INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = ("float16", "float32", "float64", *(["bfloat16"] if BFLOAT16 else []))
COMPLEXES = ("complex64", "complex128")
ALL = ("bool", *INTS, *FLOATS, *COMPLEXES)
MOVING = ("datetime64[s]", "S5", "U2", "i4,f8", ">i4")
UFUNCS: dict[str, tuple[np.ufunc, tuple[str, ...]]] = {
    "sum": (np.add, ALL),
    "prod": (np.multiply, ALL),
    "min": (np.minimum, ("bool", *INTS, *FLOATS)),
    "max": (np.maximum, ("bool", *INTS, *FLOATS)),
    "avg": (np.add, (*FLOATS, *COMPLEXES)),
    "band": (np.bitwise_and, ("bool", *INTS)),
    "bor": (np.bitwise_or, ("bool", *INTS)),
    "bxor": (np.bitwise_xor, ("bool", *INTS)),
    "land": (np.logical_and, ALL),
    "lor": (np.logical_or, ALL),
    "lxor": (np.logical_xor, ALL),
}


def keep_left(a: Array, b: Array) -> Array:
    return a


def keep_right(a: Array, b: Array) -> Array:
    return b


def compose(a: Array, b: Array) -> Array:
    """Affine maps in the halves of a uint32, one after the other: the order is seen."""
    factor, offset = a >> 16, a & 0xFFFF
    return ((factor * (b >> 16)) & 0xFFFF) << 16 | ((factor * (b & 0xFFFF) + offset) & 0xFFFF)


USER_OPS = (
    (pycoll.Op(keep_left, commutative=False, elementwise=True), keep_left, ALL),
    (pycoll.Op(keep_right, commutative=False), keep_right, ALL),
    (pycoll.Op(compose, commutative=False, elementwise=True), compose, ("uint32",)),
    (compose, compose, ("uint32",)),
    (pycoll.Op(np.maximum, elementwise=True), np.maximum, ("bool", *INTS)),
    (pycoll.Op(np.bitwise_xor), np.bitwise_xor, INTS),
)


def dtype_of(name: str) -> np.dtype[Any]:
    return BFLOAT16 if name == "bfloat16" and BFLOAT16 else np.dtype(name)


def values(
    rng: Random, dtype: str, shape: tuple[int, ...], op: object, exact: bool = True
) -> Array:
    """Random values; `exact`: such that their reduction is exact in every order."""
    if dtype in MOVING:
        return rng.integers(0, 100, shape).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTS:
        limits = np.iinfo(dtype)
        drawn = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return np.asarray(drawn, dtype)
    if not exact:
        drawn = rng.standard_normal(shape, np.float32)
        if dtype in COMPLEXES:
            drawn = drawn + 1j * rng.standard_normal(shape, np.float32)
        return np.asarray(drawn).astype(dtype_of(dtype))
    if op == "prod":
        drawn = rng.choice([1, -1, 2, 0.5], shape)
    else:
        drawn = rng.integers(-9, 10, shape).astype(float)
        if op in ("min", "max") and rng.random() < 0.3:
            drawn = np.where(rng.random(shape) < 0.1, np.nan, drawn)
    if dtype in COMPLEXES and op != "prod":
        drawn = drawn + 1j * rng.integers(-9, 10, shape)
    return np.asarray(drawn).astype(dtype_of(dtype))


def times(a: Array, b: Array) -> Array:
    """The product of complex numbers, each part rounded as it is written; NumPy may fuse it."""
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def reduced(op: str | Callable[[Array, Array], Array], operands: list[Array]) -> Array:
    """What NumPy makes of the operands in rank order; 16-bit floats are float32 until the end."""
    dtype = operands[0].dtype
    with np.errstate(all="ignore"):
        if not isinstance(op, str):
            return np.asarray(functools.reduce(op, operands))
        if op in ("land", "lor", "lxor"):
            operands = [x.astype(bool) for x in operands]
        elif dtype in FLOATS and dtype.itemsize == 2:
            operands = [x.astype(np.float32) for x in operands]
        combine = times if op == "prod" and dtype.kind == "c" else UFUNCS[op][0]
        total = np.asarray(functools.reduce(combine, operands))
        if op == "avg" and dtype.kind == "c":
            total.real /= len(operands)
            total.imag /= len(operands)
        elif op == "avg":
            total = np.asarray(total / total.dtype.type(len(operands)))
        return total.astype(dtype)


def laid_out(rng: Random, x: Array) -> Array:
    """The same values in some other layout, sometimes read-only or not aligned."""
    form = rng.integers(7)
    if form == 1:
        x = np.array(x, order="F")
    elif form == 2:
        wide = np.zeros((*x.shape, 3), x.dtype)
        wide[..., 1] = x
        x = wide[..., 1]
    elif form == 3:
        back = (..., *[slice(None, None, -1)] * x.ndim)
        x = x[back].copy()[back]
    elif form == 4:
        x = x.copy()
        x.flags.writeable = False
    elif form == 5 and x.nbytes:
        x = np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)
    return x


def same(actual: Any, expected: Any, what: str) -> None:
    """The same type, dtype, shape and values; NaN equals NaN."""
    if isinstance(expected, np.ndarray):
        assert type(actual) is np.ndarray, f"{what}: {type(actual)}"
        assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
        if actual.dtype == BFLOAT16:
            actual, expected = actual.astype("f4"), expected.astype("f4")
        inexact = expected.dtype.kind in "fc"
        equal = np.array_equal(actual, expected, equal_nan=inexact)
        assert equal, f"{what}: wrong values\n{actual}\n{expected}"
    else:
        assert type(actual) is type(expected), f"{what}: {type(actual)}"
        assert actual == expected, f"{what}: {str(actual)[:200]}, not {str(expected)[:200]}"


def some_object(rng: Random) -> Any:
    form = rng.integers(7)
    count = int(2 ** rng.uniform(0, 18))
    return (
        None,
        int(count),
        "text" * (count // 4),
        {"nested": [(count, b"x" * count)]},
        [bytearray(count // 3)] * 3,
        float(count),
        np.float32(count),
    )[form]
