"""Calls cut into segments, several of them under way: their order, their failures, their end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiers import few

import pycoll

Array = Any
Comm = Any

SEGMENT = {"PYCOLL_SEGMENT": "16384"}
WORLDS = [
    (4, ("--transport", "shm"), SEGMENT),
    (4, ("--transport", "tcp"), SEGMENT),
    (5, ("--emulate-hosts", "2"), SEGMENT),
]
pytestmark = pytest.mark.parametrize(
    "ranks",
    few([WORLDS[1]], [WORLDS[0], WORLDS[2]]),
    indirect=True,
    scope="module",
    ids=["tcp", "shm", "hosts"],
)

PIPELINES = ("chain", "tree", "binary_tree", "double_tree", "hierarchical")
N = 100_003
"""Elements of 8 bytes: 49 segments, the last shorter."""


def test_the_signature_tells_the_number_of_segments(ranks: Any) -> None:
    def program(comm: Comm) -> str:
        x = np.ones(N if comm.rank else N + 4096)
        try:
            comm.all_reduce(x, algorithm="chain")
        except pycoll.MismatchError as error:
            return str(error)
        return ""

    for text in ranks(program):
        assert "algorithm=chain, segments=" in text


def test_pipelines_of_several_calls_run_at_the_same_time(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        xs = [np.arange(N) * (comm.rank + 1) + i for i in range(len(PIPELINES))]
        requests = [
            comm.iall_reduce(x, algorithm=name) for x, name in zip(xs, PIPELINES, strict=True)
        ]
        requests.append(comm.ibroadcast(xs[0] if comm.rank == 1 else None, 1, algorithm="chain"))
        total = sum(range(comm.size + 1))
        for i, request in enumerate(requests[:-1]):
            np.testing.assert_array_equal(request.wait(), np.arange(N) * total + i * comm.size)
        np.testing.assert_array_equal(requests[-1].wait(), np.arange(N) * 2)

    ranks(program)


def test_an_operator_that_raises_in_one_segment_ends_the_call_everywhere(ranks: Any) -> None:
    def program(comm: Comm) -> str:
        calls = []

        def fragile(a: Array, b: Array) -> Array:
            calls.append(1)
            if comm.rank == 0 and len(calls) == 3:
                raise RuntimeError("the third piece is bad")
            return a + b

        op = pycoll.Op(fragile, commutative=True, elementwise=True)
        try:
            comm.all_reduce(np.ones(N), op, algorithm="chain")
        except (RuntimeError, pycoll.PeerFailed) as error:
            return str(error)
        return ""

    first, *others = ranks(program)
    assert first == "the third piece is bad"
    for text in others:
        assert "rank 0" in text


@pytest.mark.parametrize("name", PIPELINES)
def test_a_timeout_leaves_nothing_under_way(ranks: Any, name: str) -> None:
    def program(comm: Comm) -> None:
        with comm.dup() as other:
            out, x = np.zeros(N), np.ones(N)
            if comm.rank < comm.size - 1:
                with pytest.raises(pycoll.OperationTimeout):
                    other.all_reduce(x, out=out, algorithm=name, timeout=0.2)
            comm.barrier()
            seen = out.copy()
            if comm.rank == comm.size - 1:
                with pytest.raises(pycoll.OperationTimeout):
                    other.all_reduce(x, out=out, algorithm=name, timeout=10.0)
                seen = out.copy()
            comm.barrier()
            comm.all_reduce(np.ones(N))
            np.testing.assert_array_equal(out, seen)

    ranks(program)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_same_bits_on_all_ranks_and_from_run_to_run(ranks: Any, name: str) -> None:
    def program(comm: Comm) -> list[bytes]:
        x = np.random.default_rng(comm.rank).standard_normal(N)
        return [comm.all_reduce(x, algorithm=name).tobytes() for _ in range(3)]

    results = ranks(program)
    assert len({result for row in results for result in row}) == 1


def test_objects_of_several_parts_are_cut_too(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        value = {"a": np.arange(N), "b": b"x" * 70_001, "c": [np.ones(9)]}
        for name in ("chain", "double_tree", "scatter_all_gather"):
            got = comm.broadcast(value if comm.rank == 2 else None, 2, algorithm=name)
            np.testing.assert_array_equal(got["a"], value["a"])
            assert got["b"] == value["b"]

    ranks(program)
