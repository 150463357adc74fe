"""Operands of reductions among which is whatever is special about their dtype."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._gpu import kernels
from pycoll._transports._core import OPS

Array = np.ndarray[Any, Any]

CASES = [(op, dtype) for op in OPS for dtype in dtypes.TABLE if kernels.has(op, dtype)]
"""Every operator and dtype that the core reduces."""

_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def _specials(dtype: dtypes.DType) -> Array:
    """Bits that are special: zeros, ones, infinities, NaN of all kinds, the ends of ranges."""
    if dtype.family == "b":
        return np.array([0, 1], np.uint8)
    if dtype.family in ("i", "u"):
        bits = 8 * dtype.itemsize
        numbers = [0, 1, 2, 3, 7, 255, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
        unsigned = np.array([n % (1 << bits) for n in numbers], np.uint64)
        return unsigned.astype(f"u{dtype.itemsize}")
    part = dtype.itemsize // (2 if dtype.family == "c" else 1)
    fraction = {"float16": 10, "bfloat16": 7}.get(dtype.name, 23 if part == 4 else 52)
    bits = 8 * part
    exponent = bits - 1 - fraction
    infinity = ((1 << exponent) - 1) << fraction
    one = ((1 << (exponent - 1)) - 1) << fraction
    quiet = 1 << (fraction - 1)
    positive = [
        0, 1, 3, (1 << fraction) - 1, 1 << fraction, (1 << fraction) + 1,  # subnormals, and next
        one, one + 1, one + (1 << fraction), one - (1 << fraction) * 2, one - 1,
        one + 3 * (1 << fraction) + 5, infinity - 1, infinity - (1 << fraction), infinity,
        infinity | quiet, infinity | quiet | 5, infinity | 1, infinity | quiet - 1,
    ]  # fmt: skip
    numbers = positive + [n | 1 << (bits - 1) for n in positive]
    return np.array(numbers, np.uint64).astype(_WORDS[part])


def operands(dtype: dtypes.DType, ranks: int, count: int | None = None) -> list[Array]:
    """Return an array a rank: all pairs of special values, triples by chance, then random bits."""
    rng = np.random.default_rng([dtype.code, ranks])
    special = _specials(dtype)
    pairs = np.array(list(itertools.product(range(len(special)), repeat=2)))
    is_complex = dtype.family == "c"
    columns = [
        special[pairs[:, k]] if k < 2 else rng.choice(special, len(pairs)) for k in range(ranks)
    ]
    made = []
    for column in columns:
        if dtype.family == "b":
            noise = rng.integers(0, 2, 1000).astype(np.uint8)
        else:
            noise = np.frombuffer(rng.bytes(1000 * column.itemsize), column.dtype)
        parts = np.concatenate([column, noise, rng.permutation(column), special[:1]])
        if is_complex:
            parts = np.stack([parts, rng.permutation(parts)], axis=1)
        flat = np.ascontiguousarray(parts).view(np.uint8).view(dtype.storage).reshape(-1)
        if count is not None:
            flat = np.resize(flat, count)
        made.append(np.ascontiguousarray(flat))
    return made


@functools.lru_cache(maxsize=16)
def drawn(name: str, size: int, count: int) -> list[Array]:
    """The operands of `size` ranks, of the dtype of that name."""
    dtype = next(dtype for dtype in dtypes.TABLE if dtype.name == name)
    return [x.view(getattr(ml_dtypes, name, name)) for x in operands(dtype, size, count)]
