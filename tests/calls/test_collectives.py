"""Every collective on real ranks, against NumPy: values, shapes, dtypes, operators, algorithms.

Each rank draws the arrays of all ranks from one seed, so each knows what must come out.
"""

from __future__ import annotations

import array
import functools
import hashlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiers import sizes

import pycoll
from pycoll._calls.numbering import KINDS

Array = Any
Comm = Any

INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEXES = ("complex64", "complex128")
DTYPES = ("bool", *INTS, *FLOATS, *COMPLEXES)
ORDERED = ("bool", *INTS, *FLOATS)
REDUCTIONS = {
    "sum": (np.add, DTYPES),
    "prod": (np.multiply, DTYPES),
    "min": (np.minimum, ORDERED),
    "max": (np.maximum, ORDERED),
    "avg": (np.add, (*FLOATS, *COMPLEXES)),
    "band": (np.bitwise_and, ("bool", *INTS)),
    "bor": (np.bitwise_or, ("bool", *INTS)),
    "bxor": (np.bitwise_xor, ("bool", *INTS)),
    "land": (np.logical_and, DTYPES),
    "lor": (np.logical_or, DTYPES),
    "lxor": (np.logical_xor, DTYPES),
}
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (2, 3), (5, 1, 4), (1000,))
# Around the limits of what travels with its announcement (4 KiB) and of what is buffered (64 KiB).
LENGTHS = (0, 1, 511, 512, 513, 8192, 8193, 50_001)


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def draw(seed: int, dtype: str, shape: tuple[int, ...], op: str = "sum") -> Array:
    """Random values whose reduction by `op` is exact in every order."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5 if shape else np.array(rng.random() < 0.5)
    if dtype in INTS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True).reshape(shape)
    if op == "prod":
        factors = [1, -1, 2, 0.5] + [1j] * (dtype in COMPLEXES)
        return rng.choice(factors, shape).astype(dtype_of(dtype)).reshape(shape)
    values = rng.integers(-9, 10, shape).reshape(shape)
    if dtype in COMPLEXES:
        values = values + 1j * rng.integers(-9, 10, shape).reshape(shape)
    values = values.astype(dtype_of(dtype))
    if op in ("min", "max") and values.size > 4:
        values.flat[seed % values.size] = np.nan
    return values


def draw_all(seed: int, size: int, *args: Any) -> list[Array]:
    """The arrays of all ranks."""
    return [draw(1000 * seed + rank, *args) for rank in range(size)]


def reduced(op: str, operands: list[Array]) -> Array:
    """What NumPy makes of them: dtypes are kept, integers wrap."""
    dtype = operands[0].dtype
    with np.errstate(all="ignore"):
        if op in ("land", "lor", "lxor"):
            operands = [x.astype(bool) for x in operands]
        total = np.asarray(functools.reduce(REDUCTIONS[op][0], operands))
        if op == "avg" and dtype.kind == "c":
            return (total.real / len(operands) + 1j * (total.imag / len(operands))).astype(dtype)
        if op == "avg":
            total = total / len(operands)
        return total.astype(dtype)


def check(actual: Any, expected: Array) -> None:
    """The same values (NaN equals NaN), the same dtype, the same shape; an array of one's own."""
    assert type(actual) is np.ndarray
    assert actual.flags.writeable
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(plain(actual), plain(expected), strict=True)


def plain(x: Array) -> Array:
    """As float32 if it is bfloat16, whose NaN NumPy does not know for one."""
    return x.astype("f4") if x.dtype == dtype_of("bfloat16") else x


def algorithms(collective: str) -> list[str | None]:
    return [None, *pycoll.algorithms(collective)]


# --- values, algorithms, roots ---------------------------------------------------------------


