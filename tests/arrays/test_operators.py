"""Reduction operators: what each computes for each dtype, and what it refuses."""

from __future__ import annotations

import functools
import operator
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators, operators_numpy
from pycoll._dtypes import Array, DType

INTEGERS = [dtype for dtype in dtypes.TABLE if dtype.family in "iu"]
FLOATS = [dtype for dtype in dtypes.TABLE if dtype.family == "f"]
COMPLEX = [dtype for dtype in dtypes.TABLE if dtype.family == "c"]
NUMERIC = [dtype for dtype in dtypes.TABLE if dtype is not dtypes.BFLOAT16]


def combined(op: Any, left: Any, right: Any, dtype: Any = None) -> Array:
    """Combine two arrays of a NumPy dtype, ml_dtypes included; check first, as callers do."""
    left, right = np.asarray(left, dtype), np.asarray(right, dtype)
    known = dtypes.of_numpy(left.dtype)
    out = np.empty(left.shape, known.storage)
    resolved = operators.resolve(op)
    operators.check(resolved, known)
    operators.combine(resolved, known, left.view(known.storage), right.view(known.storage), out)
    return out.view(left.dtype)


def finished(array: Array, size: int) -> Array:
    dtype = dtypes.of_numpy(array.dtype)
    operators.finish(operators.resolve("avg"), dtype, array.view(dtype.storage), size)
    return array


# Names and functions


def a_function(left: Array, right: Array) -> Array:
    return left - right


class Callable_:  # noqa: N801
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, left: Array, right: Array) -> Array:
        return left


def test_a_name_is_an_operator() -> None:
    assert operators.resolve("sum") is operators.resolve("sum")
    assert operators.resolve("sum").name == "sum"
    assert repr(operators.resolve("sum")) == "Op('sum')"
    assert operators.resolve("sum").commutative
    assert operators.resolve("sum").elementwise


def test_the_named_operators_are_those_of_the_documentation() -> None:
    names = "sum prod min max avg band bor bxor land lor lxor minloc maxloc"
    assert tuple(names.split()) == operators.NAMES


def test_an_unknown_name_is_a_value_error_naming_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no operator 'mean'.*sum, prod.*maxloc"):
        operators.resolve("mean")


@pytest.mark.parametrize("op", [3, None, ["sum"]])
def test_what_is_no_operator_is_a_type_error(op: object) -> None:
    with pytest.raises(TypeError, match=r"op is a value of type .*\. Pass one of sum"):
        operators.resolve(op)


def test_a_function_is_not_taken_to_be_commutative_or_elementwise() -> None:
    op = operators.resolve(a_function)
    assert not op.commutative
    assert not op.elementwise
    assert op == operators.Op(a_function, commutative=False)
    assert operators.resolve(op) is op


def test_an_operator_has_a_stable_name_a_readable_repr_and_a_hash() -> None:
    op = operators.Op(a_function)
    assert op.name == f"{__name__}.a_function"
    assert repr(op) == f"Op({__name__}.a_function, commutative=True, elementwise=False)"
    assert len({op, operators.Op(a_function), operators.Op(a_function, elementwise=True)}) == 2
    assert operators.Op(functools.partial(a_function)).name == f"partial({__name__}.a_function)"
    assert operators.Op(Callable_()).name == f"{__name__}.Callable_"
    assert isinstance(hash(operators.Op(Callable_())), int)
    assert "add" in operators.Op(np.add).name
    assert "add" in operators.Op(operator.add).name


def test_functions_of_one_name_differ_in_their_signatures() -> None:
    one, other = operators.Op(lambda a, b: a + b), operators.Op(lambda a, b: a * b)
    assert one.name == other.name
    assert one.signature != other.signature
    assert operators.resolve("sum").signature == "sum"
    assert operators.Op(Callable_()).signature == operators.Op(Callable_()).name


def test_an_operator_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        operators.Op(a_function).commutative = False  # type: ignore[misc]


def test_an_operator_needs_a_function() -> None:
    with pytest.raises(TypeError, match="made of a function, not of a str"):
        operators.Op("sum")  # type: ignore[arg-type]


# What each operator computes

EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
    "land": lambda a, b: bool(a) and bool(b),
    "lor": lambda a, b: bool(a) or bool(b),
    "lxor": lambda a, b: bool(a) != bool(b),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [*INTEGERS, dtypes.BOOL], ids=str)
def test_integers_and_bool_combine_as_python_does(name: str, dtype: DType) -> None:
    values = np.array([0, 1, 2, 3, 0, 3], dtype.storage)
    others = np.array([0, 0, 3, 2, 2, 3], dtype.storage)
    expected = [EXACT[name](a, b) for a, b in zip(values.tolist(), others.tolist(), strict=True)]
    result = combined(name, values, others)
    assert result.dtype == dtype.storage
    assert result.tolist() == np.array(expected).astype(dtype.storage).tolist()


@pytest.mark.parametrize("name", ["sum", "prod", "land", "lor", "lxor"])
@pytest.mark.parametrize("dtype", [d for d in FLOATS + COMPLEX if d in NUMERIC], ids=str)
def test_floats_combine_as_python_does(name: str, dtype: DType) -> None:
    values, others = [0, 1.5, -2, 3, 0], [0, 2, 0, -0.5, 4]
    expected = [EXACT[name](a, b) for a, b in zip(values, others, strict=True)]
    result = combined(name, values, others, dtype.storage)
    assert result.dtype == dtype.storage
    assert result.tolist() == expected


def test_bool_sum_is_or_and_prod_is_and() -> None:
    left, right = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    assert combined("sum", left, right).tolist() == [False, True, True, True]
    assert combined("prod", left, right).tolist() == [False, False, False, True]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_without_a_warning(dtype: DType, shape: tuple[int, ...]) -> None:
    top = np.full(shape, np.iinfo(dtype.storage).max)
    one = np.ones(shape, dtype.storage)
    assert np.all(combined("sum", top.astype(dtype.storage), one) == np.iinfo(dtype.storage).min)
    two = one + one
    expected = -2 if dtype.family == "i" else int(np.iinfo(dtype.storage).max) - 1
    assert np.all(combined("prod", top.astype(dtype.storage), two) == expected)


@pytest.mark.parametrize("shape", [(), (3,), (1000,)])
@pytest.mark.parametrize("dtype", [d for d in FLOATS + COMPLEX if d in NUMERIC], ids=str)
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_floats_overflow_without_a_warning(name: str, dtype: DType, shape: tuple[int, ...]) -> None:
    huge = np.full(shape, np.finfo(dtype.storage).max, dtype.storage)
    assert not np.isfinite(combined(name, huge, huge)).any()
    infinite = np.full(shape, np.inf, dtype.storage)
    combined("sum", infinite, -infinite)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("dtype", [d for d in FLOATS if d in NUMERIC], ids=str)
def test_nan_wins_min_and_max(name: str, dtype: DType) -> None:
    nan = np.nan
    result = combined(name, [nan, 1, nan, 2], [1, nan, nan, 1], dtype.storage)
    assert np.isnan(result).tolist() == [True, True, True, False]


def test_not_a_number_is_true_in_logic_and_minus_zero_is_false() -> None:
    assert combined("land", [np.nan, -0.0], [1.0, 1.0]).tolist() == [1, 0]
    assert combined("lor", [0j, -0.0], [1j, 0]).tolist() == [1, 0]


def test_avg_divides_once_at_the_end() -> None:
    total = combined("avg", [1.0, 2.0], [2.0, 5.0], np.float32)
    assert finished(total, 2).tolist() == [1.5, 3.5]
    scalar = np.array(3.0)
    assert finished(scalar, 2) is scalar
    assert scalar == 1.5


def test_avg_of_complex_divides_both_parts() -> None:
    x = np.array([3 + 9j, complex(np.inf, 1)], np.complex64)
    finished(x, 3)
    assert x.tolist() == [1 + 3j, complex(np.inf, np.float32(1) / np.float32(3))]


def test_avg_of_float16_takes_any_number_of_ranks() -> None:
    assert finished(np.array([60000.0], np.float16), 100_000).tolist() == [np.float16(0.6)]
    x = np.arange(20.0).astype(np.float16)[::-2]
    expected = (x.astype(np.float32) / np.float32(2049)).astype(np.float16)
    assert np.array_equal(finished(x, 2049), expected)


