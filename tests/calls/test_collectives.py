"""Every collective on real ranks, against NumPy: values, shapes, dtypes, operators, algorithms.

Each rank draws the arrays of all ranks from one seed, so each knows what must come out.
"""

from __future__ import annotations

import array
import importlib.util
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from collective_cases import (
    DTYPES,
    REDUCTIONS,
    Array,
    Comm,
    algorithms,
    check,
    draw_all,
    reduced,
)
from script_jobs import Jobs, all_well
from tiers import few, sizes

from pycoll._transports._core import KINDS

SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (2, 3), (5, 1, 4), (1000,))


# Around the limits of what travels with its announcement (4 KiB) and of what is buffered (64 KiB).
LENGTHS = (0, 1, 511, 512, 513, 8192, 8193, 50_001)


@sizes(4, 5, more=(1, 2, 3, 6, 7, 8, 9))
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


@sizes(2, 5, more=(1,), deadline=True)
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


@sizes(1, 2, more=(3,), deadline=True)
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
@sizes(2, 3, more=(1, 4), deadline=True)
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
@pytest.mark.parametrize("mib", few([20], [64]))
def test_many_mib_arrive_whole(ranks: Any, mib: int) -> None:
    def program(comm: Comm, mib: int) -> None:
        me, size = comm.rank, comm.size
        count = mib * 2**20 // 8
        x = np.arange(count, dtype=np.int64) * (me + 1)
        total = comm.all_reduce(x)
        assert np.array_equal(total, np.arange(count) * (size * (size + 1) // 2))
        got = comm.broadcast(total if me == 1 else None, 1)
        assert np.array_equal(got, total)
        rows = comm.all_to_all(x[: count // size * size].reshape(size, -1))
        block = np.arange(count // size) + me * (count // size)
        assert np.array_equal(rows, np.stack([block * (rank + 1) for rank in range(size)]))

    ranks(program, mib)


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

    ranks(program)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
def test_where_a_library_cannot_be_imported_its_arrays_come_as_numpys(
    job: Jobs, transport: str
) -> None:
    text = """
import sys
import ml_dtypes
import numpy as np

if rank == 1:
    sys.modules["torch"] = None
    x = None
else:
    import torch
    x = torch.ones(2, dtype=torch.bfloat16)
got = comm.broadcast(x)
if rank == 1:
    assert type(got) is np.ndarray and got.dtype == ml_dtypes.bfloat16 and got.tolist() == [1, 1]
ok()
"""
    all_well(job(2, text, "--transport", transport), 2)


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
