"""Times on networks drawn at random are those of the closed formulas, but for rounding.

The model counts femtoseconds, so each step of a chain may be off by half of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import smoke

import pycoll
from pycoll.schedule import Recv, Send, Step
from pycoll.schedules import TABLE
from pycoll.simulate import Link, Network, simulate

LATENCIES = st.floats(1e-8, 1e-3)
BANDWIDTHS = st.floats(1e6, 1e12)
LENGTHS = st.floats(0.0, 1e9)
SIZES = st.integers(2, 24)
POWERS = st.integers(1, 5)
COMBINING = st.floats(0.0, 1e-9)


def about(seconds: float, steps: int) -> object:
    """Equal but for the rounding of so many steps, and the last digits of the arithmetic."""
    return pytest.approx(seconds, rel=1e-12, abs=steps * 0.5e-15 + 1e-18)


@smoke
@given(SIZES, LENGTHS, LATENCIES, BANDWIDTHS, COMBINING)
def test_rings(size: int, nbytes: float, alpha: float, bandwidth: float, gamma: float) -> None:
    network = Network(latency_s=alpha, bandwidth=bandwidth, reduce_s_per_byte=gamma)
    step, combined = alpha + nbytes / size / bandwidth, nbytes / size * gamma
    took = simulate("all_reduce", "ring", size, nbytes, network=network).seconds
    steps = size - 1
    assert took == about(2 * steps * step + steps * combined, 3 * steps)
    took = simulate("all_gather", "ring", size, nbytes / size, network=network).seconds
    assert took == about(steps * step, steps)
    took = simulate("reduce_scatter", "ring", size, nbytes / size, network=network).seconds
    assert took == about(steps * (step + combined), 2 * steps)


@given(POWERS, LENGTHS, LATENCIES, BANDWIDTHS, COMBINING)
def test_algorithms_of_lg_p_steps(
    lg: int, nbytes: float, alpha: float, bandwidth: float, gamma: float
) -> None:
    network = Network(latency_s=alpha, bandwidth=bandwidth, reduce_s_per_byte=gamma)

    def took(collective: str, name: str, nbytes: float) -> float:
        return simulate(collective, name, 1 << lg, nbytes, network=network).seconds

    step, combined, others = alpha + nbytes / bandwidth, nbytes * gamma, (1 << lg) - 1
    small = min(nbytes, 0.99 * alpha * bandwidth)  # has left when the next message has begun
    assert took("broadcast", "tree", small) == about(lg * (alpha + small / bandwidth), lg)
    doubling = took("all_reduce", "recursive_doubling", nbytes)
    assert doubling == about(lg * (step + combined), 2 * lg)
    assert took("barrier", "dissemination", 0) == about(lg * alpha, lg)
    blocks = nbytes * others / (1 << lg) / bandwidth
    gathered = took("all_gather", "recursive_doubling", nbytes / (1 << lg))
    assert gathered == about(lg * alpha + blocks, lg)
    # Rabenseifner: halves, quarters, ... combined, and the same back.
    halving = took("all_reduce", "recursive_halving", nbytes)
    expected = 2 * lg * alpha + 2 * blocks + nbytes * others / (1 << lg) * gamma
    assert halving == about(expected, 3 * lg)


@given(SIZES, st.integers(1, 16), LENGTHS, LATENCIES, BANDWIDTHS, st.floats(0.0, 1.0))
def test_a_pipeline_waits_once_for_latency_and_each_segment_for_the_overhead(
    size: int, segments: int, nbytes: float, alpha: float, bandwidth: float, busy: float
) -> None:
    network = Network(latency_s=alpha, bandwidth=bandwidth, overhead_s=busy * alpha)
    took = simulate("broadcast", "chain", size, nbytes, segments=segments, network=network)
    moved = nbytes / segments / bandwidth
    expected = (size - 1) * (alpha + moved) + (segments - 1) * (busy * alpha + moved)
    assert took.seconds == about(expected, size + segments)


@given(POWERS, LENGTHS, LATENCIES, BANDWIDTHS)
def test_what_a_rank_sends_to_several_shares_its_port(
    lg: int, nbytes: float, alpha: float, bandwidth: float
) -> None:
    """So in a tree the first of `lg` children has the value no sooner than the last."""
    network = Network(latency_s=alpha, bandwidth=bandwidth, overhead_s=0.0)
    took = simulate("broadcast", "tree", 1 << lg, nbytes, network=network).seconds
    assert took == about(lg * alpha + lg * (lg + 1) / 2 * nbytes / bandwidth, lg * (lg + 1))


@given(SIZES, LENGTHS, LATENCIES, BANDWIDTHS, st.floats(0.0, 1.0))
def test_a_port_that_is_shared_is_never_idle(
    size: int, nbytes: float, alpha: float, bandwidth: float, busy: float
) -> None:
    """A root begins one message after the other; either their starts or their bytes last longer."""
    network = Network(latency_s=alpha, bandwidth=bandwidth, overhead_s=busy * alpha)
    others, begun, passing = size - 1, busy * alpha, nbytes / bandwidth
    expected = max(others * begun + passing, begun + others * passing) + (1 - busy) * alpha
    for collective in "broadcast", "gather":
        took = simulate(collective, "linear", size, nbytes, network=network).seconds
        assert took == about(expected, size * size)


def test_a_sender_is_done_when_its_last_byte_has_left() -> None:
    """Of three messages of 1 ms, which begin 10 us apart; the wire takes 990 us more.

    The first is alone for 10 us, among two for 10 us and among three from 30 us on.
    """
    network = Network(latency_s=1e-3, bandwidth=1e9, overhead_s=1e-5)
    timing = simulate("broadcast", "linear", 4, 1e6, network=network)
    left = [2985e-6, 3005e-6, 3010e-6]
    expected = [left[2], *(seconds + 990e-6 for seconds in left)]
    assert timing.finish == tuple(about(seconds, 9) for seconds in expected)


def test_at_most_64_messages_share_a_port() -> None:
    timing = simulate("broadcast", "linear", 130, 1e6, network=Network(0.0, 1e9))
    expected = [64e-3] * 64 + [128e-3] * 64 + [129e-3]
    assert timing.finish[1:] == tuple(about(seconds, 130) for seconds in expected)


def test_bytes_pass_at_the_pace_of_the_port_that_most_share() -> None:
    """Rank 2 hears from ranks 0 and 1; rank 0 sends to three, and no more goes to rank 2."""

    def steps(rank: int, size: int) -> Iterator[Step]:
        for sender, receiver in (0, 2), (1, 2), (0, 3), (0, 4):
            if rank == sender:
                yield Send(receiver, rank)
            elif rank == receiver:
                yield Recv(sender, sender)

    pycoll.register_algorithm("all_gather", "star")(steps)
    try:
        network = Network(latency_s=0.0, bandwidth=1e9)
        timing = simulate("all_gather", "star", 5, 1e6, network=network)
    finally:
        del TABLE["all_gather"]["star"]
    # Rank 1's message has half of rank 2's port until it has left.
    assert timing.finish == tuple(about(s, 9) for s in (3e-3, 2e-3, 3e-3, 3e-3, 3e-3))


@given(st.integers(2, 6), st.integers(1, 4), LENGTHS, LATENCIES, BANDWIDTHS, st.floats(1.0, 9.0))
def test_a_ring_over_hosts_goes_at_the_pace_of_its_slowest_link(
    hosts: int, on_each: int, nbytes: float, alpha: float, bandwidth: float, slower: float
) -> None:
    network = Network(
        latency_s=alpha,
        bandwidth=bandwidth,
        between=Link(alpha * slower, bandwidth / slower),
        shared_ports=True,
    )
    size = hosts * on_each
    placed = [rank // on_each for rank in range(size)]
    took = simulate("all_reduce", "ring", size, nbytes, hosts=placed, network=network).seconds
    step = slower * (alpha + nbytes / size / bandwidth)
    assert took == about(2 * (size - 1) * step, 2 * size)


def an_exchange(network: Network) -> float:
    """Two ranks send each other 1 MB over links that take 1 ms for it."""
    network = network._replace(latency_s=0.0, bandwidth=1e9)
    return simulate("all_reduce", "recursive_doubling", 2, 1e6, network=network).seconds


@pytest.mark.parametrize(("memory", "expected"), [(1e12, 1.001e-3), (2e9, 1.5e-3), (1e9, 2e-3)])
def test_messages_of_a_host_share_its_memory(memory: float, expected: float) -> None:
    """The second of two begins when memory has read the first."""
    assert an_exchange(Network(memory_bandwidth=memory)) == about(expected, 4)


@pytest.mark.parametrize(("cores", "expected"), [(0, 1.1e-3), (2, 1.1e-3), (1, 1.2e-3)])
def test_ranks_of_a_host_share_its_cores(cores: int, expected: float) -> None:
    """A core takes 0.1 ms for each end of a message; one for both ends takes twice as long."""
    assert an_exchange(Network(core_s=1e-4, cores=cores)) == about(expected, 4)


@pytest.mark.parametrize(("cores", "expected"), [(0, 1e-6), (4, 1e-6), (3, 4e-6 / 3), (1, 4e-6)])
def test_a_call_begins_when_the_cores_have_made_it(cores: int, expected: float) -> None:
    network = Network(latency_s=0.0, call_s=1e-6, cores=cores)
    assert simulate("barrier", "dissemination", 4, 0, network=network).seconds == about(expected, 9)


def test_a_host_has_as_many_messages_under_way_as_adapters() -> None:
    """Four ranks of each host send to the other, through one, two or four adapters."""
    for adapters, rounds in (1, 4), (2, 2), (3, 2), (4, 1):
        network = Network(1e-9, 1e15, Link(0.0, 1e9), shared_ports=True, adapters=adapters)
        timing = simulate(
            "all_gather", "hierarchical", 8, 1e6, hosts=[0] * 4 + [1] * 4, network=network
        )
        assert timing.seconds == pytest.approx(rounds * 1e-3, rel=1e-4)


def test_levels_are_told_apart() -> None:
    """A chain of four ranks: inside a host, between hosts of a rack, between racks."""
    network = Network(1e-6, math.inf, Link(1e-5, math.inf), racks=Link(1e-4, math.inf))
    network = network._replace(hosts_per_rack=2)
    timing = simulate("broadcast", "chain", 4, 8, hosts=[0, 0, 1, 2], network=network)
    assert timing.finish == (about(1e-6, 3), about(1.1e-5, 3), about(1.11e-4, 3), about(1.11e-4, 3))
