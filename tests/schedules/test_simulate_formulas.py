"""Times on networks drawn at random are those of the closed formulas, but for rounding.

The model counts femtoseconds, so each step of a chain may be off by half of one.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert took("broadcast", "tree", nbytes) == about(lg * step, lg)
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


def test_a_sender_goes_on_when_its_port_is_free() -> None:
    """And is done then, while its last message is still on the way."""
    network = Network(latency_s=1e-3, bandwidth=1e9, overhead_s=1e-5)
    timing = simulate("broadcast", "linear", 4, 1e6, network=network)
    sent = [number * (1e-5 + 1e-3) for number in range(4)]
    arrived = [before + 1e-3 + 1e-3 for before in sent[:3]]
    assert timing.finish == tuple(about(seconds, 9) for seconds in (sent[3], *arrived))


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
