"""A few ranks stand for all where the schedules are one: shown against the replay of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from tiers import smoke

from pycoll.schedule import Copy, Recv, Reduce, Send, Step, recv_reduce
from pycoll.schedules import TABLE, Algorithm, find, schedule
from pycoll.simulate import Link, Network, ReplayedSteps, simulate
from pycoll.simulate.network import Placement
from pycoll.simulate.symmetry import AROUND, PARTNERS, AnyRank, Undecided, symmetry_of

ANY_SIZE = {
    ("all_reduce", "ring"),
    ("all_gather", "ring"),
    ("all_gather", "bruck"),
    ("all_gather", "pat"),
    ("reduce_scatter", "ring"),
    ("reduce_scatter", "pairwise"),
    ("reduce_scatter", "pat"),
    ("all_to_all", "pairwise"),
    ("all_to_all", "bruck"),
    ("barrier", "dissemination"),
}
POWERS_OF_TWO = {("all_reduce", "recursive_doubling")}
SYMMETRIC = sorted(ANY_SIZE | POWERS_OF_TWO)


class Machines(NamedTuple):
    """A network, and how many ranks each host has."""

    network: Network
    on_each: int

    def hosts(self, size: int) -> list[int]:
        return [rank // self.on_each for rank in range(size)]


MACHINES = {
    "one host": Machines(Network(reduce_s_per_byte=1e-10), 64),
    "hosts": Machines(
        Network(
            overhead_s=1e-6,
            between=Link(1e-4, 1e9, 2e-5),
            shared_ports=True,
            reduce_s_per_byte=1e-10,
        ),
        4,
    ),
    "racks": Machines(
        Network(
            core_s=1e-6,
            core_s_per_byte=1e-10,
            between=Link(1e-4, 1e9, core_s=2e-6),
            racks=Link(3e-4, 3e8),
            hosts_per_rack=3,
            shared_ports=True,
            adapters=2,
            cores=3,
            call_s=1e-6,
            memory_bandwidth=2e10,
            reduce_s_per_byte=1e-10,
        ),
        2,
    ),
}


LARGER = {16, 17, 24, 32, 36, 48, 60, 64}
"""Numbers of ranks: of every rank the time is computed, too, which takes long."""

REPLAYED = {
    "one host": {3: 1, 8: 1, 12: 1, 14: 1},
    "hosts": {3: 1, 8: 4, 12: 4},
    "racks": {12: 6},
}
"""By number of ranks, how many stand for all: those of a host, of a rack; elsewhere each."""


def sizes_of(collective: str, name: str, most: int) -> list[int]:
    found = find(collective, name)
    return [size for size in range(2, most + 1) if symmetry_of(found, size)]


@smoke
def test_it_is_known_of_which_algorithms_all_ranks_do_the_same() -> None:
    found = {
        (algorithm.collective, algorithm.name): sizes_of(algorithm.collective, algorithm.name, 33)
        for row in TABLE.values()
        for algorithm in row.values()
    }
    every, powers = list(range(2, 34)), [2, 4, 8, 16, 32]
    assert {key for key, sizes in found.items() if sizes == every} == ANY_SIZE
    assert {key for key, sizes in found.items() if sizes == powers} == POWERS_OF_TWO
    assert {key for key, sizes in found.items() if sizes} == set(SYMMETRIC)


def turned(step: Step, move: Callable[[int], int], size: int) -> tuple[object, ...]:
    """What a step does, its chunks as numbers that count from this rank."""
    kind = type(step).__name__, isinstance(step, Recv) and step.scratch
    return *kind, move(step.peer) if isinstance(step, Send | Recv) else None


def assert_turned(collective: str, name: str, most: int) -> None:
    for size in sizes_of(collective, name, most):
        how = symmetry_of(find(collective, name), size)
        first = schedule(collective, name, 0, size)
        for rank in range(1, size):
            other = schedule(collective, name, rank, size)

            def move(peer: int, rank: int = rank, size: int = size, how: object = how) -> int:
                return (peer - rank) % size if how == AROUND else peer ^ rank

            same = [turned(step, lambda peer: peer, size) for step in first.steps]
            assert [turned(step, move, size) for step in other.steps] == same
            assert [len(chunks) for chunks in other.chunks] == [len(c) for c in first.chunks]
            assert (other.number, other.waits, other.successors) == first[2:]


@pytest.mark.parametrize(("collective", "name"), SYMMETRIC)
def test_the_schedule_of_each_rank_is_that_of_rank_0_turned(collective: str, name: str) -> None:
    assert_turned(collective, name, 16)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("collective", "name"), SYMMETRIC)
def test_the_schedule_of_each_of_64_ranks_is_that_of_rank_0(collective: str, name: str) -> None:
    assert_turned(collective, name, 64)


def assert_as_every_rank(collective: str, name: str, size: int, machines: Machines) -> int:
    """Compare all times, to the last bit; returns how many ranks were replayed."""
    network, hosts = machines.network, machines.hosts(size)
    for segments, window in (1, 16), (3, 2):
        few, every = (
            simulate(
                collective,
                name,
                size,
                1e6,
                segments=segments,
                window=window,
                hosts=hosts,
                network=network,
                every_rank=all_of_them,
            )
            for all_of_them in (False, True)
        )
        assert few == every, (collective, name, size, segments)
    return len(ReplayedSteps(collective, name, size, 0, hosts, network).ranks)


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize(("collective", "name"), SYMMETRIC)
def test_a_few_ranks_take_the_times_of_all(collective: str, name: str, where: str) -> None:
    able = sizes_of(collective, name, 16)
    for size in {3, 8, 12, 14} & set(able):
        replayed = assert_as_every_rank(collective, name, size, MACHINES[where])
        assert replayed == REPLAYED[where].get(size, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize(("collective", "name"), SYMMETRIC)
def test_a_few_ranks_take_the_times_of_64(collective: str, name: str, where: str) -> None:
    machines = MACHINES[where]
    for size in LARGER & set(sizes_of(collective, name, 64)):
        if Placement(machines.hosts(size), machines.network).period < size:
            assert assert_as_every_rank(collective, name, size, machines) < size


def of_rank_0(rank: int, size: int) -> Iterator[Step]:
    """Rank 0 sends to all."""
    for peer in range(1, size):
        if rank == 0:
            yield Send(peer, 0)
        elif rank == peer:
            yield Recv(0, 0)


def back_and_forth(rank: int, size: int) -> Iterator[Step]:
    """Even ranks begin: what comes first depends on the rank, though each says the same."""
    if rank % 2:
        yield from recv_reduce(rank ^ 1, 0)
        yield Send(rank ^ 1, 0)
    else:
        yield Send(rank ^ 1, 0)
        yield from recv_reduce(rank ^ 1, 0)


def own_or_first(rank: int, size: int) -> Iterator[Step]:
    """Chunk 0 is rank 0's own: there alone the second message waits for the first."""
    yield Recv((rank - 1) % size, rank)
    yield Send((rank + 1) % size, 0)


