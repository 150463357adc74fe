"""Reduction operators: bits, rounding, pairs, and functions of users."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_cases import a_function, combine_into, combined, finished

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators
from pycoll._dtypes import Array, DType
from pycoll._transports import _core

INTEGERS = [dtype for dtype in dtypes.TABLE if dtype.family in "iu"]


FLOATS = [dtype for dtype in dtypes.TABLE if dtype.family == "f"]


COMPLEX = [dtype for dtype in dtypes.TABLE if dtype.family == "c"]


BUILTINS = [
    (name, dtype)
    for name in operators.NAMES[:-2]
    for dtype in dtypes.TABLE
    if dtype.family in operators.resolve(name).fn.families  # type: ignore[union-attr]
]


def special_bits(dtype: DType, count: int, seed: int) -> Array:
    """Arbitrary bits; of floats, every third is a zero, an infinity or a NaN of either sign."""
    rng = np.random.default_rng(seed)
    if dtype.family == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.family == "c":
        part = dtypes.FLOAT32 if dtype.itemsize == 8 else dtypes.FLOAT64
        return special_bits(part, 2 * count, seed).view(dtype.storage)
    bits = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(f"u{dtype.itemsize}")
    if dtype.family == "f":
        infinity = {"float16": 0x7C00, "bfloat16": 0x7F80}.get(dtype.name)
        if infinity is None:
            infinity = int(np.array(np.inf, dtype.storage).view(bits.dtype))
        choices = np.array([0, infinity, infinity | 1, infinity | infinity >> 1], bits.dtype)
        choices = np.concatenate([choices, choices | (1 << (8 * dtype.itemsize - 1))])
        bits[::3] = rng.choice(choices, len(bits[::3]))
    return bits.view(dtype.storage)


@pytest.mark.parametrize("name", sorted({name for name, _ in BUILTINS}))
def test_bits_do_not_depend_on_position_or_target(name: str) -> None:
    op = operators.resolve(name)
    for dtype in [dtype for one, dtype in BUILTINS if one == name]:
        left, right = special_bits(dtype, 999, seed=1), special_bits(dtype, 999, seed=2)
        expected = np.empty_like(left)
        combine_into(op, dtype, left, right, expected)
        for target in range(3):  # the left one, the right one, a new one
            arrays = [left.copy(), right.copy(), np.empty_like(left)]
            combine_into(op, dtype, arrays[0], arrays[1], arrays[target])
            assert arrays[target].tobytes() == expected.tobytes(), dtype
        for i in range(0, 999, 37):  # alone, an element is not in a vector register with others
            alone = np.empty(1, dtype.storage)
            combine_into(op, dtype, left[i : i + 1], right[i : i + 1], alone)
            assert alone.tobytes() == expected[i : i + 1].tobytes(), dtype


@pytest.mark.parametrize("dtype", [dtypes.FLOAT32, dtypes.FLOAT64], ids=str)
def test_the_left_of_two_nan_and_the_right_of_two_zeros_are_the_result(dtype: DType) -> None:
    bits = np.array([np.nan, -np.nan, 0.0, -0.0], dtype.storage)
    nan, minus_nan, zero, minus_zero = (np.full(40, value, dtype.storage) for value in bits)
    for name in ("sum", "prod", "min", "max"):
        assert combined(name, nan, minus_nan).tobytes() == nan.tobytes()
        assert combined(name, minus_nan, nan).tobytes() == minus_nan.tobytes()
    for name in ("min", "max"):
        assert combined(name, zero, minus_zero).tobytes() == minus_zero.tobytes()
        assert combined(name, minus_zero, zero).tobytes() == zero.tobytes()


@pytest.mark.parametrize("part", ["f4", "f8"])
def test_each_operation_of_a_complex_product_is_rounded(part: str) -> None:
    rng = np.random.default_rng(3)
    (a, b), (c, d) = rng.standard_normal((2, 2, 500)).astype(part)
    complex_ = np.dtype("c8" if part == "f4" else "c16")
    left, right = np.empty(500, complex_), np.empty(500, complex_)
    left.real, left.imag, right.real, right.imag = a, b, c, d
    result = combined("prod", left, right)
    assert np.array_equal(result.real, a * c - b * d)
    assert np.array_equal(result.imag, a * d + b * c)


@given(st.binary(min_size=64, max_size=64), st.sampled_from(["sum", "prod", "min", "max"]))
def test_float16_is_computed_in_float32_and_rounded_once(bits: bytes, name: str) -> None:
    left, right = np.frombuffer(bits, np.float16).reshape(2, 16)
    result = combined(name, left, right)
    ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[name]
    with np.errstate(all="ignore"):
        wide = ufunc(left.astype(np.float32), right.astype(np.float32)).astype(np.float16)
    assert np.array_equal(result, wide, equal_nan=True)


def all_bfloat16(ml_dtypes: Any) -> Array:
    every: Array = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return every


@pytest.mark.parametrize("name", ["sum", "prod", "min", "max"])
def test_bfloat16_agrees_with_ml_dtypes_on_every_value(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    left = all_bfloat16(ml_dtypes)
    ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[name]
    rng = np.random.default_rng(0)
    for right in (rng.permutation(left), left[::-1], np.full_like(left, 1), np.full_like(left, 3)):
        result = combined(name, left, right)
        with np.errstate(all="ignore"):
            expected = ufunc(left, right)
        nan = np.isnan(expected.astype(np.float32))
        assert np.array_equal(np.isnan(result.astype(np.float32)), nan)
        different = result.view(np.uint16)[~nan] != expected.view(np.uint16)[~nan]
        if name in ("min", "max"):  # which of two zeros wins is open
            different &= expected[~nan] != 0
        assert not different.any()


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_float32_is_rounded_to_bfloat16_as_ml_dtypes_does(values: list[float]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wide = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        expected = wide.astype(ml_dtypes.bfloat16)
    out = np.empty(wide.shape, np.uint16)
    _core.convert(True, dtypes.BFLOAT16.code, out, wide)
    result = out.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(result, expected.astype(np.float32), equal_nan=True)


def test_every_nan_stays_a_nan_in_bfloat16() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    out = np.empty(4, np.uint16)
    _core.convert(True, dtypes.BFLOAT16.code, out, bits.view(np.float32))
    assert out.tolist() == [0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF]


def test_bfloat16_logic_and_average() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    left = np.array([np.nan, 2, 0, -0.0], ml_dtypes.bfloat16)
    right = np.array([1, 0, 0, 3], ml_dtypes.bfloat16)
    assert combined("land", left, right).tolist() == [1, 0, 0, 0]
    assert combined("lor", left, right).tolist() == [1, 1, 0, 1]
    assert combined("lxor", left, right).tolist() == [0, 1, 0, 1]
    total = np.array([3, 1], ml_dtypes.bfloat16)
    assert finished(total, 3).tolist() == [1, ml_dtypes.bfloat16(1 / 3)]


PAIR = np.dtype([("value", "f8"), ("index", "i8")])


@pytest.mark.parametrize(
    ("name", "left", "right", "winner"),
    [
        ("minloc", (1, 5), (2, 3), (1, 5)),
        ("minloc", (2, 5), (1, 7), (1, 7)),
        ("minloc", (1, 5), (1, 3), (1, 3)),
        ("minloc", (1, 3), (1, 5), (1, 3)),
        ("maxloc", (1, 5), (2, 3), (2, 3)),
        ("maxloc", (2, 5), (1, 3), (2, 5)),
        ("maxloc", (2, 5), (2, 3), (2, 3)),
        ("minloc", (np.nan, 5), (1, 3), (np.nan, 5)),
        ("maxloc", (1, 3), (np.nan, 5), (np.nan, 5)),
        ("minloc", (np.nan, 5), (np.nan, 3), (np.nan, 3)),
        ("maxloc", (np.nan, 3), (np.nan, 5), (np.nan, 3)),
    ],
)
@pytest.mark.parametrize("target", ["left", "right", "new"])
def test_the_best_value_wins_with_its_index(
    name: str, left: Any, right: Any, winner: Any, target: str
) -> None:
    a, b = np.array([left, left], PAIR), np.array([right, right], PAIR)
    out = {"left": a, "right": b, "new": np.empty_like(a)}[target]
    operators.combine(operators.resolve(name), dtypes.of_numpy(PAIR), "numpy", a, b, out)
    assert out.tobytes() == np.array([winner, winner], PAIR).tobytes()


@pytest.mark.parametrize(
    "dtype",
    [
        [("a", "i2"), ("b", "u1")],
        [("v", "f2"), ("i", "f8")],
        [("v", "?"), ("i", "i4")],
        [(("its title", "v"), "q"), ("i", "i4")],
    ],
)
def test_the_two_fields_may_be_of_any_real_dtype_and_name(dtype: Any) -> None:
    assert combined("maxloc", [(0, 1)], [(1, 2)], dtype).tolist() == [(1, 2)]


def test_a_pair_without_dimensions_works() -> None:
    assert combined("minloc", (3.0, 1), (2.0, 2), PAIR).tolist() == (2.0, 2)


@pytest.mark.parametrize(
    ("names", "refused", "text"),
    [
        (["avg"], [*INTEGERS, dtypes.BOOL], "an average of integers"),
        (["band", "bor", "bxor"], FLOATS + COMPLEX, r"bitwise operators.*land"),
        (["min", "max"], COMPLEX, r"no order.*abs\(x\)"),
        (["minloc", "maxloc"], list(dtypes.TABLE), r"structured array.*Python pair"),
    ],
)
def test_a_refusal_names_operator_and_dtype_and_what_would_work(
    names: list[str], refused: list[DType], text: str
) -> None:
    for name in names:
        for dtype in dtypes.TABLE:
            if dtype in refused:
                with pytest.raises(TypeError, match=f'"{name}" does not work on {dtype}: .*{text}'):
                    operators.check(operators.resolve(name), dtype)
            else:
                operators.check(operators.resolve(name), dtype)


@pytest.mark.parametrize("op", ["sum", "max", "land", a_function])
@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (PAIR, "minloc"),
        ("M8[ns]", "int64"),
        ("m8[s]", "int64"),
        ("S3", "combine them there"),
        ("U3", "combine them there"),
        ("V3", "combine them there"),
        (">f4", "newbyteorder"),
        ("g", "float64"),
    ],
)
def test_what_only_moves_does_not_reduce(op: Any, dtype: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=f"does not work on.*{advice}"):
        operators.check(operators.resolve(op), dtypes.of_numpy(np.dtype(dtype)))


def test_an_8_bit_float_does_not_reduce() -> None:
    dtype = dtypes.of_name("float8_e5m2")
    assert dtype is not None
    with pytest.raises(TypeError, match="float32"):
        operators.check(operators.resolve("sum"), dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        [("value", "c8"), ("index", "i8")],
        [("value", ">f8"), ("index", "i8")],
        [("value", "f8", (2,)), ("index", "i8")],
        [("value", "f8"), ("index", "i8"), ("more", "i8")],
        [("value", "f8"), ("index", "S3")],
    ],
)
def test_other_structures_are_no_pairs(dtype: Any) -> None:
    with pytest.raises(TypeError, match="value, index"):
        operators.check(operators.resolve("minloc"), dtypes.of_numpy(np.dtype(dtype)))


def test_the_left_operand_comes_first() -> None:
    assert combined(a_function, [5, 5], [3, 4]).tolist() == [2, 1]


def test_a_function_sees_arrays_of_the_given_shape_that_it_cannot_write_to() -> None:
    def fn(left: Array, right: Array) -> Array:
        assert left.shape == right.shape == (2, 3)
        for operand in (left, right):
            with pytest.raises(ValueError, match="read-only"):
                operand[0, 0] = 9
        return np.asarray(left @ right.T @ left)

    left, right = np.eye(2, 3), np.ones((2, 3))
    assert combined(fn, left, right).tolist() == (left @ right.T @ left).tolist()


def test_a_function_may_return_an_operand_or_a_scalar_for_0_d() -> None:
    assert combined(lambda left, right: right, [1.0], [2.0]).tolist() == [2.0]
    assert combined(operator.add, np.array(1), np.array(2)) == 3
    assert combined(lambda left, right: max(int(left), int(right)), np.array(1), np.array(2)) == 2


def test_out_may_be_an_operand_of_a_function() -> None:
    left, right = np.array([5.0, 6.0]), np.array([1.0, 2.0])
    operators.combine(operators.resolve(a_function), dtypes.FLOAT64, "numpy", left, right, right)
    assert right.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda a, b: a.astype(np.float64), "returned float64 for float32"),
        (lambda a, b: a[:1], r"returned the shape \(1,\) for \(2,\)"),
        (lambda a, b: a.sum(), r"returned the shape \(\) for \(2,\)"),
        (lambda a, b: 1.0, "returned float64 for float32"),
        (lambda a, b: None, "returned a value of type NoneType for float32"),
        (lambda a, b: a.tolist(), "returned a value of type list for float32"),
    ],
)
def test_a_function_must_keep_dtype_and_shape(result: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"the operator .*{text}\. Return "):
        combined(result, [1, 2], [3, 4], np.float32)


def test_an_exception_of_a_function_passes_unchanged() -> None:
    error = KeyError("mine")

    def fn(left: Array, right: Array) -> Array:
        raise error

    with pytest.raises(KeyError) as info:
        combined(fn, [1], [2])
    assert info.value is error


def test_a_function_sees_bfloat16_as_ml_dtypes_does() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def fn(left: Array, right: Array) -> Array:
        assert left.dtype == right.dtype == ml_dtypes.bfloat16
        return np.asarray(left * right)

    assert combined(fn, [2, 3], [4, 5], ml_dtypes.bfloat16).tolist() == [8, 15]


def test_a_function_on_bfloat16_without_ml_dtypes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    operators.check(operators.resolve("sum"), dtypes.BFLOAT16)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        operators.check(operators.resolve(a_function), dtypes.BFLOAT16)
