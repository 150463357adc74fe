"""Values for scripts/fuzz_programs: random ones, copies, comparing, overwriting."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import numpy_oracle as oracle

Array = Any
Random = np.random.Generator

PERIOD = 4093
"""Values repeat after so many elements, a prime: drawing millions takes too long."""


def tiled(rng: Random, dtype: str, shape: tuple[int, ...], op: Any = None) -> Array:
    """Random values whose reduction is exact in every order."""
    count = math.prod(shape)
    drawn = oracle.values(rng, dtype, (min(count, PERIOD),), op)
    if count > PERIOD:
        drawn = np.tile(drawn, -(-count // PERIOD))[:count]
    return drawn.reshape(shape)


def somewhere(
    rng: Random, dtype: str, shape: tuple[int, ...], always: bool = False
) -> Array | None:
    """Return zeros in some layout, or None."""
    form = int(rng.integers(3 if always else 6))
    if form > 2:
        return None
    zeros = np.zeros(shape, oracle.dtype_of(dtype))
    if form == 1:
        return np.array(zeros, order="F")
    return zeros if form == 0 else np.repeat(zeros[..., None], 2, -1)[..., 0]


def copied(x: Any) -> Any:
    """Return a copy of an array or a list of arrays, contiguous; of others nothing."""
    if isinstance(x, list):
        return [copied(item) for item in x]
    return x.copy() if isinstance(x, np.ndarray) else x


def fill(x: Any, values: Any) -> None:
    """Write new values to a persistent request's array; what is not the root's stays."""
    if isinstance(x, list):
        for item, value in zip(x, values, strict=True):
            fill(item, value)
    elif isinstance(x, np.ndarray):
        x[...] = values


def scribble(x: Any) -> None:
    """Overwrite what an operation has used and needs no more."""
    if isinstance(x, list):
        for item in x:
            scribble(item)
    elif isinstance(x, np.ndarray) and x.flags.writeable:
        x[...] = np.array(1).astype(x.dtype)


def overlapping(x: Any, out: Any) -> bool:
    """Whether they are the same memory, or that of an array of the list `out`."""
    outs = out if isinstance(out, list) else [out]
    return isinstance(x, np.ndarray) and any(
        item is not None and np.may_share_memory(x, item) for item in outs
    )


def untouched(out: Any) -> None:
    """What lies between the elements of an array of `somewhere`, or of a list of them."""
    for item in out if isinstance(out, list) else [out]:
        wide = item.base if item is not None and item.ndim else None
        between = isinstance(wide, np.ndarray) and wide.shape == (*item.shape, 2)
        if between and item.strides == wide.strides[:-1]:  # else it is a row of another array
            assert not wide[..., 1].tobytes().strip(b"\0"), "written between elements of out"


def agree(actual: Any, expected: Any, what: str) -> None:
    """The same types, shapes and values, also in lists."""
    if isinstance(expected, list) and any(isinstance(item, np.ndarray) for item in expected):
        assert isinstance(actual, list), f"{what}: {type(actual)}, not a list"
        assert len(actual) == len(expected), f"{what}: {len(actual)}, not {len(expected)}"
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            agree(*pair, f"{what}, item {index}")
    else:
        oracle.same(actual, expected, what)


def digest(value: Any) -> int:
    """A checksum."""
    if isinstance(value, list):
        return zlib.crc32(str([digest(item) for item in value]).encode())
    return zlib.crc32(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())


def size_of(value: Any) -> int:
    """Bytes of arrays."""
    if isinstance(value, list):
        return sum(map(size_of, value))
    return value.nbytes if isinstance(value, np.ndarray) else 100
