"""Which algorithm is chosen, why a forced one cannot serve, and that all ranks choose alike."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from pycoll._selection import costs
from pycoll._selection.agreed import SHARED_MEMORY, Agreed, parse_rules
from pycoll._selection.costs import CUT, NET, RDMA, SHM, TCP, WHOLE, CostTable, LinkCosts
from pycoll._selection.select import UNKNOWN_S, Choice, Query, Selector, usable
from pycoll.schedules import REDUCING, TABLE, find, names

KiB, MiB = 1 << 10, 1 << 20

# A step takes 100 us, a byte 1 ns, and processors cost nothing: the textbook's machine.
WIRE = LinkCosts(call=0.0, step=1e-4, path=1e-9, message=0.0, byte=0.0, combine=0.0)
TEXTBOOK = CostTable("the textbook", 64, dict.fromkeys(costs.LINKS, WIRE), (8,), {})


def selector(size: int, agreed: Agreed | None = None, shm: bool = False) -> Selector:
    return Selector(agreed or Agreed(TEXTBOOK, cores={0: 64.0}), (0,) * size, shm)


def choose(collective: str, nbytes: int, size: int, **flags: bool) -> Choice:
    return selector(size).choose(Query(collective, nbytes, **flags))


# --- by time ---------------------------------------------------------------------------------


def test_small_values_take_few_steps_and_large_ones_move_few_bytes() -> None:
    assert choose("all_reduce", 8, 16).name == "linear"
    large = choose("all_reduce", 64 * MiB, 16)
    assert find("all_reduce", large.name).chunks(16) >= 16 or large.segments > 1


def test_the_time_is_that_of_the_formula() -> None:
    able, _ = selector(4).ranking(Query("all_gather", 1 * MiB))
    seconds = {candidate.choice.name: candidate.seconds for candidate in able}
    assert seconds["ring"] == pytest.approx(3 * (1e-4 + MiB * 1e-9))
    assert [candidate.seconds for candidate in able] == sorted(seconds.values())


def test_a_long_chain_is_cut_into_segments_that_take_least_time() -> None:
    able, _ = selector(8).ranking(Query("broadcast", 64 * MiB))
    times = {candidate.choice.name: candidate for candidate in able}
    segments = times["chain"].choice.segments

    def seconds(count: int) -> float:
        return (count + 6) * (1e-4 + 64 * MiB / count * 1e-9)

    assert times["chain"].seconds == pytest.approx(seconds(segments))
    assert seconds(segments) <= min(seconds(segments * 2), seconds(segments // 2))
    assert times["linear"].choice.segments == 1  # nothing waits


def test_segments_are_not_shorter_than_is_worth_a_message() -> None:
    for nbytes in (64 * KiB, 256 * KiB, MiB):
        assert selector(64).segments("chain", Query("broadcast", nbytes)) <= nbytes // (64 * KiB)


def test_a_value_that_must_stay_whole_is_not_cut() -> None:
    assert choose("all_reduce", 64 * MiB, 8, whole=True).segments == 1


def test_factors_of_the_table_turn_the_choice() -> None:
    best = choose("broadcast", 8, 8).name
    slow = {
        (TCP, "broadcast", name, WHOLE): {8: (100.0 if name == best else 1.0,)}
        for name in names("broadcast")
    }
    agreed = Agreed(TEXTBOOK._replace(factors=slow), cores={0: 64.0})
    assert selector(8, agreed).choose(Query("broadcast", 8)).name != best


def test_what_was_not_measured_is_taken_for_as_slow_as_others() -> None:
    rows = {(TCP, "broadcast", name, WHOLE): {8: (3.0,)} for name in ("tree", "chain")}
    table = TEXTBOOK._replace(factors=rows)
    assert table.factor((TCP, "broadcast", "mine", WHOLE), 8, 64, False) == 3.0
    assert table.factor((TCP, "broadcast", "mine", CUT), 8, 64, False) == 1.0


def test_segments_have_factors_of_their_own() -> None:
    slow = {(TCP, "broadcast", name, CUT): {8: (100.0,)} for name in names("broadcast")}
    agreed = Agreed(TEXTBOOK._replace(factors=slow), cores={0: 64.0})
    assert selector(8, agreed).choose(Query("broadcast", 64 * MiB)).segments == 1
    assert selector(8).choose(Query("broadcast", 64 * MiB)).segments > 1


def test_lengths_that_differ_little_have_one_choice() -> None:
    chooser = selector(5)
    for nbytes in range(1000, 1 << 20, 997):
        chooser.choose(Query("all_reduce", nbytes))
    assert len(chooser._chosen) < 100


def test_the_link_is_that_between_the_ranks() -> None:
    sharing = frozenset({0})
    assert selector(2).link == TCP
    assert selector(2, Agreed(sharing=sharing)).link == SHM
    assert Selector(Agreed(sharing=sharing), (0, 1), shm=False).link == NET
    here = Agreed(sharing=sharing, machines={0: b"here", 1: b"here"})
    assert Selector(here, (0, 1), shm=False).link == TCP


ETHERNET = {host: "Ethernet" for host in range(2)}


@pytest.mark.parametrize("machines", [{}, {0: b"here", 1: b"here"}], ids=["two", "one"])
def test_between_hosts_of_one_network_it_is_rdma_on_any_machines(
    machines: dict[int, bytes],
) -> None:
    agreed = Agreed(sharing=frozenset({0, 1}), machines=machines, networks=ETHERNET)
    assert Selector(agreed, (0, 0, 1, 1), shm=False).link == RDMA
    assert Selector(agreed, (0, 0), shm=False).link == SHM


def test_hosts_that_rdma_does_not_connect_talk_tcp() -> None:
    agreed = Agreed(networks=ETHERNET | {2: "InfiniBand"})
    assert Selector(agreed, (0, 1, 2), shm=False).link == NET
    assert Selector(agreed, (0, 1, 3), shm=False).link == NET
    assert Selector(agreed, (3, 4), shm=False).link == NET
    assert Selector(agreed, (0, 1), shm=False).link == RDMA


def test_where_no_host_shares_memory_rdma_connects_its_ranks_too() -> None:
    assert Selector(Agreed(networks=ETHERNET), (0, 0), shm=False).link == RDMA
    agreed = Agreed(sharing=frozenset({1}), networks=ETHERNET)
    assert Selector(agreed, (0, 0), shm=False).link == TCP


def test_what_travels_by_rdma_is_timed_so() -> None:
    fast = WIRE._replace(step=1e-6, path=1e-11)
    table = TEXTBOOK._replace(links=TEXTBOOK.links | {RDMA: fast})
    agreed = Agreed(table, cores={0: 8.0, 1: 8.0}, networks=ETHERNET)
    able, _ = Selector(agreed, (0, 1), shm=False).ranking(Query("broadcast", MiB))
    seconds = {candidate.choice.name: candidate.seconds for candidate in able}
    assert seconds["tree"] == pytest.approx(1e-6 + MiB * 1e-11)


@pytest.mark.parametrize("collective", TABLE)
def test_what_is_chosen_exists_and_can_serve(collective: str) -> None:
    sizes, lengths, flags = (1, 2, 3, 16, 17), (0, 1, 10**5, 10**7, 10**12), (False, True)
    for size in sizes:
        shipped = selector(size, Agreed(cores={0: 2.0}))
        for nbytes, rank_order, whole in itertools.product(lengths, flags, flags):
            choice = shipped.choose(Query(collective, nbytes, rank_order, whole))
            assert usable(collective, choice.name, rank_order=rank_order, whole=whole) is None
            assert choice.segments == 1 or not whole


@pytest.mark.parametrize("collective", sorted(REDUCING))
def test_operators_that_do_not_commute_get_rank_order(collective: str) -> None:
    for nbytes in (8, 64 * MiB):
        assert find(collective, choose(collective, nbytes, 4, rank_order=True).name).rank_order


@pytest.mark.parametrize("collective", ["reduce", "all_reduce", "scan"])
def test_operators_of_whole_values_get_one_chunk(collective: str) -> None:
    for nbytes in (8, 64 * MiB):
        assert find(collective, choose(collective, nbytes, 4, whole=True).name).chunks(4) == 1


def test_thousands_of_ranks_are_no_trouble() -> None:
    assert choose("all_reduce", MiB, 4096).name in names("all_reduce")


# --- hosts -----------------------------------------------------------------------------------


def spread(*hosts: int) -> Selector:
    cores = dict.fromkeys(hosts, 8.0)
    return Selector(Agreed(TEXTBOOK, cores=cores), hosts, shm=False)


def considered(chooser: Selector, collective: str) -> set[str]:
    return {candidate.choice.name for candidate in chooser.ranking(Query(collective, MiB))[0]}


def test_hierarchical_is_for_several_hosts_with_several_ranks() -> None:
    assert "hierarchical" in considered(spread(0, 0, 1, 1), "all_reduce")
    assert "hierarchical" in considered(spread(0, 1, 0), "all_reduce")
    assert "hierarchical" not in considered(spread(0, 0, 0), "all_reduce")
    assert "hierarchical" not in considered(spread(0, 1, 2), "all_reduce")


def test_what_crosses_less_between_hosts_is_chosen() -> None:
    fast = WIRE._replace(step=1e-6, path=1e-11)
    links = TEXTBOOK.links | {SHM: fast, TCP: fast}
    agreed = Agreed(TEXTBOOK._replace(links=links), cores={0: 8.0, 1: 8.0})
    chooser = Selector(agreed, (0, 1) * 4, shm=False)  # round robin: a ring crosses always
    assert chooser.choose(Query("all_gather", MiB)).name == "hierarchical"


def test_ranks_of_emulated_hosts_are_timed_as_if_they_were_on_one() -> None:
    agreed = Agreed(TEXTBOOK, cores={0: 1.0, 1: 1.0}, machines={0: b"here", 1: b"here"})
    spread_out = Selector(agreed, (0, 1), shm=False).ranking(Query("all_reduce", MiB))
    together = Agreed(TEXTBOOK, cores={0: 2.0})
    assert spread_out == Selector(together, (0, 0), shm=False).ranking(Query("all_reduce", MiB))


@pytest.mark.parametrize("hosts", [(0,), (0, 0), (0, 1), (0, 1, 1)], ids=str)
def test_hierarchical_may_be_asked_for_wherever_the_ranks_are(hosts: tuple[int, ...]) -> None:
    chooser = Selector(Agreed(sharing=frozenset(hosts)), hosts, shm=False)
    for collective in ("all_reduce", "barrier", "broadcast"):
        assert chooser.segments("hierarchical", Query(collective, 8)) == 1


# --- the compiled core -----------------------------------------------------------------------


def test_the_core_is_taken_wherever_it_can_serve() -> None:
    chooser = selector(4, Agreed(TEXTBOOK, cores={0: 64.0}), shm=True)
    for collective in TABLE:
        for nbytes in (0, 64 * MiB):
            assert chooser.choose(Query(collective, nbytes)) == Choice(SHARED_MEMORY)
            assert chooser.choose(Query(collective, nbytes, shm=False)).name in TABLE[collective]


# --- what the user says ----------------------------------------------------------------------


def ruled(text: str, shm: bool = False) -> Selector:
    return selector(4, Agreed(TEXTBOOK, parse_rules(text), cores={0: 64.0}), shm)


def test_an_algorithm_that_is_named_is_taken_for_all_lengths() -> None:
    chooser = ruled("all_reduce:ring")
    assert {chooser.choose(Query("all_reduce", n)).name for n in (8, MiB)} == {"ring"}
    assert chooser.choose(Query("reduce", 8)) == choose("reduce", 8, 4)


def test_of_several_that_are_named_the_quickest_is_taken() -> None:
    chooser = ruled("all_reduce:ring,recursive_doubling")
    assert chooser.choose(Query("all_reduce", 8)).name == "recursive_doubling"
    assert chooser.choose(Query("all_reduce", 64 * MiB)).name == "ring"


def test_what_is_excluded_is_not_taken() -> None:
    best = choose("all_reduce", MiB, 4).name
    assert ruled(f"all_reduce:^{best}").choose(Query("all_reduce", MiB)).name != best


def test_a_rule_keeps_calls_out_of_the_core() -> None:
    request = Query("all_reduce", 8)
    assert ruled("all_reduce:ring", shm=True).choose(request).name == "ring"
    assert ruled("all_reduce:^shared_memory", shm=True).choose(request).name != SHARED_MEMORY
    assert ruled("reduce:tree", shm=True).choose(request).name == SHARED_MEMORY


def test_where_what_was_named_cannot_serve_the_next_best_does() -> None:
    request = Query("all_reduce", 64 * MiB, rank_order=True)
    assert ruled("all_reduce:ring").choose(request) == selector(4).choose(request)
    assert ruled("all_reduce:shared_memory").choose(request) == selector(4).choose(request)


def test_an_algorithm_that_states_no_cost_is_taken_only_where_it_is_named(monkeypatch: Any) -> None:
    mine = find("all_reduce", "ring")._replace(name="mine", cost=None)
    monkeypatch.setitem(TABLE["all_reduce"], "mine", mine)
    able, refused = selector(4).ranking(Query("all_reduce", 8))
    assert "mine" not in [candidate.choice.name for candidate in able]
    assert dict(refused)["mine"] == "states no cost, so it is taken only where it is named"
    assert ruled("all_reduce:mine").choose(Query("all_reduce", 8)) == Choice("mine")
    both = ruled("all_reduce:mine,ring").ranking(Query("all_reduce", 8))[0]
    assert [(c.choice.name, c.seconds < UNKNOWN_S) for c in both] == [
        ("ring", True),
        ("mine", False),
    ]


def test_segments_have_the_length_that_the_user_says() -> None:
    def segments(nbytes: int, said: int, **flags: bool) -> int:
        agreed = Agreed(TEXTBOOK, segment_nbytes=said, cores={0: 64.0})
        return selector(4, agreed).segments("ring", Query("all_reduce", nbytes, **flags))

    assert segments(4 * MiB, 256 * KiB) == 4  # a chunk is a fourth
    assert segments(4 * MiB, 300 * KiB) == 4
    assert segments(4 * MiB, 2 * MiB) == 1
    assert segments(5 * MiB - 8, 256 * KiB) == 5  # none is longer
    assert segments(4 * MiB, 0) == 1
    assert segments(0, 256 * KiB) == 1
    assert segments(4 * MiB, 256 * KiB, whole=True) == 1
    assert segments(1 << 40, 1) < 1 << 16  # subcalls of a call


# --- what cannot serve -----------------------------------------------------------------------


def test_ring_is_refused_to_operators_that_do_not_commute() -> None:
    reason = usable("all_reduce", "ring", rank_order=True) or ""
    assert reason.startswith(
        "all_reduce ring does not combine in rank order, which an operator that is not "
        "commutative needs; use recursive_doubling or "
    )


def test_ring_is_refused_to_operators_of_whole_values() -> None:
    assert "cuts the value in pieces" in (usable("all_reduce", "ring", whole=True) or "")
    assert usable("all_reduce", "ring") is None


def test_blocks_are_whole() -> None:
    assert usable("reduce_scatter", "ring", whole=True) is None
    assert usable("exscan", "linear", whole=True) is None


def test_operators_do_not_matter_where_nothing_is_reduced() -> None:
    assert usable("all_gather", "ring", rank_order=True, whole=True) is None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="has no algorithm 'star'"):
        usable("all_reduce", "star")
    with pytest.raises(ValueError, match="no collective 'shuffle'"):
        choose("shuffle", 8, 2)


# --- in a job --------------------------------------------------------------------------------

SETTINGS = """
import json, os
OPTIONS, VARIABLES = json.load(open(sys.argv[1] + "/settings.json"))
os.environ.update(VARIABLES[int(os.environ["PYCOLL_RANK"])])
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""

