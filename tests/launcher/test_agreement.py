"""What living ranks agree on, in every order in which messages and deaths can come.

The launcher's part is the real one (`Agreements`); ranks, and what carries their messages, are a
model. What a rank has sent is heard before its end, and what it is told is delivered at once: it
has no effect on others before the rank sends again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tiers import exhaustive

from pycoll._launcher.agreement import Agreements, Decided, _Open

Members = tuple[int, ...]
Heard = tuple[tuple[str, Any], ...]

WORLD = "world"
CALLS = ("agree()", "shrink()", "agree()")  # one after the other, each on the last shrink's ranks
LEAVES = "leaves the job"


class Rank(NamedTuple):
    """A rank: what it does next, where, and what it was told."""

    calls: tuple[str, ...]
    flag: bool
    members: Members
    context: str = WORLD
    number: int = 0
    waits: bool = False
    lives: bool = True
    heard: Heard = ()


class World(NamedTuple):
    """Ranks, what they have sent and the launcher has not heard, and what the launcher knows."""

    ranks: tuple[Rank, ...]
    sent: tuple[tuple[Any, ...], ...]
    gone: frozenset[int]
    open: tuple[Any, ...]
    kills: int

    def put(self, index: int, rank: Rank, *sent: Any) -> World:
        ranks, waiting = list(self.ranks), list(self.sent)
        ranks[index], waiting[index] = rank, waiting[index] + sent
        return self._replace(ranks=tuple(ranks), sent=tuple(waiting))


def posted(index: int, rank: Rank) -> tuple[Any, ...]:
    """What a rank posts, in a form that can be compared."""
    fields = {"context": rank.context, "number": rank.number, "call": rank.calls[0]}
    more = {"name": "world", "where": f"x.py:{index}", "members": rank.members, "flag": rank.flag}
    return tuple({**fields, **more}.items())


def steps(world: World) -> Iterator[World]:
    """Every world that may come next."""
    for index, rank in enumerate(world.ranks):
        if rank.lives and not rank.waits and rank.calls:
            if rank.calls[0] == LEAVES:
                yield world.put(index, rank._replace(calls=(), waits=True), LEAVES)
            else:
                yield world.put(index, rank._replace(waits=True), posted(index, rank))
        if rank.lives and world.kills:
            dead = world._replace(kills=world.kills - 1)
            yield dead.put(index, rank._replace(lives=False), "ended")
        if world.sent[index]:
            yield listened(world, index)


def listened(world: World, index: int) -> World:
    """The launcher hears the next thing that a rank has sent, and tells what follows."""
    said, *rest = world.sent[index]
    sent = (*world.sent[:index], tuple(rest), *world.sent[index + 1 :])
    gone = world.gone | {index} if said in (LEAVES, "ended") else world.gone
    agreements = Agreements(lambda rank: rank not in gone)
    for key, members, given in world.open:  # also what the dead have given
        agreements._open[key] = _Open(list(members), {r: dict(fields) for r, fields in given})
    if said in (LEAVES, "ended"):
        ranks = tuple(tell(r, ("gone", index)) if r.lives else r for r in world.ranks)
        world = world._replace(ranks=ranks)
    else:
        agreements.give(index, dict(said))
    for decided in agreements.decided():
        ranks = tuple(
            decide(rank, decided) if rank.lives and number in decided.ranks else rank
            for number, rank in enumerate(world.ranks)
        )
        world = world._replace(ranks=ranks)
    still_open = tuple(
        (key, tuple(members), tuple((r, tuple(f.items())) for r, f in sorted(given.items())))
        for key, (members, given) in sorted(agreements._open.items())
    )
    return world._replace(sent=sent, gone=gone, open=still_open)


def tell(rank: Rank, event: tuple[str, Any]) -> Rank:
    return rank._replace(heard=(*rank.heard, event))


def decide(rank: Rank, decided: Decided) -> Rank:
    """A rank that waits hears what was decided, and goes on."""
    fields = decided.fields
    assert rank.waits
    assert (fields["context"], fields["number"]) == (rank.context, rank.number)
    ranks = tuple(fields["ranks"])
    told = (rank.context, rank.number), (fields["flag"], ranks, bool(fields["different"]))
    after = tell(rank, ("agreed", told))._replace(waits=False, calls=rank.calls[1:])
    if rank.calls[0] == "shrink()" and not fields["different"]:
        context = f"{rank.context}/{rank.number}:{ranks}"
        return after._replace(members=ranks, context=context, number=0)
    return after._replace(number=rank.number + 1)


def all_ends(start: World) -> tuple[list[World], int]:
    """Every world in which nothing can happen any more but deaths; and how many were seen."""
    seen, left, ends = {start}, [start], []
    while left:
        world = left.pop()
        after = list(steps(world))
        if all(other.kills < world.kills for other in after):
            ends.append(world)
        for other in after:
            if other not in seen:
                seen.add(other)
                left.append(other)
    return ends, len(seen)


def start(programs: list[tuple[str, ...]], flags: list[bool], kills: int) -> World:
    members = tuple(range(len(programs)))
    ranks = tuple(Rank(calls, flag, members) for calls, flag in zip(programs, flags, strict=True))
    return World(ranks, ((),) * len(ranks), frozenset(), (), kills)


def check(world: World) -> None:
    """What must hold when all has come to rest."""
    told: dict[tuple[str, int], Any] = {}
    for index, rank in enumerate(world.ranks):
        left_out: set[int] = set()
        if rank.lives and LEAVES not in rank.calls:
            assert not rank.calls, f"rank {index} waits for ever: {world}"
        for kind, what in rank.heard:
            if kind == "gone":
                left_out.add(what)
                continue
            key, (flag, ranks, different) = what
            assert told.setdefault(key, what) == what, f"ranks have heard different things: {world}"
            here = [world.ranks[each] for each in ranks]
            assert flag == all(each.flag for each in here), world
            assert not different
            missing = set(range(len(world.ranks))) - set(ranks)
            assert missing <= left_out, f"rank {index} does not know why they are missing: {world}"
            assert not left_out & set(ranks), f"who was gone before is counted: {world}"
    living = {i for i, r in enumerate(world.ranks) if r.lives and i not in world.gone}
    for rank in (world.ranks[index] for index in living):
        assert living <= set(rank.members), f"a living rank was left out: {world}"


@pytest.mark.parametrize(
    ("size", "kills"),
    [(3, 2), pytest.param(4, 1, marks=exhaustive), pytest.param(4, 3, marks=exhaustive)],
)
def test_all_living_ranks_agree_wherever_ranks_die(size: int, kills: int) -> None:
    for flags in ([True] * size, [False] + [True] * (size - 1)):
        ends, seen = all_ends(start([CALLS] * size, flags, kills))
        assert seen > 1000
        for world in ends:
            check(world)
        numbers_of_living = {sum(rank.lives for rank in world.ranks) for world in ends}
        assert numbers_of_living == {*range(size - kills, size + 1)}


def test_a_rank_that_leaves_instead_is_left_out_and_nobody_waits_for_it() -> None:
    for world in all_ends(start([CALLS, CALLS, (LEAVES,)], [True] * 3, 1))[0]:
        check(world)
        if all(world.ranks[rank].lives for rank in (0, 1)):
            assert world.ranks[0].members == world.ranks[1].members == (0, 1)


def test_who_has_agreed_waits_for_those_who_live_and_have_not() -> None:
    gone: set[int] = set()
    agreements = Agreements(lambda rank: rank not in gone)
    for index in 0, 1:
        agreements.give(index, dict(posted(index, Rank(("agree()",), True, (0, 1, 2, 3)))))
    assert agreements.awaited(0, WORLD) == agreements.awaited(1, WORLD) == [2, 3]
    gone.add(3)
    assert agreements.awaited(0, WORLD) == [2]
    assert agreements.awaited(0, "another") == agreements.awaited(2, WORLD) == []


def test_ranks_that_call_different_things_are_all_told_so() -> None:
    ends, _ = all_ends(start([("agree()",), ("shrink()",)], [True] * 2, 0))
    assert len({world.ranks for world in ends}) == 1
    for rank in ends[0].ranks:
        [(kind, (_, (_, ranks, different)))] = rank.heard
        assert (kind, ranks, different) == ("agreed", (0, 1), True)
