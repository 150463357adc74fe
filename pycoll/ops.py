"""Reduction operators: their rules for each dtype, and combining two arrays.

`combine` computes ``left op right``, left being the operand of the lower ranks. Values are never
promoted: integers wrap, bool sum is or, bool prod is and, NaN wins min and max, and 16-bit floats
are computed in float32 and rounded once. No built-in operator ever warns.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, NamedTuple, cast

import numpy as np

from pycoll import dtypes
from pycoll.dtypes import BFLOAT16, FLOAT16, Array, DType

# Elements combined at once where float32 temporaries are needed: 2 x 128 KiB stay in the L2 cache.
_BLOCK: Final = 1 << 15


class _Builtin(NamedTuple):
    """What a named operator computes, and for which dtypes."""

    name: str
    ufunc: np.ufunc
    families: str  # DType.family of the dtypes it takes
    why: str  # said of another dtype
    instead: str


@dataclass(frozen=True, slots=True, repr=False)
class Op:
    """A reduction operator made of a Python function (the named ones have no function).

    Attributes:
        fn: called as ``fn(left, right)`` with read-only NumPy arrays of one shape and dtype,
            `left` from the lower ranks; returns an array of the same shape and dtype. Arrays of
            bfloat16 have the dtype that ml_dtypes gives them.
        commutative: operands may be swapped; else they combine in rank order.
        elementwise: `fn` may be called on any pieces of the arrays; else only on whole ones.
    """

    fn: Callable[[Any, Any], Any] | _Builtin
    commutative: bool = True
    elementwise: bool = False

    def __post_init__(self) -> None:
        if not (callable(self.fn) or isinstance(self.fn, _Builtin)):
            raise TypeError(
                f"an operator is made of a function, not of a {type(self.fn).__name__}. "
                "Pass fn(left, right), or the name of a built-in operator."
            )

    @property
    def name(self) -> str:
        """The name in messages: ``"sum"``, or the function's."""
        return self.fn.name if isinstance(self.fn, _Builtin) else _qualified_name(self.fn)

    @property
    def signature(self) -> str:
        """What must be the same on all ranks: the name, and a checksum of a function's code.

        Two lambdas have one name, and so have two functions with other constants.
        """
        code = getattr(self.fn, "__code__", None)
        if not isinstance(code, CodeType):
            return self.name
        return f"{self.name}@{zlib.crc32(_code_text(code).encode()):08x}"

    def __hash__(self) -> int:
        # Not of fn: a callable object need not be hashable.
        return hash((self.name, self.commutative, self.elementwise))

    def __repr__(self) -> str:
        if isinstance(self.fn, _Builtin):
            return f"Op({self.name!r})"
        return f"Op({self.name}, commutative={self.commutative}, elementwise={self.elementwise})"


