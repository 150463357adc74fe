"""What the core's reductions are compared with: the same with NumPy, to the last bit.

The bits are those that transports/_core/reduce/reduce.h says, which NumPy alone does not promise:
which of two NaN or of two zeros it returns, and how it rounds complex products, depends on its
version, the processor, and where in an array an element stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pycoll._dtypes import BFLOAT16, FLOAT16, Array, DType
from pycoll._transports._core import with_default_floats

# Elements combined at once where temporaries are needed: 64 KiB of float32 stay in the cache.
_BLOCK: Final = 1 << 14


def combine(ufunc: np.ufunc, dtype: DType, left: Array, right: Array, out: Array) -> None:
    """Write ``ufunc(left, right)`` to `out`, which may be `left` or `right`.

    Args:
        ufunc: one that `dtype` takes.
        dtype: the type of the elements.
        left: dtype ``dtype.storage``, any strides.
        right: the same shape and dtype.
        out: the same shape and dtype.
    """
    with np.errstate(all="ignore"):
        with_default_floats(_combine, ufunc, dtype, left, right, out)


def divide(dtype: DType, array: Array, divisor: int) -> None:
    """Divide `array`, of a float or complex dtype, in place; 16-bit floats are rounded once."""
    with np.errstate(all="ignore"):
        with_default_floats(_divide, dtype, array, divisor)


def _combine(ufunc: np.ufunc, dtype: DType, left: Array, right: Array, out: Array) -> None:
    if dtype.family == "f" and (ufunc in _FLOATS or dtype.code == BFLOAT16.code):
        _combine_blocks(_FLOATS.get(ufunc, ufunc), dtype, left, right, out)
    elif dtype.family == "c" and ufunc in _COMPLEX:
        _combine_blocks(_COMPLEX[ufunc], dtype, left, right, out)
    else:
        ufunc(left, right, out=out)


def _divide(dtype: DType, array: Array, divisor: int) -> None:
    if dtype.family == "c":
        # NumPy divides by a complex number, which rounds twice and makes NaN of infinities.
        for part in (array.real, array.imag):
            np.divide(part, part.dtype.type(divisor), out=part)
    elif dtype.itemsize == 2:
        with _blocks(array) as blocks:
            for piece in blocks:
                # float16 has no 2049, and no 65520 at all.
                narrow(dtype, widen(dtype, piece) / np.float32(divisor), piece)
    else:
        # NumPy 1 would calculate with float64 where an int has more than 16 bits.
        np.divide(array, array.dtype.type(divisor), out=array)


def _blocks(*arrays: Array) -> Any:
    """Iterate over equal pieces of the last array, to be written, and of the others, to be read.

    Pieces are one-dimensional and of at most `_BLOCK` elements; strided arrays are buffered.
    """
    reads = [["readonly"]] * (len(arrays) - 1)
    return np.nditer(  # type: ignore[call-overload]
        arrays,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[*reads, ["readwrite"]],
        order="K",
        buffersize=_BLOCK,
    )


def _combine_blocks(
    combine: Callable[..., Array], dtype: DType, left: Array, right: Array, out: Array
) -> None:
    with _blocks(left, right, out) as blocks:
        for lefts, rights, outs in blocks:
            if dtype.itemsize == 2:
                wide = combine(widen(dtype, lefts), widen(dtype, rights))
                narrow(dtype, wide.astype(np.float32, copy=False), outs)
            else:
                np.copyto(outs, combine(lefts, rights))


# What floats combine to. Of two NaN the left one is the result.


def _add(left: Array, right: Array) -> Array:
    return np.asarray(np.add(left, _left_nan_or_right(left, right)))


def _multiply(left: Array, right: Array) -> Array:
    return np.asarray(np.multiply(left, _left_nan_or_right(left, right)))


def _left_nan_or_right(left: Array, right: Array) -> Array:
    nan = left != left
    return np.where(nan, left, right) if nan.any() else right


def _minimum(left: Array, right: Array) -> Array:
    return np.where((left < right) | (left != left), left, right)


def _maximum(left: Array, right: Array) -> Array:
    return np.where((left > right) | (left != left), left, right)


def _complex_add(left: Array, right: Array) -> Array:
    out = np.empty_like(left)
    out.real, out.imag = _add(left.real, right.real), _add(left.imag, right.imag)
    return out


def _complex_multiply(left: Array, right: Array) -> Array:
    out = np.empty_like(left)
    out.real = _multiply(left.real, right.real) - _multiply(left.imag, right.imag)
    out.imag = _add(_multiply(left.real, right.imag), _multiply(left.imag, right.real))
    return out


_FLOATS: Final[dict[Any, Callable[..., Array]]] = {
    np.add: _add,
    np.multiply: _multiply,
    np.minimum: _minimum,
    np.maximum: _maximum,
}
_COMPLEX: Final[dict[Any, Callable[..., Array]]] = {
    np.add: _complex_add,
    np.multiply: _complex_multiply,
}


# 16-bit floats to float32 and back


def widen(dtype: DType, narrow: Array) -> Array:
    """Return 16-bit floats as new float32."""
    if dtype.code == FLOAT16.code:
        return narrow.astype(np.float32)
    wide = narrow.astype(np.uint32)  # bfloat16 is the upper half of float32
    wide <<= 16
    return wide.view(np.float32)


def narrow(dtype: DType, wide: Array, out: Array) -> None:
    """Round float32 to 16 bits, to nearest, ties to even; NaN stays NaN. Spoils `wide`."""
    if dtype.code == FLOAT16.code:
        wide *= 1  # a signalling NaN becomes quiet, as bfloat16's do
        np.copyto(out, wide, casting="same_kind")
        return
    bits = wide.view(np.uint32)
    nan = np.isnan(wide)
    # The carry of this addition moves on to the next exponent, and to infinity, as it should.
    odd = bits >> 16
    quiet = odd | 0x40 if nan.any() else None
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    if quiet is not None:
        # A NaN whose upper half has no fraction would become infinity: set the quiet bit.
        np.copyto(bits, quiet, where=nan)
    np.copyto(out, bits, casting="unsafe")
