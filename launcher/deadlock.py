"""Who waits for whom, and whether they wait for ever: the wait-for graph of a job.

What a rank waits in ends when one of its *options* is complete, and an option when all its *needs*
are met. A need of a collective call names ranks that must each have started that call; any other
need names ranks of which one must act. So a wait is an "or" of "and"s, whose last "or" is a receive
from any source.

A set of ranks is deadlocked if each of them waits, and what it waits for can only come from the
set. The largest such set is what remains when ranks that can still go on are taken out until
nothing changes. Nothing here knows time: whether a view is still true is for the caller to see to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

Context = int | str | bytes


class Need(NamedTuple):
    """Ranks without which an option is not complete.

    Attributes:
        context, number: the collective call that each of `ranks` must have started; number -1:
            none, but one of `ranks` must send, or receive.
        ranks: the ranks.
    """

    context: Context
    number: int
    ranks: frozenset[int]


class View(NamedTuple):
    """What a waiting rank has said.

    Attributes:
        options: what it waits for; empty: that is not known.
        started: by communicator, how many collective calls on it the rank has started.
        call: the communicator and the number of the collective call it waits in; -1: none.
    """

    options: tuple[tuple[Need, ...], ...]
    started: Mapping[Context, int]
    call: tuple[Context, int]

    def has_started(self, need: Need) -> bool:
        """Whether the rank has started the call of a need, or ended it."""
        context, number, _ = need
        return self.call == (context, number) or self.started.get(context, 0) > number

    def is_before(self, need: Need) -> bool:
        """Whether the rank waits in an earlier collective call of the same communicator."""
        context, number = self.call
        return context == need.context and 0 <= number < need.number


def missing(need: Need, views: Mapping[int, View]) -> frozenset[int]:
    """Return the ranks that a need still needs, as far as that is known."""
    if need.number < 0:
        return need.ranks
    late = [r for r in need.ranks if r not in views or not views[r].has_started(need)]
    return frozenset(late)


def awaited(rank: int, views: Mapping[int, View]) -> frozenset[int]:
    """Return the ranks for which a rank waits; empty if it does not, or that is not known."""
    view = views.get(rank)
    needs = [need for option in view.options for need in option] if view is not None else []
    return frozenset().union(*(missing(need, views) for need in needs))


def deadlocked(views: Mapping[int, View], gone: Set[int] = frozenset()) -> frozenset[int]:
    """Return the ranks that wait for each other for ever, and those that wait for these.

    Args:
        views: of the ranks that wait, with nothing else of theirs under way that could help.
        gone: ranks that have ended, and never act again.
    """
    waiters = defaultdict(list)
    for rank in views:
        for other in awaited(rank, views):
            waiters[other].append(rank)
    stuck, unsure = set(views), list(views)
    while unsure:
        rank = unsure.pop()
        if rank in stuck and not _blockers(rank, views, stuck, gone):
            stuck.remove(rank)
            unsure += waiters[rank]
    return frozenset(stuck)


def circle(
    stuck: Set[int], views: Mapping[int, View], first: int, gone: Set[int] = frozenset()
) -> list[int]:
    """Return deadlocked ranks of which each waits for the next, and the last for the first.

    The search begins at `first`, one of them; `gone` as for `deadlocked`.
    """
    path: list[int] = []
    rank = first
    while rank not in path:
        path.append(rank)
        rank = min(_blockers(rank, views, stuck, gone))
    found = path[path.index(rank) :]
    least = found.index(min(found))
    return found[least:] + found[:least]


def _blockers(
    rank: int, views: Mapping[int, View], stuck: Set[int], gone: Set[int]
) -> frozenset[int]:
    """Return the ranks among `stuck` that keep every option of a rank's from being complete."""
    found: set[int] = set()
    for option in views[rank].options:
        blockers = next(_unmet(option, views, stuck, gone), None)
        if blockers is None:
            return frozenset()
        found |= blockers
    return frozenset(found)


def _unmet(
    option: tuple[Need, ...], views: Mapping[int, View], stuck: Set[int], gone: Set[int]
) -> Iterator[frozenset[int]]:
    """Yield, for each need that is never met, the ranks among `stuck` to blame for it."""
    for need in option:
        # Some calls run ahead, until a rank in an earlier one has taken what was left for it: that
        # may come though its call never ends.
        blamed = frozenset(
            rank for rank in missing(need, views) & stuck if not views[rank].is_before(need)
        )
        is_met_by_one = need.number < 0
        if blamed and (not is_met_by_one or need.ranks <= stuck | gone):
            yield blamed
