"""Every collective on real ranks: objects and operators."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collective_cases import (
    COMPLEXES,
    DTYPES,
    FLOATS,
    Array,
    Comm,
    algorithms,
    check,
    draw,
    dtype_of,
    reduced,
)
from tiers import sizes

import pycoll


@sizes(3, more=(1, 2, 5))
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
