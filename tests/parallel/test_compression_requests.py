"""Compressed sums that are started, bucket by bucket, and waited for; and ranks that differ."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from compressor_cases import KINDS
from tiers import sizes

import pycoll
from pycoll.parallel import compression as c

Array = Any
Comm = Any


def drawn(seed: int, rank: int, shape: tuple[int, ...], dtype: str = "f8") -> Array:
    return np.random.default_rng((seed, rank)).standard_normal(shape).astype(dtype)


def by_requests(comm: Comm, kinds: list[str]) -> None:
    """Three buckets in each of four steps: all are started before the first is waited for."""
    shapes = ((700,), (1,), (8, 12))
    with comm.dup() as one, comm.dup() as other:
        for kind in kinds:
            blocking, started = ([c.ErrorFeedback(KINDS[kind]()) for _ in shapes] for _ in range(2))
            for step in range(4):
                xs = [drawn(step, comm.rank, shape, "f4") for shape in shapes]
                want = [
                    c.all_reduce(one, x, compressor)
                    for x, compressor in zip(xs, blocking, strict=True)
                ]
                requests = [
                    c.iall_reduce(other, x, compressor, out=x)
                    for x, compressor in zip(xs, started, strict=True)
                ]
                for x, request, total in zip(xs, requests, want, strict=True):
                    assert request.wait() is x
                    assert request.wait() is x
                    assert x.tobytes() == total.tobytes()
            for first, second in zip(blocking, started, strict=True):
                np.testing.assert_array_equal(first.residual, second.residual, strict=True)
            sent = [each.counters().sent_bytes.tolist() for each in (one, other)]
            assert sent[0] == sent[1]


@sizes(3, more=(1, 2, 5))
def test_sums_that_are_started_have_the_bits_and_bytes_of_those_that_are_waited_for(
    ranks: Any,
) -> None:
    ranks(by_requests, list(KINDS))


def travels(comm: Comm) -> None:
    with comm.dup() as line:
        request = c.iall_reduce(line, np.ones(100_000), c.TopK(0.5))
        deadline = time.monotonic() + 30
        while line.counters().received_bytes.sum() < 12 * 50_000 * (comm.size - 1):
            assert time.monotonic() < deadline  # nobody waits for it
        np.testing.assert_array_equal(np.sort(request.wait())[[0, -1]], [0, comm.size])


@sizes(3)
def test_a_message_travels_before_its_sum_is_waited_for(ranks: Any) -> None:
    ranks(travels)


def twice_and_again(comm: Comm) -> None:
    xs = [drawn(step, comm.rank, (50,)) for step in range(5)]
    feedback = c.ErrorFeedback(c.TopK(0.1))
    total = c.all_reduce(comm, xs[0], feedback)
    if comm.rank == 1:
        comm.recv(0)
    requests = [c.iall_reduce(comm, x, feedback) for x in xs[1:4]]
    if comm.rank == 0:
        with pytest.raises(pycoll.OperationTimeout):
            requests[0].wait(timeout=0.01)
        comm.send(None, 1)
    total = sum((request.wait() for request in requests), total)
    total += c.all_reduce(comm, xs[4], feedback)
    given = comm.all_reduce(sum(xs))
    np.testing.assert_allclose(total + comm.all_reduce(feedback.residual), given, atol=1e-9)


@sizes(3)
def test_nothing_is_lost_when_a_sum_is_started_before_the_last_has_ended(ranks: Any) -> None:
    ranks(twice_and_again)


def closed_between(comm: Comm) -> None:
    """The second message cannot be sent any more: there is no sum, however often one waits."""
    for kind in ("int8", "onebit", "powersgd"):
        with comm.dup() as line:
            out = np.full((8, 8), 7.0)
            request = c.iall_reduce(line, np.ones((8, 8)), KINDS[kind](), out)
            comm.barrier()
        for _ in range(2):
            with pytest.raises((pycoll.Error, ValueError)):
                request.wait()
        assert (out == 7.0).all()


@sizes(3)
def test_a_sum_that_has_failed_is_never_there(ranks: Any) -> None:
    ranks(closed_between)


def differing(comm: Comm, kind: str) -> None:
    """The last rank has a bucket more; or one of another length; or its own compressor."""
    is_last = comm.rank == comm.size - 1

    def one_more(line: Comm) -> None:
        if is_last:
            c.all_reduce(line, np.ones(100), KINDS[kind]())

    def longer(line: Comm) -> None:
        c.all_reduce(line, np.ones(100 + is_last), KINDS[kind]())

    def another(line: Comm) -> None:
        c.all_reduce(line, np.ones(100), c.TopK(0.3) if is_last else KINDS[kind]())

    for program in (one_more, longer, another):
        with comm.dup() as line:
            c.all_reduce(line, np.ones(100), KINDS[kind]())
            with pytest.raises(pycoll.MismatchError):  # noqa: PT012  # of one of the two
                program(line)
                line.barrier()


@sizes(3, more=(2,))
def test_ranks_whose_buckets_or_compressors_differ_are_told(ranks: Any) -> None:
    for kind in KINDS:
        ranks(differing, kind)
