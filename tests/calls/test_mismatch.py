"""Ranks that make different calls are shown both, on every rank, and can go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiers import sizes

import pycoll

Comm = Any
Calls = tuple[Callable[[Comm], Any], str, Callable[[Comm], Any], str]


def maximum(a: Any, b: Any) -> Any:
    return np.maximum(a, b)


# What rank 0 calls, how it is shown; what the others call, how that is shown.
DIFFERENT: dict[str, Calls] = {
    "collectives": (
        lambda c: c.all_reduce(1.0),
        "all_reduce(float64[], op=sum",
        lambda c: c.barrier(),
        "barrier(",
    ),
    "collectives_with_the_same_data": (
        lambda c: c.gather(np.ones(3)),
        "gather(float64[3]",
        lambda c: c.all_gather(np.ones(3)),
        "all_gather(float64[3]",
    ),
    "collectives_after_which_the_root_has_left": (
        lambda c: c.broadcast("value"),
        "broadcast(root=0",
        lambda c: c.scatter(None),
        "scatter(root=0",
    ),
    "dtypes": (
        lambda c: c.all_reduce(np.ones(5, "f4")),
        "float32[5]",
        lambda c: c.all_reduce(np.ones(5, "f8")),
        "float64[5]",
    ),
    "dtypes_of_one_size": (
        lambda c: c.all_gather(np.ones(5, "i4")),
        "int32[5]",
        lambda c: c.all_gather(np.ones(5, "f4")),
        "float32[5]",
    ),
    "shapes": (
        lambda c: c.all_reduce(np.ones((2, 3))),
        "float64[2, 3]",
        lambda c: c.all_reduce(np.ones((3, 2))),
        "float64[3, 2]",
    ),
    "shapes_of_large_arrays": (
        lambda c: c.all_reduce(np.ones(200_000), algorithm="ring"),
        "float64[200000]",
        lambda c: c.all_reduce(np.ones(200_001), algorithm="ring"),
        "float64[200001]",
    ),
    "shapes_of_blocks": (
        lambda c: c.all_to_all(np.ones((c.size, 2))),
        ", 2]",
        lambda c: c.all_to_all(np.ones((c.size, 3))),
        ", 3]",
    ),
    "roots": (
        lambda c: c.broadcast(1, root=0),
        "broadcast(root=0",
        lambda c: c.broadcast(1, root=1),
        "broadcast(root=1",
    ),
    "operators": (
        lambda c: c.all_reduce(1, "sum"),
        "op=sum",
        lambda c: c.all_reduce(1, "prod"),
        "op=prod",
    ),
    "operators_of_the_user": (
        lambda c: c.reduce_scatter(np.ones(c.size), pycoll.Op(maximum)),
        "maximum",
        lambda c: c.reduce_scatter(np.ones(c.size), "max"),
        "op=max",
    ),
    "ints_and_integers_of_numpy": (
        lambda c: c.all_reduce(1),
        "all_reduce(int, op=sum",
        lambda c: c.all_reduce(np.int64(1)),
        "all_reduce(int64[], op=sum",
    ),
    "ints_and_arrays_of_what_they_travel_as": (
        lambda c: c.all_reduce(1),
        "all_reduce(int, op=sum",
        lambda c: c.all_reduce(np.ones(3, np.int64)),
        "all_reduce(int64[3], op=sum",
    ),
    "algorithms": (
        lambda c: c.all_gather(np.ones(3), algorithm="ring"),
        "algorithm=ring",
        lambda c: c.all_gather(np.ones(3), algorithm="linear"),
        "algorithm=linear",
    ),
    "algorithms_of_a_barrier": (
        lambda c: c.barrier(algorithm="tree"),
        "barrier(algorithm=tree",
        lambda c: c.barrier(algorithm="linear"),
        "barrier(algorithm=linear",
    ),
    "arrays_and_objects": (
        lambda c: c.all_gather(np.ones(3)),
        "float64[3]",
        lambda c: c.all_gather([1, 1, 1]),
        "object",
    ),
    "arrays_and_objects_all_to_all": (
        lambda c: c.all_to_all(np.ones(c.size)),
        "float64[",
        lambda c: c.all_to_all([1] * c.size),
        "object",
    ),
    "arrays_and_objects_reduced": (
        lambda c: c.all_reduce(np.ones(3), maximum),
        "float64[3]",
        lambda c: c.all_reduce("text", maximum),
        "object",
    ),
    "communicator_making": (
        lambda c: c.dup(),
        "dup(",
        lambda c: c.split(0),
        "split(",
    ),
    "counts_of_calls": (
        lambda c: (c.barrier(), c.barrier()),
        "barrier(",
        lambda c: (c.barrier(), c.all_reduce(1)),
        "all_reduce(int, ",
    ),
}

# The ranks wait for each other and nobody sends: only the launcher sees both calls.
SILENT: dict[str, Calls] = {
    "two_roots_of_a_gather": (
        lambda c: c.gather(1.5, root=0),
        "gather(object, root=0",
        lambda c: c.gather(1.5, root=1),
        "gather(object, root=1",
    ),
    "two_roots_of_a_reduce": (
        lambda c: c.reduce(np.ones(3), root=0),
        "root=0",
        lambda c: c.reduce(np.ones(3), root=1),
        "root=1",
    ),
    "a_gather_and_a_broadcast": (
        lambda c: c.gather(np.ones(3), root=0),
        "gather(float64[3], root=0",
        lambda c: c.broadcast(None, root=0),
        "broadcast(root=0",
    ),
}


def expect_mismatch(comm: Comm, calls: Calls) -> None:
    first, first_text, second, second_text = calls
    with comm.dup() as broken, comm.dup() as other:
        failure = None
        try:
            (first if comm.rank == 0 else second)(broken)
        except pycoll.MismatchError as exc:
            failure = exc
        if failure is None:  # this rank had left the call: the next one tells
            with pytest.raises(pycoll.MismatchError) as raised:
                broken.barrier()
            failure = raised.value
        assert first_text in str(failure)
        assert second_text in str(failure)
        assert "rank 0" in str(failure)
        for call in (broken.barrier, lambda: broken.send(1, 0), broken.iprobe, broken.dup):
            with pytest.raises(pycoll.MismatchError) as raised:
                call()
            assert str(raised.value) == str(failure)
        # Other communicators are untouched, whether they were made before or after.
        assert other.all_reduce(1) == comm.size
        assert comm.all_gather(comm.rank) == list(range(comm.size))


@sizes(2, 4)
def test_every_rank_is_shown_both_calls_and_other_communicators_work_on(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for name, calls in DIFFERENT.items():
            try:
                expect_mismatch(comm, calls)
            except BaseException as exc:
                exc.add_note(f"with different {name}")
                raise

    ranks(program)


@sizes(2)
@pytest.mark.parametrize("name", SILENT)
def test_calls_that_wait_for_each_other_are_compared_by_the_launcher(ranks: Any, name: str) -> None:
    ranks(expect_mismatch, SILENT[name])


LARGE = 50_000

IN_SEVERAL_ROUNDS: list[Callable[[Comm], Any]] = [
    lambda c: c.all_gatherv(np.ones(LARGE)),
    lambda c: c.all_gatherv(np.ones(LARGE), timeout=60.0),
    lambda c: c.all_gatherv(memoryview(np.ones(LARGE)) if c.rank else np.ones(LARGE)),
    lambda c: c.all_gatherv(memoryview(np.ones(2)) if c.rank else np.ones(2)),
    lambda c: c.all_to_allv([np.ones(LARGE)] * c.size),
    lambda c: c.scatterv([np.ones(LARGE)] * c.size),
    lambda c: c.reduce_scatterv(np.ones(c.size), [1] * c.size, maximum),
    lambda c: c.all_reduce_many([np.ones(3), np.ones(3, "f4"), np.ones(LARGE)]),
    lambda c: c.all_to_all([{"object": i} for i in range(c.size)]),
    lambda c: c.all_gather({"object": c.rank}),
    lambda c: c.broadcast({"object": [1] * LARGE} if c.rank == 0 else None),
    lambda c: c.all_reduce(np.ones(600_000)),
]


@sizes(2)
def test_a_call_counts_once_however_many_rounds_it_takes(ranks: Any) -> None:
    def differ(part: Comm) -> None:
        part.barrier() if part.rank == 0 else part.all_reduce(1.0)
        part.barrier()

    def program(comm: Comm) -> None:
        for number, call in enumerate(IN_SEVERAL_ROUNDS, 1):
            call(comm)
            with comm.dup() as part:
                call(part)
                with pytest.raises(pycoll.MismatchError, match=r"number 1 of|#1 on"):
                    differ(part)
            assert comm._group.number == number + number  # a dup is one, too

    ranks(program)


@sizes(3)
def test_one_rank_that_differs_is_enough(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for odd in range(comm.size):
            for collective in ("all_reduce", "all_gather", "gather", "reduce"):
                with comm.dup() as broken:
                    x = np.ones(3, "f4" if comm.rank == odd else "f8")
                    with pytest.raises(pycoll.MismatchError) as raised:  # noqa: PT012
                        getattr(broken, collective)(x)
                        broken.barrier()
                    assert "float32[3]" in str(raised.value)
                    assert "float64[3]" in str(raised.value)
                    assert f"rank {odd}: {collective}(float32" in str(raised.value)

    ranks(program)


@sizes(2, 3)
def test_an_array_that_cannot_take_the_broadcast_value_is_a_mismatch(ranks: Any) -> None:
    wrong = [
        (np.ones(3), np.zeros(3, "f4"), "float32[3]"),
        (np.ones(3), np.zeros(4), "float64[4]"),
        (np.ones((100, 100)), np.zeros((10, 1000)), "float64[10, 1000]"),
        ({"an": "object"}, np.zeros(4), "float64[4]"),
    ]

    def program(comm: Comm) -> None:
        for sent, mine, text in wrong:
            with comm.dup() as broken:
                with pytest.raises(pycoll.MismatchError, match="rank 0") as raised:  # noqa: PT012
                    broken.broadcast(mine if comm.rank else sent)
                    broken.barrier()
                assert text in str(raised.value)
                assert not mine.any()
            assert comm.all_reduce(1) == comm.size

    ranks(program)


@sizes(4)
def test_a_mismatch_in_one_half_does_not_reach_the_other(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        half = comm.split(comm.rank // 2)
        if comm.rank < 2:
            with pytest.raises(pycoll.MismatchError):
                half.all_reduce(comm.rank, "sum" if comm.rank else "max")
        else:
            for i in range(50):
                assert half.all_reduce(i) == 2 * i
        comm.barrier()
        if comm.rank >= 2:
            assert half.all_gather(comm.rank) == [2, 3]

    ranks(program)


@sizes(2)
def test_messages_wait_in_other_communicators_while_one_breaks(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        other = 1 - comm.rank
        comm.send("before", other)
        with comm.dup() as broken, pytest.raises(pycoll.MismatchError):
            broken.reduce_scatter(np.ones((2, comm.rank + 1)))
        comm.send("after", other)
        assert [comm.recv(other), comm.recv(other)] == ["before", "after"]

    ranks(program)
