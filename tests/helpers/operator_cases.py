"""What tests of operators share."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators
from pycoll._dtypes import Array


def combined(op: Any, left: Any, right: Any, dtype: Any = None) -> Array:
    """Combine two arrays of a NumPy dtype, ml_dtypes included; check first, as callers do."""
    left, right = np.asarray(left, dtype), np.asarray(right, dtype)
    known = dtypes.of_numpy(left.dtype)
    out = np.empty(left.shape, known.storage)
    resolved = operators.resolve(op)
    operators.check(resolved, known)
    operators.combine(resolved, known, left.view(known.storage), right.view(known.storage), out)
    return out.view(left.dtype)


def finished(array: Array, size: int) -> Array:
    dtype = dtypes.of_numpy(array.dtype)
    operators.finish(operators.resolve("avg"), dtype, array.view(dtype.storage), size)
    return array


def a_function(left: Array, right: Array) -> Array:
    return left - right