def test_only_avg_divides() -> None:
    x = np.ones(3)
    operators.finish(operators.resolve("sum"), dtypes.FLOAT64, x, 2)
    operators.finish(operators.Op(a_function), dtypes.FLOAT64, x, 2)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("target", ["left", "right"])
@pytest.mark.parametrize("name", ["sum", "max", "land"])
@pytest.mark.parametrize("dtype", [d for d in dtypes.TABLE if d.family != "c"], ids=str)
def test_out_may_be_an_operand(name: str, dtype: DType, target: str) -> None:
    rng = np.random.default_rng(1)
    left = rng.integers(0, 100, (2, 50)).astype(dtype.storage)
    right = rng.integers(0, 100, (2, 50)).astype(dtype.storage)
    op = operators.resolve(name)
    expected = np.empty_like(left)
    operators.combine(op, dtype, left, right, expected)
    operators.combine(op, dtype, left, right, left if target == "left" else right)
    assert np.array_equal(left if target == "left" else right, expected)


@pytest.mark.parametrize("dtype", [dtypes.FLOAT32, dtypes.BFLOAT16, dtypes.FLOAT16], ids=str)
def test_operands_and_out_may_be_strided(dtype: DType) -> None:
    left = np.arange(24).astype(dtype.storage).reshape(4, 6)[::-1, ::2]
    right = np.arange(12).astype(dtype.storage).reshape(3, 4).T
    out = np.zeros((3, 4), dtype.storage).T
    expected = np.empty((4, 3), dtype.storage)
    op = operators.resolve("sum")
    operators.combine(op, dtype, left.copy(), right.copy(), expected)
    operators.combine(op, dtype, left, right, out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", ["sum", "minloc", a_function])
def test_no_elements_are_combined_to_none(name: Any) -> None:
    dtype = [("value", "f8"), ("index", "i8")] if name == "minloc" else "f4"
    assert combined(name, np.zeros((0, 3), dtype), np.zeros((0, 3), dtype)).shape == (0, 3)


# The same bits everywhere

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
def test_bits_do_not_depend_on_strides_position_or_target(name: str) -> None:
    op = operators.resolve(name)
    for dtype in [dtype for one, dtype in BUILTINS if one == name]:
        left, right = special_bits(dtype, 999, seed=1), special_bits(dtype, 999, seed=2)
        expected = np.empty_like(left)
        operators.combine(op, dtype, left, right, expected)
        for target in range(3):  # the left one, the right one, a new one
            spaced = [np.zeros((999, 2), dtype.storage)[::-1, 0] for _ in range(3)]
            spaced[0][:], spaced[1][:] = left, right
            operators.combine(op, dtype, spaced[0], spaced[1], spaced[target])
            assert spaced[target].tobytes() == expected.tobytes(), dtype
        for i in range(0, 999, 37):  # alone, an element is not in a vector register with others
            alone = np.empty(1, dtype.storage)
            operators.combine(op, dtype, left[i : i + 1], right[i : i + 1], alone)
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


# 16-bit floats


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
    operators_numpy.narrow(dtypes.BFLOAT16, wide.copy(), out)
    result = out.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(result, expected.astype(np.float32), equal_nan=True)


def test_every_nan_stays_a_nan_in_bfloat16() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    out = np.empty(4, np.uint16)
    operators_numpy.narrow(dtypes.BFLOAT16, bits.view(np.float32).copy(), out)
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


@pytest.mark.parametrize("dtype", [dtypes.BFLOAT16, dtypes.FLOAT16], ids=str)
def test_large_arrays_of_16_bit_floats_need_little_memory(dtype: DType) -> None:
    left = np.ones(1 << 20, dtype.storage)
    op = operators.resolve("avg")
    operators.combine(op, dtype, left[:10], left[:10], left[:10].copy())
    tracemalloc.start()
    try:
        operators.combine(op, dtype, left, left, left)
        operators.finish(op, dtype, left, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < left.nbytes / 2


# minloc and maxloc

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
    operators.combine(operators.resolve(name), dtypes.of_numpy(PAIR), a, b, out)
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


# What is refused


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


# The user's functions


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
    operators.combine(operators.resolve(a_function), dtypes.FLOAT64, left, right, right)
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
