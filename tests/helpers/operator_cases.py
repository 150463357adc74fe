"""What tests of operators share."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators
from pycoll._arrays.value import Value
from pycoll._dtypes import Array, DType
from pycoll._transports import _core


def combined(op: Any, left: Any, right: Any, dtype: Any = None) -> Array:
    """Combine two arrays of a NumPy dtype, ml_dtypes included; check first, as callers do."""
    left, right = np.asarray(left, dtype, order="C"), np.asarray(right, dtype, order="C")
    known = dtypes.of_numpy(left.dtype)
    out = np.empty(left.shape, known.storage)
    resolved = operators.resolve(op)
    operators.check(resolved, known)
    combine_into(resolved, known, left.view(known.storage), right.view(known.storage), out)
    return out.view(left.dtype)


def combine_into(op: operators.Op, dtype: DType, left: Array, right: Array, out: Array) -> None:
    """Combine two arrays: in the core, or in Python what that does not have."""
    how = operators.reduction(op, Value(left, dtype, "numpy"), left.shape, 2)
    if isinstance(how, tuple):
        _core.reduce(how[0], how[1], out, [left, right])
    else:
        operators.combine(op, dtype, "numpy", left, right, out)


def finished(array: Array, size: int) -> Array:
    dtype = dtypes.of_numpy(array.dtype)
    _core.reduce(operators.NAMES.index("avg"), dtype.code, array, [array], size)
    return array


def a_function(left: Array, right: Array) -> Array:
    return left - right
