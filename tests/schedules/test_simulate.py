"""The model's times are those of the closed formulas, where there are some."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from patience import PATIENCE
from tiers import smoke

import pycoll
from pycoll import simulate
from pycoll.schedule import Recv, Send, Step
from pycoll.schedules import TABLE, Algorithm
from pycoll.simulate import PIECES, Link, Network, Timing

ALPHA, BETA, GAMMA = 20e-6, 1 / 4e9, 1 / 16e9
NETWORK = Network(latency_s=ALPHA, bandwidth=1 / BETA)
MIB = 1 << 20
ROWS = [algorithm for row in TABLE.values() for algorithm in row.values() if not algorithm.hosts]


def seconds(collective: str, name: str, size: int, nbytes: float, segments: int = 1) -> float:
    return simulate.simulate(
        collective, name, size, nbytes, segments=segments, network=NETWORK
    ).seconds


def exactly(value: float) -> object:
    """Equal but for the last digits of the arithmetic: the model counts femtoseconds."""
    return pytest.approx(value, rel=1e-9, abs=1e-14)


@pytest.fixture
def stuck() -> Iterator[None]:
    """Two wrong algorithms of broadcast, while the test runs."""

    def circle(rank: int, size: int, root: int) -> Iterator[Step]:
        yield Recv((rank - 1) % size, 0)
        yield Send((rank + 1) % size, 0)

    def to_nobody(rank: int, size: int, root: int) -> Iterator[Step]:
        if rank == root:
            yield Send((rank + 1) % size, 0)

    pycoll.register_algorithm("broadcast", "circle")(circle)
    pycoll.register_algorithm("broadcast", "to_nobody")(to_nobody)
    yield
    del TABLE["broadcast"]["circle"], TABLE["broadcast"]["to_nobody"]


# Closed formulas


@smoke
@pytest.mark.parametrize("size", [2, 3, 8, 33])
@pytest.mark.parametrize("segments", [1, 2, 16, 64])
def test_a_chain_takes_a_segment_time_for_each_segment_and_each_further_rank(
    size: int, segments: int
) -> None:
    expected = (segments + size - 2) * (ALPHA + 8 * MIB / segments * BETA)
    assert seconds("broadcast", "chain", size, 8 * MIB, segments) == exactly(expected)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("segments", [1, 5, 32])
def test_a_ring_takes_its_steps_in_turn_whatever_the_segments(size: int, segments: int) -> None:
    one = ALPHA + 8 * MIB / size / segments * BETA
    expected = 2 * (size - 1) * segments * one
    assert seconds("all_reduce", "ring", size, 8 * MIB, segments) == exactly(expected)


@pytest.mark.parametrize("lg", [0, 1, 3, 5])
@pytest.mark.parametrize(
    ("collective", "name", "nbytes"),
    [("broadcast", "tree", 64 << 10), ("all_reduce", "recursive_doubling", MIB)],
)
def test_lg_p_messages_of_the_whole_value(collective: str, name: str, nbytes: int, lg: int) -> None:
    expected = lg * (ALPHA + nbytes * BETA)
    assert seconds(collective, name, 1 << lg, nbytes) == exactly(expected)


@pytest.mark.parametrize("size", [2, 5, 9])
@pytest.mark.parametrize("nbytes", [8, 64 << 10, MIB])
def test_a_root_that_sends_to_all_begins_one_after_the_other_and_shares_its_port(
    nbytes: int, size: int
) -> None:
    others, bytes_s = size - 1, nbytes * BETA
    expected = max(others * ALPHA + bytes_s, ALPHA + others * bytes_s)
    assert seconds("broadcast", "linear", size, nbytes) == exactly(expected)
    assert seconds("gather", "linear", size, nbytes) == exactly(expected)


@pytest.mark.parametrize("size", [1, 2, 6, 8, 13])
def test_a_barrier_takes_its_steps_of_no_bytes(size: int) -> None:
    expected = math.ceil(math.log2(size)) * ALPHA
    assert seconds("barrier", "dissemination", size, 0) == exactly(expected)


def test_a_message_both_ways_at_once_takes_no_longer_than_one() -> None:
    assert seconds("all_gather", "ring", 2, MIB) == exactly(ALPHA + MIB * BETA)


# Reductions


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_combines_one_part_a_step(size: int) -> None:
    network = NETWORK._replace(reduce_s_per_byte=GAMMA)
    timing = simulate.simulate("all_reduce", "ring", size, MIB, network=network)
    without = 2 * (size - 1) * (ALPHA + MIB / size * BETA)
    assert timing.seconds == exactly(without + (size - 1) * MIB / size * GAMMA)


@pytest.mark.parametrize("lg", [1, 2, 4])
def test_recursive_doubling_combines_the_whole_value_each_step(lg: int) -> None:
    network = NETWORK._replace(reduce_s_per_byte=GAMMA)
    timing = simulate.simulate("all_reduce", "recursive_doubling", 1 << lg, MIB, network=network)
    assert timing.seconds == exactly(lg * (ALPHA + MIB * (BETA + GAMMA)))


@pytest.mark.parametrize("segments", [1, 4])
def test_a_rank_combines_one_thing_at_a_time(segments: int) -> None:
    """No time passes but that of the root, which combines what seven others send."""
    network = Network(latency_s=0.0, bandwidth=math.inf, reduce_s_per_byte=GAMMA)
    timing = simulate.simulate("reduce", "linear", 8, MIB, segments=segments, network=network)
    assert timing.seconds == exactly(7 * MIB * GAMMA)


# Who is quicker


def test_segments_pipeline_a_chain_until_latency_outweighs_them() -> None:
    times = [seconds("broadcast", "chain", 8, 64 * MIB, 1 << k) for k in range(0, 13, 2)]
    assert times[0] > times[1] > times[2] > times[3]
    assert times[-1] > times[-2] > times[-3]


def test_a_double_tree_beats_a_chain_of_many_ranks_and_a_tree_of_large_values() -> None:
    size, nbytes, segments = 64, 64 * MIB, 64
    double = seconds("broadcast", "double_tree", size, nbytes, segments)
    assert double < seconds("broadcast", "chain", size, nbytes, segments)
    assert double < min(seconds("broadcast", "tree", size, nbytes, k) for k in (1, 4, 16, 64))
    assert double < min(seconds("broadcast", "binary_tree", size, nbytes, k) for k in (16, 64))


def test_a_tree_beats_a_double_tree_of_small_values() -> None:
    assert seconds("broadcast", "tree", 64, 8) < seconds("broadcast", "double_tree", 64, 8)


def test_few_segments_under_way_hold_a_long_pipeline_up() -> None:
    def all_reduce(window: int) -> float:
        return simulate.simulate(
            "all_reduce", "chain", 64, 64 * MIB, segments=64, window=window, network=NETWORK
        ).seconds

    assert all_reduce(1) > all_reduce(4) > all_reduce(16) > all_reduce(64)


# Hosts


def test_links_between_hosts_have_times_of_their_own() -> None:
    far = Link(latency_s=1e-3, bandwidth=1e8)
    network = NETWORK._replace(between=far)
    timing = simulate.simulate("broadcast", "chain", 4, MIB, hosts=[0, 0, 1, 1], network=network)
    near = ALPHA + MIB * BETA
    assert timing.finish == (
        exactly(near),
        exactly(near + 1e-3 + MIB / 1e8),
        exactly(2 * near + 1e-3 + MIB / 1e8),
        exactly(2 * near + 1e-3 + MIB / 1e8),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_two_ranks_of_a_host_share_its_port(shared: bool) -> None:
    """Each rank of host 0 exchanges blocks with one of host 1 and one beside it."""
    network = NETWORK._replace(between=Link(ALPHA, 1 / BETA), shared_ports=shared)
    hosts = [0, 0, 1, 1]
    timing = simulate.simulate(
        "all_reduce", "recursive_doubling", 4, MIB, hosts=hosts, network=network
    )
    assert timing.seconds == exactly(2 * ALPHA + (3 if shared else 2) * MIB * BETA)


def test_a_hierarchical_all_reduce_takes_as_long_wherever_the_ranks_are() -> None:
    network = NETWORK._replace(between=Link(1e-4, 1e9), shared_ports=True)

    def took(name: str, hosts: list[int]) -> float:
        return simulate.simulate("all_reduce", name, 16, MIB, hosts=hosts, network=network).seconds

    blocks, round_robin = [rank // 4 for rank in range(16)], [rank % 4 for rank in range(16)]
    assert took("hierarchical", blocks) == exactly(took("hierarchical", round_robin))
    assert took("hierarchical", round_robin) < took("ring", round_robin) / 3


# What holds for all


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("algorithm", ROWS, ids=lambda row: f"{row.collective}-{row.name}")
def test_no_algorithm_is_quicker_than_its_longest_chain_or_slower_than_one_by_one(
    algorithm: Algorithm, size: int
) -> None:
    assert algorithm.cost is not None
    cost = algorithm.cost(size)
    pieces = algorithm.chunks(size) if algorithm.collective in PIECES else 1
    chunk = MIB / pieces * BETA
    took = seconds(algorithm.collective, algorithm.name, size, MIB)
    assert took >= max(cost.steps * ALPHA, cost.path * chunk, cost.load * chunk) * (1 - 1e-9)
    assert took <= (cost.messages * ALPHA + cost.volume * chunk) * (1 + 1e-9)


def test_the_last_rank_and_the_busiest_port_are_told() -> None:
    """The second message begins when the first has begun, and ends as much later."""
    timing = simulate.simulate("broadcast", "linear", 3, MIB, network=NETWORK)
    both = 2 * MIB * BETA
    last = ALPHA + both
    assert timing == Timing(
        exactly(last),
        (exactly(last), exactly(both), exactly(last)),
        (1.0, exactly(both / last), exactly(both / last)),
    )


def test_any_root_takes_as_long() -> None:
    times = {
        simulate.simulate("broadcast", "double_tree", 9, MIB, root=root, segments=3).seconds
        for root in range(9)
    }
    assert len(times) == 1


@pytest.mark.parametrize("segments", [1, 3])
def test_one_rank_takes_no_time(segments: int) -> None:
    for algorithm in ROWS:
        took = seconds(algorithm.collective, algorithm.name, 1, MIB, segments)
        assert took == 0.0, algorithm


def test_more_bytes_never_take_less_time() -> None:
    times = [seconds("all_reduce", "ring", 6, nbytes) for nbytes in (0, 1, 1000, MIB, 3 * MIB)]
    assert all(before < after for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("run.h", "PC_RUN_WINDOW", simulate.SCRATCH),
        ("pipeline.h", "PC_SEGMENTS_IN_FLIGHT", simulate.WINDOW),
    ],
)
def test_as_much_is_under_way_as_in_the_core(header: str, name: str, value: int) -> None:
    folder = Path(__file__).resolve().parents[2] / "transports" / "_core" / "engine"
    assert f"#define {name} {value}\n" in (folder / header).read_text()


# What makes no sense


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"segments": 0},
        {"window": 0},
        {"nbytes": -1},
        {"nbytes": math.nan},
        {"root": 4},
        {"root": -1},
        {"hosts": [0, 0, 1]},
        {"network": Network(bandwidth=0.0)},
        {"network": Network(latency_s=-1.0)},
        {"network": Network(latency_s=1e-6, overhead_s=2e-6)},
        {"network": Network(between=Link(0.0, 0.0))},
        {"network": Network(reduce_s_per_byte=-1.0)},
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"size": 4, "nbytes": MIB, **wrong}
    with pytest.raises(ValueError, match=r"cannot be below 0|the ranks are 0 to 3|must"):
        simulate.simulate("broadcast", "tree", **arguments)  # type: ignore[arg-type]


def test_an_algorithm_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast has no algorithm 'circle'; it has "):
        simulate.simulate("broadcast", "circle", 4, MIB)


@pytest.mark.usefixtures("stuck")
def test_a_deadlock_ends_the_simulation() -> None:
    with pytest.raises(pycoll.Error, match=r"broadcast circle, size 3: a deadlock; pycoll\.prove"):
        simulate.simulate("broadcast", "circle", 3, MIB)


@pytest.mark.usefixtures("stuck")
def test_a_message_without_its_other_half_is_named() -> None:
    with pytest.raises(pycoll.Error, match="message 0 from rank 1 to rank 2 has no Recv"):
        simulate.simulate("broadcast", "to_nobody", 3, MIB, root=1)


def test_the_table_of_pipelines_has_a_row_for_each_algorithm() -> None:
    program = Path(__file__).parents[2] / "benchmarks/pipelining"
    command = [sys.executable, str(program), "--model", "--ranks", "3", "--segments", "1,2"]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60 * PATIENCE
    ).stdout
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] == ["3"]]
    assert [row[1:3] for row in rows] == [
        *(["broadcast", name] for name in ("chain", "double_tree", "tree")),
        *(["all_reduce", name] for name in ("chain", "double_tree", "tree", "ring")),
    ]
    for row in rows:
        *times, least = map(float, row[3:])
        assert len(times) == 2
        assert min(times) >= least > 0.0
