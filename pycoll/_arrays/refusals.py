"""What is said of values that are no operands: why, and what to pass in their place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from pycoll._arrays.value import type_name
from pycoll._support.wording import with_article

_OR_OP = "Or pass a Python function as op, which combines such values as they are."
_OP = (
    "Pass a Python function as op, which combines such values as they are, for example "
    "op=lambda a, b: {}, or gather them: comm.all_gather(x)."
)

_TAKES = "Reductions take arrays and numbers."
TO_SPLIT = ". To split it: comm.scatter(numpy.array_split(x, comm.size))"
_NO_ARRAYS = "Lists and tuples are no arrays: pass numpy.array(x)."


def of_operand(x: object) -> str:
    """Return why `x` does not reduce by an operator's name, and what does."""
    if type(x) is np.ndarray:
        what = f"an array of {x.dtype}, which travels as a Python object"
        return f"cannot reduce {what}. Convert it with x.astype(float). {_OR_OP}"
    if x is None:
        return (
            "cannot reduce None. Every rank passes an array or a number to a reduction, those that "
            "do not get the result, too."
        )
    if isinstance(x, FunctionType | BuiltinFunctionType):
        return "cannot reduce a function. The operator comes second: (x, op=function)."
    advice = instead(x)
    op = _OR_OP
    if advice == _TAKES:
        op = _OP.format("a | b" if isinstance(x, dict | set | frozenset) else "a + b")
    return f"cannot reduce a value of type {type_name(x)}. {advice} {op}"


def of_pair(op: str) -> str:
    """Return why a tuple of two numbers does not reduce by an operator's name, and what does."""
    pairs = 'Two numbers are a value and its index for "minloc" and "maxloc" alone.'
    return f'cannot reduce a tuple by "{op}". {_NO_ARRAYS} {pairs}'


def instead(x: object) -> str:
    """Return what to pass to a reduction in place of a value that is no array: a sentence."""
    has = partial(hasattr, type(x))
    if has("filled"):
        parts = "x.unmasked" if has("unmasked") else "x.data"  # the former in astropy
        return f"Its mask would be lost: pass x.filled(value), or {parts} and x.mask."
    for name in ("to_value", "m_as"):  # of astropy and unyt; of Pint
        if has(name):
            return f"Its unit would be lost: pass x.{name}(unit), the same unit on all ranks."
    if isinstance(x, list) and x and hasattr(x[0], "dtype"):
        return (
            "For one array pass the array itself, without a list; for several use "
            "comm.all_reduce_many."
        )
    if type(x) is np.ndarray:
        return "Convert it with x.astype(float)."
    if isinstance(x, np.ndarray):
        return (
            "What it has beside its numbers would be lost: pass numpy.asarray(x), if the numbers "
            "mean the same on all ranks."
        )
    for name in ("toarray", "todense", "to_dense"):  # of SciPy; of Sparse and JAX
        if has(name):
            return f"It is sparse: pass x.{name}(), of the same shape on all ranks."
    if has("astype") and has("__dlpack__"):
        return f"It has the dtype {getattr(x, 'dtype', None)}: pass x.astype(float), for example."
    if isinstance(x, list | tuple) and _has_numbers(x):
        return _NO_ARRAYS
    if isinstance(x, list | tuple):
        return _TAKES
    if isinstance(x, Iterator):
        return f"{_TAKES[:-1]}, and this is an iterator: pass numpy.array(list(x))."
    if isinstance(x, bytes | bytearray):
        return f"{_TAKES[:-1]}: pass numpy.frombuffer(x, 'uint8'), for example."
    if isinstance(x, np.generic):
        return _TAKES
    if has("__array__") or isinstance(x, range):
        return f"{_TAKES[:-1]}: pass numpy.asarray(x, float), for example."
    for name in ("timestamp", "total_seconds"):  # of datetime and timedelta
        if has(name):
            return f"{_TAKES[:-1]}: pass x.{name}(), for example."
    if has("__float__"):
        return f"{_TAKES[:-1]}: pass float(x), for example."
    return _TAKES


def _has_numbers(x: object) -> bool:
    try:
        np.asarray(x, float)
    except (TypeError, ValueError):
        return False
    return True


def of_split(what: str, x: object) -> str:
    """Return why `x` is no array for a reduction that cuts it, and what to pass."""
    if isinstance(x, Number):
        advice = "For a number on each rank use comm.all_reduce or comm.reduce."
    else:
        advice = "" if x is None else instead(x).replace("arrays and numbers", "arrays")
    return f"{what}, not {with_article(type_name(x))}. {advice}".rstrip()


def of_blocks(what: str, x: object, size: int) -> str:
    """Return why `x` is not a value for each rank, which `what` splits."""
    hint = ""
    if isinstance(x, np.ndarray):
        hint = ". Pass list(x): objects, each of them whole"
    elif what == "scatter" and hasattr(x, "__len__") and not isinstance(x, str | bytes | dict):
        hint = TO_SPLIT
    takes = f"{what} takes an array (size, ...) or a list of {size} objects"
    return f"{takes}, not {with_article(type_name(x))}{hint}"


def of_tensor(x: Any) -> str:
    """Return why a tensor of PyTorch whose dtype pycoll has not cannot be sent, and what can."""
    why = f"a tensor of dtype {x.dtype} cannot be sent."
    if x.is_quantized:
        return f"{why} Convert it with x.dequantize()."
    convert = "x.to(torch.complex64)" if x.is_complex() else "x.float()"
    return f"{why} Convert it, for example with {convert}, or send its bits: x.view(torch.uint8)."


def said(error: Exception) -> str:
    """Return what another library has said, to go on after it in a sentence."""
    return str(error).rstrip(". \n")


def of_target(out: object, name: str) -> str:
    """Return why `out`, which is called `name`, cannot be filled."""
    if isinstance(out, np.ndarray) and type(out) is not np.ndarray and not out.dtype.hasobject:
        return (
            f"{name} is an array of type {type_name(out)}, which has more to it than the numbers "
            f"that would be written. Pass numpy.asarray({name}), if only these shall change."
        )
    return (
        f"{name} is not an array but a value of type {type_name(out)}. "
        "Pass a writable array, for example numpy.empty(shape, dtype)."
    )


def of_read_only(library: str) -> str:
    """Return what to pass in place of an array of this kind that may not be written to."""
    if library.startswith("dlpack:"):
        return (
            f"{library.removeprefix('dlpack:')} does not let others write to it: leave it away and "
            "use the result, or pass an array of NumPy."
        )
    return "Pass a writable array, for example a copy of it."
