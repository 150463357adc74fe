"""Every algorithm, forced, on every way that bytes can go: against NumPy, and counting the bytes.

Each rank draws the arrays of all ranks from one seed, so each knows what must come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sent_messages import sent_messages
from tiers import few

import pycoll

Array = Any
Comm = Any

SHM, TCP = ("--transport", "shm"), ("--transport", "tcp")


def hosts(count: int) -> tuple[str, ...]:
    return "--emulate-hosts", str(count)


# Segments of 4 KiB: the larger values of these tests go through pipelines.
SEGMENT = {"PYCOLL_SEGMENT": "4096"}
WORLDS = [(4, hosts(2), SEGMENT)]
MORE_WORLDS = [
    (3, TCP, SEGMENT),
    (2, SHM, SEGMENT),
    (5, SHM, SEGMENT),
    (6, hosts(3), SEGMENT),
    (7, hosts(2), SEGMENT),
    (8, TCP, SEGMENT),
    (9, hosts(3), SEGMENT),
]
pytestmark = pytest.mark.parametrize(
    "ranks",
    few(WORLDS, MORE_WORLDS),
    indirect=True,
    scope="module",
    ids=[f"{n}-{way[-1]}" for n, way, _ in WORLDS + MORE_WORLDS],
)


def followed_by(a: Array, b: Array) -> Array:
    """First one affine map, then the other, in the halves of a uint32: order is not lost."""
    factor, offset = a >> 16, a & 0xFFFF
    return ((factor * (b >> 16)) & 0xFFFF) << 16 | ((offset * (b >> 16) + b) & 0xFFFF)


SEEN: set[int] = set()


def uncut(a: Array, b: Array) -> Array:
    """Wants all of both, and remembers how long they were."""
    SEEN.update((a.size, b.size))
    return a + b


def whole_seen(size: int) -> None:
    """What `uncut` has got since was as long as a value, and no piece of it."""
    assert {size} >= SEEN
    SEEN.clear()


ORDERED = pycoll.Op(followed_by, commutative=False, elementwise=True)
UNCUT = pycoll.Op(uncut, commutative=True, elementwise=False)
OPERATORS: list[tuple[Any, Callable[[Array, Array], Array], str]] = [
    ("sum", np.add, "float32"),
    ("prod", np.multiply, "int8"),
    ("max", np.maximum, "float64"),
    ("bxor", np.bitwise_xor, "uint16"),
    (ORDERED, followed_by, "uint32"),
    (UNCUT, np.add, "int64"),
]
LENGTHS = (0, 1, 3, 17, 1000)
MOVING = ("int8", "float64", "S3", "bool", "complex64", "i4,f8")


def draw(seed: int, size: int, dtype: str, shape: tuple[int, ...]) -> list[Array]:
    """The arrays of all ranks, such that floats are added exactly."""
    rng = np.random.default_rng(seed)
    top = min(int(np.iinfo(dtype).max), 2**31) if dtype[0] in "iu" else 99
    return [rng.integers(0, top, shape).astype(dtype) for _ in range(size)]


def lengths(size: int) -> tuple[int, ...]:
    """Numbers of elements; the last is longer where the exhaustive tier runs it."""
    return (*LENGTHS, 20_001 if size in (3, 4) else 70_001)


def able(collective: str, op: Any) -> list[str]:
    """The algorithms by messages that take the operator."""
    from pycoll._selection.select import usable

    is_op = isinstance(op, pycoll.Op)
    flags = (is_op and not op.commutative, is_op and not op.elementwise)
    return [
        name
        for name in pycoll.algorithms(collective)
        if name != "shared_memory"
        and usable(collective, name, rank_order=flags[0], whole=flags[1]) is None
    ]


def test_reductions(ranks: Any) -> None:
    def program(comm: Comm) -> int:
        me, size, calls = comm.rank, comm.size, 0
        for index, (op, fn, dtype) in enumerate(OPERATORS):
            for n in lengths(comm.size)[index % 2 :: 2]:
                xs = draw(n + index, size, dtype, (size, n))
                x, total = xs[me], functools.reduce(fn, xs)
                until = [functools.reduce(fn, xs[: r + 1]) for r in range(size)]
                root = (n + index) % size
                for name in able("all_reduce", op):
                    np.testing.assert_array_equal(comm.all_reduce(x, op, algorithm=name), total)
                    own = x.copy()
                    comm.all_reduce(own, op, out=own, algorithm=name)
                    np.testing.assert_array_equal(own, total, name)
                    calls += 2
                for name in able("reduce", op):
                    got = comm.reduce(x, op, root=root, algorithm=name)
                    if me == root:
                        np.testing.assert_array_equal(got, total, name)
                    else:
                        assert got is None
                    calls += 1
                whole_seen(size * n)
                for name in able("reduce_scatter", op):
                    got = comm.reduce_scatter(x, op, algorithm=name)
                    np.testing.assert_array_equal(got, total[me], name)
                    calls += 1
                whole_seen(n)
                for name in able("scan", op):
                    np.testing.assert_array_equal(comm.scan(x, op, algorithm=name), until[me])
                    calls += 1
                for name in able("exscan", op):
                    got = comm.exscan(x, op, algorithm=name)
                    if me:
                        np.testing.assert_array_equal(got, until[me - 1], name)
                    else:
                        assert got is None
                    calls += 1
                whole_seen(size * n)
        return calls

    assert min(ranks(program)) > 100


def test_values_that_move(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for n, dtype in zip(lengths(size), MOVING, strict=True):
            stacked = [(x * (r + 1)).astype(dtype) for r, x in enumerate(_numbers(size, n))]
            x, root = stacked[me], n % size
            for name in algorithms("broadcast"):
                got = comm.broadcast(x if me == root else None, root=root, algorithm=name)
                np.testing.assert_array_equal(got, stacked[root], name)
            for name in algorithms("gather"):
                got = comm.gather(x, root=root, algorithm=name)
                if me == root:
                    np.testing.assert_array_equal(got, np.stack(stacked), name)
            for name in algorithms("all_gather"):
                got = comm.all_gather(x, algorithm=name)
                np.testing.assert_array_equal(got, np.stack(stacked), name)
            for name in algorithms("scatter"):
                got = comm.scatter(x if me == root else None, root=root, algorithm=name)
                np.testing.assert_array_equal(got, stacked[root][me], name)
            for name in algorithms("all_to_all"):
                got = comm.all_to_all(x, algorithm=name)
                want = np.stack([block[me] for block in stacked])
                np.testing.assert_array_equal(got, want, name)
            for name in algorithms("barrier"):
                comm.barrier(algorithm=name)

    ranks(program)


def test_the_bytes_that_travel_are_those_of_the_formula(ranks: Any) -> None:
    """Counted where the engine hands messages to the transports."""

    def program(comm: Comm) -> list[tuple[str, str, int, int]]:
        block = np.ones((comm.size, 40), np.int64)
        calls: dict[str, Callable[[str], Any]] = {
            "reduce": lambda name: comm.reduce(block, algorithm=name),
            "all_reduce": lambda name: comm.all_reduce(block, algorithm=name),
            "gather": lambda name: comm.gather(block[0], algorithm=name),
            "all_gather": lambda name: comm.all_gather(block[0], algorithm=name),
            "reduce_scatter": lambda name: comm.reduce_scatter(block, algorithm=name),
            "all_to_all": lambda name: comm.all_to_all(block, algorithm=name),
            "scan": lambda name: comm.scan(block, algorithm=name),
            "exscan": lambda name: comm.exscan(block, algorithm=name),
        }
        counted = []
        for collective, call in calls.items():
            for name in algorithms(collective):
                with sent_messages(comm) as sent:
                    call(name)
                counted.append((collective, name, *sent))
        return counted

    from pycoll.schedules import find

    size, node = ranks.size, ranks(lambda comm: comm.node)
    for rows in zip(*ranks(program), strict=True):
        collective, name = rows[0][:2]
        algorithm = find(collective, name)
        cost = algorithm.cost(size, node) if algorithm.hosts else algorithm.cost(size)
        whole_value = collective in ("reduce", "all_reduce", "scan", "exscan")
        chunk = 8 * 40
        if whole_value:
            chunk = 8 * 40 * size // (1 if collective == "exscan" else algorithm.chunks(size))
        assert sum(messages for _, _, messages, _ in rows) == cost.messages, (collective, name)
        assert sum(nbytes for *_, nbytes in rows) == cost.volume * chunk, (collective, name)
        assert max(nbytes for *_, nbytes in rows) <= cost.load * chunk, (collective, name)


def algorithms(collective: str) -> list[str]:
    return [name for name in pycoll.algorithms(collective) if name != "shared_memory"]


def _numbers(size: int, n: int) -> list[Array]:
    return draw(n, size, "int16", (size, n))