@sizes(2, 3, 4, 5, more=(1, 6, 7, 8, 9))
def test_every_algorithm_of_every_collective_moves_blocks_where_they_belong(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, length in enumerate((0, 1, size + 1, 3001)):
            all_x = draw_all(case, size, "int32", (size, length))
            x, root = all_x[me], (case + size // 2) % size
            stacked = np.stack(all_x)
            for name in algorithms("broadcast"):
                got = comm.broadcast(x if me == root else None, root, algorithm=name)
                assert (got is x) == (me == root)
                check(got, all_x[root])
            for name in algorithms("gather"):
                got = comm.gather(x, root, algorithm=name)
                check(got, stacked) if me == root else check_none(got)
            for name in algorithms("all_gather"):
                check(comm.all_gather(x, algorithm=name), stacked)
            for name in algorithms("scatter"):
                got = comm.scatter(x if me == root else None, root, algorithm=name)
                check(got, all_x[root][me])
            for name in algorithms("all_to_all"):
                check(comm.all_to_all(x, algorithm=name), stacked[:, me])

    def check_none(got: object) -> None:
        assert got is None

    ranks(program)


@sizes(2, 3, 4, 5, more=(1, 6, 7, 8, 9))
def test_every_algorithm_of_every_reduction_gives_the_sum(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, length in enumerate((0, 1, size - 1, size + 1, 3001)):
            all_x = draw_all(case, size, "float32", (size, length))
            x, root = all_x[me], (case + size // 2) % size
            total = reduced("sum", all_x)
            for name in algorithms("reduce"):
                got = comm.reduce(x, "sum", root, algorithm=name)
                assert (got is None) == (me != root)
                if me == root:
                    check(got, total)
            for name in algorithms("all_reduce"):
                check(comm.all_reduce(x, algorithm=name), total)
            for name in algorithms("reduce_scatter"):
                check(comm.reduce_scatter(x, algorithm=name), total[me])
            check(x, all_x[me])

    ranks(program)


@sizes(2, 5)
def test_every_rank_can_be_root(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        all_x = draw_all(3, size, "int16", (size, 3000))
        for root in range(size):
            for name in algorithms("broadcast"):
                x = all_x[root] if me == root else None
                check(comm.broadcast(x, np.int64(root), algorithm=name), all_x[root])
            for name in algorithms("scatter"):
                x = all_x[root] if me == root else None
                check(comm.scatter(x, root, algorithm=name), all_x[root][me])
            for name in algorithms("gather"):
                got = comm.gather(all_x[me], root=root, algorithm=name)
                assert (got is not None) == (me == root)
                assert got is None or np.array_equal(got, np.stack(all_x))
            for name in algorithms("reduce"):
                got = comm.reduce(all_x[me], root=root, algorithm=name)
                assert (got is not None) == (me == root)
                assert got is None or np.array_equal(got, reduced("sum", all_x))

    ranks(program)


@sizes(1, 2, 3, more=(8,))
def test_every_operator_reduces_every_dtype_it_takes(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, (op, dtype) in enumerate(
            (op, dtype) for op, (_, dtypes) in REDUCTIONS.items() for dtype in dtypes
        ):
            all_x = draw_all(case, size, dtype, (size, 11), op)
            expected = reduced(op, all_x)
            check(comm.all_reduce(all_x[me], op), expected)
            check(comm.reduce_scatter(all_x[me], op), expected[me])
            got = comm.reduce(all_x[me], op, root=case % size)
            assert (got is not None) == (me == case % size)
            if got is not None:
                check(got, expected)

    ranks(program)


@sizes(1, 3)
def test_every_dtype_moves(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, dtype in enumerate(DTYPES):
            all_x = draw_all(case, size, dtype, (size, 5))
            root = case % size
            check(comm.broadcast(all_x[me] if me == root else None, root), all_x[root])
            check(comm.all_gather(all_x[me]), np.stack(all_x))
            check(comm.all_to_all(all_x[me]), np.stack(all_x)[:, me])
            check(comm.scatter(all_x[me] if me == root else None, root), all_x[root][me])
            got = comm.gather(all_x[me], root)
            assert got is None or np.array_equal(got, np.stack(all_x))

    ranks(program)


@sizes(2, 3)
def test_structured_and_date_and_text_dtypes_move(ranks: Any) -> None:
    moving = [
        np.dtype([("position", "f4", 3), ("id", "u1"), ("name", "S5")], align=True),
        np.dtype("M8[us]"),
        np.dtype("m8[D]"),
        np.dtype("U4"),
        np.dtype("S3"),
        np.dtype(">i4"),
        np.dtype("longdouble"),
    ]

    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for dtype in moving:
            rng = np.random.default_rng(1)
            codes = rng.integers(0, 100, (size, size, 700 * dtype.itemsize), "u1")
            if dtype.kind in "gf":
                all_x = codes[..., ::16][..., :700].astype(dtype)
            elif dtype.kind == "U":
                all_x = codes.astype("U4")
            else:
                all_x = codes.view(dtype)
            for root in range(size):
                got = comm.broadcast(all_x[me] if me == root else None, root)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got, all_x[root])
                got = comm.scatter(all_x[me] if me == root else None, root)
                np.testing.assert_array_equal(got, all_x[root, me])
                got = comm.gather(all_x[me], root)
                assert got is None or np.array_equal(got, all_x)
            np.testing.assert_array_equal(comm.all_gather(all_x[me]), all_x)
            np.testing.assert_array_equal(comm.all_to_all(all_x[me]), all_x[:, me])

    ranks(program)


# --- shapes and layouts ----------------------------------------------------------------------


def layouts(x: Array) -> Iterator[Array]:
    """Arrays of the same values, laid out differently."""
    yield x
    yield np.asfortranarray(x)
    wide = np.zeros((*x.shape, 3), x.dtype)
    wide[..., 1] = x
    yield wide[..., 1]
    every_axis_back = (slice(None, None, -1),) * x.ndim
    yield np.ascontiguousarray(x[every_axis_back])[every_axis_back]
    yield np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1)
    fixed = x.copy()
    fixed.flags.writeable = False
    yield fixed
    if x.nbytes:
        unaligned = np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1)
        yield unaligned.reshape(x.shape)


@sizes(2, 5, more=(1,))
def test_memory_layout_of_the_input_does_not_matter(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, shape in enumerate(((4, 3), (1, 1), (0, 2), (3, 5, 2))):
            all_x = draw_all(case, size, "int32", (size, *shape))
            total, stacked = reduced("sum", all_x), np.stack(all_x)
            for x in layouts(all_x[me]):
                check(comm.all_reduce(x), total)
                check(comm.reduce_scatter(x), total[me])
                check(comm.all_gather(x), stacked)
                check(comm.all_to_all(x), stacked[:, me])
                for root in {0, size - 1}:
                    got = comm.broadcast(x if me == root else None, root)
                    np.testing.assert_array_equal(got, all_x[root], strict=True)
                    check(comm.scatter(x if me == root else None, root), all_x[root][me])
                    for got, expected in (
                        (comm.reduce(x, root=root), total),
                        (comm.gather(x, root=root), stacked),
                    ):
                        check(got, expected) if me == root else check(x * 0, x * 0)
                np.testing.assert_array_equal(x, all_x[me], strict=True)

    ranks(program)


@sizes(1, 2, more=(3,))
def test_shapes_are_kept_from_scalars_to_empty_arrays(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, shape in enumerate(SHAPES):
            all_x = draw_all(case, size, "float64", shape)
            check(comm.all_reduce(all_x[me]), reduced("sum", all_x))
            check(comm.all_gather(all_x[me]), np.stack(all_x))
            check(comm.broadcast(all_x[me] if me == 0 else None), all_x[0])
            rows = draw_all(case, size, "int8", (size, *shape))
            check(comm.reduce_scatter(rows[me], "max"), reduced("max", rows)[me])
            check(comm.all_to_all(rows[me]), np.stack(rows)[:, me])
            check(comm.scatter(rows[me] if me == 0 else None), rows[0][me])
            got, total = comm.gather(all_x[me]), comm.reduce(all_x[me])
            if me == 0:
                check(got, np.stack(all_x))
                check(total, reduced("sum", all_x))

    ranks(program)


@pytest.mark.parametrize("read_from", [0, 1], ids=["as they choose", "read directly"])
@sizes(2, 3, more=(1, 4))
def test_lengths_around_every_threshold_are_right(ranks: Any, read_from: int) -> None:
    def program(comm: Comm) -> None:
        if not read_from:
            check_lengths(comm)
            return
        from pycoll._transports._core import set_direct_from

        for kind in range(len(KINDS)):
            set_direct_from(kind, read_from)
        try:
            check_lengths(comm)
        finally:
            for kind in range(len(KINDS)):
                set_direct_from(kind, 0)

    def check_lengths(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for case, length in enumerate(LENGTHS):
            all_x = draw_all(case, size, "float64", (size, length))
            root = case % size
            check(comm.broadcast(all_x[me] if me == root else None, root), all_x[root])
            check(comm.all_reduce(all_x[me][0]), reduced("sum", [x[0] for x in all_x]))
            check(comm.all_gather(all_x[me][0]), np.stack([x[0] for x in all_x]))
            check(comm.reduce_scatter(all_x[me]), reduced("sum", all_x)[me])
            check(comm.all_to_all(all_x[me]), np.stack(all_x)[:, me])
            check(comm.scatter(all_x[me] if me == root else None, root), all_x[root][me])
            got, total = comm.gather(all_x[me], root), comm.reduce(all_x[me], root=root)
            if me == root:
                check(got, np.stack(all_x))
                check(total, reduced("sum", all_x))

    ranks(program)


@sizes(2, more=(3,))
def test_64_mib_arrive_whole(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        count = 2**26 // 8
        x = np.arange(count, dtype=np.int64) * (me + 1)
        total = comm.all_reduce(x)
        assert np.array_equal(total, np.arange(count) * (size * (size + 1) // 2))
        got = comm.broadcast(total if me == 1 else None, 1)
        assert np.array_equal(got, total)
        rows = comm.all_to_all(x[: count // size * size].reshape(size, -1))
        block = np.arange(count // size) + me * (count // size)
        assert np.array_equal(rows, np.stack([block * (rank + 1) for rank in range(size)]))

    ranks(program)


# --- kinds of value --------------------------------------------------------------------------


@sizes(1, 3)
def test_python_numbers_and_numpy_scalars_come_back_as_their_type(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        numbers = [3, 2.5, 1 + 2j, True, np.float32(1.5), np.int8(7), np.complex64(2j)]
        numbers += [np.bool_(True), np.longlong(3), np.float64(0.5), ml_dtypes.bfloat16(2)]
        for number in numbers:
            for op in ("sum", "prod", "lor"):
                got = comm.all_reduce(number, op)
                assert type(got) is type(number), (op, number)
                got = comm.reduce(number, op, root=size - 1)
                assert type(got) is (type(number) if me == size - 1 else type(None))
        assert comm.all_reduce(me + 1) == size * (size + 1) // 2
        assert comm.all_reduce(me + 0.5, "max") == size - 0.5
        assert comm.all_reduce(me == 0, "sum") is True
        assert comm.all_reduce(np.int8(127)) == np.int64(127 * size).astype(np.int8)
        assert comm.all_reduce(float(me), "avg") == (size - 1) / 2
        zero_d = comm.all_reduce(np.array(2.0))
        assert type(zero_d) is np.ndarray
        assert zero_d.shape == ()

    ranks(program)


@sizes(1, 2)
def test_a_result_is_the_kind_of_array_that_was_passed_in(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for code in "bBhHiIlLqQfd":
            x = array.array(code, [me + 1, 2, 3])
            total = comm.all_reduce(x)
            assert type(total) is array.array
            assert total.typecode == code
            assert total.tolist() == [size * (size + 1) // 2, 2 * size, 3 * size]
            view = memoryview(x)
            viewed = comm.all_reduce(view, "max")
            assert type(viewed) is memoryview
            assert viewed.format == code
            assert viewed.tolist() == [size, 2, 3]
            got = comm.broadcast(x if me == 0 else None)
            assert type(got) is array.array
            assert got.tolist() == [1, 2, 3]
            got = comm.broadcast(view if me == 0 else None)
            assert type(got) is memoryview
            assert got.tolist() == [1, 2, 3]
        stacked = comm.all_gather(memoryview(x))
        assert stacked.tolist() == [[rank + 1, 2, 3] for rank in range(size)]
        square = memoryview(np.arange(size * 2.0).reshape(size, 2))
        assert comm.reduce_scatter(square).tolist() == [size * 2.0 * me, size * (2.0 * me + 1)]
        x = memoryview(bytearray(range(size)))
        assert comm.all_to_all(x).tolist() == [me] * size

    ranks(program)


@sizes(2)
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
def test_tensors_come_back_as_tensors(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        import torch

        me, size = comm.rank, comm.size
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            x = torch.arange(6).reshape(2, 3).to(dtype)
            got = comm.all_reduce(x, "max" if dtype != torch.complex64 else "sum")
            assert got.dtype == dtype
            assert torch.equal(got, x * (size if dtype == torch.complex64 else 1))
            assert torch.equal(comm.broadcast(x.T if me == 1 else None, 1), x.T)
            assert torch.equal(comm.all_gather(x), torch.stack([x, x]))
            assert torch.equal(comm.all_to_all(x), torch.stack([x[me], x[me]]))
            assert torch.equal(comm.scatter(x if me == 0 else None), x[me])
            assert torch.equal(comm.sendrecv(x, 1 - me, 1 - me), x)
            out = torch.zeros(3, 2, dtype=dtype).T
            assert comm.all_reduce(x, "lor", out=out) is out
            assert torch.equal(out, x.bool().to(dtype))
        gradient = torch.ones(3, requires_grad=True)
        assert comm.all_reduce(gradient).tolist() == [size] * 3
        assert comm.broadcast(torch.ones(2) if me == 0 else torch.zeros(2)).tolist() == [1, 1]
        # Where the sender's library cannot be imported, its arrays come as NumPy arrays.
        if me == 1:
            sys.modules["torch"] = None
        try:
            got = comm.broadcast(torch.ones(2, dtype=torch.bfloat16) if me == 0 else None)
        finally:
            sys.modules["torch"] = torch
        assert me == 0 or (type(got) is np.ndarray and got.dtype == dtype_of("bfloat16"))

    ranks(program)


@sizes(2)
@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="needs JAX")
def test_jax_arrays_come_back_as_jax_arrays(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import jax.numpy as jnp

            x = jnp.arange(6.0).reshape(2, 3) + comm.rank
            total = comm.all_reduce(x)
            assert isinstance(total, type(x))
            assert total.tolist() == [[1, 3, 5], [7, 9, 11]]
            got = comm.broadcast(x.astype(jnp.bfloat16) if comm.rank else None, 1)
            assert got.dtype == jnp.bfloat16
            assert got.tolist() == [[1, 2, 3], [4, 5, 6]]

    ranks(program)


# --- objects ---------------------------------------------------------------------------------


@sizes(2, 5, more=(1,))
def test_objects_travel_through_every_collective_that_takes_them(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        objects: list[Callable[[int], Any]] = [
            lambda rank: None,
            lambda rank: rank,
            lambda rank: f"rank {rank}" * rank,
            lambda rank: b"x" * (40_000 * rank),
            lambda rank: {"rank": rank, "nested": [(rank, {rank})]},
            lambda rank: np.array([rank, "two", None], object),
            lambda rank: "long" * 30_000 if rank == 0 else "",
        ]
        for make in objects:
            everything = [make(rank) for rank in range(size)]
            for root in range(size):
                mine = make(root) if me == root else None
                for name in algorithms("broadcast"):
                    same(comm.broadcast(mine, root, algorithm=name), make(root))
                for name in (None, "linear", "tree"):
                    gathered = comm.gather(make(me), root, algorithm=name)
                    assert (gathered is None) == (me != root)
                    if me == root:
                        assert type(gathered) is list
                        same(gathered, everything)
                    own = comm.scatter(everything if me == root else None, root, algorithm=name)
                    same(own, make(me))
            for name in algorithms("all_gather"):
                same(comm.all_gather(make(me), algorithm=name), everything)
            for name in algorithms("all_to_all"):
                got = comm.all_to_all([(me, make(rank)) for rank in range(size)], algorithm=name)
                same([value for _, value in got], [make(me)] * size)
                assert [rank for rank, _ in got] == list(range(size))
        assert comm.scatter(tuple(range(size)) if me == 0 else None) == me

    def same(actual: Any, expected: Any) -> None:
        np.testing.assert_equal(actual, expected)

    ranks(program)


@sizes(1, 3)
def test_arrays_inside_objects_arrive_whole_and_writable(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        fixed = np.arange(100_000.0)
        fixed.flags.writeable = False
        sent = {"large": np.arange(300_000) * me, "small": np.arange(3), "fixed": fixed}
        for rank, got in enumerate(comm.all_gather(sent)):
            np.testing.assert_array_equal(got["large"], np.arange(300_000) * rank)
            for key in sent:
                got[key][:] = 0
        got = comm.broadcast(sent if me == size - 1 else None, size - 1)
        assert got["large"][-1] == 299_999 * (size - 1)
        assert me == size - 1 or got["fixed"].flags.writeable
        assert sent["large"][-1] == 299_999 * me

    ranks(program)


@sizes(2, 5, more=(1,))
def test_scan_and_exscan_combine_the_ranks_up_to_this_one(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for count in (0, 1, 7, 5000, 70_000):
            xs = [draw(rank, "float64", (count,)) for rank in range(size)]
            for op in ("sum", "max", "avg"):
                for name in (None, *pycoll.algorithms("scan")):
                    check(comm.scan(xs[me], op, algorithm=name), reduced(op, xs[: me + 1]))
                    before = comm.exscan(xs[me], op, algorithm=name)
                    out = np.full(count, -1.0)
                    again = comm.exscan(xs[me], op, out=out, algorithm=name)
                    if me == 0:
                        assert before is None
                        assert again is None
                        assert (out == -1).all()
                    else:
                        check(before, reduced(op, xs[:me]))
                        assert again is out
                        check(out, before)
        last = pycoll.Op(lambda a, b: b, commutative=False)
        for name in (None, *pycoll.algorithms("scan")):  # the core does not have this operator
            assert comm.scan(np.array([me]), last, algorithm=name).tolist() == [me]
            before = comm.exscan(np.array([me]), last, algorithm=name)
            assert before is None if me == 0 else before.tolist() == [me - 1]
        assert comm.scan(me + 1) == (me + 1) * (me + 2) // 2
        assert comm.scan(str(me), lambda a, b: a + b) == "".join(map(str, range(me + 1)))
        assert comm.exscan([me], lambda a, b: a + b) == (list(range(me)) or None)
        with pytest.raises(ValueError, match="shared_memory, linear"):
            comm.scan(1, algorithm="ring")

    ranks(program)


@sizes(2, 5, more=(1,))
def test_a_python_function_reduces_objects_in_rank_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        text = "".join(map(str, range(size)))
        assert comm.all_reduce(str(me), lambda a, b: a + b) == text
        assert comm.all_reduce(str(me), pycoll.Op(lambda a, b: a + b, commutative=False)) == text
        assert comm.all_reduce([me], lambda a, b: a + b) == list(range(size))
        assert comm.all_reduce({me}, set.union) == set(range(size))
        assert comm.all_reduce(2**70, max) == 2**70
        got = comm.all_reduce(np.array([me, str(me)], object), lambda a, b: a + b)
        assert got.tolist() == [size * (size - 1) // 2, text]
        for root in range(size):
            got = comm.reduce((me,), lambda a, b: a + b, root=root)
            assert got == (tuple(range(size)) if me == root else None)

    ranks(program)


# --- operators -------------------------------------------------------------------------------


def multiply(a: Array, b: Array) -> Array:
    return a @ b


def after(a: Array, b: Array) -> Array:
    """Composition of the affine maps x -> m x + c, modulo 2**16: elementwise on pairs of uint8."""
    m, c = a >> 16, a & 0xFFFF
    n, d = b >> 16, b & 0xFFFF
    return ((m * n) & 0xFFFF) << 16 | ((m * d + c) & 0xFFFF)


@sizes(2, 3, 5, more=(1, 8))
def test_operators_that_are_not_commutative_combine_in_rank_order(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        rng = np.random.default_rng(5)
        matrices = list(rng.integers(-3, 4, (size, 3, 3)))
        product = functools.reduce(multiply, matrices)
        whole = pycoll.Op(multiply, commutative=False)
        maps = [
            rng.integers(0, 2**32, (size, 901), "uint64", endpoint=True) & 0xFFFFFFFF
            for _ in range(size)
        ]
        composed = functools.reduce(after, maps)
        pieces = pycoll.Op(after, commutative=False, elementwise=True)
        check(comm.all_reduce(matrices[me], whole), product)
        check(comm.all_reduce(matrices[me], multiply), product)
        check(comm.all_reduce(maps[me], pieces), composed)
        check(comm.reduce_scatter(maps[me], pieces), composed[me])
        rows = np.stack([matrices[me]] * size)
        check(comm.reduce_scatter(rows, whole), product)
        for root in range(size):
            got = comm.reduce(matrices[me], whole, root=root)
            assert got is None or np.array_equal(got, product)
            got = comm.reduce(maps[me], pieces, root=root)
            assert got is None or np.array_equal(got, composed)
        for name in pycoll.algorithms("all_reduce"):
            try:
                got = comm.all_reduce(maps[me], pieces, algorithm=name)
            except ValueError as exc:
                assert "rank order" in str(exc)  # noqa: PT017  it may serve, or say why not
            else:
                check(got, composed)

    ranks(program)


@sizes(2, 5, more=(1,))
def test_an_operator_gets_whole_arrays_unless_it_is_elementwise(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size

        def sort_together(a: Array, b: Array) -> Array:
            assert a.shape == b.shape == (40, 5)
            assert a.dtype == np.float32
            return np.sort(np.concatenate([a.ravel(), b.ravel()]))[:200].reshape(40, 5)

        all_x = [np.random.default_rng(r).random((40, 5), "f4") for r in range(size)]
        smallest = np.sort(np.concatenate([x.ravel() for x in all_x]))[:200].reshape(40, 5)
        expected = smallest if size > 1 else all_x[0]
        check(comm.all_reduce(all_x[me], pycoll.Op(sort_together)), expected)

        def larger(a: Array, b: Array) -> Array:
            assert a.shape == b.shape
            return np.where(abs(a) > abs(b), a, b)

        for dtype in DTYPES:
            values = [(3 * (r + 1) * np.arange(-9, 1000) % 101) for r in range(size)]
            values = [value.astype(dtype_of(dtype)) for value in values]
            op = pycoll.Op(larger, elementwise=True)
            check(comm.all_reduce(values[me], op, algorithm="ring"), reduced("max", values))

    ranks(program)


@sizes(2, 5, more=(1,))
def test_minloc_and_maxloc_find_the_extreme_and_the_lowest_index(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        pair = np.dtype([("value", "f8"), ("index", "i4")])
        rng = np.random.default_rng(2)
        values = rng.integers(0, 4, (size, 50)).astype(float)
        x = np.empty(50, pair)
        x["value"], x["index"] = values[me], me
        for op, extreme, first in (("minloc", np.min, np.argmin), ("maxloc", np.max, np.argmax)):
            for name in pycoll.algorithms("all_reduce"):
                got = comm.all_reduce(x, op, algorithm=name)
                assert got.dtype == pair
                np.testing.assert_array_equal(got["value"], extreme(values, axis=0))
                np.testing.assert_array_equal(got["index"], first(values, axis=0))
        assert comm.all_reduce((float(me % 2), me), "maxloc") == (
            (1.0, 1) if size > 1 else (0.0, 0)
        )
        best = comm.reduce((-me, size - me), "minloc", root=size - 1)
        assert best == ((1 - size, 1) if me == size - 1 else None)

    ranks(program)


@sizes(3, 4, more=(7,))
def test_every_rank_gets_the_same_bits_each_time(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for dtype in (*FLOATS, *COMPLEXES):
            all_x = [np.random.default_rng(r).standard_normal(2003) for r in range(size)]
            if dtype in COMPLEXES:
                all_x = [x + 1j * x[::-1] for x in all_x]
            x = all_x[me].astype(dtype_of(dtype))
            exact = np.sum([x.astype(dtype_of(dtype)).astype(complex) for x in all_x], axis=0)
            tolerance = {"float16": 3e-3, "bfloat16": 3e-2}.get(dtype, 1e-6)
            for name in pycoll.algorithms("all_reduce"):
                first = comm.all_reduce(x, algorithm=name)
                again = comm.all_reduce(x, algorithm=name)
                assert first.tobytes() == again.tobytes()
                digest = hashlib.sha256(first.tobytes()).hexdigest()
                assert set(comm.all_gather(digest)) == {digest}
                np.testing.assert_allclose(first.astype(complex), exact, tolerance, 4 * tolerance)

    ranks(program)


# --- out -------------------------------------------------------------------------------------


def spaced(shape: tuple[int, ...], dtype: Any) -> Array:
    """A non-contiguous array of that shape."""
    return np.full((*shape, 2), 99).astype(dtype)[..., 0]


@sizes(2, 5, more=(1,))
def test_out_is_filled_and_returned_whatever_its_layout(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        all_x = draw_all(1, size, "float32", (size, 301, 2))
        x, total, stacked = all_x[me], reduced("sum", all_x), np.stack(all_x)
        for make in (
            lambda shape, dtype: np.full(shape, 9, dtype),
            spaced,
            lambda shape, dtype: np.full(shape, 9, dtype, order="F"),
            lambda shape, dtype: np.full(shape, 9, dtype)[::-1],
        ):
            for call, expected in (
                (functools.partial(comm.all_reduce, x), total),
                (functools.partial(comm.reduce_scatter, x), total[me]),
                (functools.partial(comm.all_gather, x), stacked),
                (functools.partial(comm.all_to_all, x), stacked[:, me]),
                (functools.partial(comm.scatter, x if me == 0 else None), all_x[0][me]),
            ):
                out = make(expected.shape, "f4")
                assert call(out=out) is out
                np.testing.assert_array_equal(out, expected)
            for call, expected in ((comm.reduce, total), (comm.gather, stacked)):
                out = make(expected.shape, "f4")
                before = out.copy()
                got = call(x, root=size - 1, out=out)
                assert got is (out if me == size - 1 else None)
                np.testing.assert_array_equal(out, expected if me == size - 1 else before)

    ranks(program)


@sizes(2, 5, more=(1,))
def test_the_in_place_forms_give_what_separate_arrays_give(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        all_x = draw_all(2, size, "int64", (size, 1001))
        total = reduced("sum", all_x)
        for make in (np.array, lambda x: spaced_copy(x), np.asfortranarray):
            for name in algorithms("all_reduce"):
                x = make(all_x[me])
                assert comm.all_reduce(x, out=x, algorithm=name) is x
                np.testing.assert_array_equal(x, total)
            for name in algorithms("all_gather"):
                out = make(np.zeros((size, size, 1001), np.int64))
                out[me] = all_x[me]
                assert comm.all_gather(out[me], out=out, algorithm=name) is out
                np.testing.assert_array_equal(out, np.stack(all_x))
            for name in algorithms("reduce_scatter"):
                x = make(all_x[me])
                out = x[me]
                assert comm.reduce_scatter(x, out=out, algorithm=name) is out
                np.testing.assert_array_equal(out, total[me])
                others = [rank for rank in range(size) if rank != me]
                np.testing.assert_array_equal(x[others], all_x[me][others])

    def spaced_copy(x: Array) -> Array:
        copy = spaced(x.shape, x.dtype)
        copy[...] = x
        return copy

    ranks(program)


@sizes(1, 3)
def test_arrays_of_other_kinds_can_be_filled(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        out: Any = array.array("d", [0.0] * 3)
        assert comm.all_reduce(np.arange(3.0), out=out) is out
        assert out.tolist() == [0, size, 2 * size]
        out = memoryview(bytearray(size))
        assert comm.all_gather(np.array(me, "u1"), out=out) is out
        assert out.tolist() == list(range(size))
        out = np.zeros(3, ml_dtypes.bfloat16)
        assert comm.all_reduce(np.ones(3, ml_dtypes.bfloat16), out=out) is out
        assert out.tolist() == [size] * 3

    ranks(program)


@sizes(2, 5)
def test_broadcast_fills_the_array_that_is_passed_off_root(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for length in (3, 5000):
            sent = np.arange(2.0 * length).reshape(2, length)
            for root in range(size):
                for name in algorithms("broadcast"):
                    for mine in (np.zeros((2, length)), spaced((2, length), "f8")):
                        x = sent if me == root else mine
                        assert comm.broadcast(x, root, algorithm=name) is x
                        np.testing.assert_array_equal(x, sent)
        out = array.array("i", [0] * 4)
        got = comm.broadcast(np.arange(4, dtype="i4") if me == 0 else out)
        assert me == 0 or got is out
        assert got.tolist() == [0, 1, 2, 3]

    ranks(program)


@sizes(2, 3)
def test_an_input_may_be_changed_as_soon_as_the_call_returns(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for length in (10, 400, 10_000, 300_000):
            for _ in range(3):
                x = np.full((size, length), me + 1)
                expected = np.repeat(np.arange(1, size + 1), length).reshape(size, length)
                got = [comm.all_gather(x[0])]
                x[:] = -1
                root = comm.broadcast(np.full(length, 7) if me == 0 else None)
                root[:] = -1
                x[:] = me + 1
                got.append(comm.all_to_all(x))
                x[:] = me + 1
                gathered = comm.gather(x[0])
                x[:] = -1
                got.append(expected if gathered is None else gathered)
                for one in got:
                    np.testing.assert_array_equal(one, expected)
                x[:] = me + 1
                total = comm.reduce(x[0])
                x[:] = -1
                assert total is None or (total == size * (size + 1) // 2).all()

    ranks(program)


# --- calls and communicators -----------------------------------------------------------------


@sizes(2, 5, more=(1, 3, 6, 9))
def test_nobody_leaves_a_barrier_before_everybody_has_entered(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for late in range(comm.size):
            for name in algorithms("barrier"):
                if comm.rank == late:
                    comm.sendrecv(np.zeros(100_000), late, late)
                entered = time.monotonic_ns()  # one clock for all processes of the machine
                comm.barrier(algorithm=name)
                left = time.monotonic_ns()
                times = comm.all_gather(np.array([entered, left]))
                assert times[:, 0].max() <= times[:, 1].min()

    ranks(program)


@sizes(2, 4)
def test_a_rank_may_run_ahead_of_the_others(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        got = [comm.broadcast(i if me == 0 else None) for i in range(500)]
        assert got == list(range(500))
        for i in range(300):
            comm.gather(np.full(100, i), root=size - 1)
        totals = [comm.reduce(np.full(200, i), root=i % size) for i in range(300)]
        assert all((total == i * size).all() for i, total in enumerate(totals) if i % size == me)
        # More bytes than are buffered: the root has to wait for the others, and they come.
        for i in range(40):
            x = comm.broadcast(np.full(100_000, i, "u1") if me == 0 else None)
            assert (x == i).all()

    ranks(program)


@sizes(2, 5)
def test_calls_of_dup_and_split_communicators_never_meet(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        twin = comm.dup()
        parts = comm.split(me % 2, key=-me)
        members = [rank for rank in reversed(range(size)) if rank % 2 == me % 2]
        assert (parts.size, members[parts.rank]) == (len(members), me)
        assert parts.all_gather(me) == members
        # The same calls on all three, in an order that differs from rank to rank: point to point
        # first, all of it under way at once.
        order = np.random.default_rng(me).permutation(3)
        comms = [comm, twin, parts]
        for which in order:
            c = comms[which]
            c.send(f"for {which}", (c.rank + 1) % c.size, tag=3)
        for which in reversed(order):
            c = comms[which]
            assert c.recv((c.rank - 1) % c.size, tag=3) == f"for {which}"
        for i in range(20):
            comm.broadcast(("comm", i) if me == 0 else None)
            assert twin.all_reduce(i) == i * size
            assert parts.all_reduce(me, "max") == max(members)
            assert comm.all_gather((me, i)) == [(rank, i) for rank in range(size)]
        again = parts.dup()
        assert again.all_gather(me) == members
        for made in (again, parts, twin):
            made.close()
            made.close()
        comm.barrier()

    ranks(program)


@sizes(1, 4)
def test_split_orders_by_key_then_rank_and_leaves_out_those_without_color(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        assert comm.split(None) is None
        all_of_us = comm.split(0, key=0)
        assert all_of_us.all_gather(me) == list(range(size))
        backward = comm.split(7, -me)
        assert backward.all_gather(me) == list(reversed(range(size)))
        assert backward.rank == size - 1 - me
        some = comm.split(-5 if me in (0, size - 1) else None)
        assert (some is None) == (me not in (0, size - 1))
        if some is not None:
            assert some.all_gather(me) == sorted({0, size - 1})
            # Roots and sources are ranks of the new communicator.
            assert some.broadcast("last" if me == size - 1 else None, root=some.size - 1) == "last"
        alone = comm.split(me)
        assert (alone.rank, alone.size) == (0, 1)
        assert alone.all_reduce(5) == 5

    ranks(program)


@sizes(1, 3)
def test_a_closed_communicator_says_so_and_the_others_work_on(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        with comm.dup() as twin:
            twin.barrier()
        for call in (twin.barrier, lambda: twin.send(1, 0), twin.dup, lambda: twin.iprobe()):
            with pytest.raises(pycoll.Error, match="closed"):
                call()
        assert comm.all_reduce(1) == comm.size
        # What one rank has sent before the others make the communicator waits for them.
        first = comm.dup()
        second = first.dup()
        second.send(comm.rank, (comm.rank + 1) % comm.size)
        assert second.recv() == (comm.rank - 1) % comm.size

    ranks(program)


@sizes(1, 3)
def test_allreduce_is_another_name_of_all_reduce(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        assert comm.allreduce(2) == 2 * comm.size
        assert 0 <= comm.rank < comm.size == comm.local_size
        assert (comm.local_rank, comm.node) == (comm.rank, 0)
        assert f"rank {comm.rank} of {comm.size}" in repr(comm)

    ranks(program)
