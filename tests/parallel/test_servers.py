"""Parameter servers: the same result as one process, and bounds that hold."""

from __future__ import annotations

import math
import random
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_runs import EXAMPLES, needs_example_packages, run_example
from patience import PATIENCE
from tiers import few

import pycoll

Array = Any
Comm = Any

PROGRAM = str(EXAMPLES / "parallel/parameter_server.py")


def servers_of(*arguments: Any) -> Any:
    """A `ParameterServer` of the program, on a rank."""
    return runpy.run_path(PROGRAM)["ParameterServer"](*arguments)


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
        servers = servers_of(comm, length, num_servers)
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
        servers = servers_of(comm, 3)
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
@pytest.mark.parametrize("staleness", [None, 1, math.inf])
def test_workers_may_make_different_numbers_of_steps_and_none_is_lost(
    ranks: Any, staleness: float | None
) -> None:
    """Worker w pushes w + 1 times; who has finished is waited for no longer."""

    def add(shard: Array, gradient: Array) -> None:
        shard += gradient

    def program(comm: Comm) -> Any:
        servers = servers_of(comm, 3)
        if servers.is_server:
            return servers.serve(np.zeros(3), add, staleness).updates
        for _ in range(comm.rank + 1):
            servers.pull()
            servers.push(np.eye(3)[comm.rank])
        return servers.finish().tolist()

    for _ in range(5):
        assert ranks(program) == [[1.0, 2.0, 3.0]] * 3 + [3 if staleness is None else 6]


@four_ranks
def test_more_servers_than_parameters_and_no_parameters_at_all(ranks: Any) -> None:
    def program(comm: Comm, length: int) -> Any:
        servers = servers_of(comm, length, 3, np.float32)
        if servers.is_server:
            return servers.serve(np.zeros(length, np.float32), descend).updates
        for step in range(4):
            servers.push(servers.pull() - step)
        return servers.finish().tolist()

    for length in (0, 1, 2):
        final = np.float32(0)
        for step in range(4):
            final -= np.float32(0.1) * (final - np.float32(step))
        answers = ranks(program, length)
        np.testing.assert_allclose(answers[0], [final] * length, rtol=1e-6)
        assert answers[1:] == [4] * 3


