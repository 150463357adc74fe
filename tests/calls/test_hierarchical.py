"""Calls by the algorithm `hierarchical`, of ranks on two hosts and on three uneven ones."""

from __future__ import annotations

import functools
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiers import THREE_HOSTS, TWO_HOSTS, few

import pycoll

Comm = Any

WORLDS = [(4, TWO_HOSTS), (5, THREE_HOSTS)]
of_worlds = pytest.mark.parametrize(
    "ranks",
    few(WORLDS[1:], WORLDS[:1]),
    indirect=True,
    scope="module",
    ids=["uneven", "two hosts"],
)
FORCED = {"algorithm": "hierarchical"}


@of_worlds
def test_values_are_combined(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for op, fn, dtype in [
            ("sum", np.add, "float64"),
            ("avg", np.add, "float32"),
            ("avg", np.add, ml_dtypes.bfloat16),
            ("prod", np.multiply, "uint8"),
            ("max", np.maximum, "int8"),
            ("lxor", np.logical_xor, "uint16"),
            (pycoll.Op(np.bitwise_or, elementwise=True), np.bitwise_or, "int64"),
        ]:
            for shape in ((), (1,), (3, 5), (2000,)):
                rng = np.random.default_rng(7)
                xs = [rng.integers(0, 9, shape).astype(dtype) for _ in range(comm.size)]
                total = np.asarray(functools.reduce(fn, xs))
                if op == "avg":
                    total = total / comm.size
                got = comm.all_reduce(xs[comm.rank], op, **FORCED)
                np.testing.assert_array_equal(got, total.astype(dtype))
                own = xs[comm.rank].copy()
                comm.all_reduce(own, op, out=own, **FORCED)
                np.testing.assert_array_equal(own, total.astype(dtype))
        for _ in range(20):
            comm.barrier(**FORCED)

    ranks(program)


@of_worlds
def test_a_barrier_lets_nobody_out_before_the_last_is_in(ranks: Any) -> None:
    def program(comm: Comm, late: int) -> tuple[float, float]:
        if comm.rank == late:  # the others are about to enter
            for _ in range(comm.size - 1):
                comm.recv()
        else:
            comm.send(None, late)
        entered = time.monotonic()
        comm.barrier(**FORCED)
        return entered, time.monotonic()

    for late in range(4):
        times = ranks(program, late)
        assert min(left for _, left in times) > max(entered for entered, _ in times)


@of_worlds
def test_other_calls_are_told_apart(ranks: Any) -> None:
    def program(comm: Comm, odd: int) -> str:
        with comm.dup() as other:
            try:
                if comm.rank == odd:
                    other.barrier(**FORCED)
                else:
                    other.all_reduce(np.ones(3, int), **FORCED)
            except pycoll.MismatchError as error:
                with pytest.raises(pycoll.Error):
                    other.barrier()
                return str(error)
            return ""

    for odd in range(4):
        for text in ranks(program, odd):
            assert "barrier(algorithm=hierarchical)" in text
            assert "all_reduce(int64[3]" in text


@of_worlds
def test_a_request_gives_the_same_bits(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for dtype in ("float16", "float32", "complex64", "int32"):
            x = np.random.default_rng(comm.rank).normal(0, 99, 999).astype(dtype)
            blocking = comm.all_reduce(x, **FORCED)
            assert comm.iall_reduce(x, **FORCED).wait().tobytes() == blocking.tobytes()

    ranks(program)
