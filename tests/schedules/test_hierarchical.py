"""Two-level algorithms: proved on many placements, and frugal between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import few

from pycoll.errors import ProofError
from pycoll.schedule import Recv, Send, Step, chunks_of
from pycoll.schedules import ROOTED, TABLE, cost_of, find, steps_of
from pycoll.schedules.check import placements, prove, prove_algorithm

COLLECTIVES = [row["hierarchical"].collective for row in TABLE.values() if "hierarchical" in row]

BLOCKS = tuple(rank // 4 for rank in range(16))
ROUND_ROBIN = tuple(rank % 4 for rank in range(16))
UNEVEN = (0, 0, 1, 0, 2, 0, 1, 2, 0, 2, 2)

Crossing = tuple[int, int, tuple[int, ...]]


def crossings(collective: str, hosts: Sequence[int], root: int = 0) -> list[Crossing]:
    """Messages between hosts: sender, receiver, chunks."""
    algorithm = find(collective, "hierarchical")
    size = len(hosts)
    return [
        (rank, step.peer, chunks_of(step))
        for rank in range(size)
        for step in steps_of(algorithm, rank, size, root, hosts)
        if isinstance(step, Send) and hosts[rank] != hosts[step.peer]
    ]


def entries(found: list[Crossing], hosts: Sequence[int]) -> Counter[tuple[int, int]]:
    """How often each chunk enters each host."""
    return Counter((hosts[peer], chunk) for _, peer, chunks in found for chunk in chunks)


def exits(found: list[Crossing], hosts: Sequence[int]) -> Counter[tuple[int, int]]:
    """How often each chunk leaves each host."""
    return Counter((hosts[rank], chunk) for rank, _, chunks in found for chunk in chunks)


def test_these_collectives_have_a_hierarchical_algorithm() -> None:
    assert COLLECTIVES == [
        "broadcast",
        "reduce",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "barrier",
    ]
    assert all(find(collective, "hierarchical").hosts for collective in COLLECTIVES)
    assert not any(find(collective, "hierarchical").rank_order for collective in COLLECTIVES)


# The proof


@pytest.mark.parametrize("most", few([9], [18]))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_placements_and_roots_are_proved_with_their_exact_cost(
    collective: str, most: int
) -> None:
    algorithm = find(collective, "hierarchical")
    summary = prove_algorithm(algorithm, max_size=most)
    # Of more than 16 ranks one placement is proved.
    cases = sum(
        (len(placements(size)) if size <= 16 else 1) * (size if collective in ROOTED else 1)
        for size in range(1, most + 1)
    )
    assert summary.proofs >= cases


@given(data=st.data())
def test_any_placement_is_proved(data: st.DataObject) -> None:
    collective = data.draw(st.sampled_from(COLLECTIVES))
    hosts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=14))
    root = data.draw(st.integers(0, len(hosts) - 1))
    prove(collective, "hierarchical", len(hosts), root, window=1, hosts=hosts)


def test_placements_are_those_that_are_promised() -> None:
    found = placements(9)
    assert (0,) * 9 in found
    assert tuple(range(9)) in found
    assert (0, 0, 0, 0, 1, 1, 1, 1, 2) in found
    assert (0, 1, 2, 0, 1, 2, 0, 1, 2) in found
    assert (1, 2, 1, 3, 1, 2, 1, 4, 1) in found
    assert all(len(set(placements(size))) == len(placements(size)) for size in range(1, 20))


def test_hosts_may_have_any_numbers() -> None:
    for collective in COLLECTIVES:
        algorithm = find(collective, "hierarchical")
        for rank in range(5):
            dense = list(steps_of(algorithm, rank, 5, 3, (0, 1, 0, 1, 1)))
            assert list(steps_of(algorithm, rank, 5, 3, (2, 9, 2, 9, 9))) == dense


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN])
@pytest.mark.parametrize(
    ("collective", "steps", "load"),
    [
        ("broadcast", 2 + 3, 12 + 12 + 4),
        ("reduce", 2 + 3, 12 + 12 + 4),
        ("all_reduce", 2 * 4, 2 * 15),
        ("all_gather", 4, 15),
        ("reduce_scatter", 4, 15),
        ("barrier", 2 * 2 + 2, 2 + 2),
    ],
)
def test_costs_are_those_of_the_docstrings(
    collective: str, steps: int, load: int, hosts: tuple[int, ...]
) -> None:
    cost = prove(collective, "hierarchical", 16, hosts=hosts).cost
    assert (cost.steps, cost.load) == (steps, load)


# Between hosts


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN, UNEVEN])
@pytest.mark.parametrize("root", [0, 2, 10])
def test_a_broadcast_enters_each_other_host_once(hosts: tuple[int, ...], root: int) -> None:
    entered = entries(crossings("broadcast", hosts, root), hosts)
    others = set(hosts) - {hosts[root]}
    assert entered == {(host, chunk): 1 for host in others for chunk in range(len(hosts))}


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN, UNEVEN])
@pytest.mark.parametrize("root", [0, 2, 10])
def test_a_reduce_leaves_each_other_host_once(hosts: tuple[int, ...], root: int) -> None:
    left = exits(crossings("reduce", hosts, root), hosts)
    others = set(hosts) - {hosts[root]}
    assert left == {(host, chunk): 1 for host in others for chunk in range(len(hosts))}


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN, UNEVEN])
def test_each_block_of_an_all_gather_enters_each_other_host_once(hosts: tuple[int, ...]) -> None:
    entered = entries(crossings("all_gather", hosts), hosts)
    assert entered == {
        (host, block): 1 for host in set(hosts) for block, home in enumerate(hosts) if home != host
    }


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN, UNEVEN])
def test_each_chunk_of_a_reduce_scatter_leaves_each_other_host_once(hosts: tuple[int, ...]) -> None:
    left = exits(crossings("reduce_scatter", hosts), hosts)
    assert left == {
        (host, chunk): 1 for host in set(hosts) for chunk, home in enumerate(hosts) if home != host
    }


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN])
def test_an_all_reduce_moves_the_fewest_bytes_between_hosts(hosts: tuple[int, ...]) -> None:
    found = crossings("all_reduce", hosts)
    least = 2 * (4 - 1) * 16 // 4  # 2 (H - 1) / H of 16 chunks
    assert Counter(host for host, _ in entries(found, hosts).elements()) == dict.fromkeys(
        range(4), least
    )
    assert Counter(host for host, _ in exits(found, hosts).elements()) == dict.fromkeys(
        range(4), least
    )


def test_an_all_reduce_on_uneven_hosts_moves_no_more_in_all() -> None:
    found = crossings("all_reduce", UNEVEN)
    assert sum(len(chunks) for *_, chunks in found) == 2 * (3 - 1) * len(UNEVEN)


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "all_reduce", "all_gather"])
def test_every_rank_of_a_host_has_its_share_of_the_traffic(collective: str) -> None:
    sent: Counter[int] = Counter()
    for rank, peer, chunks in crossings(collective, BLOCKS):
        sent[rank] += len(chunks)
        sent[peer] += len(chunks)
    for host in range(4):
        assert len({sent[rank] for rank in range(4 * host, 4 * host + 4)}) == 1


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_neighbors_alone_exchange(collective: str) -> None:
    hops = {
        (ROUND_ROBIN[peer] - ROUND_ROBIN[rank]) % 4
        for rank, peer, _ in crossings(collective, ROUND_ROBIN)
    }
    assert len(hops) == 1
    assert hops <= {1, 3}


def test_a_barrier_sends_between_the_first_ranks_alone() -> None:
    found = crossings("barrier", UNEVEN)
    assert {rank for rank, *_ in found} == {0, 2, 4}
    assert len(found) == 3 * 2  # H ceil(lg H)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_on_one_host_nothing_crosses(collective: str) -> None:
    assert crossings(collective, (7,) * 9, root=4) == []


# Planted faults


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_believes_in_another_placement_is_found(collective: str) -> None:
    algorithm = find(collective, "hierarchical")

    def steps(rank: int, size: int, *case: object) -> Iterator[Step]:
        believed = (0, 0, 1, 1, 1, 1) if rank == 3 else (0, 0, 0, 1, 1, 1)
        yield from algorithm.steps(rank, size, *case[:-1], believed)

    with pytest.raises(ProofError, match=r"hosts \(0, 0, 0, 1, 1, 1\)"):
        prove(collective, "hierarchical", 6, steps=steps, hosts=(0, 0, 0, 1, 1, 1))


def test_a_leader_whose_part_stays_in_its_host_is_found() -> None:
    hosts = (0, 0, 1, 1)
    algorithm = find("all_reduce", "hierarchical")

    def steps(rank: int, size: int, placement: Sequence[int]) -> Iterator[Step]:
        for step in algorithm.steps(rank, size, placement):
            if isinstance(step, Send) and hosts[step.peer] != hosts[rank] and rank == 1:
                continue
            yield step

    with pytest.raises(ProofError, match="rank 1 has no Send for this message"):
        prove("all_reduce", "hierarchical", 4, steps=steps, hosts=hosts)


def test_hosts_that_never_exchange_are_found() -> None:
    hosts = (0, 1, 0, 1)

    def steps(rank: int, size: int, placement: Sequence[int]) -> Iterator[Step]:
        here = placement[rank]
        for step in find("all_reduce", "hierarchical").steps(rank, size, placement):
            match step:
                case Send(peer) | Recv(peer):
                    stays = placement[peer] == here
            if stays:
                yield step

    with pytest.raises(ProofError, match=r"rank 0 ends with .*without the contribution of ranks 1"):
        prove("all_reduce", "hierarchical", 4, steps=steps, hosts=hosts)


def test_steps_that_ignore_the_placement_do_not_take_what_is_stated() -> None:
    def steps(rank: int, size: int, placement: Sequence[int]) -> Iterator[Step]:
        yield from find("all_reduce", "hierarchical").steps(rank, size, (0,) * size)

    with pytest.raises(ProofError, match="states Cost"):
        prove("all_reduce", "hierarchical", 4, steps=steps, hosts=(0, 1, 0, 1))


def test_the_cost_depends_on_the_root_where_hosts_are_uneven() -> None:
    algorithm = find("broadcast", "hierarchical")
    hosts = (0, 1, 1, 1, 1)
    assert cost_of(algorithm, 5, 0, hosts) != cost_of(algorithm, 5, 1, hosts)
    assert cost_of(algorithm, 5, 1, hosts) == prove(*algorithm[:2], 5, 1, hosts=hosts).cost


def test_without_a_placement_all_ranks_are_on_one_host() -> None:
    algorithm = find("all_gather", "hierarchical")
    assert cost_of(algorithm, 6) == cost_of(algorithm, 6, 0, (0,) * 6)