def _qualified_name(fn: object) -> str:
    if isinstance(fn, functools.partial):
        return f"partial({_qualified_name(fn.func)})"
    named = fn if hasattr(fn, "__name__") else type(fn)
    name = getattr(named, "__qualname__", None) or getattr(named, "__name__", "?")
    module = getattr(named, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def _code_text(code: CodeType) -> str:
    """Return what a function's code does, the same in every process."""
    constants = [
        _code_text(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
        if not isinstance(constant, frozenset)  # its order differs from process to process
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_firstlineno} {constants}"


_NO_AVERAGE: Final = (
    "an average of integers is not an integer",
    'Convert x to a float dtype, or use "sum" and divide the result.',
)
_NO_BITS: Final = (
    "bitwise operators need integers or bool",
    'Use the logical "land", "lor" or "lxor", or view x as an integer dtype of its size.',
)
_NO_ORDER: Final = (
    "complex numbers have no order",
    "Reduce abs(x), or the real and imaginary parts apart.",
)
_NO_PAIR: Final = (
    "it needs values with their indices",
    "Pass a structured array with two fields of numbers (value, index), or a Python pair.",
)

_OPS: Final = {
    name: Op(_Builtin(name, ufunc, families, *reason), elementwise=True)
    for name, ufunc, families, reason in (
        ("sum", np.add, "biufc", ("", "")),
        ("prod", np.multiply, "biufc", ("", "")),
        ("min", np.minimum, "biuf", _NO_ORDER),
        ("max", np.maximum, "biuf", _NO_ORDER),
        ("avg", np.add, "fc", _NO_AVERAGE),
        ("band", np.bitwise_and, "biu", _NO_BITS),
        ("bor", np.bitwise_or, "biu", _NO_BITS),
        ("bxor", np.bitwise_xor, "biu", _NO_BITS),
        ("land", np.logical_and, "biufc", ("", "")),
        ("lor", np.logical_or, "biufc", ("", "")),
        ("lxor", np.logical_xor, "biufc", ("", "")),
        ("minloc", np.less, "", _NO_PAIR),
        ("maxloc", np.greater, "", _NO_PAIR),
    )
}

NAMES: Final = tuple(_OPS)


def resolve(op: object) -> Op:
    """Return the operator for a name, an Op, or a function (not commutative, not elementwise).

    Raises:
        ValueError: no operator has this name.
        TypeError: `op` is none of these.
    """
    if isinstance(op, str):
        if op not in _OPS:
            raise ValueError(
                f"there is no operator {op!r}. Use one of {', '.join(NAMES)}, or pycoll.Op(fn)."
            )
        return _OPS[op]
    if isinstance(op, Op):
        return op
    if callable(op):
        return Op(op, commutative=False)
    raise TypeError(
        f"op is a value of type {type(op).__name__}. "
        f"Pass one of {', '.join(NAMES)}, a function, or pycoll.Op(fn)."
    )


def check(op: Op, dtype: DType) -> None:
    """Check that `op` takes `dtype`.

    Raises:
        TypeError: it does not; names both, and says what would work.
    """
    if not isinstance(op.fn, _Builtin):
        if dtype.code == 0:
            _refuse(op, dtype, *_only_moves(dtype))
        dtypes.to_numpy(dtype)
    elif op.name in ("minloc", "maxloc"):
        if not _is_value_index(dtype.storage):
            _refuse(op, dtype, op.fn.why, op.fn.instead)
    elif dtype.code == 0:
        _refuse(op, dtype, *_only_moves(dtype))
    elif dtype.family not in op.fn.families:
        _refuse(op, dtype, op.fn.why, op.fn.instead)


def _refuse(op: Op, dtype: DType, why: str, instead: str) -> None:
    raise TypeError(f'operator "{op.name}" does not work on {dtype}: {why}. {instead}')


def _only_moves(dtype: DType) -> tuple[str, str]:
    """Return why a dtype with code 0 does not reduce, and what would."""
    storage = dtype.storage
    if storage.names is not None:
        return (
            "structured values do not reduce",
            'Reduce the fields one by one, or (value, index) pairs with "minloc" or "maxloc".',
        )
    if dtype.foreign:
        return "8-bit floats only move", "Convert to float32, for example with x.astype('float32')."
    if storage.kind in "mM":
        return "dates and times only move", "Reduce the numbers inside, x.view('int64')."
    if storage.kind in "fc" and storage.isnative:
        return "extended precision only moves", "Convert to float64 or complex128."
    if storage.kind in "iufc":
        return (
            "its bytes are not in this machine's order",
            "Convert with x.astype(x.dtype.newbyteorder('=')).",
        )
    return "text and raw bytes do not reduce", "Gather them, and combine them there."


def _is_value_index(storage: np.dtype[Any]) -> bool:
    fields = [dtypes.reducing(storage[name]) for name in storage.names or ()]
    return len(fields) == 2 and all(field and field.family in "biuf" for field in fields)


def combine(op: Op, dtype: DType, left: Array, right: Array, out: Array) -> None:
    """Write ``left op right`` to `out`, which may be `left` or `right`.

    Args:
        op: an operator that `check` has passed for `dtype`.
        dtype: the type of the elements.
        left: operand of the lower ranks, dtype ``dtype.storage``, any strides.
        right: operand of the higher ranks, the same shape and dtype.
        out: the same shape and dtype.

    Memory beside the arrays: about 512 KiB for bfloat16, one byte to three an element for
    minloc and maxloc, what `fn` allocates for others of the user's, nothing else.

    Raises:
        TypeError: a user's function returned another dtype or shape.
    """
    if out.size == 0:
        return
    if not isinstance(op.fn, _Builtin):
        _combine_user(op, dtype, left, right, out)
        return
    with np.errstate(all="ignore"):
        if dtype.storage.names is not None:
            _combine_located(op.fn.ufunc, left, right, out)
        elif dtype.code == BFLOAT16.code:
            _combine_bfloat16(op.fn.ufunc, left, right, out)
        else:
            # NumPy's float16 loops compute in float32 and round once, without temporaries.
            op.fn.ufunc(left, right, out=out)


def finish(op: Op, dtype: DType, array: Array, size: int) -> None:
    """Do in place what is left when the values of all `size` ranks have been combined.

    ``"avg"`` divides by `size`. A logical operator with one rank, where nothing was combined, still
    gives 0 or 1. The others do nothing.
    """
    if size == 1 and op.name in ("land", "lor", "lxor"):
        combine(_OPS["lor"], dtype, array, array, array)
    if op.name != "avg" or array.size == 0:
        return
    with np.errstate(all="ignore"):
        if dtype.family == "c":
            # NumPy divides by a complex number, which rounds twice and makes NaN of infinities.
            parts = array.real, array.imag
            for part in parts:
                np.divide(part, size, out=part)
        elif dtype.code in (BFLOAT16.code, FLOAT16.code):
            _divide_16_bit(dtype, array, size)
        else:
            np.divide(array, size, out=array)


def _divide_16_bit(dtype: DType, array: Array, size: int) -> None:
    divisor = np.float32(size)  # float16 has no 2049, and no 65520 at all
    with _blocks(array) as blocks:
        for piece in blocks:
            if dtype.code == FLOAT16.code:
                np.copyto(piece, piece.astype(np.float32) / divisor, casting="same_kind")
            else:
                _narrow(_widen(piece) / divisor, piece)


def _combine_user(op: Op, dtype: DType, left: Array, right: Array, out: Array) -> None:
    fn = cast("Callable[[Array, Array], object]", op.fn)
    shown = dtypes.to_numpy(dtype)
    operands = left.view(shown), right.view(shown)
    for operand in operands:
        operand.flags.writeable = False
    result = fn(*operands)
    if not isinstance(result, np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(
            f"the operator {op.name} returned a value of type {type(result).__name__} "
            f"for {dtype}. Return a NumPy array of the dtype and shape it was given."
        )
    array = np.asarray(result)
    if array.dtype != shown:
        raise TypeError(
            f"the operator {op.name} returned {array.dtype} for {dtype}. "
            "Return the dtype it was given, for example with .astype(left.dtype)."
        )
    if array.shape != out.shape:
        raise TypeError(
            f"the operator {op.name} returned the shape {array.shape} for {out.shape}. "
            "Return an array of the shape it was given."
        )
    np.copyto(out, array.view(dtype.storage))


def _combine_located(wins: np.ufunc, left: Array, right: Array, out: Array) -> None:
    """Combine (value, index) pairs: NaN wins, then the better value, then the lower index."""
    assert left.dtype.names is not None
    value, index = left.dtype.names
    left_nan, right_nan = left[value] != left[value], right[value] != right[value]
    lower = right[index] < left[index]
    take_right = wins(right[value], left[value])
    take_right |= (left[value] == right[value]) & lower
    take_right &= ~left_nan
    take_right |= right_nan & (~left_nan | lower)
    if np.may_share_memory(out, right):
        np.copyto(out, left, where=~take_right)
    else:
        np.copyto(out, left)
        np.copyto(out, right, where=take_right)


def _blocks(*arrays: Array) -> Any:
    """Iterate over equal pieces of the last array, to be written, and of the others, to be read.

    Pieces are one-dimensional and of at most `_BLOCK` elements; strided arrays are buffered.
    """
    reads = [["readonly"]] * (len(arrays) - 1)
    return np.nditer(  # type: ignore[call-overload]
        arrays,
        flags=["external_loop", "buffered"],
        op_flags=[*reads, ["readwrite"]],
        order="K",
        buffersize=_BLOCK,
    )


def _combine_bfloat16(ufunc: np.ufunc, left: Array, right: Array, out: Array) -> None:
    with _blocks(left, right, out) as blocks:
        for left_bits, right_bits, out_bits in blocks:
            wide = _widen(left_bits)
            ufunc(wide, _widen(right_bits), out=wide)
            _narrow(wide, out_bits)


def _widen(bits: Array) -> Array:
    """Return bfloat16 bits as new float32: they are its upper half."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _narrow(wide: Array, out: Array) -> None:
    """Round float32 to bfloat16 bits, to nearest, ties to even; NaN stays NaN. Spoils `wide`."""
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
