"""The wait-for graph: who waits for whom, and whether for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest

from pycoll._launcher.deadlock import Context, Need, View, awaited, circle, deadlocked

WORLD, OTHER = 1, 2


def message(*ranks: int) -> Need:
    """One of `ranks` must send, or receive."""
    return Need(WORLD, -1, frozenset(ranks))


def p2p(*ranks: int) -> View:
    return View(((message(*ranks),),), {}, (WORLD, -1))


def call(
    number: int,
    members: Iterable[int],
    context: Context = WORLD,
    started: Mapping[Context, int] = MappingProxyType({}),
) -> View:
    need = Need(context, number, frozenset(members))
    return View(((need,),), {context: number + 1, **started}, (context, number))


def any_of(*needs: Need) -> View:
    return View(tuple((need,) for need in needs), {}, (WORLD, -1))


def all_of(*needs: Need) -> View:
    return View((needs,), {}, (WORLD, -1))


@pytest.mark.parametrize(
    ("views", "stuck", "ring"),
    [
        # two large sends, or two receives
        ({0: p2p(1), 1: p2p(0)}, {0, 1}, [0, 1]),
        # a rank that receives from itself
        ({0: p2p(0)}, {0}, [0]),
        # a ring of sends, and one who waits for it
        ({0: p2p(1), 1: p2p(2), 2: p2p(0), 3: p2p(1)}, {0, 1, 2, 3}, [0, 1, 2]),
        # the last of a chain runs
        ({0: p2p(1), 1: p2p(2)}, set(), []),
        # a collective here, a receive there
        ({0: call(3, [1]), 1: p2p(0)}, {0, 1}, [0, 1]),
        ({0: call(3, [1, 2]), 2: call(3, [0, 1]), 1: p2p(2)}, {0, 1, 2}, [1, 2]),
        # two communicators in another order
        (
            {
                0: call(0, [1], WORLD, {OTHER: 0}),
                1: call(0, [0], OTHER, {WORLD: 0}),
            },
            {0, 1},
            [0, 1],
        ),
        # rank 1 has been through the call in which rank 0 waits: what it has done is on its way
        ({0: call(3, [1]), 1: View(((message(0),),), {WORLD: 4}, (WORLD, -1))}, set(), []),
        # all are in the call
        ({0: call(3, [1]), 1: call(3, [0])}, set(), []),
        # rank 1 may still take what rank 0 has left for it in the earlier call, when 3 comes
        ({0: call(3, [1]), 1: call(2, [2, 3]), 2: p2p(0)}, set(), []),
        ({0: call(3, [1, 2]), 1: call(2, [2]), 2: p2p(0)}, {0, 1, 2}, [0, 2]),
        # any source: all of them must be stuck
        ({0: p2p(1, 2), 1: p2p(0), 2: p2p(0)}, {0, 1, 2}, [0, 1]),
        ({0: p2p(1, 2), 1: p2p(0)}, set(), []),
        # wait_any: every request must be stuck; wait_all: one is enough
        ({0: any_of(message(1), message(2)), 1: p2p(0)}, set(), []),
        ({0: any_of(message(1), message(2)), 1: p2p(0), 2: p2p(0)}, {0, 1, 2}, [0, 1]),
        ({0: all_of(message(1), message(2)), 1: p2p(0)}, {0, 1}, [0, 1]),
        # it is not known what rank 1 waits for
        ({0: p2p(1), 1: View((), {}, (WORLD, -1))}, set(), []),
        # two circles, apart
        ({0: p2p(1), 1: p2p(0), 2: p2p(3), 3: p2p(2)}, {0, 1, 2, 3}, [0, 1]),
    ],
)
def test_those_are_deadlocked_for_whom_only_the_deadlocked_could_act(
    views: dict[int, View], stuck: set[int], ring: list[int]
) -> None:
    found = deadlocked(views)
    assert found == stuck
    if found:
        assert circle(found, views, min(found)) == ring


def test_a_circle_is_found_from_one_who_only_waits_for_it() -> None:
    views = {0: p2p(2), 1: p2p(2), 2: p2p(1)}
    assert circle(deadlocked(views), views, 0) == [1, 2]


def test_ranks_that_have_ended_never_send_but_are_no_deadlock_alone() -> None:
    views = {0: p2p(1, 2), 1: p2p(0)}
    assert deadlocked(views, gone={2}) == {0, 1}
    assert circle({0, 1}, views, 0, gone={2}) == [0, 1]
    assert deadlocked({0: p2p(2)}, gone={2}) == set()


def test_a_rank_waits_for_those_that_have_not_started_its_call() -> None:
    views = {0: call(3, [1, 2, 3]), 1: call(3, [0, 2, 3]), 2: p2p(0)}
    assert awaited(0, views) == {2, 3}
    assert awaited(2, views) == {0}
    assert awaited(3, views) == set()


def test_a_ring_of_a_thousand_is_found_quickly() -> None:
    size = 1000
    views = {rank: p2p((rank + 1) % size) for rank in range(size)}
    assert circle(deadlocked(views), views, 5) == list(range(size))
    del views[size - 1]  # it runs: so all can go on, one after the other
    assert deadlocked(views) == set()
