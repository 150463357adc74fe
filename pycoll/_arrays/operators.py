"""Reduction operators: their rules for each dtype, and combining two arrays.

Values are never promoted: integers wrap, bool sum is or, bool prod is and, NaN wins min and max,
and 16-bit floats are computed in float32 and rounded once. The compiled core does all that. What it
does not have (functions, minloc and maxloc) is combined here: ``left op right``, left being the
operand of the lower ranks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import refusals, user_operators
from pycoll._arrays.value import Value
from pycoll._dtypes import Array, DType
from pycoll._support import foreign_names
from pycoll._support.foreign_names import Hinting
from pycoll._support.public_edge import edge, public
from pycoll._support.wording import with_article
from pycoll._transports._core import with_default_floats


class _Builtin(NamedTuple):
    """What a named operator computes, and for which dtypes."""

    name: str
    code: int  # its number in the core, which has no minloc and maxloc
    ufunc: np.ufunc
    families: str  # DType.family of the dtypes it takes
    why: str  # said of another dtype
    instead: str


@public
@dataclass(frozen=True, slots=True, repr=False)
class Op(Hinting, foreign={"Create": "pycoll.Op(f, commutative=True)"}):
    """A reduction operator made of a Python function (the named ones have no function).

    Attributes:
        fn: called as ``fn(left, right)`` with values of the kind that was passed, of one shape and
            dtype, `left` from the lower ranks; returns an array or a number of the same shape and
            dtype, of any kind. NumPy arrays are read-only; PyTorch tensors are copies in host
            memory. For a memoryview or an array.array it gets NumPy arrays. NumPy arrays of
            bfloat16 have the dtype that ml_dtypes gives them. It runs in the floating-point
            environment of the thread that calls it.
        commutative: operands may be swapped; else they combine in rank order.
        elementwise: `fn` may be called on any pieces of the arrays; else only on whole ones.
        is_known: Python knows that `fn` takes two values; else a call of pycoll tries `fn` out, on
            arrays of one element, before anything is sent.

    Raises:
        TypeError: `fn` cannot be called, or cannot be called with two values.
    """

    fn: Callable[[Any, Any], Any] | _Builtin
    commutative: bool = True
    elementwise: bool = False
    is_known: bool = field(default=True, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.fn, _Builtin):
            return
        if not callable(self.fn):
            raise TypeError(
                f"an operator is made of a function, not of a {type(self.fn).__name__}. "
                "Pass fn(left, right), or the name of a built-in operator."
            )
        if type(self.fn) is not FunctionType and _is_member(self.fn):
            raise TypeError(
                f"an operator is made of a function of two values, not of {self.fn}"
                f"{_meant(self.fn)}."
            )
        why = user_operators.misfit(self.fn)
        if why:
            raise TypeError(
                f"an operator is made of a function of two values, but {self.name} {why}. "
                "Pass fn(left, right), or the name of a built-in operator."
            )
        object.__setattr__(self, "is_known", why is not None)

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
        return f"{self.name}@{_checksum(code):08x}"

    def __hash__(self) -> int:
        # Not of fn: a callable object need not be hashable.
        return hash((self.name, self.commutative, self.elementwise))

    def __repr__(self) -> str:
        if isinstance(self.fn, _Builtin):
            return f"Op({self.name!r})"
        return f"Op({self.name}, commutative={self.commutative}, elementwise={self.elementwise})"


_init = Op.__init__
Op.__init__ = edge(_init)  # type: ignore[method-assign]


def _qualified_name(fn: object) -> str:
    if isinstance(fn, functools.partial):
        return f"partial({_qualified_name(fn.func)})"
    named = fn if hasattr(fn, "__name__") else type(fn)
    name = getattr(named, "__qualname__", None) or getattr(named, "__name__", "?")
    module = getattr(named, "__module__", None)
    return f"{module}.{name}" if module else str(name)


@functools.lru_cache(256)
def _checksum(code: CodeType) -> int:
    return zlib.crc32(_code_text(code).encode())


def _code_text(code: CodeType) -> str:
    """Return what a function's code does, the same in every process."""
    constants = [
        _code_text(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
        if not isinstance(constant, frozenset)  # its order differs from process to process
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_firstlineno} {constants}"


_NO_AVERAGE: Final = (
    "an average of integers or bools is not one of them",
    'Pass floats, as float(x) or x.astype(float), or use "sum" and divide the result.',
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
_OF_PAIRS: Final = ("minloc", "maxloc")
_PYTHON_NUMBERS: Final = ("int", "float", "complex", "bool")
"""Kinds of values that are called by their type, as users know them."""

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
        made = object.__new__(Op)
        _init(made, op, commutative=False)
        return made
    shown = f"a value of type {type(op).__name__}"
    if callable(op):
        shown = str(op) if _is_member(op) else _qualified_name(op)
    meant = _meant(op)
    names = f" Pass one of {', '.join(NAMES)}, a function of two values, or pycoll.Op(fn)."
    raise TypeError(f"op is {shown}{meant}.{'' if meant else names}")


def _is_anothers(op: object) -> bool:
    """Whether `op` is an operator's name in another library rather than a function of the user's.

    Python's `sum`, `any` and `all` take one operand, and what NumPy's functions compute is quicker
    by name; who wants them called makes a pycoll.Op of them.
    """
    return type(op) is not FunctionType and (
        any(op is function for function in (sum, any, all))
        or (isinstance(op, np.ufunc) and op in _UFUNCS)
        or type(op).__module__.partition(".")[0] == "mpi4py"
        or _is_member(op)
    )


def _is_member(op: object) -> bool:
    """Whether `op` is a member of an enumeration, as PyTorch's ReduceOp.SUM, which is callable."""
    return isinstance(getattr(op, "name", None), str) and hasattr(op, "value")


def _meant(op: object) -> str:
    name = foreign_names.of_operator(op, NAMES)
    return f': write op="{name}"' if name else ""


def check_operand(op: Op, x: Value, ndim: int) -> None:
    """Check that `op` takes values like `x`, before anything is sent.

    Args:
        op: the operator.
        x: this rank's value.
        ndim: number of axes of what is combined: fewer than x's if that is cut.

    Raises:
        TypeError: it does not; names both, and says what would work.
    """
    if x.kind.startswith("pair:") and isinstance(op.fn, _Builtin) and op.name not in _OF_PAIRS:
        raise TypeError(refusals.of_pair(op.name))
    shown = with_article(x.kind) if x.kind in _PYTHON_NUMBERS else None
    check(op, x.dtype, user_operators.kind_of(x), shown)
    if isinstance(op.fn, _Builtin):
        return
    if (op.fn is min or op.fn is max) and ndim > 0:  # they would ask which array is larger
        raise TypeError(f"op is {op.name}, which compares whole arrays{_meant(op.fn)}")
    if not op.is_known:
        user_operators.try_out(op.fn, op.name, x, 1 if op.elementwise else ndim)


def check(op: Op, dtype: DType, kind: str = "numpy", shown: str | None = None) -> None:
    """Check that `op` takes `dtype`.

    Args:
        op: the operator.
        dtype: of the elements.
        kind: of the values (see `user_operators.kind_of`).
        shown: what the user calls them; None: by their dtype.

    Raises:
        TypeError: it does not; names both, and says what would work.
    """
    shown = shown or str(dtype)
    if not isinstance(op.fn, _Builtin):
        if dtype.code == 0:
            _refuse(op, shown, *_only_moves(dtype))
        user_operators.check_shown(dtype, kind)
    elif op.name in _OF_PAIRS:
        if not _is_value_index(dtype.storage):
            _refuse(op, shown, op.fn.why, op.fn.instead)
    elif dtype.code == 0:
        _refuse(op, shown, *_only_moves(dtype))
    elif dtype.family not in op.fn.families:
        _refuse(op, shown, op.fn.why, op.fn.instead)


def _refuse(op: Op, shown: str, why: str, instead: str) -> None:
    raise TypeError(f'operator "{op.name}" does not work on {shown}: {why}. {instead}')


def _only_moves(dtype: DType) -> tuple[str, str]:
    """Return why a dtype with code 0 does not reduce, and what would."""
    storage = dtype.storage
    if storage.names is not None:
        return (
            "structured values do not reduce",
            'Reduce the fields one by one, or (value, index) pairs with "minloc" or "maxloc".',
        )
    if dtype.foreign:
        return (
            "8-bit floats only move",
            "Convert with x.astype('float32'), a tensor with x.float().",
        )
    if storage.kind in "mM":
        return "dates and times only move", "Reduce the numbers inside, x.view('int64')."
    if storage.kind in "fc" and storage.isnative:
        return (
            "extended precision only moves",
            "Convert with x.astype('float64') or x.astype('complex128').",
        )
    if storage.kind in "iufc":
        return (
            "its bytes are not in this machine's order",
            "Convert with x.astype(x.dtype.newbyteorder('=')).",
        )
    return "text and raw bytes do not reduce", "Gather them, and combine them there."


def _is_value_index(storage: np.dtype[Any]) -> bool:
    fields = [dtypes.reducing(storage[name]) for name in storage.names or ()]
    return len(fields) == 2 and all(field and field.family in "biuf" for field in fields)


def combine(op: Op, dtype: DType, kind: str, left: Array, right: Array, out: Array) -> None:
    """Write ``left op right`` to `out`, which may be `left` or `right`.

    Args:
        op: an operator that the core does not have, and `check` has passed for `dtype`.
        dtype: the type of the elements.
        kind: of the values that a function gets (`user_operators.kind_of`).
        left: operand of the lower ranks, dtype ``dtype.storage``, any strides.
        right: operand of the higher ranks, the same shape and dtype.
        out: the same shape and dtype.

    Memory beside the arrays: what `fn` allocates; for pairs one byte to three an element.

    Raises:
        TypeError: a user's function returned another dtype or shape.
    """
    if out.size == 0:
        return
    if not isinstance(op.fn, _Builtin):
        user_operators.combine(op.fn, op.name, dtype, kind, left, right, out)
    else:
        with_default_floats(_combine_located, op.fn.ufunc, left, right, out)


def _combine_located(wins: np.ufunc, left: Array, right: Array, out: Array) -> None:
    """Combine (value, index) pairs: NaN wins, then the better value, then the lower index.

    `wins` is true of (right, left) where the right value is better.
    """
    assert left.dtype.names is not None
    value, index = left.dtype.names
    with np.errstate(all="ignore"):
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


class Combiner:
    """The reduction of byte views by an operator that the core does not have.

    Args:
        op: the operator.
        dtype: of the elements.
        shape: of the whole arrays that it takes if it is not elementwise.
        kind: of the values that a function gets.
    """

    __slots__ = ("_shape", "dtype", "kind", "op")

    def __init__(self, op: Op, dtype: DType, shape: tuple[int, ...], kind: str) -> None:
        self.op = op
        self.dtype = dtype
        self.kind = kind
        self._shape = shape

    def __call__(self, left: memoryview, right: memoryview, out: memoryview) -> None:
        operands = [np.frombuffer(view, self.dtype.storage) for view in (left, right, out)]
        if not self.op.elementwise or not self._shape:  # a number is no piece
            operands = [operand.reshape(self._shape) for operand in operands]
        combine(self.op, self.dtype, self.kind, *operands)


def reduction(
    op: Op, x: Value, shape: tuple[int, ...], count: int
) -> Combiner | tuple[int, int, int]:
    """Return the reduction of byte views of values like `x`, as a `Binding` has it.

    Args:
        op, x: operator and value, checked.
        shape: of what is combined as a whole, if `op` is not elementwise.
        count: so many ranks' values are combined. An average is divided by that; and a logical
            operator of one rank, where nothing is combined, still gives 0 or 1.
    """
    if not isinstance(op.fn, _Builtin) or not x.dtype.code:
        return Combiner(op, x.dtype, shape, user_operators.kind_of(x))
    has_end = op.name == "avg" or (count == 1 and op.name in ("land", "lor", "lxor"))
    return op.fn.code, x.dtype.code, count if has_end else 0
