"""Whole ranks over simulated RDMA devices: engines and communicators, as threads of one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import pytest
from simulated_device import Fabric

import pycoll
from pycoll import agreed
from pycoll.communicator import Communicator, World
from pycoll.engine import Engine
from pycoll.group import Group
from pycoll.transports.base import Transport
from pycoll.transports.inproc import Hub, InprocTransport
from pycoll.transports.rdma import RdmaTransport, completions_for, receives_for

DEADLINE_S = 60.0


class Rank(Engine):
    """An engine without a launcher: its letters go straight to the others."""

    ranks: list[Rank]

    def tell(self, peer: int, letter: bytes) -> None:
        other = self.ranks[peer]
        other.transports[self.rank].hear(self.rank, letter)
        for seat in (other._front, other._back):
            seat.ring()

    def listen(self, timeout_s: float) -> Collection[int]:
        return ()


class Job:
    """Ranks of one process, each with a communicator and a simulated device."""

    def __init__(self, size: int) -> None:
        self.fabric = Fabric(seed=size)
        own = {"node": 0, "rdma": {"network": "simulated"}, **agreed.said({}, 1)}
        infos = [own] * size
        agreed.settle(agreed.agree(infos))
        hub, ranks = Hub(size), []
        for rank in range(size):
            device = self.fabric.device(receives_for(size - 1), completions_for(size - 1))
            rdma, to_self = RdmaTransport(rank, device, "simulated"), InprocTransport(hub, rank)
            reach: list[Transport] = [rdma] * size
            reach[rank] = to_self
            ranks.append(Rank(rank, reach, None))
        addresses = [rank.transports[rank.rank - 1].address() for rank in ranks]
        for rank in ranks:
            rank.ranks = ranks
            for transport in rank._distinct:
                transport.start(addresses, rank)
        self.ranks = ranks
        self.comms = []
        for rank in ranks:
            with rank.locked():
                group = Group(rank, 1, range(size))
            self.comms.append(Communicator(World(rank, rank.rank, size, 0, math.inf), group))

    def run(self, program: Callable[[Any], Any]) -> list[Any]:
        """Run `program(comm)` on each rank, and return the results."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            running = [pool.submit(program, comm) for comm in self.comms]
            for done in as_completed(running, DEADLINE_S):
                if done.exception() is not None:
                    for rank in self.ranks:  # the others would wait for it
                        rank.close("another rank has failed", 0.0)
                done.result()
        return [done.result() for done in running]

    def close(self) -> None:
        closing = [
            threading.Thread(target=rank.close, args=("the end", 5.0)) for rank in self.ranks
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(DEADLINE_S)
        self.fabric.check()


@pytest.fixture
def settled() -> Iterator[None]:
    """What this process's job has agreed on is as before afterwards."""
    before = agreed.current()
    yield
    agreed.settle(before)


@pytest.fixture(params=[2, 4])
def job(request: pytest.FixtureRequest, settled: None) -> Iterator[Job]:
    made = Job(request.param)
    yield made
    made.close()


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
