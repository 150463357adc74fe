"""Every collective on real ranks: `out`, calls and communicators."""

from __future__ import annotations

import array
import functools
import time
from typing import Any

import ml_dtypes
import numpy as np
from collective_cases import Array, Comm, algorithms, draw_all, reduced
from tiers import sizes


def spaced(shape: tuple[int, ...], dtype: Any) -> Array:
    """A non-contiguous array of that shape."""
    return np.full((*shape, 2), 99).astype(dtype)[..., 0]


@sizes(2, 5, more=(1,), deadline=True)
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


@sizes(2, 5, more=(1,), deadline=True)
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


@sizes(2, 4, deadline=True)
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
def test_allreduce_is_another_name_of_all_reduce(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        assert comm.allreduce(2) == 2 * comm.size
        assert 0 <= comm.rank < comm.size == comm.local_size
        assert (comm.local_rank, comm.node) == (comm.rank, 0)
        assert f"rank {comm.rank} of {comm.size}" in repr(comm)
        assert f"Communicator 'dp' rank {comm.rank} of {comm.size}" in repr(
            comm.split(0, name="dp")
        )

    ranks(program)