@four_ranks
def test_wrong_arguments_are_refused_by_name(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        for num_servers in (0, comm.size):
            with pytest.raises(ValueError, match=f"num_servers is {num_servers}"):
                servers_of(comm, 3, num_servers)
        with pytest.raises(ValueError, match="length is -1"):
            servers_of(comm, -1)
        servers = servers_of(comm, 3)
        if servers.is_server:
            with pytest.raises(ValueError, match="staleness is -1"):
                servers.serve(np.zeros(3), descend, -1)
            with pytest.raises(
                ValueError, match=r"parameters is float64\[4\]: it must be float64\[3\]"
            ):
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
import os, random, runpy, signal, threading, time
import numpy as np
import pycoll

comm = pycoll.init()
servers = runpy.run_path(program)["ParameterServer"](comm, 1000, num_servers)
pushed = 0

def die():
    print("dies", time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def update(shard, gradient):
    global pushed
    pushed += 1
    shard += gradient
    if comm.rank == culprit and pushed == after:
        die()

if comm.rank == culprit and isinstance(after, float):
    threading.Timer(after, die).start()
try:
    if servers.is_server:
        servers.serve(np.zeros(1000), update, staleness)
    for step in range(10**9):
        if comm.rank == culprit and step == after:
            die()
        pulled = servers.pull()
        assert (pulled[servers._shards[0]] == pulled[0]).all()  # a shard is never in between
        assert pulled[0] >= (servers.num_workers if staleness is None else 1) * step
        servers.push(np.ones(1000))
except pycoll.PeerFailed as error:
    print("rank", comm.rank, "lost rank", error.rank, time.monotonic(), flush=True)
    raise
"""


def lost(job: Any, size: int, num_servers: int, **names: Any) -> None:
    """Run until one dies, after so many steps or seconds; the others must name it."""
    names |= dict(program=PROGRAM, num_servers=num_servers)
    settings = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    done = job(size, settings + KILLED)
    assert done.status == 128 + 9, (names, done.stderr)
    (died,) = re.findall(r"dies (\S+)", done.stdout)
    told = re.findall(r"rank (\d) lost rank (\d) (\S+)", done.stdout)
    culprit = names["culprit"]
    others = [(str(r), str(culprit)) for r in range(size) if r != culprit]
    assert sorted((rank, of) for rank, of, _ in told) == others, (names, done.stderr)
    assert "AssertionError" not in done.stderr
    assert max(float(at) for *_, at in told) < float(died) + 5 * PATIENCE, names


@pytest.mark.parallel
@pytest.mark.parametrize("case", [(2, None), (0, 1)], ids=str)
def test_a_server_or_a_worker_that_is_killed_ends_the_others_who_name_it(
    job: Any, case: tuple[int, int | None]
) -> None:
    culprit, staleness = case
    lost(job, 3, 1, culprit=culprit, staleness=staleness, after=5)


@pytest.mark.parallel
@pytest.mark.parametrize("seed", range(12))
def test_workers_and_servers_killed_at_random_moments_end_the_others(job: Any, seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randint(2, 6)
    lost(
        *(job, size, chance.randint(1, size - 1)),
        culprit=chance.randrange(size),
        staleness=chance.choice([None, 0, 1, 3]),
        after=chance.uniform(0.0, 0.5),
    )


NAMES = ("ring", "one server", "two servers")
PAGE = (EXAMPLES.parent / "docs/parallel/data.md").read_text(encoding="utf-8")


def rows_of(page: str, head: str, number: int = 1) -> list[list[str]]:
    """The cells of the table that begins so, but for its head."""
    table = page.split(f"\n| {head} |")[number].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]


@pytest.mark.parallel
@needs_example_packages
@pytest.mark.parametrize("size", few([3], [2, 5]))
def test_the_program_counts_what_the_page_has_and_is_equal_to_one_process(
    size: int, tmp_path: Path
) -> None:
    output = run_example("parallel/data_parallel.py", size, tmp_path, "--steps", "30")
    assert "equal to one process, and bytes as the formulas say: True" in output
    rows = re.findall(r"^servers, bound (\d) .* (\d+)$", output, re.M)
    assert [bound for bound, _ in rows] == ["0", "1", "4"]
    assert all(int(ahead) <= int(bound) for bound, ahead in rows)
    printed = output[output.index("\nranks ") :].splitlines()[2:5]
    for name, line, row in zip(NAMES, printed, rows_of(PAGE, "ranks"), strict=True):
        assert row[0] == name
        assert line.removeprefix(name).split() == [cell for cell in row[1:size] if cell]


@needs_example_packages
def test_the_page_about_data_parallelism_has_the_formulas_bytes_and_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "parallel")
    program = runpy.run_path(str(EXAMPLES / "parallel/data_parallel.py"))
    for number, (name, *cells) in enumerate(rows_of(PAGE, "ranks")):
        assert name == NAMES[number]
        for size, cell in enumerate(cells, 2):
            if size > number:
                assert cell == f"{program['formula'](size, number):.3f}"
    rows = [(row, "lot", 7) for row in rows_of(PAGE, "way | waits alone", 1)]
    rows += [(row, "one", 3) for row in rows_of(PAGE, "way | waits alone", 2)]
    assert len(rows) == 7
    for (way, waits, *_), slow, workers in rows:
        bound = re.search(r"bound (\d)", way)
        ideal = program["Digits"](300, slow).ideal_seconds(
            workers + way.startswith("ring"), int(bound[1]) if bound else None
        )
        assert waits == f"{1000 * ideal / 300:.2f}"
