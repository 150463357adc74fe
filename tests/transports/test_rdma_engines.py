"""Collectives and requests of whole ranks over simulated RDMA devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rdma_job import DEADLINE_S, Job
from tiers import smoke

import pycoll


@pytest.fixture(params=[2, 4])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param)
    yield made
    made.close()


@smoke
def test_every_algorithm_of_all_reduce_and_all_to_all(job: Job) -> None:
    def program(comm: Any) -> None:
        for count in (1, 1000, 200_000):
            count -= count % comm.size
            xs = [np.arange(count) + rank for rank in range(comm.size)]
            for algorithm in pycoll.algorithms("all_reduce"):
                if algorithm != "shared_memory":
                    got = comm.all_reduce(xs[comm.rank], algorithm=algorithm, timeout=DEADLINE_S)
                    np.testing.assert_array_equal(got, sum(xs))
            blocks = [x.reshape(comm.size, -1) for x in xs]
            for algorithm in pycoll.algorithms("all_to_all"):
                if algorithm != "shared_memory":
                    got = comm.all_to_all(
                        blocks[comm.rank], algorithm=algorithm, timeout=DEADLINE_S
                    )
                    np.testing.assert_array_equal(got, [block[comm.rank] for block in blocks])

    job.run(program)


def test_what_is_buffered_goes_on_while_its_sender_does_something_else(job: Job) -> None:
    number, received = 200, threading.Event()

    def program(comm: Any) -> None:
        if comm.rank == 0:
            for i in range(number):
                comm.send(i, 1)
            assert received.wait(DEADLINE_S)  # this thread does nothing for pycoll
        elif comm.rank == 1:
            assert [comm.recv(0, timeout=DEADLINE_S) for _ in range(number)] == list(range(number))
            received.set()

    job.run(program)


def test_what_goes_over_a_device_is_counted_at_both_ends(job: Job) -> None:
    lengths = [1, 3_000_000]  # in a frame, and from memory to memory

    def program(comm: Any) -> list[list[int]]:
        before = comm.counters()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        requests = [comm.isend(np.ones(nbytes, np.uint8), right) for nbytes in lengths]
        pycoll.wait_all([*requests, *(comm.irecv(left) for _ in lengths)])
        now = comm.counters()
        return [(n - b).tolist() for n, b in zip(now, before, strict=True)]

    size = len(job.ranks)
    for rank, (sent, num_sent, received, num_received) in enumerate(job.run(program)):
        to, source = ([(rank + by) % size == peer for peer in range(size)] for by in (1, -1))
        assert num_sent == [2 * is_it for is_it in to]
        assert num_received == [2 * is_it for is_it in source]
        assert sent == [sum(lengths) * is_it for is_it in to]
        assert received == [sum(lengths) * is_it for is_it in source]


def test_requests_in_both_directions_at_once(job: Job) -> None:
    def program(comm: Any) -> None:
        peer = comm.rank ^ 1
        for nbytes in (10, 70_000, 3_000_000):
            x = np.full(nbytes, comm.rank, np.uint8)
            requests = [comm.irecv(peer, tag=tag) for tag in range(4)]
            requests += [comm.isend(x, peer, tag=tag) for tag in (3, 1, 0, 2)]
            for request in requests[:4]:
                assert (request.wait(timeout=DEADLINE_S) == peer).all()
            pycoll.wait_all(requests)

    job.run(program)


def test_an_array_that_is_sent_again_is_not_registered_again(job: Job) -> None:
    def program(comm: Any) -> None:
        x, peer = np.full(3_000_000, comm.rank, np.uint8), comm.rank ^ 1
        registrations = job.devices[comm.rank].endpoint.registrations
        for turn in range(5):
            if comm.rank < peer:
                comm.send(x if turn % 2 else x[1000:], peer)
                assert len(registrations) == 1
            else:
                assert (comm.recv(peer, timeout=DEADLINE_S) == peer).all()
        if comm.rank < peer:
            comm.isend(x, peer).wait()
            assert len(registrations) == 1
        else:
            comm.recv(peer, timeout=DEADLINE_S)

    job.run(program)
