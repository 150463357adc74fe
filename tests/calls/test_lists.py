"""Lists of equal arrays, one for each rank, in place of one array with an axis of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pycoll

Comm = pycoll.Communicator

WAYS = [2, (3, ("--transport", "tcp")), (3, (), {"PYCOLL_SINGLE_COPY": "0"})]

everywhere = pytest.mark.parametrize(
    "ranks", WAYS, indirect=True, scope="module", ids=["shm", "tcp", "segments"]
)

SHAPES = [(), (0,), (3,), (2, 5), (40_000,)]


def empty(comm: Comm, shape: tuple[int, ...]) -> list[Any]:
    """An array for each rank, of which one is strided."""
    rows = [np.full(shape, np.nan) for _ in range(comm.size)]
    rows[-1] = np.full((*shape, 2), np.nan)[..., 0]
    return rows


def calls(comm: Comm, name: str) -> list[Any]:
    """The call, its twin, and a persistent one, which return its result."""
    persistent = getattr(comm.persistent, name)
    return [
        getattr(comm, name),
        lambda *args, **how: getattr(comm, f"i{name}")(*args, **how).wait(),
        lambda *args, **how: persistent(*args, **how).start().wait(),
    ]


@everywhere
def test_gathers_fill_a_list_of_arrays(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for shape in SHAPES:
            x = np.full(shape, comm.rank + 0.5)
            for call in calls(comm, "all_gather"):
                out = empty(comm, shape)
                assert call(x, out=out) is out
                for rank, row in enumerate(out):
                    assert np.array_equal(row, np.full(shape, rank + 0.5))
            for call in calls(comm, "gather"):
                out, root = empty(comm, shape), comm.size - 1
                got = call(x, root, out if comm.rank == root else None)
                assert (got is out) == (comm.rank == root)
                for rank, row in enumerate(out if comm.rank == root else ()):
                    assert np.array_equal(row, np.full(shape, rank + 0.5))

    ranks(program)


@everywhere
def test_a_list_here_and_an_array_there_are_the_same_call(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x = np.full(30_000, comm.rank + 1.0)
        out = empty(comm, x.shape) if comm.rank else None
        rows = comm.all_gather(x, out=out, algorithm=None)
        assert [row[-1] for row in rows] == [rank + 1.0 for rank in range(comm.size)]
        own = empty(comm, x.shape)
        own[comm.rank] = x  # in place
        comm.all_gather(x, out=tuple(own))
        assert [row[0] for row in own] == [rank + 1.0 for rank in range(comm.size)]
        for algorithm in pycoll.algorithms("all_gather"):
            if algorithm not in ("shared_memory", "hierarchical"):
                got = comm.all_gather(x, empty(comm, x.shape), algorithm=algorithm)
                assert [row[9] for row in got] == [rank + 1.0 for rank in range(comm.size)]

    ranks(program)


@everywhere
def test_scatter_and_reduce_scatter_take_lists_of_equal_arrays(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for shape in SHAPES:
            xs = empty(comm, shape)
            for rank, x in enumerate(xs):
                x[...] = rank + 1
            mine = np.full(shape, comm.rank + 1.0)
            for call in calls(comm, "scatter"):
                out = np.empty(shape)
                assert call(xs if comm.rank == 0 else None, out=out) is out
                assert np.array_equal(out, mine)
                got = call(tuple(xs) if comm.rank == 0 else None)
                assert isinstance(got, np.ndarray) and np.array_equal(got, mine)  # noqa: PT018
            for call in calls(comm, "reduce_scatter"):
                out = np.empty(shape)
                assert call(xs, "sum", out) is out
                assert np.array_equal(out, comm.size * mine)
                if comm.rank:  # one array on other ranks
                    assert np.array_equal(call(xs, "max"), mine)
                else:
                    assert np.array_equal(call(np.stack(xs), "max"), mine)

    ranks(program)


@everywhere
def test_rows_of_another_byte_order_or_of_no_numbers_keep_their_bytes(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size = comm.size
        pair = np.dtype([("a", ">i2"), ("b", "<f8")], align=True)
        for dtype in (">i4", ">f8", ">c16", ">M8[s]", "S3", pair):
            rows = [np.arange(3 * k, 3 * k + 3).astype("i4").astype(dtype) for k in range(size)]
            for call in calls(comm, "scatter"):
                for out in (None, np.empty(3, dtype)):
                    got = call(rows if comm.rank == 1 else None, root=1, out=out)
                    assert got.dtype == rows[0].dtype
                    assert (got == rows[comm.rank]).all(), (dtype, got)

    ranks(program)


@everywhere
def test_what_is_no_list_of_equal_arrays_is_refused_or_goes_as_objects(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x, size = np.ones(3), comm.size
        good = [np.empty(3) for _ in range(size)]
        for wrong, kind, said in (
            ([*good, x], ValueError, f"out is a list of {size} arrays"),
            (
                [*good[1:], np.empty(4)],
                ValueError,
                r"out\[\d\] has shape \(4,\), but the result has shape \(3,\)",
            ),
            ([*good[1:], np.empty(3, np.float32)], ValueError, r"out\[\d\] has dtype float32"),
            ([*good[1:], None], TypeError, r"out\[\d\]"),
            ([x[:], *good[1:]] if comm.rank else [*good[1:], x], ValueError, "overlaps x"),
        ):
            with pytest.raises(kind, match=said):
                comm.all_gather(x, out=wrong)
        for values, error, text in (
            ([x] * (size + 1), ValueError, f"a list of {size} arrays"),
            ([*good[1:], np.empty(4)], ValueError, "takes equal arrays"),
            ([1.0] * size, TypeError, "reduce_scatter takes an array"),
        ):
            with pytest.raises(error, match=text):
                comm.reduce_scatter(values)
        blocks = [np.arange(rank) for rank in range(size)]
        assert len(comm.scatter(blocks if comm.rank == 0 else None)) == comm.rank
        assert comm.scatter(["text"] * size if comm.rank == 0 else None) == "text"
        comm.barrier()

    ranks(program)
