"""reduce_scatterv against NumPy, and wrong arguments of all calls with uneven blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiers import TCP, THREE_HOSTS, TWO_HOSTS, sizes
from uneven_cases import DTYPES, Array, Comm, both_ways, check, check_list, draw

import pycoll


@sizes(3, (4, TWO_HOSTS), more=(1, 2, 4, 5, (2, TCP), (5, TCP), (3, THREE_HOSTS)))
def test_every_algorithm_reduces_parts_of_any_lengths(ranks: Any) -> None:
    ranks(reduce_with_every_algorithm)


def reduce_with_every_algorithm(comm: Comm) -> None:
    me, size = comm.rank, comm.size
    names = [None, *pycoll.algorithms("reduce_scatter")]
    if comm._group.shm is None:
        names.remove("shared_memory")
    for case, base in enumerate((0, 1, 1000, 40_000)):
        spread = [base * ((rank + case) % 3) for rank in range(size)]
        for counts in (spread, [base] * size, [base * 2, *[0] * (size - 1)]):
            for rest in ((), (2,), (1, 3)):
                all_x = [draw(rank, "float32", (sum(counts), *rest)) for rank in range(size)]
                x, start = all_x[me], sum(counts[:me])
                expected = np.sum(all_x, axis=0, dtype="f4")[start : start + counts[me]]
                for name in names:
                    check(comm.reduce_scatterv(x, counts, algorithm=name), expected)
                check(comm.ireduce_scatterv(x, counts).wait(), expected)
                np.testing.assert_array_equal(x, draw(me, "float32", x.shape))


@sizes(2, 3, deadline=True)
def test_every_kind_of_operator_reduces_parts(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        for counts in ([rank + 1 for rank in range(size)], [2] * size, [30_000, *range(1, size)]):
            start, length = sum(counts[:me]), sum(counts)

            def mine(x: Array, start: int = start, count: int = counts[me]) -> Array:
                return x[start : start + count]

            for dtype in DTYPES:
                all_x = [draw(rank, dtype, (length, 2)) for rank in range(size)]
                largest = np.maximum.reduce(all_x) if dtype != "complex128" else sum(all_x)
                got = comm.reduce_scatterv(all_x[me], counts, "max" if dtype[0] != "c" else "sum")
                check(got, mine(largest))
            all_x = [draw(rank, "float64", (length,)) for rank in range(size)]
            average = np.add.reduce(all_x) / size
            check(comm.reduce_scatterv(all_x[me], counts, "avg"), mine(average))
            check(comm.ireduce_scatterv(all_x[me], counts, "avg").wait(), mine(average))
            pairs = np.zeros(length, "f4,i4")
            pairs["f0"], pairs["f1"] = (np.arange(length) + me) % size, me
            least = comm.reduce_scatterv(pairs, counts, "minloc")
            assert (least["f0"] == 0).all()
            assert ((mine(np.arange(length)) + least["f1"]) % size == 0).all()

    ranks(program)


@sizes(1, 2, 3)
def test_an_operator_that_is_not_elementwise_gets_the_rows_of_one_rank(ranks: Any) -> None:
    def keep_ends(a: Array, b: Array) -> Array:
        assert a.shape == b.shape
        assert a.shape[1:] == (2,)
        assert len(set(a[:, 1].tolist())) == 1, "rows of several ranks"
        result = np.array(a)
        result[-1, 0] = b[-1, 0]  # the first operand's rows, with the last one's end
        return result

    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        counts = [rank + 1 for rank in range(size)]
        owner = np.repeat(np.arange(size), counts)
        x = np.stack([np.full(len(owner), me), owner], axis=1)
        native = ["shared_memory"] if size > 1 else []
        op = pycoll.Op(keep_ends, commutative=False)
        for name in [None, "linear", *native]:
            got = comm.reduce_scatterv(x, counts, op, algorithm=name)
            assert got[:, 0].tolist() == [0] * me + [size - 1]
        got = comm.ireduce_scatterv(x, counts, op).wait()
        assert got[:, 0].tolist() == [0] * me + [size - 1]

    ranks(program)


# A collective, what it raises, a pattern of the message, its arguments.
WRONG: tuple[tuple[str, type[Exception], str, Callable[[Comm], tuple[Any, ...]]], ...] = (
    ("gatherv", TypeError, r"\bgather\b", lambda c: (1.5,)),
    ("gatherv", TypeError, r"\bgather\b", lambda c: ([1, 2],)),
    ("gatherv", ValueError, "root", lambda c: (np.ones(2), c.size)),
    ("all_gatherv", TypeError, r"\ball_gather\b", lambda c: ("text",)),
    ("scatterv", TypeError, "list", lambda c: (np.ones(2), c.rank)),
    ("scatterv", TypeError, "list", lambda c: (None, c.rank)),
    ("scatterv", ValueError, "has 0", lambda c: ([], c.rank)),
    ("scatterv", TypeError, r"\bscatter\b", lambda c: ([1.0] * c.size, c.rank)),
    ("scatterv", TypeError, "float64.*float32", lambda c: (two_dtypes(c), c.rank)),
    ("all_to_allv", TypeError, "list", lambda c: (np.ones(9),)),
    ("all_to_allv", ValueError, "has", lambda c: ([np.ones(1)] * (c.size + 1),)),
    ("all_to_allv", TypeError, "float64.*float32", lambda c: (two_dtypes(c),)),
    ("reduce_scatterv", ValueError, "leading", lambda c: (np.ones(c.size + 1), [1] * c.size)),
    ("reduce_scatterv", ValueError, "leading", lambda c: (np.ones(()), [0] * c.size)),
    ("reduce_scatterv", ValueError, "items", lambda c: (np.ones(1), [1] + [0] * c.size)),
    ("reduce_scatterv", ValueError, "-1", lambda c: (np.ones(0), [-1] + [1] * (c.size - 1))),
    ("reduce_scatterv", TypeError, "counts", lambda c: (np.ones(3), 3)),
    ("reduce_scatterv", TypeError, "int", lambda c: (np.ones(c.size), [1.0] * c.size)),
    ("reduce_scatterv", TypeError, "array", lambda c: ([1.0] * c.size, [1] * c.size)),
    ("reduce_scatterv", TypeError, "avg", lambda c: (np.ones(c.size, "i4"), [1] * c.size, "avg")),
)


def two_dtypes(comm: Comm) -> list[Array]:
    return [*[np.ones(1)] * (comm.size - 1), np.ones(1, "f4")]


@sizes(2)
def test_wrong_arguments_are_refused_and_the_call_does_not_count(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for odd in range(comm.size):
            for name, kind, text, args in WRONG:
                for call in both_ways(comm, name):
                    if comm.rank == odd:
                        with pytest.raises(kind, match=text):
                            call(*args(comm))
            if comm.rank == odd:
                with pytest.raises(ValueError, match="nonsense"):
                    comm.reduce_scatterv(np.ones(2), [1, 1], algorithm="nonsense")
            blocks = [np.ones(rank) for rank in range(comm.size)]
            check_list(comm.all_gatherv(blocks[comm.rank]), blocks)

    ranks(program)


Calls = tuple[Callable[[Comm], Any], str, Callable[[Comm], Any], str]


DIFFERENT: dict[str, Calls] = {
    "dtypes": (
        lambda c: c.all_gatherv(np.ones(3)),
        "all_gatherv(float64)",
        lambda c: c.all_gatherv(np.ones(3, "f4")),
        "all_gatherv(float32)",
    ),
    "dtypes_exchanged": (
        lambda c: c.all_to_allv([np.ones(3)] * c.size),
        "all_to_allv(float64)",
        lambda c: c.all_to_allv([np.ones(6, "f4")] * c.size),
        "all_to_allv(float32)",
    ),
    "roots": (
        lambda c: c.gatherv(np.ones(3), 0),
        "gatherv(float64, root=0)",
        lambda c: c.gatherv(np.ones(3), 1),
        "gatherv(float64, root=1)",
    ),
    "even_and_uneven": (
        lambda c: c.all_gather(np.ones(3)),
        "all_gather(float64[3]",
        lambda c: c.all_gatherv(np.ones(3)),
        "all_gatherv(float64)",
    ),
    "blocking_and_not": (
        lambda c: c.all_gatherv(np.ones(3)),
        " all_gatherv(float64)",
        lambda c: c.iall_gatherv(np.ones(3)).wait(),
        " iall_gatherv(float64)",
    ),
    "not_blocking": (
        lambda c: c.iall_gatherv(np.ones(3)).wait(),
        "iall_gatherv(float64)",
        lambda c: c.iall_to_allv([np.ones(3)] * c.size).wait(),
        "iall_to_allv(float64)",
    ),
    "counts": (
        lambda c: c.reduce_scatterv(np.ones(c.size), [1] * c.size),
        "counts=[1, 1",
        lambda c: c.reduce_scatterv(np.ones(c.size), [2, 0] + [1] * (c.size - 2)),
        "counts=[2, 0",
    ),
    "operators": (
        lambda c: c.reduce_scatterv(np.ones(c.size), [1] * c.size, "max"),
        "op=max",
        lambda c: c.reduce_scatterv(np.ones(c.size), [1] * c.size, "min"),
        "op=min",
    ),
    "reductions": (
        lambda c: c.reduce_scatterv(np.ones(c.size), [1] * c.size),
        "reduce_scatterv(float64",
        lambda c: c.reduce_scatter(np.ones((c.size, 1))),
        "reduce_scatter(float64",
    ),
}


@sizes(3, more=(2,))
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_are_shown_side_by_side(ranks: Any, name: str) -> None:
    def program(comm: Comm) -> None:
        first, first_text, second, second_text = DIFFERENT[name]
        with comm.dup() as broken:
            with pytest.raises(pycoll.MismatchError) as raised:  # noqa: PT012
                (first if comm.rank == 0 else second)(broken)
                broken.barrier()
            assert first_text in str(raised.value)
            assert second_text in str(raised.value)
            with pytest.raises(pycoll.MismatchError):
                broken.all_gatherv(np.ones(2))
        assert comm.all_reduce(1) == comm.size

    ranks(program)
