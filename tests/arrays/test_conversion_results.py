"""Operands, descriptions and results: numbers, `out`, overlap, and every kind of array."""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from array_cases import Exported, a_library, wrapped
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pycoll import _dtypes as dtypes
from pycoll._arrays import conversion
from pycoll._arrays.value import Value

TAKES = "Reductions take arrays and numbers"

NUMBERS = [
    3,
    -(2**63),
    2**63 - 1,
    2.5,
    float("nan"),
    1 + 2j,
    True,
    np.float32(1.5),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1j),
    np.longlong(5),
    np.ulonglong(5),
    np.float64(2.5),
    (2.5, 3),
    (7, 3),
    (np.float32(1.5), np.longlong(2)),
    (True, 1),
]


def flat(x: Any) -> Iterator[Any]:
    yield from x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("x", NUMBERS, ids=repr)
def test_a_number_or_a_pair_comes_back_with_its_type(x: Any) -> None:
    operand = conversion.wrap_operand(x)
    assert operand.array.shape == ()
    assert operand.array.dtype == operand.dtype.storage
    dtype, kind, shape = conversion.from_description(conversion.describe(operand))
    value = conversion.fresh(dtype, kind, shape)
    value.array[...] = operand.array
    result = conversion.unwrap(value)
    assert [type(part) for part in flat(result)] == [type(part) for part in flat(x)]
    assert [np.array(part).tobytes() for part in flat(result)] == [
        np.array(part).tobytes() for part in flat(x)
    ]


def test_a_bfloat16_scalar_comes_back_as_one(ml_dtypes: Any) -> None:
    operand = conversion.wrap_operand(ml_dtypes.bfloat16(1.5))
    assert operand.dtype is dtypes.BFLOAT16
    result = conversion.unwrap(operand)
    assert type(result) is ml_dtypes.bfloat16
    assert result == 1.5


def test_bool_is_not_int() -> None:
    assert conversion.wrap_operand(True).dtype is dtypes.BOOL
    assert conversion.wrap_operand(1).dtype is dtypes.INT64


@pytest.mark.parametrize("x", [2**63, -(2**63) - 1, 10**4000, (1.0, 2**70)])
def test_an_int_outside_int64_is_refused(x: object) -> None:
    with pytest.raises(ValueError, match="does not fit into int64"):
        conversion.wrap_operand(x)


@pytest.mark.parametrize(
    ("x", "advice"),
    [
        *[(x, "Lists and tuples are no arrays: pass numpy.array(x).") for x in ([1, 2], (1, 2, 3))],
        *[(x, f"{TAKES}: pass float(x), ") for x in (decimal.Decimal(1), fractions.Fraction(1, 2))],
        (range(3), f"{TAKES}: pass numpy.asarray(x, float), "),
        (iter([1, 2]), "and this is an iterator: pass numpy.array(list(x))."),
        (datetime.datetime(2020, 1, 1), f"{TAKES}: pass x.timestamp(), "),
        (datetime.timedelta(1), f"{TAKES}: pass x.total_seconds(), "),
        (b"bytes", f"{TAKES}: pass numpy.frombuffer(x, 'uint8'), "),
        *[(x, "for example op=lambda a, b: a | b, or gather them") for x in ({}, {1})],
        *[
            (x, f"{TAKES}. Pass a Python function as op, which combines such values as they are")
            for x in ("text", (1, "a"), ["a"], np.str_("a"), object())
        ],
        (None, "cannot reduce None. Every rank passes an array or a number"),
        (len, "cannot reduce a function. The operator comes second"),
    ],
)
def test_an_operand_that_is_neither_array_nor_number_is_refused(x: object, advice: str) -> None:
    with pytest.raises(TypeError, match=re.escape(advice)):
        conversion.wrap_operand(x)


def test_an_array_operand_is_wrapped_without_a_copy() -> None:
    x = np.arange(3)
    assert conversion.wrap_operand(x).array is x


def test_a_structured_scalar_comes_back_as_one() -> None:
    x = np.array((1.5, 3), [("value", "f8"), ("index", "i4")])[()]
    result = conversion.unwrap(conversion.wrap_operand(x))
    assert type(result) is np.void
    assert result == x


