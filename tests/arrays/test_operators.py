"""Reduction operators: what each computes for each dtype, and what it refuses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from operator_cases import a_function, combine_into, combined, finished

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators
from pycoll._dtypes import Array, DType

INTEGERS = [dtype for dtype in dtypes.TABLE if dtype.family in "iu"]


FLOATS = [dtype for dtype in dtypes.TABLE if dtype.family == "f"]


COMPLEX = [dtype for dtype in dtypes.TABLE if dtype.family == "c"]


NUMERIC = [dtype for dtype in dtypes.TABLE if dtype is not dtypes.BFLOAT16]


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
    said = r'list: write op="sum"\.$' if op == ["sum"] else r".*\. Pass one of sum"
    with pytest.raises(TypeError, match=f"op is a value of type {said}"):
        operators.resolve(op)


def test_a_function_is_not_taken_to_be_commutative_or_elementwise() -> None:
    op = operators.resolve(a_function)
    assert not op.commutative
    assert not op.elementwise
    assert op == operators.Op(a_function, commutative=False)
    assert operators.resolve(op) is op


def test_an_operator_has_a_stable_name_a_readable_repr_and_a_hash() -> None:
    op = operators.Op(a_function)
    assert op.name == f"{a_function.__module__}.a_function"
    assert (
        repr(op) == f"Op({a_function.__module__}.a_function, commutative=True, elementwise=False)"
    )
    assert len({op, operators.Op(a_function), operators.Op(a_function, elementwise=True)}) == 2
    assert operators.Op(functools.partial(a_function)).name == f"partial({op.name})"
    assert operators.Op(Callable_()).name == f"{Callable_.__module__}.Callable_"
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
    x = np.arange(20.0).astype(np.float16)
    expected = (x.astype(np.float32) / np.float32(2049)).astype(np.float16)
    assert np.array_equal(finished(x, 2049), expected)


@pytest.mark.parametrize("target", ["left", "right"])
@pytest.mark.parametrize("name", ["sum", "max", "land"])
@pytest.mark.parametrize("dtype", [d for d in dtypes.TABLE if d.family != "c"], ids=str)
def test_out_may_be_an_operand(name: str, dtype: DType, target: str) -> None:
    rng = np.random.default_rng(1)
    left = rng.integers(0, 100, (2, 50)).astype(dtype.storage)
    right = rng.integers(0, 100, (2, 50)).astype(dtype.storage)
    op = operators.resolve(name)
    expected = np.empty_like(left)
    combine_into(op, dtype, left, right, expected)
    combine_into(op, dtype, left, right, left if target == "left" else right)
    assert np.array_equal(left if target == "left" else right, expected)


@pytest.mark.parametrize("name", ["sum", "minloc", a_function])
def test_no_elements_are_combined_to_none(name: Any) -> None:
    dtype = [("value", "f8"), ("index", "i8")] if name == "minloc" else "f4"
    assert combined(name, np.zeros((0, 3), dtype), np.zeros((0, 3), dtype)).shape == (0, 3)
