"""out= of gatherv, all_gatherv, scatterv, all_to_allv, reduce_scatterv, scan and exscan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pycoll

Array = Any
Comm = Any
Call = Callable[..., Any]

LENGTHS = (0, 1, 7, 600, 5000, 70_000)
"""Rows of 16 bytes: blocks that travel with their heads, and those that follow them."""

on_every_way = pytest.mark.parametrize(
    "ranks",
    [
        1,
        3,
        (3, ("--transport", "tcp")),
        (2, ("--transport", "zmq")),
        (3, (), {"PYCOLL_SINGLE_COPY": "0"}),
    ],
    indirect=True,
    scope="module",
    ids=["alone", "shm", "tcp", "zmq", "segments"],
)


def block(source: int, dest: int, shift: int = 0) -> Array:
    """What rank `source` has for rank `dest`: of another length for each pair."""
    length = LENGTHS[(2 * source + 3 * dest + shift) % len(LENGTHS)]
    return np.arange(2 * length).reshape(length, 2) + 1000 * source + dest


def all_ways(comm: Comm, name: str) -> list[Call]:
    """The blocking method, its twin, and the persistent one, started twice."""
    twin, again = getattr(comm, f"i{name}"), getattr(comm.persistent, name)

    def twice(*args: Any, **kwargs: Any) -> Any:
        request = again(*args, **kwargs)
        request.start().wait()
        return request.start().wait()

    return [getattr(comm, name), lambda *args, **kwargs: twin(*args, **kwargs).wait(), twice]


def shapes_of_out(blocks: Sequence[Array]) -> list[Any]:
    """Places for blocks: arrays, some None, not contiguous, one array for all, that not so."""
    rows = sum(map(len, blocks))
    return [
        [np.full_like(x, -1) for x in blocks],
        tuple(None if i % 2 else np.full_like(x, -1) for i, x in enumerate(blocks)),
        [np.full((len(x), 4), -1)[:, ::2] for x in blocks],
        np.full((rows, 2), -1),
        np.full((rows, 4), -1)[:, ::2],
    ]


def check_filled(got: Any, out: Any, blocks: Sequence[Array]) -> None:
    """The blocks have come, and to where they should."""
    assert type(got) is list
    for actual, expected in zip(got, blocks, strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)
    if isinstance(out, np.ndarray):
        np.testing.assert_array_equal(out, np.concatenate(blocks))
        assert all(x.base is not None and np.shares_memory(x, out) for x in got if x.size)
    else:
        for actual, item in zip(got, out, strict=True):
            assert item is None or actual is item


@on_every_way
def test_blocks_come_to_where_they_are_wanted(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for shift in (0, 3):  # of three ranks all lengths, to each of them
            every = [block(rank, 0, shift) for rank in range(size)]
            mine = [block(rank, me, shift) for rank in range(size)]
            sent = [block(me, rank, shift) for rank in range(size)]
            for gather in all_ways(comm, "all_gatherv"):
                for out in shapes_of_out(every):
                    check_filled(gather(every[me], out), out, every)
            for gather in all_ways(comm, "gatherv"):
                for out in shapes_of_out(every):
                    if me == size - 1:
                        check_filled(gather(every[me], size - 1, out), out, every)
                    else:
                        assert gather(every[me], size - 1, "not looked at") is None
            for exchange in all_ways(comm, "all_to_allv"):
                for out in shapes_of_out(mine):
                    check_filled(exchange(sent, out=out), out, mine)

    ranks(program)


@on_every_way
def test_scatterv_fills_an_array(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for shift in range(len(LENGTHS)):
            root = shift % size
            blocks = [block(root, rank, shift) for rank in range(size)]
            for scatter in all_ways(comm, "scatterv"):
                for out in (np.zeros_like(blocks[me]), np.zeros((len(blocks[me]), 4), int)[:, ::2]):
                    assert scatter(blocks if me == root else None, root, out) is out
                    np.testing.assert_array_equal(out, blocks[me])

    ranks(program)


@on_every_way
def test_reduce_scatterv_fills_an_array(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        function = pycoll.Op(lambda a, b: a + b)
        for counts in ([3] * size, list(range(size)), [2000 * (rank + 1) for rank in range(size)]):
            x = np.arange(2 * sum(counts)).reshape(-1, 2) + me
            begin = sum(counts[:me])
            expected = sum(x - me + rank for rank in range(size))[begin : begin + counts[me]]
            for reduce in all_ways(comm, "reduce_scatterv"):
                for op in ("sum", function):
                    out = np.full((counts[me], 4), -1)[:, ::2]
                    assert reduce(x, counts, op, out) is out
                    np.testing.assert_array_equal(out, expected)
            for reduce in all_ways(comm, "reduce_scatterv")[:2]:  # in place changes x
                both = x.copy()
                rows = both[begin : begin + counts[me]]
                assert reduce(both, counts, out=rows) is rows
                np.testing.assert_array_equal(rows, expected)

    ranks(program)


@on_every_way
def test_scans_fill_an_array(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me = comm.rank
        for count in (1, 1000, 100_000):
            x = np.arange(count) + me
            for op in ("sum", pycoll.Op(lambda a, b: a + b)):
                for scan in all_ways(comm, "scan"):
                    for out in (np.zeros_like(x), np.zeros(2 * count, int)[::2]):
                        assert scan(x, op, out) is out
                        np.testing.assert_array_equal(out, sum(x - r for r in range(me + 1)))
                for exscan in all_ways(comm, "exscan"):
                    for out in (np.full_like(x, -1), np.full(2 * count, -1)[::2]):
                        got = exscan(x, op, out=out)
                        if me == 0:
                            assert got is None
                            assert (out == -1).all()
                        else:
                            assert got is out
                            np.testing.assert_array_equal(out, sum(x - r - 1 for r in range(me)))

    ranks(program)


@on_every_way
def test_what_is_wrong_with_out_is_said_before_anything_is_sent(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        x = np.arange(10.0).reshape(5, 2)
        xs, counts = [x.copy() for _ in range(size)], [5] * size
        tall = np.zeros((5 * size, 2))
        frozen = x.copy()
        frozen.flags.writeable = False
        new = [np.zeros((5, 2)) for _ in range(size)]

        def but_mine(item: Any) -> list[Any]:
            return [*new[:me], item, *new[me + 1 :]]

        def of_array(wrong: Any) -> list[tuple[Any, ...]]:
            return [
                (comm.scan, x, "sum", wrong),
                (comm.exscan, x, "sum", wrong),
                (comm.reduce_scatterv, tall, counts, "sum", wrong),
            ]

        def of_blocks(wrong: Any) -> list[tuple[Any, ...]]:
            return [(comm.all_gatherv, x, wrong), (comm.all_to_allv, xs, wrong)]

        bad: list[tuple[type[Exception], str, list[tuple[Any, ...]]]] = [
            (
                ValueError,
                "float32",
                [*of_array(x.astype("f4")), *of_blocks(but_mine(x.astype("f4")))],
            ),
            (
                ValueError,
                "shape|block is",
                [*of_array(x[:4].copy()), *of_blocks(but_mine(x[:4].copy()))],
            ),
            (ValueError, "read-only", [*of_array(frozen), *of_blocks(but_mine(frozen))]),
            (TypeError, "out is", [*of_array("text"), *of_blocks(but_mine("text")), *of_blocks(3)]),
            (ValueError, f"a list of {size} arrays", of_blocks([*new, None])),
            (ValueError, "into rows of one shape", of_blocks(np.zeros((5 * size, 3)))),
            (ValueError, "alone has 5", of_blocks(np.zeros((4, 2)))),
            (ValueError, "no axes", of_blocks(np.zeros(()))),
            (
                ValueError,
                "overlaps x",
                [
                    (comm.scan, x, "sum", x),
                    (comm.reduce_scatterv, tall, counts, "sum", tall[5 * size - 5 :][::-1]),
                    (comm.all_gatherv, x, but_mine(x)),
                    (comm.all_gatherv, tall[:5], tall),
                    (comm.all_to_allv, xs, but_mine(xs[0])),
                ],
            ),
        ]
        for error, text, calls in bad:
            for method, *args in calls:
                for call in all_ways(comm, method.__name__):
                    with pytest.raises(error, match=text):
                        call(*args)
        with pytest.raises(ValueError, match="Python objects"):
            comm.scan("a", lambda a, b: a + b, out=x)
        if me == 0:
            with pytest.raises(ValueError, match="block is"):
                comm.gatherv(x, 0, [x[:3].copy()] * size)
            with pytest.raises(ValueError, match="out is"):
                comm.scatterv(xs, 0, x[:3].copy())
        with pytest.raises(TypeError, match="out is not an array"):
            comm.scatterv(xs if me == 0 else None, 0, [x])
        assert comm.all_reduce(1) == size

    ranks(program)


@on_every_way
def test_a_communicator_is_usable_when_out_turned_out_not_to_fit(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for count in (3, 70_000):
            x = np.arange(count)
            others = [np.zeros(count + (rank != me), int) for rank in range(size)]
            wholes = [np.zeros(size * count + 1, int), np.zeros(max(count, size * count - 1), int)]
            for gather in all_ways(comm, "all_gatherv")[:2]:
                for out in (others, *wholes):
                    if size == 1 and out is not wholes[0]:
                        continue
                    with pytest.raises(ValueError, match=r"the block is|the blocks have|put one"):
                        gather(x, out)
            for exchange in all_ways(comm, "all_to_allv")[:2]:
                if size > 1:
                    with pytest.raises(ValueError, match="the block is"):
                        exchange([x] * size, others)
            for scatter in all_ways(comm, "scatterv")[:2]:
                if me:
                    for wrong in (np.zeros(count + 1, int), np.zeros(count, "f4")):
                        with pytest.raises(ValueError, match=r"out is .* but the block is"):
                            scatter(None, 0, wrong)
                elif size > 1:
                    for _ in range(2):
                        scatter([x] * size)
            np.testing.assert_array_equal(comm.all_gatherv(x)[-1], x)

    ranks(program)


@on_every_way
def test_some_ranks_may_have_an_out_and_others_none(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size = comm.size
        every = [block(rank, 1) for rank in range(size)]
        for gather in all_ways(comm, "all_gatherv"):
            out = np.zeros((sum(map(len, every)), 2), int) if comm.rank else None
            got = gather(every[comm.rank], out)
            for actual, expected in zip(got, every, strict=True):
                np.testing.assert_array_equal(actual, expected)

    ranks(program)
