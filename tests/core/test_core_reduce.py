"""The core's reductions: the bits of NumPy from left to right, on every level of processor."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy_reductions
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycoll import _dtypes as dtypes
from pycoll._arrays import operators
from pycoll._dtypes import BFLOAT16, FLOAT16, FLOAT32, Array, DType

core = pytest.importorskip("pycoll._transports._core", exc_type=ImportError)
if not hasattr(core, "reduce"):  # the folder of C sources, taken for a package
    pytest.skip("the core is not compiled here", allow_module_level=True)

OPS = [name for name in operators.NAMES if name not in ("minloc", "maxloc")]
LEVELS = [level for level in range(3) if core.reduce_level(level) == level]
HALVES = [FLOAT16, BFLOAT16]
KINDS = [
    (name, dtype)
    for name in OPS
    for dtype in dtypes.TABLE
    if dtype.family in operators.resolve(name).fn.families  # type: ignore[union-attr]
]


def of(name: str) -> list[DType]:
    """The dtypes that the operator takes."""
    return [dtype for one, dtype in KINDS if one == name]


@pytest.fixture(scope="module", params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    assert core.reduce_level(request.param) == request.param
    yield request.param
    core.reduce_level(-1)


def test_the_level_is_the_best_that_the_processor_has(level: int) -> None:
    said = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(said[1].split()) if said else set()
    needs = ({"avx2", "f16c", "bmi1", "bmi2"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"})
    best = 0 if not flags >= needs[0] else 2 if flags >= needs[1] else 1
    chosen = core.reduce_level(-1)
    core.reduce_level(level)  # the tests after this one run on it
    assert chosen == best


def reduce(name: str, dtype: DType, out: Array, operands: list[Array], divisor: int = 1) -> Array:
    core.reduce(OPS.index(name), dtype.code, out, operands, divisor)
    return out


def expected(name: str, dtype: DType, operands: list[Array], divisor: int = 1) -> Array:
    """What NumPy makes of the operands, from left to right."""
    if len(operands) == 1 and name in ("land", "lor", "lxor"):
        return expected("lor", dtype, operands * 2)
    if len(operands) == 1 and name != "avg":
        return operands[0].copy()
    ufunc = operators.resolve(name).fn.ufunc  # type: ignore[union-attr]
    shape = operands[0].shape
    with np.errstate(all="ignore"):
        if dtype in HALVES:
            total = numpy_reductions.widen(dtype, operands[0])
            for operand in operands[1:]:
                numpy_reductions.combine(
                    ufunc, FLOAT32, total, numpy_reductions.widen(dtype, operand), total
                )
            if name == "avg":
                total /= np.float32(divisor)
            out = np.empty(shape, dtype.storage)
            numpy_reductions.narrow(dtype, total, out)
            return out
        out = operands[0].copy()
        for operand in operands[1:]:
            numpy_reductions.combine(ufunc, dtype, out, operand, out)
        if name == "avg":
            numpy_reductions.divide(dtype, out, divisor)
    return out


def special_values(dtype: DType) -> Array:
    """Values at which something changes: limits, zeros, denormals, infinities, all kinds of NaN."""
    if dtype.family == "b":
        return np.array([False, True])
    if dtype.family in "iu":
        limits = np.iinfo(dtype.storage)
        half = limits.max // 2 + 1
        values = [0, 1, 2, 3, 7, 11, limits.max, limits.max - 1, limits.min, limits.min + 1, half]
        return np.array(values, dtype.storage)
    if dtype.family == "c":
        part = special_values(dtypes.of_name("float32" if dtype.itemsize == 8 else "float64"))  # type: ignore[arg-type]
        pairs = list(itertools.product(part[::2], part[1::3]))
        return np.array(pairs, part.dtype).reshape(-1).view(dtype.storage)
    # sign, exponent and fraction by hand: the same for all formats
    fraction_bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype.name]
    bits = 8 * dtype.itemsize
    top = (1 << (bits - 1 - fraction_bits)) - 1
    ones = (1 << fraction_bits) - 1
    quiet = 1 << (fraction_bits - 1)
    middle = top // 2
    values = [
        *(0, 1, 2, ones, ones - 1),  # zero and denormals
        *(1 << fraction_bits, 1 << fraction_bits | 1),  # the smallest normal numbers
        *(middle << fraction_bits | fraction for fraction in (0, 1, 3, quiet, ones)),
        *((middle + 1) << fraction_bits, (middle + 3) << fraction_bits | 5),
        *((top - 1) << fraction_bits | ones, (top - 1) << fraction_bits),  # the largest
        *(top << fraction_bits | fraction for fraction in (0, 1, 2, quiet, quiet | 3, ones)),
    ]
    signed = np.array(values + [value | 1 << (bits - 1) for value in values], f"u{dtype.itemsize}")
    return signed.view(dtype.storage)


def draw(dtype: DType, n: int, count: int, seed: int = 0) -> list[Array]:
    """n arrays, half of special values and half of arbitrary bits."""
    rng = np.random.default_rng(seed)
    special = special_values(dtype)
    operands = []
    for _ in range(n):
        operand = special[rng.integers(0, len(special), count)]
        if dtype.family != "b":
            anything = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.storage)
            operand = np.where(rng.integers(0, 2, count), operand, anything)
        operands.append(np.ascontiguousarray(operand))
    return operands


def assert_same_bits(result: Array, right: Array) -> None:
    assert result.dtype == right.dtype
    if result.tobytes() != right.tobytes():
        word = f"u{min(result.itemsize, 8)}" if result.dtype.kind != "b" else "u1"
        found, wanted = result.view(word), right.view(word)
        at = np.flatnonzero(found != wanted)[:5]
        values = [hex(v) for v in found[at]], [hex(v) for v in wanted[at]]
        pytest.fail(f"{result.dtype} at {at}: {values[0]}, not {values[1]}")


@pytest.mark.parametrize("name", OPS)
def test_every_count_and_number_of_operands_gives_the_bits_of_numpy(name: str) -> None:
    for dtype, n in itertools.product(of(name), range(1, 6)):
        operands = draw(dtype, n, 200, seed=n)
        right = expected(name, dtype, operands, divisor=n)
        for count in [*range(71), 127, 128, 129, 200]:
            out = np.full(count + 1, 1, dtype.storage)
            reduce(name, dtype, out[:count], [x[:count] for x in operands], divisor=n)
            assert_same_bits(out[:count], right[:count])
            assert out[count] == 1, "written past the end"


@pytest.mark.parametrize("name", OPS)
def test_every_pair_of_special_values_gives_the_bits_of_numpy(name: str) -> None:
    for dtype in of(name):
        special = special_values(dtype)
        left, right = np.repeat(special, len(special)), np.tile(special, len(special))
        for operands in ([left, right], [left, right, left], [left]):
            out = np.empty_like(left)
            reduce(name, dtype, out, operands, divisor=3)
            assert_same_bits(out, expected(name, dtype, operands, divisor=3))


@pytest.mark.parametrize("name", OPS)
def test_large_arrays_that_start_anywhere_and_out_that_is_an_operand(name: str) -> None:
    lengths = [(1, 1031), (2, 5003), (3, 5003), (5, 9001)]
    for dtype, (n, count) in itertools.product(of(name), lengths):
        operands = draw(dtype, n, count, seed=count)
        right = expected(name, dtype, operands, divisor=n)
        # each operand one element further from an alignment than the one before
        moved = [np.empty(count + k, dtype.storage)[k:] for k in range(1, n + 1)]
        for target in range(n):
            for to, operand in zip(moved, operands, strict=True):
                to[:] = operand
            reduce(name, dtype, moved[target], moved, divisor=n)
            assert_same_bits(moved[target], right)
            for k in set(range(n)) - {target}:
                assert_same_bits(moved[k], operands[k])


@pytest.mark.parametrize("name", ["sum", "max", "avg", "lxor"])
def test_operands_may_all_be_one_array_and_out_too(name: str) -> None:
    some = {FLOAT16, BFLOAT16, FLOAT32, dtypes.COMPLEX64}.intersection(of(name))
    for dtype, n in itertools.product(some, (2, 4, 5)):
        (x,) = draw(dtype, 1, 3001)
        right = expected(name, dtype, [x] * n, divisor=n)
        assert_same_bits(reduce(name, dtype, x, [x] * n, divisor=n), right)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["sum", "prod", "min", "max", "avg", "land"])
def test_every_16_bit_float_is_widened_and_rounded_right(name: str, dtype: DType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    zero = np.zeros_like(every)
    for operands in ([every, zero], [zero, every], [every, every], [every]):
        out = reduce(name, dtype, np.empty_like(every), operands, divisor=7)
        assert_same_bits(out, expected(name, dtype, operands, divisor=7))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_16_bit_float_plus_zero_is_itself(dtype: DType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    zero = np.full(1 << 16, 0x8000, np.uint16)  # x + -0 is x, also for x = -0
    out = reduce("sum", dtype, np.empty_like(every), [every, zero])
    wide = numpy_reductions.widen(dtype, every.view(dtype.storage))
    quiet_bit = {"float16": 0x200, "bfloat16": 0x40}[dtype.name]
    assert np.array_equal(out, np.where(np.isnan(wide), every | quiet_bit, every))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_floats_are_converted_to_float32_and_back(dtype: DType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    wide = np.empty(every.shape, np.float32)
    core.convert(False, dtype.code, wide, every)
    right = numpy_reductions.widen(dtype, every)
    assert np.array_equal(wide, right, equal_nan=True)
    with np.errstate(all="ignore"):
        ties = (right[:-1] + right[1:]) / 2
        between = np.concatenate([right, ties, np.nextafter(ties, right[1:]), right * 1.3])
    for numbers in between, between[:1], between[5:132]:
        out, expected = (np.empty(numbers.shape, dtype.storage) for _ in range(2))
        core.convert(True, dtype.code, out, numbers)
        with np.errstate(all="ignore"):
            numpy_reductions.narrow(dtype, numbers.copy(), expected)
        assert_same_bits(out, expected)


@pytest.mark.parametrize(
    ("dtype", "nbytes", "offset"),
    [(FLOAT32, 16, 0), (FLOAT16, 15, 0), (FLOAT16, 18, 0), (FLOAT16, 16, 1)],
)
def test_no_other_arrays_are_converted(dtype: DType, nbytes: int, offset: int) -> None:
    wide = np.zeros(32, np.uint8)
    halves = np.zeros(32, np.uint8)[offset : offset + nbytes]
    with pytest.raises(ValueError, match="one number of 16-bit floats"):
        core.convert(False, dtype.code, wide, halves)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_floats_are_rounded_once_after_the_last_operand(dtype: DType) -> None:
    big = {"float16": 2048.0, "bfloat16": 256.0}[dtype.name]  # big + 1 is rounded to big
    for n in range(2, 7):
        values = np.array([[big], *([[1.0]] * n)], np.float32)
        operands = [np.empty(1, dtype.storage) for _ in values]
        for operand, value in zip(operands, values, strict=True):
            numpy_reductions.narrow(dtype, value, operand)
        right = np.empty(1, dtype.storage)
        numpy_reductions.narrow(dtype, np.array([big + n], np.float32), right)
        assert_same_bits(reduce("sum", dtype, operands[0], operands), right)


@pytest.mark.parametrize("dtype", [d for d in dtypes.TABLE if d.family in "fc"], ids=str)
def test_an_average_is_divided_by_any_number(dtype: DType) -> None:
    divisors = (1, 2, 3, 64, 1000, 2049, 1 << 20, 100_003, (1 << 31) - 1)
    for divisor, n in itertools.product(divisors, (1, 2, 6)):
        operands = draw(dtype, n, 3000, seed=divisor)
        out = reduce("avg", dtype, np.empty_like(operands[0]), operands, divisor)
        assert_same_bits(out, expected("avg", dtype, operands, divisor))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_arbitrary_bits_give_the_bits_of_numpy(data: st.DataObject) -> None:
    name, dtype = data.draw(st.sampled_from(KINDS))
    n, count = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 300))
    operands = []
    for _ in range(n):
        bits = data.draw(
            st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)
        )
        operand = np.frombuffer(bits, np.uint8 if dtype.family == "b" else dtype.storage)
        operands.append((operand & 1).view(bool) if dtype.family == "b" else operand)
    divisor = data.draw(st.integers(1, 1000))
    out = reduce(name, dtype, np.empty(count, dtype.storage), operands, divisor)
    assert_same_bits(out, expected(name, dtype, operands, divisor))


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, dtypes.FLOAT64], ids=str)
def test_of_two_nan_the_left_one_is_the_result_and_of_two_zeros_the_right_one(
    dtype: DType,
) -> None:
    shift = 8 * dtype.itemsize - 1
    word = f"u{dtype.itemsize}"
    special = special_values(dtype).view(word)
    quiet = [int(v) for v in special[special_values_are_nan(dtype)]][-2:]
    for name in ("sum", "prod", "min", "max"):
        for pair in itertools.permutations(quiet):
            left, right = (np.full(67, bits, word).view(dtype.storage) for bits in pair)
            out = reduce(name, dtype, np.empty_like(left), [left, right])
            assert set(out.view(word).tolist()) == {pair[0]}
    for name in ("min", "max"):
        for pair in ((0, 1 << shift), (1 << shift, 0)):
            left, right = (np.full(67, bits, word).view(dtype.storage) for bits in pair)
            out = reduce(name, dtype, np.empty_like(left), [left, right])
            assert set(out.view(word).tolist()) == {pair[1]}


def special_values_are_nan(dtype: DType) -> Array:
    values = special_values(dtype)
    nan: Array = np.isnan(numpy_reductions.widen(dtype, values) if dtype in HALVES else values)
    return nan


def test_operators_refuse_the_dtypes_that_ops_refuses() -> None:
    x = np.zeros(16, np.uint8)
    for name in OPS:
        for dtype in dtypes.TABLE:
            if (name, dtype) not in KINDS:
                with pytest.raises(ValueError, match="no operator"):
                    reduce(name, dtype, x, [x, x])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 12), TypeError, "4 or 5 arguments, not 2"),
        ((11, 12, np.zeros(2, "f4"), [np.zeros(2, "f4")]), ValueError, "no operator 11"),
        ((0, 16, np.zeros(2, "f4"), [np.zeros(2, "f4")]), ValueError, "dtype 16"),
        ((0, -1, np.zeros(2, "f4"), [np.zeros(2, "f4")]), ValueError, "dtype -1"),
        ((0, 12, np.zeros(2, "f4"), [np.zeros(2, "f4")], 0), ValueError, "divisor 0"),
        ((0, 12, np.zeros(2, "f4"), []), ValueError, "at least one operand"),
        ((0, 12, np.zeros(2, "f4"), 7), TypeError, "has no len"),
        ((0, 12, np.zeros(2, "f4"), [np.zeros(2, "f4"), "text"]), TypeError, "bytes-like"),
        ((0, 12, np.zeros(2, "f4"), [np.zeros(3, "f4")]), ValueError, "12 bytes, out has 8"),
        ((0, 12, bytes(8), [np.zeros(2, "f4")]), BufferError, "not writable"),
        ((0, 13, np.zeros(3, "f4"), [np.zeros(3, "f4")]), ValueError, "whole elements"),
        ((0, 12, np.zeros(9, "u1")[1:], [np.zeros(2, "f4")]), ValueError, "out is not an aligned"),
        ((0, 12, np.zeros(2, "f4"), [np.zeros(9, "u1")[1:]]), ValueError, "operand 0 .* aligned"),
        ((0, 12, np.zeros(4, "f4")[::2], [np.zeros(2, "f4")]), ValueError, "contiguous"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        core.reduce(*arguments)


def test_a_level_that_does_not_exist_is_not_set(level: int) -> None:
    assert core.reduce_level(3) == -1
    assert core.reduce_level(-2) == -1
    assert core.reduce_level(-1) == max(LEVELS)
    assert core.reduce_level(level) == level