@given(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.array_dtypes(), hnp.array_shapes(min_dims=0, min_side=0)
    ).filter(lambda x: x.dtype.itemsize > 0)
)
def test_a_description_gives_dtype_kind_and_shape(x: np.ndarray[Any, Any]) -> None:
    value = wrapped(x)
    assert conversion.from_description(conversion.describe(value)) == (
        value.dtype,
        "numpy",
        x.shape,
    )


def test_a_description_of_a_small_array_is_small() -> None:
    assert len(conversion.describe(wrapped(np.zeros((2, 3))))) <= 32


@given(st.binary(max_size=80))
def test_garbage_is_not_a_description(garbage: bytes) -> None:
    try:
        conversion.from_description(garbage)
    except ValueError:
        return


@given(st.integers(0, 40), st.binary(min_size=1, max_size=8))
def test_a_damaged_description_gives_an_array_or_a_value_error(at: int, damage: bytes) -> None:
    good = conversion.describe(conversion.wrap_operand((2.5, 3)))
    try:
        dtype, kind, shape = conversion.from_description(
            good[:at] + damage + good[at + len(damage) :]
        )
    except ValueError:
        return
    conversion.unwrap(Value(np.zeros([min(dim, 2) for dim in shape], dtype.storage), dtype, kind))


@pytest.mark.parametrize(
    ("code", "kind", "dims", "text"),
    [
        (5, b"numpy2", (3,), b""),
        (5, b"dlpack:os.path", (3,), b""),
        (5, b"int", (3,), b""),
        (5, b"float", (), b""),
        (5, b"pair:int,int", (), b""),
        (0, b"pair:int,int", (), b"[('value', 'S8'), ('index', '<i8')]"),
        (0, b"pair:int,int", (), b"[('value', '<i8', (2,)), ('index', '<i8')]"),
        (5, b"numpy", (1 << 62,), b""),
        (5, b"numpy", (0, 1 << 63), b""),
        (5, b"numpy", (1,) * 65, b""),
        (0, b"numpy", (3,), b"'O'"),
        (99, b"numpy", (3,), b""),
    ],
)
def test_a_description_of_what_cannot_be_is_refused(
    code: int, kind: bytes, dims: tuple[int, ...], text: bytes
) -> None:
    head = bytes([code, len(kind), len(dims)]) + kind
    with pytest.raises(ValueError, match=r"kind|pair|number|shape|dtype"):
        conversion.from_description(
            head + b"".join(dim.to_bytes(8, "little") for dim in dims) + text
        )


@pytest.mark.parametrize("make", [lambda: np.zeros((4, 6))[::2, ::-3], lambda: np.zeros((2, 2)).T])
def test_out_may_be_non_contiguous(make: Any) -> None:
    out = make()
    value = conversion.check_out(out, dtypes.FLOAT64, (2, 2))
    assert value.array is out
    assert conversion.unwrap(value) is out


def test_out_may_be_of_another_kind(torch: Any) -> None:
    for out in (torch.zeros(3), array.array("f", [0, 0, 0]), memoryview(array.array("f", [0] * 3))):
        conversion.check_out(out, dtypes.FLOAT32, (3,)).array[1] = 5
        assert list(out) == [0, 5, 0]


def test_a_tensor_that_requires_a_gradient_is_filled_where_none_is_traced(torch: Any) -> None:
    out = torch.zeros(2, requires_grad=True)
    for traced in (out, out[1:], out * 2):
        with pytest.raises(ValueError, match=r"requires a gradient.*torch\.no_grad\(\).*detach"):
            conversion.wrap_target(traced)
    with torch.no_grad():
        conversion.check_out(out, dtypes.FLOAT32, (2,)).array[...] = 3
    conversion.wrap_target(out.detach()).array[1] = 4
    assert out.tolist() == [3, 4]


def test_out_of_another_dtype_or_shape_names_both() -> None:
    with pytest.raises(ValueError, match=r"dtype float64, but the result is float32"):
        conversion.check_out(np.zeros(3), dtypes.FLOAT32, (3,))
    with pytest.raises(ValueError, match=r"shape \(3,\), but the result has shape \(2, 3\)"):
        conversion.check_out(np.zeros(3), dtypes.FLOAT64, (2, 3))
    with pytest.raises(ValueError, match=r"dtype uint16, but the result is bfloat16"):
        conversion.check_out(np.zeros(3, np.uint16), dtypes.BFLOAT16, (3,))


