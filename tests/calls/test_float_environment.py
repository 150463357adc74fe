"""Ranks that round differently, or flush subnormals, get the same bits as those that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from float_environments import DEFAULT, FLUSHING, UPWARD, control, floats

import pycoll
from pycoll._selection import costs
from pycoll._selection.agreed import Agreed
from pycoll._selection.costs import CostTable, LinkCosts
from pycoll._selection.select import Query, Selector

WORLDS = {
    "shm": 3,
    "tcp": (3, ("--transport", "tcp")),
}

of_three = pytest.mark.parametrize(
    "ranks", WORLDS.values(), indirect=True, scope="module", ids=WORLDS
)

OPS = ("sum", "prod", "min", "max", "avg", "land", "lor", "lxor")
DTYPES = ("f2", "bfloat16", "f4", "f8", "c8", "c16")


def values(rank: int, dtype: str, count: int) -> Any:
    """Numbers whose sums and products are rounded, and subnormals, which make up every third."""
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    part = np.dtype({"c8": "f4", "c16": "f8"}.get(dtype, kind))
    info = ml_dtypes.finfo(part)
    least = float(info.smallest_subnormal)
    ones = np.arange(count * (kind.itemsize // part.itemsize))
    fractions = (ones * 7 + rank * 3) % 11 / 7 + 0.1
    tiny = (ones * 5 + rank) % 9 * least
    return np.where(ones % 3 == rank, tiny, fractions).astype(part).view(kind)


def reductions(comm: Any, x: Any, op: str) -> Iterator[Any]:
    """Results of every call that combines; the first ones are the same on all ranks."""
    size = comm.size
    rows = x.reshape(size, -1)
    yield comm.all_reduce(x, op)
    yield comm.iall_reduce(x, op).wait()
    yield comm.all_reduce(x, op, algorithm="hierarchical")
    yield comm.all_reduce(x[::2], op, timeout=100.0)
    request = comm.persistent.all_reduce(x, op)
    request.start()
    yield request.wait()
    if x.dtype.kind != "V":  # Python has no bfloat16
        yield comm.all_reduce(x[0].item(), op)
        yield comm.all_reduce(x[0], op)
    yield from comm.all_reduce_many([x, x[:5]], op)
    yield comm.reduce(x, op, size - 1)
    yield comm.ireduce(x, op, size - 1).wait()
    yield comm.reduce_scatter(rows, op)
    yield comm.ireduce_scatter(rows, op).wait()
    yield comm.reduce_scatterv(x, [0, 1, len(x) - 1], op)
    yield comm.iscan(x, op).wait()
    yield comm.scan(x, op)
    yield comm.exscan(x, op)
    shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype)  # not aligned
    shifted[:] = x
    yield comm.all_reduce(shifted, op)


def long_reductions(comm: Any, x: Any, op: str) -> Iterator[Any]:
    """Results of calls whose ranks share the work, or read each other's memory."""
    shared = pycoll.empty(x.shape, x.dtype)
    shared[:] = x
    yield comm.all_reduce(x, op)
    yield comm.all_reduce(shared, op, out=pycoll.empty(x.shape, x.dtype))
    yield comm.iall_reduce(x, op).wait()
    yield comm.reduce_scatter(x.reshape(comm.size, -1), op)


def located_reductions(comm: Any, x: Any, op: str) -> Iterator[Any]:
    """Results of operators that NumPy combines."""
    yield comm.all_reduce(x, op)
    yield comm.iall_reduce(x, op, algorithm="linear").wait()  # each rank combines a third
    yield np.array(comm.all_reduce((float(x["value"][3]), comm.rank), op))


def gives_the_same(
    comm: Any, calls: Callable[[Any, Any, str], Iterator[Any]], x: Any, op: str
) -> list[bytes | None]:
    """Compare results with those of ranks that all compute by default, and return these' bits."""
    alike = [bits_of(result) for result in calls(comm, x, op)]
    with floats((DEFAULT, FLUSHING, UPWARD)[comm.rank]) as before:
        results = calls(comm, x, op)
        for number, expected in enumerate(alike):
            got = bits_of(next(results))
            assert got == expected, f"{x.dtype} {op} {number}: {show(got)}, {show(expected)}"
            assert control() == before, f"{x.dtype} {op} {number} left another environment"
    return alike


def bits_of(result: Any) -> bytes | None:
    return None if result is None else np.asarray(result).tobytes()


def show(result: bytes | None) -> str:
    return "None" if result is None else result[:40].hex(" ")


