"""Tables of costs: what they say of times, and what is wrong with one that is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pycoll._selection import costs, flows
from pycoll._selection.costs import CUT, NET, RDMA, SHM, TCP, WHOLE, CostTable, LinkCosts, Work
from pycoll.schedules import TABLE, Cost, cost_of, find

NOTHING = LinkCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ROW = (TCP, "all_reduce", "ring", WHOLE)


def table(**changes: Any) -> CostTable:
    links = {name: NOTHING for name in costs.LINKS}
    return CostTable("a test", 4, links, (8, 1024), {})._replace(**changes)


def with_rows(rows: dict[int, tuple[float, ...]]) -> CostTable:
    return table(factors={ROW: rows})


def test_seconds_are_work_times_constants_on_all_links() -> None:
    links = table().links | {TCP: LinkCosts(1, 2, 3, 4, 5, 6), NET: NOTHING._replace(step=100)}
    works = (TCP, Work(1, 1, 1, 1, 1, 1)), (NET, Work(steps=2))
    assert table(links=links).seconds(*works) == 21 + 200


def test_a_factor_that_was_measured_is_taken_as_it_is() -> None:
    measured = with_rows({2: (0.5, 3.0)})
    assert measured.factor(ROW, 2, 8, crowded=False) == 0.5
    assert measured.factor(ROW, 2, 1024, crowded=False) == 3.0


def test_beyond_the_sizes_that_were_measured_the_last_factor_holds() -> None:
    measured = with_rows({2: (0.5, 3.0)})
    assert measured.factor(ROW, 2, 0, crowded=False) == 0.5
    assert measured.factor(ROW, 2, 1 << 40, crowded=False) == 3.0


def test_between_two_sizes_the_factor_goes_with_the_logarithm_of_the_size() -> None:
    measured = with_rows({2: (1.0, 8.0)})
    between = [measured.factor(ROW, 2, 8 << n, crowded=False) for n in range(8)]
    assert between == [1, 2, 3, 4, 5, 6, 7, 8]


def test_one_factor_holds_for_all_sizes() -> None:
    assert with_rows({2: (0.5,)}).factor(ROW, 2, 1 << 20, crowded=False) == 0.5


def test_a_number_of_ranks_that_was_not_measured_takes_the_factor_of_the_nearest() -> None:
    measured = with_rows({2: (2.0,), 4: (4.0,)})
    assert measured.factor(ROW, 3, 8, crowded=False) == 4.0  # 3 / 2 is more than 4 / 3
    assert measured.factor(ROW, 64, 8, crowded=False) == 4.0


def test_what_was_measured_with_more_ranks_than_cores_says_nothing_where_there_are_cores() -> None:
    measured = with_rows({2: (2.0,), 8: (8.0,)})  # on 4 cores
    assert measured.factor(ROW, 8, 8, crowded=False) == 2.0
    assert measured.factor(ROW, 8, 8, crowded=True) == 8.0
    assert measured.factor(ROW, 2, 8, crowded=True) == 8.0
    assert with_rows({8: (8.0,)}).factor(ROW, 8, 8, crowded=False) == 1.0


def test_what_was_never_measured_has_the_factor_one() -> None:
    assert table().factor(ROW, 2, 8, crowded=False) == 1.0
    assert with_rows({2: (2.0,)}).factor((*ROW[:3], CUT), 2, 8, crowded=False) == 1.0


# --- files -----------------------------------------------------------------------------------


def test_a_table_that_was_written_can_be_read() -> None:
    written = table(
        links={name: LinkCosts(1e-6, 2e-6, 3e-9, 4e-6, 5e-9, 6e-10) for name in costs.LINKS},
        factors={ROW: {2: (0.5, 1.25), 8: (3.0,)}, (NET, "barrier", "tree", CUT): {4: (2.0,)}},
    )
    assert costs.parse(written.as_json(), "it") == written


def test_a_table_that_says_nothing_of_rdma_gets_an_estimate() -> None:
    shm = LinkCosts(1e-6, 2e-6, 3e-9, 4e-6, 5e-9, 6e-10)
    data = json.loads(table(links=table().links | {SHM: shm}).as_json())
    del data["links"][RDMA]
    found = costs.parse(json.dumps(data), "it").links[RDMA]
    assert found == costs.estimated_rdma(shm)
    assert found.step > shm.step
    assert (found.message, found.byte) == (shm.message, 0.0)


def test_a_table_that_says_something_of_rdma_is_believed() -> None:
    mine = table().links | {RDMA: LinkCosts(1e-6, 2e-6, 3e-9, 4e-6, 5e-9, 6e-10)}
    assert costs.parse(table(links=mine).as_json(), "it").links == mine


def test_the_shipped_estimate_of_rdma_follows_from_the_shipped_constants() -> None:
    links = costs.shipped().links
    assert links[RDMA] == pytest.approx(costs.estimated_rdma(links[SHM]), rel=5e-3)


def test_the_shipped_table_is_small_and_names_what_exists() -> None:
    shipped = costs.shipped()
    assert len(shipped.as_json()) < 64 << 10
    for link, collective, algorithm, how in shipped.factors:
        assert link in costs.LINKS
        assert how in (WHOLE, CUT)
        assert algorithm == "shared_memory" or algorithm in TABLE[collective]


def spoiled(**changes: Any) -> str:
    data = json.loads(with_rows({2: (1.0, 1.0)}).as_json()) | changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "it is no map"),
        ("[" * 100_000, "recursion"),
        (" " * (costs.MAX_NBYTES + 1), "too large"),
        (spoiled(version=2), "its version is 2, not 1"),
        (spoiled(links={}), "links has no core"),
        (spoiled(links={"core": {}}), "call of link core is None"),
        (spoiled(links={"core": {"call": -1}}), "call of link core is -1"),
        (spoiled(cores=0), "cores of it is 0"),
        (spoiled(cores=float("nan")), "cores of it is nan"),
        (spoiled(sizes=[]), "sizes is empty"),
        (spoiled(sizes=[8, 8]), "does not ascend"),
        (spoiled(sizes=["8"]), "no list of whole numbers"),
        (spoiled(factors={"tcp": {"reduce": {"tree": {"whole": {"2": [1]}}}}}), None),
        (spoiled(factors={"tcp": {"reduce": {"tree": {"whole": {"x": [1]}}}}}), "for 'x' ranks"),
        (spoiled(factors={"tcp": {"reduce": {"tree": {"whole": {"2": [1] * 3}}}}}), "2 factors"),
        (spoiled(factors={"tcp": {"reduce": {"tree": {"whole": {"2": [0]}}}}}), "the factor 0"),
        (spoiled(factors={"tcp": {"reduce": {"tree": {"whole": {"2": ["a"]}}}}}), "factor 'a'"),
        (spoiled(factors={"tcp": {"reduce": []}}), "tcp reduce is no map"),
    ],
    ids=str,
)
def test_what_is_no_table_is_named_with_the_reason(text: str, why: str | None) -> None:
    if why is None:
        costs.parse(text, "/here/costs.json")
        return
    with pytest.raises(ValueError, match=r"/here/costs\.json is no table of costs") as caught:
        costs.parse(text, "/here/costs.json")
    assert why in str(caught.value)


def test_a_table_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path}/none cannot be read: .*No such file"):
        costs.read(f"{tmp_path}/none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ValueError, match=rf"{tmp_path}/binary cannot be read"):
        costs.read(f"{tmp_path}/binary")


# --- what travels ----------------------------------------------------------------------------


def test_a_pipeline_through_a_chain_takes_as_many_steps_as_ranks_and_segments_less_two() -> None:
    size, segments, chunk = 8, 16, 1600
    cost = cost_of(find("broadcast", "chain"), size)
    assert cost is not None
    work = flows.one_host(cost, size, cores=size).work(chunk, segments)
    assert work.steps == size + segments - 2
    assert work.path_nbytes == (size + segments - 2) * chunk / segments


def test_with_a_core_for_each_rank_the_busiest_counts_and_else_all_together() -> None:
    cost = Cost(steps=1, path=1, messages=7, volume=7, load=7)  # a star
    assert flows.one_host(cost, 8, cores=64).ends == 7
    assert flows.one_host(cost, 8, cores=2).ends == 7
    assert flows.one_host(cost, 8, cores=1).ends == 14
    even = Cost(steps=7, path=7, messages=56, volume=56, load=7)  # a ring
    assert flows.one_host(even, 8, cores=64).ends == 14
    assert flows.one_host(even, 8, cores=2).ends == 56


def test_what_crosses_between_hosts_is_counted() -> None:
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    cores = {0: 4.0, 1: 4.0}
    inside, across = flows.between_hosts(find("all_gather", "ring"), hosts, cores)
    assert across.load == 7  # one link between the hosts, each way
    assert across.ends == 2 * 7 / 4
    assert inside.ends == 2 * 3 * 7 / 4
    _, crowded = flows.between_hosts(find("all_gather", "linear"), hosts, cores)
    assert crowded.load == 16  # every block to every rank of the other host
    _, best = flows.between_hosts(find("all_gather", "hierarchical"), hosts, cores)
    assert best.load == 4  # every block once


def test_hosts_that_were_not_looked_at_are_like_the_others() -> None:
    hosts = [rank // 2 for rank in range(16)]
    cores = dict.fromkeys(hosts, 2.0)
    inside, across = flows.between_hosts(find("barrier", "dissemination"), hosts, cores)
    # To the neighbor one of a host's two ranks sends across, to ranks farther away both do.
    assert (inside.ends, across.load) == (2 * 1 / 2, 1 + 2 + 2 + 2)


def test_a_table_says_how_many_connections_tcp_has() -> None:
    text = table(lanes=4).as_json()
    assert costs.parse(text, "it").lanes == 4
    without = {key: value for key, value in json.loads(text).items() if key != "tcp_links"}
    assert costs.parse(json.dumps(without), "it").lanes == 1
    with pytest.raises(ValueError, match="tcp_links of it is 0, which is no number from 1 up"):
        costs.parse(json.dumps({**without, "tcp_links": 0}), "it")
