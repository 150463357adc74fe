"""Averages of 16-bit floats: added in float32 and rounded once, however a call goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

WORLDS = {
    "shm": 3,
    "tcp": (3, ("--transport", "tcp")),
}

of_three = pytest.mark.parametrize(
    "ranks", WORLDS.values(), indirect=True, scope="module", ids=WORLDS
)


def kind_of(dtype: str) -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def values(rank: int, dtype: str) -> Any:
    """What a rank passes: sums leave float16, need more bits, and are subnormal; 6 elements."""
    import ml_dtypes

    kind = kind_of(dtype)
    least, large = float(ml_dtypes.finfo(kind).smallest_subnormal), 60_000
    first = [large, 2048, least, 256, 3 * least, -large]
    return np.array(first if rank == 0 else [large, 1, least, 1, 0, -large]).astype(kind)


def average(xs: list[Any]) -> Any:
    """The exact sum, which fits in float64, divided and rounded once."""
    return (sum(x.astype(np.float64) for x in xs) / len(xs)).astype(xs[0].dtype)


def averages(comm: Any, x: Any) -> Iterator[tuple[Any, Any]]:
    """Results of calls, with what they should be."""
    rank, size = comm.rank, comm.size
    all_x = [values(peer, x.dtype.name) for peer in range(size)]
    full, rows = average(all_x), x.reshape(size, -1)
    mine, upto, before = full.reshape(size, -1)[rank], average(all_x[: rank + 1]), all_x[:rank]
    yield comm.all_reduce(x, "avg"), full
    yield comm.iall_reduce(x, "avg").wait(), full
    yield comm.all_reduce(x[::2], "avg"), full[::2]
    yield comm.all_reduce(x[0], "avg"), full[0]
    yield comm.iall_reduce(x[:0], "avg").wait(), full[:0]
    yield comm.all_reduce(x, "avg", algorithm="ring"), full
    in_place = x.copy()
    assert comm.iall_reduce(in_place, "avg", out=in_place).wait() is in_place
    yield in_place, full
    strided = np.zeros(12, x.dtype)[::2]
    comm.iall_reduce(x, "avg", out=strided).wait()
    yield strided, full
    request = comm.persistent.all_reduce(in_place, "avg")
    for _ in range(2):
        in_place[:] = x
        request.start()
        yield request.wait(), full
    for many in comm.all_reduce_many, lambda *args: comm.iall_reduce_many(*args).wait():
        yield from zip(many([x, x[:2]], "avg"), (full, full[:2]), strict=True)
        yield from zip(many([x], "avg"), [full], strict=True)
    yield comm.reduce(x, "avg", 1), full if rank == 1 else None
    yield comm.ireduce(x, "avg", 1).wait(), full if rank == 1 else None
    yield comm.reduce_scatter(rows, "avg"), mine
    yield comm.ireduce_scatter(rows, "avg").wait(), mine
    counts, begin = [0, 1, 5], [0, 0, 1][rank]
    some = full[begin : begin + counts[rank]]
    yield comm.reduce_scatterv(x, counts, "avg"), some
    yield comm.ireduce_scatterv(x, counts, "avg").wait(), some
    yield comm.scan(x, "avg"), upto
    yield comm.iscan(x, "avg").wait(), upto
    yield comm.exscan(x, "avg"), average(before) if before else None
    yield comm.iexscan(x, "avg").wait(), average(before) if before else None


@of_three
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_average_of_16_bit_floats_is_rounded_once(ranks: Any, dtype: str) -> None:
    def program(comm: Any, dtype: str) -> None:
        x = values(comm.rank, dtype)
        kept = x.copy()
        for number, (got, right) in enumerate(averages(comm, x)):
            assert (got is None) == (right is None), number
            if right is not None:
                same = got.dtype == right.dtype and np.asarray(got).tobytes() == right.tobytes()
                assert same, (number, got, right)
        assert x.tobytes() == kept.tobytes()

    ranks(program, dtype)


@of_three
def test_an_iexscan_leaves_the_out_of_rank_0_alone(ranks: Any) -> None:
    def program(comm: Any) -> list[float]:
        out = np.full(2, 7, np.float16)
        comm.iexscan(np.ones(2, np.float16), "avg", out=out).wait()
        return [float(x) for x in out]

    assert ranks(program) == [[7, 7], [1, 1], [1, 1]]


@of_three
def test_a_call_and_its_twin_give_the_same_bits_by_the_same_algorithm(ranks: Any) -> None:
    def program(comm: Any) -> None:
        for dtype in np.float16, np.float32:
            x = np.random.default_rng(comm.rank).normal(size=999).astype(dtype)
            for name in "tree", "ring", "recursive_doubling":
                got = comm.all_reduce(x, algorithm=name)
                assert got.tobytes() == comm.iall_reduce(x, algorithm=name).wait().tobytes(), name

    ranks(program)
