"""The element types of arrays: what each is called, its number on the wire, how it is stored.

Fifteen types reduce (`TABLE`, native byte order). Every other NumPy dtype without Python objects
moves only; its code is 0 and its description is text that `decode` parses again without ever
evaluating it. Types that NumPy itself lacks (bfloat16, float8_*) are stored as unsigned integers
of the same size, because their arrays from ml_dtypes export no buffer.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# A description longer than this is refused on both sides, so that a peer cannot make us parse
# without bound. A structured dtype of 10,000 fields takes about 250 KB.
_MAX_TEXT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: what messages and signatures say, for example ``"float32"``.
        code: from 1 on for a type that reduces, 0 for one that only moves.
        storage: dtype of the NumPy array that holds the elements (bfloat16: uint16).
        itemsize: bytes an element.
        family: ``"b"`` bool, ``"i"`` signed, ``"u"`` unsigned, ``"f"`` float, ``"c"`` complex,
            ``""`` for a type that only moves.
        foreign: NumPy alone does not know the type; `storage` holds its bits.
    """

    name: str
    code: int
    storage: np.dtype[Any]
    itemsize: int
    family: str = ""
    foreign: bool = False

    def __str__(self) -> str:
        return self.name


def _native(name: str, code: int) -> DType:
    storage = np.dtype(name)
    return DType(name, code, storage, storage.itemsize, storage.kind)


# Codes are part of the wire format: never renumber, only append.
BOOL: Final = _native("bool", 1)
INT8: Final = _native("int8", 2)
INT16: Final = _native("int16", 3)
INT32: Final = _native("int32", 4)
INT64: Final = _native("int64", 5)
UINT8: Final = _native("uint8", 6)
UINT16: Final = _native("uint16", 7)
UINT32: Final = _native("uint32", 8)
UINT64: Final = _native("uint64", 9)
FLOAT16: Final = _native("float16", 10)
BFLOAT16: Final = DType("bfloat16", 11, np.dtype(np.uint16), 2, "f", foreign=True)
FLOAT32: Final = _native("float32", 12)
FLOAT64: Final = _native("float64", 13)
COMPLEX64: Final = _native("complex64", 14)
COMPLEX128: Final = _native("complex128", 15)

TABLE: Final[tuple[DType, ...]] = (
    BOOL,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    FLOAT16,
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    COMPLEX64,
    COMPLEX128,
)

# The 8-bit floats that ml_dtypes, PyTorch and JAX call by the same name.
_FLOAT8: Final = tuple(
    DType(name, 0, np.dtype(np.uint8), 1, foreign=True)
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)

_BY_CODE: Final = {dtype.code: dtype for dtype in TABLE}
_BY_NAME: Final = {dtype.name: dtype for dtype in (*TABLE, *_FLOAT8)}
# Keyed by type number, which is quicker to hash than a dtype. Two numbers may mean one type:
# C's long and long long are both int64 here.
_BY_NUMBER: Final = {
    np.dtype(char).num: _BY_NAME[np.dtype(char).name] for char in "?bhilqBHILQefdFD"
}


def of_name(name: str) -> DType | None:
    """Return the type that is called `name` (a table name or float8_*), or None."""
    return _BY_NAME.get(name)


def reducing(dtype: np.dtype[Any]) -> DType | None:
    """Return the type of the table that a NumPy dtype is, or None (as for bfloat16)."""
    return _BY_NUMBER.get(dtype.num) if dtype.isnative else None


def of_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the type of a NumPy dtype (ml_dtypes included).

    Raises:
        TypeError: values of this dtype cannot move as arrays (it holds Python objects, has no
            bytes, or has fields that overlap or are out of order); they travel as objects.
    """
    return reducing(dtype) or _other(dtype)


@functools.lru_cache(maxsize=256)
def _other(dtype: np.dtype[Any]) -> DType:
    if dtype.type.__module__ == "ml_dtypes" and dtype.isnative:
        known = _BY_NAME.get(dtype.name)
        if known is not None:
            return known
    elif not dtype.hasobject and dtype.itemsize > 0:
        try:
            # From the text, as on the receiving side: np.record and metadata are dropped.
            again = _parse(_text(dtype))
            if again == dtype:
                return _moving(again)
        except ValueError:
            pass  # fields that overlap, are out of order or have metadata have no description
    raise TypeError(
        f"arrays of dtype {dtype} cannot be sent as arrays. "
        "Convert them to a dtype of numbers, or send them inside a list, as an object."
    )


def _moving(dtype: np.dtype[Any]) -> DType:
    return DType(str(dtype), 0, dtype, dtype.itemsize)


def _text(dtype: np.dtype[Any]) -> str:
    # What np.lib.format.dtype_to_descr gives, without its warning about metadata, which would
    # be raised at a user who can do nothing about it.
    return repr(dtype.descr if dtype.names is not None else dtype.str)


def _parse(text: str) -> np.dtype[Any]:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a dtype description of {len(text)} characters is too long")
    try:
        dtype: Any = np.lib.format.descr_to_dtype(ast.literal_eval(text))
    except Exception as exc:  # anything: the text may be garbage
        raise ValueError(f"not a dtype: {text[:80]!r}") from exc
    if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"not a dtype of plain bytes: {text[:80]!r}")
    return dtype


def encode(dtype: DType) -> bytes:
    """Return what `decode` needs beside the code: empty for the types of the table."""
    if dtype.code:
        return b""
    return (dtype.name if dtype.foreign else _text(dtype.storage)).encode()


def decode(code: int, text: bytes) -> DType:
    """Return the type that `encode` described.

    Raises:
        ValueError: this is not a description.
    """
    if code:
        if code not in _BY_CODE or text:
            raise ValueError(f"no dtype has the code {code} and {len(text)} bytes of text")
        return _BY_CODE[code]
    try:
        words = text.decode()
    except UnicodeDecodeError as exc:
        raise ValueError("not a dtype: the text is not UTF-8") from exc
    if re.fullmatch(r"float8_\w+", words):
        known = _BY_NAME.get(words)
        if known is None:
            raise ValueError(f"not a dtype: {words[:80]!r}")
        return known
    return _moving(_parse(words))


def to_numpy(dtype: DType) -> np.dtype[Any]:
    """Return the dtype that a NumPy user sees: `storage`, or the one of ml_dtypes.

    Raises:
        TypeError: the type needs ml_dtypes, which is not installed here.
    """
    if not dtype.foreign:
        return dtype.storage
    library = import_library("ml_dtypes")
    if library is None or not hasattr(library, dtype.name):
        raise TypeError(
            f"NumPy has no {dtype.name}, and ml_dtypes, which has it, cannot be imported. "
            "Install it with: pip install ml_dtypes"
        )
    found: np.dtype[Any] = np.dtype(getattr(library, dtype.name))
    return found


def import_library(name: str) -> Any:
    """Return the module `name`, imported if need be, or None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception:  # a broken installation raises anything, OSError for one
        return None
