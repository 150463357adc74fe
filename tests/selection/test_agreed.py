"""What the user may say about algorithms, and that the ranks of a job go by the same."""

from __future__ import annotations

from typing import Any

import pytest

from pycoll._selection import agreed, costs
from pycoll._selection.agreed import Rule, agree, parse_rules, parse_segment, said
from pycoll.errors import BootstrapError


def test_names_are_allowed_or_excluded() -> None:
    rules = parse_rules("all_reduce:double_tree;broadcast:^tree,chain")
    assert rules == {
        "all_reduce": Rule(("double_tree",), excluded=False),
        "broadcast": Rule(("tree", "chain"), excluded=True),
    }
    assert [rules["all_reduce"].allows(name) for name in ("double_tree", "ring")] == [True, False]
    assert [rules["broadcast"].allows(name) for name in ("chain", "linear")] == [False, True]


def test_blanks_and_empty_parts_do_not_matter() -> None:
    assert parse_rules(" ; reduce : ^ tree , linear;; ") == parse_rules("reduce:^tree,linear")
    assert parse_rules("") == {}


def test_a_rule_reads_as_it_was_written() -> None:
    assert str(parse_rules("reduce:^tree,linear")["reduce"]) == "^tree,linear"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ring", "'ring' is not COLLECTIVE:NAME"),
        ("shuffle:ring", "no collective 'shuffle'; there are broadcast, reduce"),
        ("all_reduce:rng", "all_reduce has no algorithm 'rng'; it has shared_memory, "),
        ("all_reduce:", "all_reduce has no algorithm ''"),
        ("all_reduce:ring,^tree", "no algorithm '^tree'"),
        ("reduce:tree;reduce:linear", "reduce was there before"),
        ("all_to_all:^shared_memory,pairwise,linear,bruck", "leaves no algorithm of all_to_all"),
    ],
)
def test_what_makes_no_sense_is_named_with_what_exists(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^PYCOLL_ALGORITHM") as caught:
        parse_rules(text)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "nbytes"), [("4096", 4096), ("256K", 1 << 18), (" 1m ", 1 << 20)])
def test_a_segment_has_a_length(text: str, nbytes: int) -> None:
    assert parse_segment(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "soon"])
def test_a_segment_without_a_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PYCOLL_SEGMENT"):
        parse_segment(text)


PLACE = {"cpus", "quota", "machine"}


def home(tmp_path: Any) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_who_has_set_nothing_says_nothing_about_algorithms(tmp_path: Any) -> None:
    assert said(home(tmp_path), 0).keys() <= PLACE


def test_only_rank_0_says_what_is_set(tmp_path: Any) -> None:
    environ = home(tmp_path) | {"PYCOLL_ALGORITHM": "nonsense", "PYCOLL_SEGMENT": "soon"}
    assert said(environ, 1).keys() <= PLACE
    with pytest.raises(BootstrapError, match="'nonsense' is not COLLECTIVE:NAME"):
        said(environ, 0)


def test_a_table_in_the_home_folder_is_found_and_the_variable_wins(tmp_path: Any) -> None:
    (tmp_path / "pycoll").mkdir()
    mine, other = tmp_path / "pycoll/costs.json", tmp_path / "other.json"
    mine.write_text(costs.shipped()._replace(origin="mine").as_json())
    other.write_text(costs.shipped()._replace(origin="the other").as_json())
    found = agree([{"node": 0} | said(home(tmp_path), 0)])
    assert found.costs.origin == f"{mine}: mine"
    chosen = agree([{"node": 0} | said(home(tmp_path) | {"PYCOLL_COSTS": str(other)}, 0)])
    assert chosen.costs.origin == f"{other}: the other"


def test_a_table_that_is_none_is_named(tmp_path: Any) -> None:
    file = tmp_path / "costs.json"
    file.write_text("{}")
    with pytest.raises(BootstrapError, match=f"{file} is no table of costs"):
        said({"PYCOLL_COSTS": str(file)}, 0)


def rank_on(node: int, machine: str = "this one", cpus: int = 0xFF) -> dict[str, Any]:
    return {"node": node, "machine": machine.encode(), "cpus": cpus.to_bytes(1, "little")}


def test_cores_of_a_host_are_those_of_all_its_ranks() -> None:
    bound = [rank_on(n // 2, f"machine {n // 2}", cpus=1 << n % 2) for n in range(4)]
    assert agree(bound).cores == {0: 2.0, 1: 2.0}
    assert agree([rank_on(0, cpus=0xFF) | {"quota": 3}] * 2).cores == {0: 3.0}


def test_hosts_that_are_one_machine_share_its_cores() -> None:
    found = agree([rank_on(0), rank_on(0), rank_on(0), rank_on(1)])
    assert found.cores == {0: 6.0, 1: 2.0}
    assert found.machines[0] == found.machines[1]


def test_a_host_shares_memory_if_all_its_ranks_do() -> None:
    sharing = rank_on(0) | {"shm": {}}
    assert agree([sharing, sharing, rank_on(1)]).sharing == {0}


def in_network(node: int, name: str) -> dict[str, Any]:
    return rank_on(node) | {"rdma": {"network": name, "lid": node}}


def test_a_host_is_in_an_rdma_network_if_all_its_ranks_are_in_that() -> None:
    both = [in_network(0, "Ethernet"), in_network(0, "Ethernet"), in_network(1, "Ethernet")]
    assert agree(both).networks == {0: "Ethernet", 1: "Ethernet"}
    assert agree([*both, rank_on(1)]).networks == {0: "Ethernet"}
    assert agree([*both, in_network(1, "InfiniBand subnet 1")]).networks == {0: "Ethernet"}
    assert agree([rank_on(0), rank_on(1)]).networks == {}


def test_a_rank_that_knows_other_algorithms_than_rank_0_says_so() -> None:
    with pytest.raises(BootstrapError, match=r"rank 0's settings .* no algorithm 'mine'"):
        agree([rank_on(0) | {"algorithm": "reduce:mine"}, rank_on(0)])


def test_ranks_of_which_only_some_encrypt_are_named() -> None:
    encrypting, other = rank_on(0) | {"encrypt": True}, rank_on(0)
    agree([encrypting, encrypting])
    with pytest.raises(BootstrapError, match="is set for rank 1, but not for ranks 0, 2;"):
        agree([other, encrypting, other])
    with pytest.raises(BootstrapError, match="is set for ranks 0, 1, but not for rank 2;"):
        agree([encrypting, encrypting, other])


@pytest.mark.parametrize("text", ["yes", "2", " 1"])
def test_an_encryption_that_is_neither_1_nor_0_is_refused(text: str) -> None:
    with pytest.raises(BootstrapError, match=r"PYCOLL_ENCRYPT is .*, but must be 1 or 0"):
        said({"PYCOLL_ENCRYPT": text}, 1)


def test_without_a_job_nothing_was_agreed() -> None:
    assert agreed.Agreed().costs is costs.shipped()
