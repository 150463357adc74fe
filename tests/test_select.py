"""Which algorithm is chosen, and why a forced one cannot serve."""

from __future__ import annotations

import itertools

import pytest

from pycoll.schedules import TABLE, find, names
from pycoll.select import TCP, KiB, MiB, choose, usable


@pytest.mark.parametrize(
    ("collective", "small", "large"),
    [
        ("broadcast", "tree", "chain"),
        ("reduce", "tree", "tree"),
        ("all_reduce", "recursive_doubling", "ring"),
        ("gather", "linear", "linear"),
        ("scatter", "linear", "linear"),
        ("all_gather", "linear", "ring"),
        ("reduce_scatter", "pairwise", "ring"),
        ("all_to_all", "pairwise", "pairwise"),
        ("barrier", "dissemination", "dissemination"),
    ],
)
def test_small_and_large_values_have_their_algorithms(
    collective: str, small: str, large: str
) -> None:
    assert choose(collective, 8, 4) == small
    assert choose(collective, 64 * MiB, 4) == large


def test_a_threshold_belongs_to_the_smaller_side() -> None:
    assert choose("all_reduce", 512 * KiB, 4) == "recursive_doubling"
    assert choose("all_reduce", 512 * KiB + 1, 4) == "ring"


def test_a_chain_must_be_worth_its_length() -> None:
    assert choose("broadcast", 6 * MiB, 16) == "chain"
    assert choose("broadcast", 6 * MiB, 17) == "tree"
    assert choose("broadcast", 9 * MiB, 17) == "chain"


@pytest.mark.parametrize("collective", TABLE)
def test_what_is_chosen_exists_and_can_serve(collective: str) -> None:
    sizes, lengths, flags = (1, 2, 3, 16, 17, 1000), (0, 1, 10**5, 10**7, 10**12), (False, True)
    for nbytes, size, rank_order, whole in itertools.product(lengths, sizes, flags, flags):
        name = choose(collective, nbytes, size, rank_order=rank_order, whole=whole)
        assert usable(collective, name, rank_order=rank_order, whole=whole) is None


@pytest.mark.parametrize("collective", ["reduce", "all_reduce", "reduce_scatter"])
def test_operators_that_do_not_commute_get_rank_order(collective: str) -> None:
    for nbytes in (8, 64 * MiB):
        assert find(collective, choose(collective, nbytes, 4, rank_order=True)).rank_order


@pytest.mark.parametrize("collective", ["reduce", "all_reduce"])
def test_operators_of_whole_values_get_one_chunk(collective: str) -> None:
    for nbytes in (8, 64 * MiB):
        assert find(collective, choose(collective, nbytes, 4, whole=True)).chunks(4) == 1


def test_every_rule_names_an_algorithm_of_its_collective() -> None:
    assert TCP.keys() == TABLE.keys()
    for collective, rules in TCP.items():
        assert {rule.name for rule in rules} <= set(names(collective))


def test_ring_is_refused_to_operators_that_do_not_commute() -> None:
    reason = usable("all_reduce", "ring", rank_order=True)
    assert reason == (
        "all_reduce ring does not combine in rank order, which an operator that is not "
        "commutative needs; use recursive_doubling or tree or linear"
    )


def test_ring_is_refused_to_operators_of_whole_values() -> None:
    assert "cuts the value in pieces" in (usable("all_reduce", "ring", whole=True) or "")
    assert usable("all_reduce", "ring") is None


def test_blocks_of_reduce_scatter_are_whole() -> None:
    assert usable("reduce_scatter", "ring", whole=True) is None


def test_operators_do_not_matter_where_nothing_is_reduced() -> None:
    assert usable("all_gather", "ring", rank_order=True, whole=True) is None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="has no algorithm 'star'"):
        usable("all_reduce", "star")
    with pytest.raises(ValueError, match="no collective 'shuffle'"):
        choose("shuffle", 8, 2)
