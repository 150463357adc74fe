"""Reduction operators: their rules for each dtype, and combining two arrays.

`combine` computes ``left op right``, left being the operand of the lower ranks. Values are never
promoted: integers wrap, bool sum is or, bool prod is and, NaN wins min and max, and 16-bit floats
are computed in float32 and rounded once. No built-in operator ever warns. The compiled core does it
where it can, NumPy elsewhere, with the same bits.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators_numpy
from pycoll._dtypes import Array, DType
from pycoll._support.lazy_import import LazyModule
from pycoll._support.public_edge import edge
from pycoll._transports._core import reduce

if TYPE_CHECKING:
    from pycoll._support import foreign_names
else:  # needed when something is wrong
    foreign_names = LazyModule("pycoll._support.foreign_names")


class _Builtin(NamedTuple):
    """What a named operator computes, and for which dtypes."""

    name: str
    code: int  # its number in the core, which has no minloc and maxloc
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
            bfloat16 have the dtype that ml_dtypes gives them. It runs in the floating-point
            environment of the thread that calls it.
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


Op.__init__ = edge(Op.__init__)  # type: ignore[method-assign]


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
    name: Op(_Builtin(name, code, ufunc, families, *reason), elementwise=True)
    for code, (name, ufunc, families, reason) in enumerate(
        (
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
    )
}

NAMES: Final = tuple(_OPS)

_UFUNCS: Final = {
    getattr(np, name): name
    for name in (
        *("add", "multiply", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("logical_and", "logical_or", "logical_xor"),
    )
}


def resolve(op: object) -> Op:
    """Return the operator for a name, an Op, or a function (not commutative, not elementwise).

    Raises:
        ValueError: no operator has this name.
        TypeError: `op` is none of these.
    """
    if isinstance(op, str):
        if op not in _OPS:
            raise ValueError(
                f"there is no operator {op!r}{_meant(op)}. "
                f"Use one of {', '.join(NAMES)}, or pycoll.Op(fn)."
            )
        return _OPS[op]
    if isinstance(op, Op):
        return op
    if callable(op) and not _is_anothers(op):
        return Op(op, commutative=False)
    shown = _qualified_name(op) if callable(op) else f"a value of type {type(op).__name__}"
    raise TypeError(
        f"op is {shown}{_meant(op)}. "
        f"Pass one of {', '.join(NAMES)}, a function of two values, or pycoll.Op(fn)."
    )


def _is_anothers(op: object) -> bool:
    """Whether `op` is an operator's name in another library rather than a function of the user's.

    Python's `sum`, `any` and `all` take one operand, and what NumPy's functions compute is quicker
    by name; who wants them called makes a pycoll.Op of them.
    """
    return (
        any(op is function for function in (sum, any, all))
        or (isinstance(op, np.ufunc) and op in _UFUNCS)
        or type(op).__module__.partition(".")[0] == "mpi4py"
    )


def _meant(op: object) -> str:
    name = foreign_names.of_operator(op, NAMES)
    return f': write op="{name}"' if name else ""


def check_whole(op: Op, ndim: int) -> None:
    """Refuse Python's `min` and `max` for arrays, of which they would ask which one is larger."""
    if (op.fn is min or op.fn is max) and ndim > 0:
        raise TypeError(f"op is {op.name}, which compares whole arrays{_meant(op.fn)}")


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

    Memory beside the arrays: for arrays that are contiguous and aligned none, but one byte to three
    an element for minloc and maxloc and what `fn` allocates for others of the user's.

    Raises:
        TypeError: a user's function returned another dtype or shape.
    """
    if out.size == 0:
        return
    if not isinstance(op.fn, _Builtin):
        _combine_user(op, dtype, left, right, out)
    elif dtype.code and _is_plain(left) and _is_plain(right) and _is_plain(out):
        reduce(op.fn.code, dtype.code, out, (left, right))
    else:
        operators_numpy.combine(op.fn.ufunc, dtype, left, right, out)


def _is_plain(array: Array) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def has_finish(op: Op, size: int) -> bool:
    """Whether `finish` does anything."""
    return op.name == "avg" or (size == 1 and op.name in ("land", "lor", "lxor"))


def finish(op: Op, dtype: DType, array: Array, size: int) -> None:
    """Do in place what is left when the values of all `size` ranks have been combined.

    ``"avg"`` divides by `size`. A logical operator with one rank, where nothing was combined, still
    gives 0 or 1. The others do nothing.
    """
    if size == 1 and op.name in ("land", "lor", "lxor"):
        combine(_OPS["lor"], dtype, array, array, array)
    if op.name == "avg" and array.size:
        operators_numpy.divide(dtype, array, size)


class Combiner:
    """The reduction of byte views by an operator.

    Args:
        op: the operator.
        dtype: of the elements.
        shape: of the whole arrays that it takes if it is not elementwise.
    """

    __slots__ = ("_shape", "dtype", "op")

    def __init__(self, op: Op, dtype: DType, shape: tuple[int, ...]) -> None:
        self.op = op
        self.dtype = dtype
        self._shape = shape

    def __call__(self, left: memoryview, right: memoryview, out: memoryview) -> None:
        operands = [np.frombuffer(view, self.dtype.storage) for view in (left, right, out)]
        if not self.op.elementwise:
            operands = [operand.reshape(self._shape) for operand in operands]
        combine(self.op, self.dtype, *operands)


@dataclass(frozen=True)
class Finisher:
    """What is left to do with the combined values of `count` ranks."""

    op: Op
    dtype: DType
    count: int

    def __call__(self, view: memoryview) -> None:
        finish(self.op, self.dtype, np.frombuffer(view, self.dtype.storage), self.count)


def finisher(op: Op, dtype: DType, count: int) -> Finisher | None:
    """Return what is left to do with the combined values of `count` ranks; None: nothing."""
    return Finisher(op, dtype, count) if has_finish(op, count) else None


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