@of_three
def test_every_reduction_gives_the_bits_of_the_default_environment(ranks: Any) -> None:
    def program(comm: Any) -> list[bytes | None]:
        firsts = []
        for dtype in DTYPES:
            x = values(comm.rank, dtype, 12)
            for op in OPS:
                if op not in ("min", "max") or not dtype.startswith("c"):
                    firsts += gives_the_same(comm, reductions, x, op)[:6]
        return firsts

    first, *others = ranks(program)
    assert all(other == first for other in others)


@of_three
def test_so_does_a_long_one(ranks: Any) -> None:
    def program(comm: Any) -> None:
        for dtype in ("f4", "f8", "bfloat16"):
            x = values(comm.rank, dtype, 3 * 70_000)
            for op in ("sum", "avg", "max"):
                gives_the_same(comm, long_reductions, x, op)

    ranks(program)


@of_three
def test_so_does_one_that_numpy_combines(ranks: Any) -> None:
    def program(comm: Any) -> list[bytes | None]:
        pairs = np.zeros(9, [("value", "f8"), ("index", "i8")])
        # subnormals, which are equal where they count as zero
        pairs["value"] = (np.arange(9) * 5 + comm.rank * 4) % 9 * 5e-324
        pairs["index"] = comm.rank
        least, most = (
            gives_the_same(comm, located_reductions, pairs, op) for op in ("minloc", "maxloc")
        )
        return least + most

    first, *others = ranks(program)
    assert all(other == first for other in others)


@of_three
def test_sums_of_subnormals_are_right(ranks: Any) -> None:
    def program(comm: Any) -> list[Any]:
        x = np.array([1e-310, 1 / 3])
        with floats((DEFAULT, FLUSHING, UPWARD)[comm.rank]):
            got = comm.all_reduce(x), comm.iall_reduce(x).wait(), comm.all_reduce(x, "lor")
        return [result.tolist() for result in got]

    total = [1e-310 + 1e-310 + 1e-310, 1.0]
    assert ranks(program) == [[total, total, [1.0, 1.0]]] * 3


@of_three
def test_a_function_of_the_users_runs_in_the_users_environment(ranks: Any) -> None:
    def program(comm: Any) -> bool:
        seen = []

        def add(left: Any, right: Any) -> Any:
            seen.append(control())
            return left + right

        with floats((DEFAULT, FLUSHING, UPWARD)[comm.rank]) as before:
            for root in range(comm.size):  # which alone combines
                comm.reduce(np.ones(3), add, root, algorithm="linear")
        return set(seen) == {before}

    assert ranks(program) == [True] * 3


@of_three
@pytest.mark.parametrize("of", ["arrays", "objects"])
def test_so_does_one_that_another_thread_calls(ranks: Any, of: str) -> None:
    def program(comm: Any, x: Any) -> bool:
        seen, called = [], threading.Event()

        def add(left: Any, right: Any) -> Any:
            seen.append((threading.get_ident(), control()))
            called.set()
            return left + right

        def combine_at_each() -> None:
            for root in range(comm.size):
                called.clear()
                request = comm.ireduce(x, add, root)
                if comm.rank == root:
                    assert called.wait(60)  # nobody waits in a call: the core's thread goes on
                request.wait()

        combine_at_each()  # the core's thread begins in the default environment
        with floats((DEFAULT, FLUSHING, UPWARD)[comm.rank]) as before:
            seen.clear()
            for _ in range(20):
                combine_at_each()
        assert {thread for thread, _ in seen} - {threading.get_ident()}
        return {environment for _, environment in seen} == {before}

    assert ranks(program, np.ones(3) if of == "arrays" else "a text") == [True] * 3


# Of 3 KiB on 3 ranks two algorithms take the same time, unless it is rounded up.
TIED = LinkCosts(call=0.0, step=1e-5, path=1e-9, message=0.0, byte=1e-9, combine=0.0)
SETTINGS = Agreed(
    CostTable("two that tie", 64, dict.fromkeys(costs.LINKS, TIED), (8,), {}), cores={0: 64.0}
)


def test_times_depend_on_the_environment() -> None:
    def choose() -> str:
        query = Query("all_reduce", 3 << 10, shm=False)
        return Selector(SETTINGS, (0, 0, 0), False).choose(query).name

    by_default = choose()
    with floats(UPWARD):
        assert choose() != by_default


@of_three
def test_all_ranks_choose_the_same_algorithm_all_the_same(ranks: Any) -> None:
    def program(comm: Any, settings: Agreed) -> tuple[str, float]:
        group = comm._group
        group.hosts = (0, 0, 0)
        group.go_by(settings)
        with floats((DEFAULT, FLUSHING, UPWARD)[comm.rank]):
            choice = group.choose("all_reduce", 3 << 10, None, shm=False)
            return choice.name, comm.explain("all_reduce", 3 << 10, blocking=False).seconds

    assert len(set(ranks(program, SETTINGS))) == 1