def overlapping(rank: int, size: int) -> Iterator[Step]:
    """Chunk rank + 1 is that of (rank + 1) % size, but for the last rank."""
    yield Copy(rank, rank + 1)
    yield Send((rank + 1) % size, (rank + 1) % size)
    yield Recv((rank - 1) % size, (rank - 1) % size)


@pytest.mark.parametrize("steps", [of_rank_0, back_and_forth, own_or_first, overlapping])
@pytest.mark.parametrize("size", [3, 4])
def test_where_a_rank_may_differ_nothing_is_proved(
    steps: Callable[[int, int], Iterator[Step]], size: int
) -> None:
    algorithm = Algorithm("all_gather", "odd", steps, lambda size: 2 * size, None)
    assert symmetry_of(algorithm, size) is None


def test_an_algorithm_of_a_user_is_proved_like_any_other() -> None:
    def both_ways(rank: int, size: int) -> Iterator[Step]:
        yield Send((rank + 1) % size, (0, 1))
        yield Send((rank - 1) % size, (0, 1))
        for peer in (rank + 1) % size, (rank - 1) % size:
            yield Recv(peer, (0, 1), scratch=True)
            yield Reduce((0, 1), incoming_first=peer < rank)

    assert symmetry_of(Algorithm("all_reduce", "mine", both_ways, lambda s: 2, None), 5) == AROUND


def test_a_rank_that_may_be_any_knows_what_holds_for_all() -> None:
    rank = AnyRank(AROUND, 8)
    assert ((rank + 7) % 8 + 2) % 8 == (rank + 1) % 8
    assert (3 + rank) % 8 != rank
    assert 8 + rank != (rank + 5) % 8
    assert rank != -1
    assert AnyRank(PARTNERS, 8) ^ 6 ^ 2 == 4 ^ AnyRank(PARTNERS, 8)
    for answer in (rank == 3, rank != 7, rank < 4, rank >= 0, rank + 1 == rank):
        with pytest.raises(Undecided):
            bool(answer)


@pytest.mark.parametrize(
    ("hosts", "network", "period"),
    [
        ([0, 0, 1, 1], Network(), 1),
        ([0, 0, 1, 1], Network(shared_ports=True), 2),
        ([0, 0, 1, 1], Network(between=Link(1e-3, 1e9)), 2),
        ([0, 1, 0, 1], Network(shared_ports=True), 4),
        ([0, 0, 0, 1], Network(shared_ports=True), 4),
        ([0, 1, 2, 3], Network(shared_ports=True), 1),
        ([0, 0, 0, 0], Network(cores=2), 4),
        ([0, 0, 0, 0], Network(memory_bandwidth=1e10), 4),
        ([0, 0, 1, 1, 2, 2, 3, 3], Network(racks=Link(1e-3, 1e9), hosts_per_rack=2), 4),
        ([0, 0, 1, 1, 2, 2], Network(racks=Link(1e-3, 1e9), hosts_per_rack=2), 6),
    ],
)
def test_ranks_stand_for_others_only_where_the_machines_look_the_same(
    hosts: list[int], network: Network, period: int
) -> None:
    assert Placement(hosts, network).period == period
