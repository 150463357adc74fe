"""Lists of equal arrays, one for each rank, where calls take one array ``(size, ...)``.

A scatter by messages reads the caller's arrays. Shared memory has one array on each rank, and so
has a reduction: there they are put together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls.collectives import type_text
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:  # who scatters objects alone needs no NumPy
    np = LazyModule("numpy")


def equal(xs: Any, size: int) -> list[Value] | None:
    """Return `size` arrays of one dtype and shape in host memory; None: it is something else."""
    if not isinstance(xs, list | tuple) or len(xs) != size:
        return None
    return _alike([conversion.wrap(x) for x in xs])


def _alike(values: Sequence[Value | None]) -> list[Value] | None:
    """Return these, if all are arrays of one dtype and shape in host memory."""
    found: list[Value] = []
    for value in values:
        if value is None or value.stage is not None:
            return None
        found.append(value)
        if (value.dtype, value.array.shape) != (found[0].dtype, found[0].array.shape):
            return None
    return found


def stacked(xs: Sequence[Value]) -> Value:
    """Return equal arrays as one, with one more axis in front."""
    first = xs[0].array  # of whose dtype it stays: stacked alone, it gets this machine's byte order
    whole = np.empty((len(xs), *first.shape), first.dtype)
    return Value(np.stack([x.array for x in xs], out=whole), xs[0].dtype, xs[0].kind)


def one_array(what: str, xs: Any, size: int) -> Value | None:
    """Return a list of equal arrays as one array; None: it is no list of arrays.

    Raises:
        TypeError: they are on a GPU.
        ValueError: there is not one for each rank, or they differ.
    """
    if not isinstance(xs, list | tuple) or not xs:
        return None
    values = [conversion.wrap(x) for x in xs]
    if None in values:
        return None
    found = _alike(values) if len(xs) == size else None
    if found is not None:
        return stacked(found)
    shown = [type_text(value) for value in values if value is not None]
    if len(xs) != size:
        raise ValueError(
            f"{what} takes a list of {size} arrays, one for each rank; this one has {len(xs)}"
        )
    other = next((i for i, text in enumerate(shown) if text != shown[0]), None)
    if other is None:
        raise TypeError(
            f"{what} takes a list of arrays in host memory; stack those on a GPU to one array "
            "(size, ...)"
        )
    raise ValueError(
        f"{what} takes equal arrays: the one for rank 0 is {shown[0]}, the one for rank {other} "
        f"{shown[other]}"
    )
