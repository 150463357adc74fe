"""Element types and their descriptions."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pycoll import _dtypes as dtypes

NESTED = np.dtype(
    [("a", "f4"), ("b", [("c", ">i8", (2, 3)), ("d", "S3"), ("e", "M8[us]")]), ("f", "?")],
    align=True,
)
MOVING = [
    np.dtype(">f4"),
    np.dtype(">u2"),
    np.dtype("M8[ns]"),
    np.dtype("M8[25s]"),
    np.dtype("m8"),
    np.dtype("S5"),
    np.dtype("U3"),
    np.dtype(">U3"),
    np.dtype("V8"),
    np.dtype("g"),
    np.dtype("G"),
    np.dtype([("value", "f8"), ("index", "i8")]),
    np.dtype([(("a title", "x"), "i4"), ("é", "f8")]),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 8], "itemsize": 20}),
    np.dtype([("sub", "f4", (2, 2))]),
    NESTED,
]


def round_trip(dtype: dtypes.DType) -> dtypes.DType:
    return dtypes.decode(dtype.code, dtypes.encode(dtype))


def test_the_codes_of_the_fifteen_types_never_change() -> None:
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32"
    expected = [*names.split(), "float64", "complex64", "complex128"]
    assert [(dtype.code, dtype.name) for dtype in dtypes.TABLE] == list(enumerate(expected, 1))


@pytest.mark.parametrize("dtype", dtypes.TABLE, ids=str)
def test_a_type_of_the_table_is_found_by_name_code_and_numpy_dtype(dtype: dtypes.DType) -> None:
    assert dtypes.of_name(dtype.name) is dtype
    assert round_trip(dtype) is dtype
    assert dtype.storage.itemsize == dtype.itemsize
    if dtype is not dtypes.BFLOAT16:
        assert dtypes.of_numpy(np.dtype(dtype.name)) is dtype


def test_long_and_long_long_are_both_int64() -> None:
    assert dtypes.of_numpy(np.dtype("l")) is dtypes.of_numpy(np.dtype("q")) is dtypes.INT64
    assert dtypes.of_numpy(np.dtype("L")) is dtypes.of_numpy(np.dtype("Q")) is dtypes.UINT64


def test_bfloat16_of_ml_dtypes_is_stored_as_uint16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = dtypes.of_numpy(np.dtype(ml_dtypes.bfloat16))
    assert dtype is dtypes.BFLOAT16
    assert dtype.storage == np.uint16
    assert dtypes.to_numpy(dtype) == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_an_8_bit_float_only_moves(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = dtypes.of_numpy(np.dtype(getattr(ml_dtypes, name)))
    assert (dtype.name, dtype.code, dtype.storage) == (name, 0, np.dtype(np.uint8))
    assert round_trip(dtype) is dtype
    assert dtypes.to_numpy(dtype) == getattr(ml_dtypes, name)


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        dtypes.to_numpy(dtypes.BFLOAT16)


@pytest.mark.parametrize("dtype", MOVING, ids=str)
def test_any_other_plain_dtype_moves_and_round_trips(dtype: np.dtype[Any]) -> None:
    moving = dtypes.of_numpy(dtype)
    assert moving.code == 0
    assert moving.storage == dtype
    assert round_trip(moving) == moving
    assert hash(round_trip(moving)) == hash(moving)


def test_aligned_fields_keep_their_offsets() -> None:
    storage = round_trip(dtypes.of_numpy(NESTED)).storage
    assert storage.fields is not None
    assert NESTED.fields is not None
    assert [field[1] for field in storage.fields.values()] == [
        field[1] for field in NESTED.fields.values()
    ]


def test_metadata_is_dropped_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moving = dtypes.of_numpy(np.dtype("S3", metadata={"unit": "m"}))
    assert moving.storage.metadata is None


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("O"),
        np.dtype([("a", "i4"), ("b", "O")]),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]}),
        np.dtype("V0"),
    ],
    ids=["object", "object field", "out of order", "overlapping", "empty"],
)
def test_a_dtype_that_cannot_be_described_is_refused(dtype: np.dtype[Any]) -> None:
    with pytest.raises(TypeError, match="cannot be sent as arrays"):
        dtypes.of_numpy(dtype)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="needs NumPy 2")
def test_strings_of_variable_length_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent as arrays"):
        dtypes.of_numpy(np.dtypes.StringDType())


def test_other_dtypes_of_ml_dtypes_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="int4"):
        dtypes.of_numpy(np.dtype(ml_dtypes.int4))


@given(
    hnp.array_dtypes(allow_subarrays=True)
    | hnp.datetime64_dtypes()
    | hnp.timedelta64_dtypes()
    | hnp.nested_dtypes()
)
def test_what_is_accepted_round_trips(dtype: np.dtype[Any]) -> None:
    try:
        known = dtypes.of_numpy(dtype)
    except TypeError:
        return
    assert round_trip(known) == known
    assert known.storage == dtype


@pytest.mark.parametrize(
    "text",
    [
        "",
        "'|O'",
        "'O'",
        "[('a', '|O')]",
        "[]",
        "'V0'",
        "__import__('os').getpid()",
        "numpy.float64",
        "'no such'",
        "[('a', 'f4'), ('a', 'f4')]",
        "[('a',)]",
        "(1, 2, 3)",
        "(" * 5000,
        "-" * 20000 + "1",
        "'f4'" + " " * (1 << 21),
        "float8_nothing",
        "float8_e5m2\n",
    ],
)
def test_text_that_is_no_dtype_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="dtype"):
        dtypes.decode(0, text.encode())


@pytest.mark.parametrize(("code", "text"), [(16, b""), (255, b""), (5, b"'f4'"), (0, b"\xff")])
def test_a_code_without_a_type_is_refused(code: int, text: bytes) -> None:
    with pytest.raises(ValueError, match="dtype"):
        dtypes.decode(code, text)


@given(
    st.integers(0, 255), st.binary(max_size=60) | st.text("[]()'\",<>|fiOVSM48 ").map(str.encode)
)
def test_garbage_gives_a_type_or_a_value_error(code: int, text: bytes) -> None:
    try:
        dtype = dtypes.decode(code, text)
    except ValueError:
        return
    assert not dtype.storage.hasobject