def test_a_read_only_out_is_refused() -> None:
    out = np.zeros(3)
    out.flags.writeable = False
    for read_only in (out, out.data):
        with pytest.raises(ValueError, match="read-only"):
            conversion.check_out(read_only, dtypes.FLOAT64, (3,))


def test_an_out_that_overlaps_itself_is_refused(torch: Any) -> None:
    expanded = torch.zeros(1).expand(3)
    with pytest.raises(ValueError, match="overlaps itself"):
        conversion.check_out(expanded, dtypes.FLOAT32, (3,))
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(4), 2, writeable=True)
    with pytest.raises(ValueError, match="overlaps itself"):
        conversion.check_out(windows, dtypes.FLOAT64, (3, 2))


def test_a_broadcast_axis_of_length_one_is_no_overlap() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(3), (1, 3), (0, 8))
    assert conversion.check_out(out, dtypes.FLOAT64, (1, 3)).array is out


@pytest.mark.parametrize("out", [[0, 0], bytearray(8), np.float64(0), 5])
def test_an_out_that_is_no_array_is_a_type_error(out: object) -> None:
    with pytest.raises(TypeError, match="out is not an array"):
        conversion.check_out(out, dtypes.FLOAT64, ())


def test_interleaved_slices_do_not_overlap() -> None:
    x = np.zeros(10)
    assert not conversion.overlap(x[::2], x[1::2])
    assert conversion.overlap(x[::2], x[4:5])
    assert conversion.overlap(x, x)
    assert not conversion.overlap(x, x.copy())
    assert not conversion.overlap(x[:0], x)


def test_overlap_of_contrived_strides_is_answered_at_once() -> None:
    x = np.zeros(4_000_000, np.int8)
    strided = np.lib.stride_tricks.as_strided
    a = strided(x, (7, 11, 13, 17, 19), (36674, 61119, 85569, 103391, 120091))
    assert isinstance(conversion.overlap(a[..., 1:], a[1:, ..., :-1]), bool)


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(7),
        np.zeros((0, 3)),
        np.zeros(3, "M8[s]"),
        np.ones(2, [("a", "f4"), ("b", "S3")]),
        np.ones(3, bool),
    ],
    ids=lambda x: str(x.dtype),
)
def test_as_bytes_is_a_flat_view_of_the_memory(x: np.ndarray[Any, Any]) -> None:
    view = conversion.as_bytes(x)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, x.nbytes)
    assert bytes(view) == x.tobytes()
    if x.nbytes:
        view[0] = 99
        assert x.tobytes()[0] == 99


def test_as_bytes_of_a_read_only_array_is_read_only() -> None:
    x = np.ones(3)
    x.flags.writeable = False
    assert conversion.as_bytes(x).readonly


