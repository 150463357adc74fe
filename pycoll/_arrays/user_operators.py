"""Operators that users write: whether a callable takes two values, and the call itself.

A function gets values of the kind that was passed: tensors for tensors, JAX arrays for JAX arrays,
numbers for numbers. memoryview and array.array have no arithmetic, so for them it gets NumPy
arrays; of what is on a GPU it gets the copy in host memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import conversion, libraries
from pycoll._arrays.value import ON_GPU, Value, type_name
from pycoll._dtypes import Array, DType
from pycoll._support import public_edge

_VARARGS = 0x04
"""A code object's flag for ``*args``."""

_AS_NUMPY = ("memoryview", "array", "cupy")
"""Kinds whose values cannot be combined by arithmetic, or exist on a GPU only."""


def misfit(fn: Callable[..., Any]) -> str | None:
    """Return why `fn` cannot be called with two values; "": it can; None: nobody knows.

    It is not called. Unknown are most functions in C, whose parameters Python does not see.
    """
    if type(fn) is BuiltinFunctionType and isinstance(fn.__self__, ModuleType | None):
        return _misfit_builtin(fn)
    if type(fn) is FunctionType:
        code, defaults = fn.__code__, fn.__defaults__ or ()
        takes = code.co_argcount
        if (
            takes - len(defaults) <= 2
            and (takes >= 2 or code.co_flags & _VARARGS)
            and code.co_kwonlyargcount <= len(fn.__kwdefaults__ or ())
        ):
            return ""
    return _inspected(fn)


def _inspected(fn: Callable[..., Any]) -> str | None:
    inputs, outputs = getattr(fn, "nin", None), getattr(fn, "nout", None)
    if isinstance(inputs, int) and isinstance(outputs, int):  # of ufuncs, NumPy's and others'
        fits = (inputs, outputs) == (2, 1)
        return "" if fits else f"has {inputs} inputs and {outputs} outputs"
    try:
        try:
            signature = inspect.signature(fn, follow_wrapped=False)
        except ValueError:
            signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, None)
    except TypeError:
        return f"has the parameters {signature}"
    return ""


_misfit_builtin = functools.lru_cache(64)(_inspected)  # which takes 0.1 ms


def kind_of(value: Value) -> str:
    """Return the kind of the values that a function gets for `value`."""
    kind = value.kind.removeprefix(ON_GPU)
    base = kind.partition(":")[0]
    if base in _AS_NUMPY or (base == "dlpack" and kind != value.kind):
        return "numpy"
    return kind


def try_out(fn: Callable[..., Any], name: str, value: Value, ndim: int) -> None:
    """Call a function of which nothing is known with two arrays of one element, like `value`.

    Raises:
        TypeError: it does not take them, or does not return their like.
    """
    one = np.ones((1,) * ndim, value.dtype.storage)
    kind = kind_of(value)
    try:
        combine(fn, name, value.dtype, kind, one, one.copy(), np.empty_like(one))
    except TypeError as exc:
        if not public_edge.is_users(exc):
            raise
        why = str(exc).partition("\n")[0].rstrip(".:")
    except Exception:
        return  # it takes them, but not these
    else:
        return
    raise TypeError(
        f"op is {name}, which does not take two values of the kind that was passed: {why}. "
        "Pass the name of an operator, or a function (a, b) -> c of two such values."
    )


def combine(
    fn: Callable[..., Any],
    name: str,
    dtype: DType,
    kind: str,
    left: Array,
    right: Array,
    out: Array,
) -> None:
    """Write ``fn(left, right)`` to `out`, which may be `left` or `right`.

    Args:
        fn: takes two values of a kind, and returns one of the same dtype and shape, of any kind.
        name: of the operator, for messages.
        dtype: of the elements.
        kind: as `kind_of` gives it.
        left, right: arrays of dtype ``dtype.storage`` and one shape.
        out: the same.

    Raises:
        TypeError: it returned something else.
        Exception: what `fn` raises, with a note that names it.
    """
    result = call(fn, name, _operand(left, dtype, kind), _operand(right, dtype, kind))
    is_plain = type(result) is np.ndarray and not dtype.foreign
    if is_plain and result.dtype is out.dtype and result.shape == out.shape:
        np.copyto(out, result)
        return
    value = _value_of(result, name, dtype)
    if value.dtype != dtype:
        raise TypeError(
            f"the operator {name} returned {value.dtype} for {dtype}. "
            "Return the dtype it was given, for example with .astype(left.dtype)."
        )
    if value.array.shape != out.shape:
        raise TypeError(
            f"the operator {name} returned the shape {value.array.shape} for {out.shape}. "
            "Return an array of the shape it was given."
        )
    np.copyto(out, value.array)


def _operand(array: Array, dtype: DType, kind: str) -> Any:
    """Return a value of that kind over the array, read-only; a copy where a kind is never so."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    if kind == "numpy":
        return libraries.to_numpy(array, dtype)
    return conversion.unwrap(Value(array, dtype, kind))


def call(fn: Callable[..., Any], name: str, left: Any, right: Any) -> Any:
    """Call the operator of that name; what it raises gets a note that names it."""
    try:
        return fn(left, right)
    except Exception as exc:
        public_edge.mark_users(exc, f"raised by the operator {name}")
        raise


def _value_of(result: Any, name: str, dtype: DType) -> Value:
    try:
        value = conversion.wrap_operand(result)
    except TypeError:
        raise TypeError(
            f"the operator {name} returned a value of type {type_name(result)} "
            f"for {dtype}. Return an array of the dtype and shape it was given."
        ) from None
    if value.stage is not None:
        raise TypeError(
            f"the operator {name} returned an array on a GPU. Return it in host memory, where the "
            "arrays are that it was given."
        )
    return value


def check_shown(dtype: DType, kind: str) -> None:
    """Check that values of this kind can be made of `dtype`.

    Raises:
        TypeError: they would be NumPy arrays of bfloat16, and ml_dtypes is missing.
    """
    if not libraries.importable(kind, dtype):
        kind = "numpy"
    if kind == "numpy":
        dtypes.to_numpy(dtype)
