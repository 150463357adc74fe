"""Parameter servers: the same result as one process, and bounds that hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_runs import needs_example_packages, run_example
from tiers import few

import pycoll
from pycoll.parallel import ParameterServer

Array = Any
Comm = Any

ranks_2_to_5 = pytest.mark.parametrize(
    "ranks",
    few([(4, ("--transport", "shm"))], [2, 3, (5, ("--transport", "tcp"))]),
    indirect=True,
    scope="module",
)
four_ranks = pytest.mark.parametrize(
    "ranks", [(4, ("--transport", "shm"))], indirect=True, scope="module", ids=["4"]
)


def descend(shard: Array, gradient: Array) -> None:
    shard -= 0.1 * gradient


def draw(seed: int, num_workers: int, length: int) -> tuple[Array, Array]:
    """Where the descent begins, and by worker the minimum of its own quadratic function."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=length), rng.normal(size=(num_workers, length))


@ranks_2_to_5
@pytest.mark.parametrize("seed", few([1], [2, 3]))
def test_synchronous_servers_give_what_one_process_gives_for_any_number_of_them(
    ranks: Any, seed: int
) -> None:
    steps, size = 20, ranks.size
    length = int(np.random.default_rng(seed).integers(size, 40_000))

    def program(comm: Comm, num_servers: int) -> tuple[Array | None, int, list[list[int]]]:
        servers = ParameterServer(comm, length, num_servers)
        begin, minima = draw(seed, servers.num_workers, length)
        if servers.is_server:
            served = servers.serve(begin, descend)
            counted = [row.tolist() for row in servers.comm.counters()]
            return None, served.updates, counted
        for _ in range(steps):
            weights = servers.pull()
            servers.push(weights - minima[comm.rank])
        return servers.finish(), steps, [row.tolist() for row in servers.comm.counters()]

    for num_servers in range(1, size):
        num_workers = size - num_servers
        weights, minima = draw(seed, num_workers, length)
        for _ in range(steps):
            weights -= 0.1 * sum(weights - minimum for minimum in minima)
        answers = ranks(program, num_servers)
        finals = [final for final, _, _ in answers[:num_workers]]
        np.testing.assert_allclose(finals[0], weights, rtol=1e-12, atol=1e-13)
        assert all(final.tobytes() == finals[0].tobytes() for final in finals)
        assert {updates for _, updates, _ in answers} == {steps}
        # K bytes to and from each worker in each step, and the parameters once more at the end
        for rank, (_, _, (sent, _, received, _)) in enumerate(answers):
            share = length if rank < num_workers else 0
            if rank >= num_workers:
                each = rank - num_workers
                shard = length * (each + 1) // num_servers - length * each // num_servers
                share = shard * num_workers
            pulled, pushed = 8 * (steps + 1) * share, 8 * steps * share
            wanted = [pushed, pulled] if rank < num_workers else [pulled, pushed]
            assert [sum(sent), sum(received)] == wanted


@four_ranks
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_worker_is_never_further_ahead_than_the_bound_and_reaches_it(
    ranks: Any, staleness: int
) -> None:
    """Each gradient adds 1 at its worker's place, so who pulls sees the steps of all.

    The slow worker takes a step when the quick one has asked for parameters that it may not have
    before. The others take theirs when they can.
    """
    steps, slow, quick = 12, 0, 1

    def add(shard: Array, gradient: Array) -> None:
        shard += gradient

    def program(comm: Comm) -> list[int]:
        servers = ParameterServer(comm, 3)
        if servers.is_server:
            served = servers.serve(np.zeros(3), add, staleness)
            assert served.updates == 3 * steps
            return list(served.ahead)
        one, ahead = np.eye(3)[comm.rank], []
        for step in range(steps):
            if comm.rank == slow and step < steps - staleness - 1:
                comm.recv(quick)
            weights = np.empty(3)
            requests = servers.ipull(weights)
            if comm.rank == quick and step > staleness:
                comm.send(None, slow)  # it may go on: this one must wait for it
            pycoll.wait_all(requests)
            assert weights[comm.rank] == step
            ahead.append(int(step - weights.min()))
            servers.push(one)
        assert servers.finish().tolist() == [steps] * 3
        return ahead

    *workers, histogram = ranks(program)
    assert max(map(max, workers)) == staleness
    assert max(workers[quick]) == staleness
    assert len(histogram) == staleness + 1
    assert histogram[-1] > 0
    assert sum(histogram) == 3 * steps


@four_ranks
def test_wrong_arguments_are_refused_by_name(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for num_servers in (0, comm.size):
            with pytest.raises(ValueError, match=f"num_servers is {num_servers}"):
                ParameterServer(comm, 3, num_servers)
        with pytest.raises(ValueError, match="length is -1"):
            ParameterServer(comm, -1)
        servers = ParameterServer(comm, 3)
        if servers.is_server:
            with pytest.raises(ValueError, match="staleness is -1"):
                servers.serve(np.zeros(3), descend, -1)
            with pytest.raises(ValueError, match="parameters must be float64"):
                servers.serve(np.zeros(4), descend)
            with pytest.raises(ValueError, match="this rank is a server"):
                servers.push(np.zeros(3))
        else:
            with pytest.raises(ValueError, match="this rank is a worker"):
                servers.serve(np.zeros(3), descend)
            for wrong in (np.zeros(4), np.zeros(3, np.float32)):
                with pytest.raises(ValueError, match="gradient is"):
                    servers.push(wrong)

    ranks(program)


KILLED = """
import os, signal
import numpy as np
import pycoll
from pycoll.parallel import ParameterServer

comm = pycoll.init()
servers = ParameterServer(comm, 1000)
pushed = 0

def update(shard, gradient):
    global pushed
    pushed += 1
    if comm.rank == culprit and pushed == 5:
        os.kill(os.getpid(), signal.SIGKILL)

try:
    if servers.is_server:
        servers.serve(np.zeros(1000), update, staleness)
    for step in range(10**9):
        if comm.rank == culprit and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        servers.push(servers.pull())
except pycoll.PeerFailed as error:
    print("rank", comm.rank, "lost rank", error.rank, flush=True)
    raise
"""


@pytest.mark.parametrize("case", [(2, None), (0, 1)], ids=str)
def test_a_server_or_a_worker_that_is_killed_ends_the_others_who_name_it(
    job: Any, case: tuple[int, int | None]
) -> None:
    culprit, staleness = case
    done = job(3, f"culprit, staleness = {culprit}, {staleness}" + KILLED)
    assert done.status == 128 + 9
    told = re.findall(r"rank (\d) lost rank (\d)", done.stdout)
    assert sorted(told) == sorted((str(r), str(culprit)) for r in range(3) if r != culprit)


@pytest.mark.parallel
@needs_example_packages
@pytest.mark.parametrize("size", few([3], [2, 5]))
def test_the_program_finds_ring_and_servers_equal_to_one_process(size: int, tmp_path: Path) -> None:
    output = run_example("parallel/data_parallel.py", size, tmp_path, "--steps", "30")
    assert "equal to one process, and bytes as the formulas say: True" in output
    rows = re.findall(r"^servers, bound (\d) .* (\d+)$", output, re.M)
    assert [bound for bound, _ in rows] == ["0", "1", "4"]
    assert all(int(ahead) <= int(bound) for bound, ahead in rows)