def every_array() -> dict[str, Any]:
    """One array of each kind, dtype, memory order and flag that this process can make."""
    grid = np.arange(24).reshape(4, 6) % 2
    found: dict[str, Any] = {}
    for dtype in dtypes.TABLE:
        if not dtype.foreign:
            x = grid.astype(dtype.storage)
            found[f"numpy {dtype}"] = x
            found[f"numpy {dtype}, backwards"] = x[::-1, ::2]
            found[f"numpy {dtype}, transposed"] = x.T
            found[f"numpy {dtype}, broadcast"] = np.broadcast_to(x[0], (3, 6))  # and read-only
            found[f"numpy {dtype}, 0-d"] = x[1, 1, ...]
            found[f"numpy {dtype}, empty"] = x[:, :0]
            if dtype.family != "c" and dtype is not dtypes.FLOAT16:
                found[f"memoryview {dtype}"] = x.data
    unaligned = np.zeros(25, np.uint8)[1:].view(np.float64)
    unaligned[...] = [1, 2, 3]
    found["numpy, not aligned"] = unaligned
    found["array.array"] = array.array("i", [1, 2, 3])
    found["memoryview, strided and read-only"] = memoryview(bytes(range(9)))[::-2]
    found["another library"] = a_library(grid.astype(np.float32)[:, ::-2])
    ml_dtypes = dtypes.import_library("ml_dtypes")
    if ml_dtypes is not None:
        found["numpy bfloat16"] = grid.astype(ml_dtypes.bfloat16)[:, ::-1]
    torch = dtypes.import_library("torch")
    if torch is not None:
        for dtype in dtypes.TABLE:
            x = torch.from_numpy(grid).to(getattr(torch, dtype.name))
            found[f"torch {dtype}"] = x
            found[f"torch {dtype}, transposed"] = x.t()[1::2]
            found[f"torch {dtype}, expanded"] = x[:1].expand(3, 6)
            found[f"torch {dtype}, 0-d"] = x[1, 1]
            found[f"torch {dtype}, empty"] = x[:, :0]
            if dtype.family in "fc":
                found[f"torch {dtype}, leaf"] = x.clone().requires_grad_()
            if dtype.family == "c":
                found[f"torch {dtype}, conjugate"] = (x * 1j).conj()
                found[f"torch {dtype}, negative"] = (x * 1j).conj().imag
        found["torch, in shared memory"] = torch.ones(3).share_memory_()
        found["another library, bfloat16"] = a_library(torch.ones(3).bfloat16())
    jax = dtypes.import_library("jax")
    if jax is not None:
        for name in ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "complex64"):
            found[f"jax {name}"] = jax.numpy.asarray(grid, name)
            found[f"jax {name}, 0-d"] = jax.numpy.ones((), name)
            found[f"jax {name}, empty"] = jax.numpy.ones((0, 3), name)
    return found


def elements(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    value = wrapped(x)
    return value.dtype.name, value.array.shape, value.array.tobytes()


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_every_kind_of_array_comes_back_as_its_own_kind(ranks: Any) -> None:
    def program(comm: Any) -> list[str]:
        mine = every_array()
        other = 1 - comm.rank
        for name, x in mine.items():
            results = [
                comm.sendrecv(x, dest=other, source=other),
                comm.broadcast(x if comm.rank == 0 else None),
            ]
            if "complex" not in name:
                results.append(comm.all_reduce(x, op="max"))
            for result in results:
                assert type(result) is type(x), name
                assert elements(result) == elements(x), name
            if "complex" in name:
                twice = comm.all_reduce(x)
                assert type(twice) is type(x), name
                assert np.array_equal(wrapped(twice).array, 2 * wrapped(x).array), name
        return list(mine)

    names, theirs = ranks(program)
    assert names == theirs
    assert len(names) > 80


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
def test_an_array_that_is_being_sent_lives_until_it_is_sent(ranks: Any) -> None:
    def program(comm: Any) -> None:
        if comm.rank == 1:
            comm.barrier()
            received = comm.recv(source=0)
            assert (received.shape, received.sum()) == ((1_000_000,), 3_000_000)
            return
        memory = np.full(1_000_000, 3.0)
        alive = weakref.ref(memory)
        # Of a library that the receiver does not have.
        foreign = type("Array", (Exported,), {"__module__": "no_such_library"})
        request = comm.isend(foreign(memory), dest=1)
        del memory
        gc.collect()
        assert alive() is not None
        assert not request.test()  # larger than what is buffered
        comm.barrier()
        request.wait()
        del request
        gc.collect()
        assert alive() is None

    ranks(program)


@pytest.mark.parametrize("ranks", [2], indirect=True, scope="module")
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_a_result_keeps_its_elements_whatever_comes_after_it(ranks: Any, library: str) -> None:
    pytest.importorskip(library)

    def program(comm: Any) -> None:
        module = dtypes.import_library(library)
        kept = []
        again = comm.persistent.all_reduce(module.full((20_000,), 1.0))
        for number in range(6):
            x = module.full((20_000,), float(number))
            kept.append((2 * number, comm.all_reduce(x)))
            kept.append((number, comm.sendrecv(x, dest=1 - comm.rank, source=1 - comm.rank)))
            kept.append((number, comm.broadcast(x if comm.rank == 0 else None)))
            kept.append((2 * number, comm.all_reduce_many([x, x])[1]))
            again.start()
            kept.append((2, again.wait()))
        for number, result in kept:
            assert (np.asarray(result) == number).all()

    ranks(program)
