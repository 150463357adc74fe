"""all_reduce_many against all_reduce of each array: the same results, in few messages."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sent_messages import sent_messages
from tiers import TCP, TWO_HOSTS, sizes
from uneven_cases import check, draw

import pycoll
from pycoll._calls.many import ALONE_NBYTES, BUCKET_NBYTES

Array = Any
Comm = Any

DTYPES = ("float32", "bool", "int64", "bfloat16", "float32", "uint8", "complex64", "float16")
# Small ones, some that fill a bucket, and some that are buckets alone.
LENGTHS = (0, 1, 3, 1000, ALONE_NBYTES // 4 - 1, ALONE_NBYTES // 4, 300_000, 17)


def draw_many(rank: int, count: int = 24) -> list[Array]:
    """Arrays of several dtypes, shapes and lengths, in a mixed order."""
    drawn = []
    for i in range(count):
        length = LENGTHS[3 * i % len(LENGTHS)]
        shape = ((length,), (1, length), ())[i % 3]
        drawn.append(draw(100 * rank + i, DTYPES[i % len(DTYPES)], shape))
    return drawn


def both_ways(comm: Comm) -> list[Callable[..., Any]]:
    """The blocking method, and its non-blocking twin with its wait."""

    def twin(*args: Any, **kwargs: Any) -> Any:
        return comm.iall_reduce_many(*args, **kwargs).wait()

    return [comm.all_reduce_many, twin]


def reduce_mixed_lists(comm: Comm) -> None:
    drawn = [draw_many(rank) for rank in range(comm.size)]
    own = drawn[comm.rank]
    for op, combined in (("sum", np.add), ("max", np.maximum)):
        places = [i for i, x in enumerate(own) if op == "sum" or x.dtype.kind != "c"]
        for all_reduce_many in both_ways(comm):
            got = all_reduce_many([own[i] for i in places], op)
            assert type(got) is list
            assert len(got) == len(places)
            for i, result in zip(places, got, strict=True):
                expected = drawn[0][i]
                for others in drawn[1:]:
                    expected = combined(expected, others[i])
                check(result, np.asarray(expected))
    for x, again in zip(own, draw_many(comm.rank), strict=True):
        check(x, again)


@sizes(2, 3, (2, TCP), more=(1, 4, 5, (5, TCP), (4, TWO_HOSTS)))
def test_every_array_comes_back_reduced_in_its_place(ranks: Any) -> None:
    ranks(reduce_mixed_lists)


@sizes(2, 3)
def test_every_algorithm_reduces_lists(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        size = comm.size
        own = [draw(5, "float32", (n,)) for n in (1, 5, size + 1, 10_000)]
        for name in [None, *pycoll.algorithms("all_reduce")]:
            got = comm.all_reduce_many(own, algorithm=name)
            for x, result in zip(own, got, strict=True):
                check(result, size * x)

    ranks(program)


@sizes(1, 2)
def test_an_empty_list_gives_an_empty_list(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for all_reduce_many in both_ways(comm):
            assert all_reduce_many([]) == []
            assert all_reduce_many(()) == []
        assert comm.all_reduce(1) == comm.size

    ranks(program)


@sizes(2, 3)
def test_numbers_and_kinds_of_arrays_are_kept(ranks: Any) -> None:
    torch = pytest.importorskip("torch")

    def program(comm: Comm) -> None:
        size = comm.size
        xs = [
            3,
            np.float32(1.5),
            array.array("d", [1.0, 2.0]),
            torch.ones(2, 3),
            2.5,
            memoryview(np.arange(3)),
            torch.ones(4, dtype=torch.bfloat16),
            True,
            torch.ones(300_000),
            np.float64(4.0) * np.ones(()),
            1j,
        ]
        for all_reduce_many in both_ways(comm):
            got = all_reduce_many(xs)
            assert [type(x) for x in got] == [type(x) for x in xs]
            assert (got[0], got[1], got[4], got[7], got[10]) == (
                3 * size,
                1.5 * size,
                2.5 * size,
                True,
                size * 1j,
            )
            for place in (2, 3, 5, 6, 8, 9):
                expected = size * np.asarray(torch.as_tensor(xs[place]).float())
                np.testing.assert_array_equal(torch.as_tensor(got[place]).float(), expected)
            assert got[6].dtype == torch.bfloat16

    ranks(program)


@sizes(2, 3)
def test_pairs_with_their_places_are_reduced(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        structured = np.zeros(3, "f4,i8")
        structured["f0"], structured["f1"] = [me, -me, 1], me
        for all_reduce_many in both_ways(comm):
            got = all_reduce_many([(2.5 + me, me), structured, (7, me)], "minloc")
            assert got[0] == (2.5, 0)
            assert got[1].tolist() == [(0.0, 0), (1.0 - size, size - 1), (1.0, 0)]
            assert got[2] == (7, 0)

    ranks(program)


@sizes(2, 3)
def test_an_average_is_divided_once(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for all_reduce_many in both_ways(comm):
            got = all_reduce_many([np.full(n, 6.0 * comm.rank) for n in (2, 3, 400_000)], "avg")
            for n, x in zip((2, 3, 400_000), got, strict=True):
                check(x, np.full(n, 3.0 * (comm.size - 1)))

    ranks(program)


@sizes(1, 2, 3)
def test_an_operator_that_is_not_elementwise_gets_one_array_at_a_time(ranks: Any) -> None:
    shapes = ((2,), (3, 2), (1,), (4,), (100_000,))

    def keep_ends(a: Array, b: Array) -> Array:
        assert a.shape == b.shape
        assert a.shape in shapes
        result = np.array(a)
        result.flat[-1] = b.flat[-1]  # of the lowest rank, with the end of the highest
        return result

    def program(comm: Comm) -> None:
        me, size = comm.rank, comm.size
        op = pycoll.Op(keep_ends, commutative=False)
        xs = [np.full(shape, me, np.int32) for shape in shapes]
        natives = ["shared_memory"] if size > 1 else []
        results = [call(xs, op) for call in both_ways(comm)]
        results += [comm.all_reduce_many(xs, op, algorithm=name) for name in ("tree", *natives)]
        for got in results:
            for x, shape in zip(got, shapes, strict=True):
                expected = np.zeros(shape, np.int32)
                expected.flat[-1] = size - 1
                check(x, expected)

    ranks(program)


@sizes(3)
def test_all_ranks_get_the_same_bits(ranks: Any) -> None:
    def program(comm: Comm) -> list[bytes]:
        rng = np.random.default_rng(comm.rank)
        xs = [rng.standard_normal(n).astype("f4") for n in (5, 70_000, 300, 300_000)]
        return [x.tobytes() for call in both_ways(comm) for x in call(xs)]

    first, *others = ranks(program)
    assert all(other == first for other in others)


@sizes(2)
def test_what_comes_back_is_no_memory_of_the_callers(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        xs = [np.full(n, 1.0) for n in (3, 3, 100_000)]
        for all_reduce_many in both_ways(comm):
            got = all_reduce_many([*xs, xs[0]])
            for i, x in enumerate(got):
                assert not any(np.shares_memory(x, other) for other in [*xs, *got[:i]])
                x[...] = -1.0
            assert all((x == 1.0).all() for x in xs)

    ranks(program)


@sizes(2)
def test_arrays_need_not_be_contiguous(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        xs = [np.arange(24.0).reshape(4, 6)[::2, ::-3], np.ones((2000, 300)).T]
        for all_reduce_many in both_ways(comm):
            for x, got in zip(xs, all_reduce_many(xs), strict=True):
                check(got, 2 * x)

    ranks(program)


@sizes(2)
def test_lists_of_many_arrays_take_few_messages(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        xs = [np.ones(1000, "f4") for _ in range(500)]
        with sent_messages(comm) as sent:
            comm.iall_reduce_many(xs, algorithm="recursive_doubling").wait()
        assert 1 <= sent[0] <= -(-500 * 4000 // BUCKET_NBYTES) + 1

    ranks(program)


@sizes(2)
def test_wrong_arguments_are_refused_and_the_call_does_not_count(ranks: Any) -> None:
    wrong: tuple[tuple[type[Exception], str, tuple[Any, ...]], ...] = (
        (TypeError, "list of arrays", (np.ones(3),)),
        (TypeError, "list of arrays", (2.5,)),
        (TypeError, "cannot reduce", ([np.ones(3), "text"],)),
        (TypeError, "avg", ([np.ones(3), np.ones(3, "i4")], "avg")),
        (ValueError, "nonsense", ([np.ones(3)], "nonsense")),
    )

    def program(comm: Comm) -> None:
        for odd in range(comm.size):
            for kind, text, args in wrong:
                for all_reduce_many in both_ways(comm):
                    if comm.rank == odd:
                        with pytest.raises(kind, match=text):
                            all_reduce_many(*args)
            if comm.rank == odd:
                with pytest.raises(ValueError, match="pat"):
                    comm.all_reduce_many([np.ones(3)], algorithm="pat")
            assert comm.all_reduce_many([1, 2]) == [comm.size, 2 * comm.size]

    ranks(program)


Calls = tuple[Callable[[Comm], Any], str, Callable[[Comm], Any], str]

DIFFERENT: dict[str, Calls] = {
    "numbers": (
        lambda c: c.all_reduce_many([np.ones(3), np.ones(3)]),
        "all_reduce_many(2 arrays, 48 bytes",
        lambda c: c.all_reduce_many([np.ones(6)]),
        "all_reduce_many(1 array, 48 bytes",
    ),
    "shapes": (
        lambda c: c.all_reduce_many([np.ones((2, 3)), np.ones(4)]),
        "all_reduce_many(2 arrays, 80 bytes",
        lambda c: c.all_reduce_many([np.ones((3, 2)), np.ones(4)]),
        "all_reduce_many(2 arrays, 80 bytes",
    ),
    "shapes_of_requests": (
        lambda c: c.iall_reduce_many([np.ones(2), np.ones(4)]).wait(),
        "iall_reduce_many(2 arrays, 48 bytes",
        lambda c: c.iall_reduce_many([np.ones(4), np.ones(2)]).wait(),
        "iall_reduce_many(2 arrays, 48 bytes",
    ),
    "dtypes": (
        lambda c: c.all_reduce_many([np.ones(2, "f4")]),
        "all_reduce_many(1 array, 8 bytes",
        lambda c: c.all_reduce_many([np.ones(2, "i4")]),
        "all_reduce_many(1 array, 8 bytes",
    ),
    "operators": (
        lambda c: c.all_reduce_many([np.ones(2)], "max"),
        "op=max",
        lambda c: c.all_reduce_many([np.ones(2)], "min"),
        "op=min",
    ),
    "collectives": (
        lambda c: c.all_reduce_many([np.ones(2)]),
        "all_reduce_many(1 array",
        lambda c: c.all_reduce(np.ones(2)),
        "all_reduce(float64[2]",
    ),
    "empty_lists": (
        lambda c: c.all_reduce_many([]),
        "all_reduce_many(0 arrays",
        lambda c: c.all_reduce_many([np.ones(2)]),
        "all_reduce_many(1 array",
    ),
}


@sizes(2, 3)
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
            # of what is passed, if nothing else tells the calls apart
            alone = name in ("shapes", "shapes_of_requests", "dtypes")
            assert ("checksum" in str(raised.value)) == alone
        assert comm.all_reduce(1) == comm.size

    ranks(program)


@sizes(2)
def test_an_operator_that_raises_breaks_its_communicator_alone(ranks: Any) -> None:
    def fails(a: Array, b: Array) -> Array:
        raise ZeroDivisionError("in the operator")

    def program(comm: Comm) -> None:
        with comm.dup() as broken:
            with pytest.raises((ZeroDivisionError, pycoll.Error), match="in the operator"):
                broken.all_reduce_many([np.ones(2), np.ones(2, "f4")], fails)
            with pytest.raises(pycoll.Error, match="in the operator"):
                broken.barrier()
        assert comm.all_reduce(1) == comm.size

    ranks(program)
