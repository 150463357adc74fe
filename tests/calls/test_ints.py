"""Python ints are reduced exactly, or are an OverflowError on every rank."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from tiers import few

import pycoll

OPTIONS = {
    "shm": (),
    "tcp": ("--transport", "tcp"),
    "two hosts": ("--emulate-hosts", "2"),
}

of_four = pytest.mark.parametrize(
    "ranks",
    few([(4, OPTIONS["shm"]), (4, OPTIONS["tcp"])], [(4, OPTIONS["two hosts"])]),
    indirect=True,
    scope="module",
    ids=OPTIONS,
)

LEAST, MOST = -(2**63), 2**63 - 1

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "sum": sum,
    "prod": math.prod,
    "min": min,
    "max": max,
    "band": lambda xs: reduce(operator.and_, xs),
    "bor": lambda xs: reduce(operator.or_, xs),
    "bxor": lambda xs: reduce(operator.xor, xs),
    "land": lambda xs: int(all(xs)),
    "lor": lambda xs: int(any(xs)),
    "lxor": lambda xs: sum(bool(x) for x in xs) % 2,
}

ROWS = [
    [2**62, 2**62, 2**62, 2**62],
    [LEAST, LEAST, LEAST, LEAST],
    [MOST, MOST, 0, MOST],
    [MOST, LEAST, -1, 2**32],
    [-1, -1, -(2**32), 2**31],
    [3, -5, 7, 2**40],
    [0, 0, 0, 0],
]
"""What ranks 0 to 3 pass."""

TOO_LARGE = 2**63, LEAST - 1, 2**64, -(10**400)


def groups(comm: Any) -> Iterator[Any]:
    """Communicators of the ranks 0, 0 to 1, 0 to 2, and all; on their ranks."""
    for size in range(1, comm.size + 1):
        if comm.rank < size:
            group = comm.sub(range(size))
            yield group
            group.close()


FORMS: list[Callable[[Any, str], Callable[..., Any]]] = [
    lambda group, name: getattr(group, name),
    lambda group, name: lambda *args: getattr(group, f"i{name}")(*args).wait(),
    lambda group, name: lambda *args: getattr(group.persistent, name)(*args).start().wait(),
]
"""A method blocks, returns a request, or makes one that is started."""


def reductions(group: Any, x: int, op: str, number: int) -> Iterator[tuple[str, Any]]:
    """What reduces an int, each in the form that `number` tells, and a call of it."""
    form = FORMS[number % 3]
    for name in ("all_reduce", "scan", "exscan"):
        yield name, lambda n=name: form(group, n)(x, op)
    yield "reduce", lambda: form(group, "reduce")(x, op, group.size - 1)
    xs = [np.ones(2, int), x, np.int64(1), x] if number % 2 else [x]
    yield "many", lambda: form(group, "all_reduce_many")(xs, op)[number % 2]


@of_four
def test_results_are_exact(ranks: Any) -> None:
    def program(comm: Any) -> None:
        number = 0
        for group in groups(comm):
            rank, size = group.rank, group.size
            for op, fold in OPERATORS.items():
                for row in ROWS if size == 4 else ROWS[:3]:
                    xs = row[:size]
                    right = {
                        "reduce": fold(xs) if rank == size - 1 else None,
                        "scan": fold(xs[: rank + 1]),
                        "exscan": fold(xs[:rank]) if rank else None,
                    }
                    number += 1
                    for name, call in reductions(group, xs[rank], op, number):
                        result, expected = call(), right.get(name, fold(xs))
                        assert result == expected, (name, op, xs)
                        assert type(result) is type(expected), (name, op, xs)

    ranks(program)


@of_four
def test_ints_that_fit_go_through_no_python(ranks: Any) -> None:
    def program(comm: Any) -> None:
        names = "scan", "exscan", "iscan", "iexscan", "iall_reduce", "ireduce"
        mine, before = comm.rank + 2, range(2, comm.rank + 2)

        def reduce_all() -> None:
            for op in OPERATORS:
                fold = OPERATORS[op]
                below = fold(list(before)) if comm.rank else None
                assert comm.scan(mine, op) == comm.iscan(mine, op).wait() == fold([*before, mine])
                assert comm.exscan(mine, op) == comm.iexscan(mine, op).wait() == below
                assert comm.iall_reduce(mine, op).wait() == fold([2, 3, 4, 5])
                assert comm.ireduce(mine, op).wait() == (None if comm.rank else fold([2, 3, 4, 5]))

        def never(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("it went through Python")

        reduce_all()  # the first calls are prepared in Python
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(pycoll.Communicator, name, never)
            reduce_all()

    ranks(program)


@of_four
def test_an_int_that_does_not_fit_is_an_error_on_every_rank(ranks: Any) -> None:
    def program(comm: Any) -> None:
        for group in groups(comm):
            size = group.size
            for number, op in enumerate(OPERATORS):
                culprit, x = number % size, TOO_LARGE[number % len(TOO_LARGE)]
                mine = x if group.rank == culprit else 1
                which = "of this rank" if group.rank == culprit else "of another rank"
                if op in ("land", "lor", "lxor"):  # of these only the truth counts
                    expected = 1 if op != "lxor" else size % 2
                    assert group.all_reduce(mine, op) == expected
                    continue
                for _, call in reductions(group, mine, op, number + size):
                    with pytest.raises(OverflowError, match=f"{which} does not fit"):
                        call()
            assert group.all_reduce(1) == size

    ranks(program)


@of_four
def test_what_the_core_and_python_reduce_is_one_call(ranks: Any) -> None:
    class Own(int):
        """The core leaves it to Python."""

    def program(comm: Any) -> None:
        for op, fold in OPERATORS.items():
            for row in ROWS:
                x = Own(row[comm.rank]) if comm.rank % 2 else row[comm.rank]
                result = comm.all_reduce(x, op)
                assert (result, type(result)) == (fold(row), int), (op, row)
                assert comm.scan(x, op) == fold(row[: comm.rank + 1])
                assert comm.ireduce(x, op, 1).wait() == (fold(row) if comm.rank == 1 else None)
        for x in (1, 1.5, True, 2j):  # of numbers that travel as arrays, these may be some
            mixed = np.array(x)[()] if comm.rank == 1 and x != 1 else x
            assert comm.all_reduce(mixed) == (True if x is True else 4 * x)

    ranks(program)


@of_four
def test_errors_show_the_call(ranks: Any) -> None:
    def program(comm: Any) -> None:
        for other, theirs in (1.0, "float64[]"), (np.ones(3, int), "int64[3]"), (None, "barrier"):
            group = comm.dup()
            group.barrier()

            def calls(group: Any = group, other: Any = other) -> None:
                if other is None and comm.rank:
                    group.barrier()
                else:
                    group.all_reduce(1 if comm.rank == 0 else other)
                group.barrier()

            with pytest.raises(pycoll.MismatchError) as caught:
                calls()
            assert re.search(r"all_reduce\(int, op=sum|reduction of Python ints", str(caught.value))
            assert theirs in str(caught.value)
        group = comm.dup()
        group.barrier()
        if comm.rank == 1:
            match = r"reduce\(int, op=max, algorithm=\w+, root=1\)"
            with pytest.raises(pycoll.OperationTimeout, match=match):
                group.reduce(1, "max", 1, timeout=0.01)
        comm.barrier()

    ranks(program)


@of_four
def test_a_function_gets_ints_of_any_size(ranks: Any) -> None:
    def program(comm: Any) -> None:
        assert comm.all_reduce(2**70, lambda a, b: a + b) == 4 * 2**70
        xs = [comm.rank + 2, np.ones(2, int)]
        assert comm.all_reduce_many(xs, lambda a, b: a * b)[0] == 120

    ranks(program)


@of_four
def test_an_algorithm_may_be_named(ranks: Any) -> None:
    def program(comm: Any) -> None:
        for name in ("reduce", "all_reduce", "scan"):
            for op in ("sum", "prod"):
                for algorithm in pycoll.algorithms(name):
                    if algorithm == "shared_memory":  # it is the default where it serves
                        continue
                    result = getattr(comm, name)(2**62, op, algorithm=algorithm)
                    count = comm.rank + 1 if name == "scan" else comm.size
                    expected = 2**62 * count if op == "sum" else (2**62) ** count
                    assert result == (None if name == "reduce" and comm.rank else expected)
            with pytest.raises(ValueError, match=f"{name} has no algorithm 'none'"):
                getattr(comm, name)(1, algorithm="none")

    ranks(program)


@of_four
def test_out_holds_a_result_that_fits(ranks: Any) -> None:
    def program(comm: Any) -> None:
        out = np.zeros((), np.int64)
        assert comm.all_reduce(2**60, out=out) is out
        assert out == 2**62
        assert comm.all_reduce_many([2**60, 1.5], out=[out, None])[1] == 6.0
        assert comm.reduce(-3, "min", out=out) is (out if comm.rank == 0 else None)
        with pytest.raises(OverflowError, match="does not fit into out"):
            comm.all_reduce(2**62, out=out)
        with pytest.raises(ValueError, match="int64"):
            comm.all_reduce(1, out=np.zeros((), np.int32))
        with pytest.raises(TypeError, match="average of integers"):
            comm.all_reduce(2**64, "avg")
        assert comm.all_reduce(1) == comm.size

    ranks(program)


@of_four
def test_bools_and_integers_of_numpy_stay_what_they_are(ranks: Any) -> None:
    def program(comm: Any) -> None:
        assert comm.all_reduce(True) is True
        wrapped = comm.all_reduce(np.int64(2**61))
        assert wrapped == LEAST
        assert type(wrapped) is np.int64

    ranks(program)
