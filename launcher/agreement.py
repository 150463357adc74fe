"""What the living ranks of a communicator agree on: `comm.agree` and `comm.shrink`, decided here.

An agreement is over when each member has given its flag, or does not take part any more. That is
decided in one place, and all members hear of it on the connection by which they hear of failures.
So they hear the same, and before it of every rank that was left out. docs/design.md says why no
more is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pycoll._rendezvous.wire import Context

SHRINK = "shrink"
"""How a call begins that leaves out the ranks which have failed."""


class Decided(NamedTuple):
    """What was decided.

    Attributes:
        fields: of the event "agreed".
        ranks: those that take part, who are told, in order.
        left_out: the members that do not, and that the others go on without: the call is a shrink.
    """

    fields: dict[str, Any]
    ranks: list[int]
    left_out: list[int]


class _Open(NamedTuple):
    """An agreement that is not over: its members, and what each has given."""

    members: list[int]
    given: dict[int, dict[str, Any]]


class Agreements:
    """The agreements that are under way in a job.

    Args:
        takes_part: returns whether a rank lives, and has not left.
    """

    def __init__(self, takes_part: Callable[[int], bool]) -> None:
        self._takes_part = takes_part
        self._open: dict[tuple[Context, int], _Open] = {}

    def give(self, rank: int, fields: dict[str, Any]) -> None:
        """Note what a rank has given, in the post "agree"; `decided` says what comes of it."""
        if self._takes_part(rank):
            key = fields["context"], fields["number"]
            begun = self._open.setdefault(key, _Open(fields["members"], {}))
            begun.given[rank] = fields

    def awaited(self, rank: int, context: Context) -> list[int]:
        """Return the ranks for which `rank` waits in an agreement on a communicator."""
        return [
            member
            for key, (members, given) in self._open.items()
            if key[0] == context and rank in given
            for member in members
            if member not in given and self._takes_part(member)
        ]

    def decided(self) -> Iterator[Decided]:
        """Take out the agreements that are over by now.

        To be called when a rank has given something, or takes part no more.
        """
        for key, (members, given) in list(self._open.items()):
            ranks = [rank for rank in members if self._takes_part(rank)]
            if all(rank in given for rank in ranks):
                del self._open[key]
                if ranks:
                    yield _decide(key, members, {rank: given[rank] for rank in ranks})


def _decide(
    key: tuple[Context, int], members: list[int], given: dict[int, dict[str, Any]]
) -> Decided:
    """What those have agreed on that take part."""
    ranks = list(given)
    first = given[ranks[0]]
    fields: dict[str, Any] = {
        "context": key[0],
        "number": key[1],
        "flag": all(each["flag"] for each in given.values()),
        "ranks": ranks,
        "different": "",
    }
    other = next((rank for rank in ranks if given[rank]["call"] != first["call"]), None)
    if other is not None:
        fields["different"] = (
            f"ranks made different calls on {first['name']}:\n"
            f"    rank {ranks[0]}: {first['call']} at {first['where']}\n"
            f"    rank {other}: {given[other]['call']} at {given[other]['where']}\n"
            "Call agree() and shrink() in the same order on all ranks."
        )
    shrinks = other is None and first["call"].startswith(SHRINK)
    return Decided(fields, ranks, [m for m in members if m not in given] if shrinks else [])