COMPARE = """
comm.barrier()  # in the core, which from now on takes NumPy arrays without asking
x = np.full(5, rank + 1.0)
for value in (x, np.repeat(x, 10_000)):
    total = size * (size + 1) / 2
    assert comm.all_reduce(value)[0] == total
    assert comm.broadcast(value if rank == 0 else None)[0] == 1.0
    total_again = comm.all_reduce(value) if rank % 2 else comm.all_reduce(value, timeout=20.0)
    assert total_again[0] == total
group = comm._group
job = group.engine.agreed
mine = [str(group.choose("all_reduce", 1 << 20, None)), job.costs.origin, job.segment_nbytes]
every = comm.gather(mine)
if rank == 0:
    assert all(one == mine for one in every), every
    print(json.dumps(mine))
ok()
"""


def settled(job: Any, *options: str, variables: list[dict[str, str]]) -> Any:
    """What all ranks of a job go by, if each has variables of its own."""
    (job.folder / "settings.json").write_text(json.dumps([options, variables]))
    done = job(len(variables), COMPARE, *options, init=SETTINGS)
    assert (done.status, done.content) == (0, list(range(len(variables)))), done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))


@pytest.mark.parametrize("options", [["--transport", "tcp"], ["--transport", "shm"]], ids=str)
def test_what_rank_0_has_set_holds_on_all_ranks(job: Any, options: list[str]) -> None:
    mine, other = job.folder / "mine.json", job.folder / "other.json"
    mine.write_text(costs.shipped()._replace(origin="rank 0").as_json())
    other.write_text(costs.shipped()._replace(origin="rank 1").as_json())
    variables = [
        {
            "PYCOLL_ALGORITHM": "all_reduce:ring;broadcast:linear",
            "PYCOLL_SEGMENT": "8K",
            "PYCOLL_COSTS": str(mine),
        },
        {
            "PYCOLL_ALGORITHM": "all_reduce:recursive_doubling",
            "PYCOLL_SEGMENT": "64K",
            "PYCOLL_COSTS": str(other),
        },
        {},
    ]
    choice, origin, segment = settled(job, *options, variables=variables)
    assert (choice, segment) == ("ring, segments=43", 8192)
    assert origin == f"{mine}: rank 0"


def test_what_only_other_ranks_have_set_does_not_hold(job: Any) -> None:
    wrong = {"PYCOLL_ALGORITHM": "nonsense", "PYCOLL_SEGMENT": "x", "PYCOLL_COSTS": "/none"}
    nothing = {"XDG_CONFIG_HOME": str(job.folder)}
    choice, origin, segment = settled(job, variables=[nothing, nothing | wrong])
    assert (choice, segment) == (SHARED_MEMORY, None)
    assert origin == costs.shipped().origin


def test_a_setting_that_makes_no_sense_is_named_when_the_job_starts(job: Any) -> None:
    (job.folder / "settings.json").write_text(
        json.dumps([[], [{"PYCOLL_ALGORITHM": "all_reduce:rng"}, {}]])
    )
    done = job(2, "", init=SETTINGS)
    assert done.status == 1
    assert "BootstrapError: PYCOLL_ALGORITHM: 'all_reduce:rng': all_reduce has no " in done.stderr
