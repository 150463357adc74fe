"""The table that says who waits for whom: text only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pycoll._support.wording import ranks_text

WIDTH = 100
PREFIX = "pycoll-run: "
_MAX_LIST = 24  # characters of a list of ranks
_MAX_PLACE = 40  # of a file and a line; the end is what tells
_MAX_LINES = 3  # of what a rank does that does not wait
_MAX_ROWS = 10  # of waiting ranks; more are joined by call, and then left out
_MAX_WORDS = 3  # ranks of a circle that is told in words
_MAX_CIRCLE = 8  # ranks of a longer one that are named
_MAX_CAUSES = 3
_MAX_NAMES = 4


class Waiter(NamedTuple):
    """What one rank waits in.

    Attributes:
        call: the call as text.
        which: its number, and its communicator unless that is the world: " #3 on dp".
        where: its file and line.
        name, members: of the communicator.
        waited_s: how long.
        awaited: the ranks it waits for; empty: not known.
        doing: what its process does if it cannot even wait, for example "stopped", or "".
    """

    call: str
    which: str
    where: str
    name: str
    members: tuple[int, ...]
    waited_s: float
    awaited: frozenset[int]
    doing: str = ""


def deadlock_text(circle: Sequence[int], ends: bool, doubt: str = "") -> str:
    """Return the heading of a table for ranks that wait in a circle.

    Args:
        circle: the ranks, in order.
        ends: one of them has a deadline.
        doubt: why it may end all the same; empty: it is certain that it does not.
    """
    names = [*map(str, circle), str(circle[0])]
    if len(circle) == 1:
        path = f"rank {circle[0]} waits for itself"
    elif len(circle) <= _MAX_WORDS:
        path = f"rank {names[0]} waits for {', which waits for '.join(names[1:])}"
    else:
        if len(names) > _MAX_CIRCLE:
            names[_MAX_CIRCLE - 3 : -2] = ["..."]
        path = f"{len(circle)} ranks wait in a circle: {' -> '.join(names)}"
    if doubt:
        return f"perhaps a deadlock ({doubt}): {path}"
    return f"deadlock{' until a deadline passes' if ends else ''}: {path}"


def threads_text(ranks: Collection[int]) -> str:
    """Return that ranks have other threads."""
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} other threads"


def waiting_text(causes: Mapping[int, str], waited_s: float) -> str:
    """Return the heading of a table for ranks that wait for others, which do something else.

    Args:
        causes: what each of those others does.
        waited_s: how long the first has waited.
    """
    groups = defaultdict(list)
    for rank, doing in causes.items():
        groups[doing].append(rank)
    if not groups:
        return f"waiting for {_seconds(waited_s)} s; it is not known for whom"
    parts = [
        f"{ranks_text(ranks)}, which {_is(doing, len(ranks))}"
        for doing, ranks in list(groups.items())[:_MAX_CAUSES]
    ]
    left = sum(map(len, list(groups.values())[_MAX_CAUSES:]))
    if left:
        parts.append(f"{left} more")
    return f"waiting for {', and '.join(parts)}"


def _is(doing: str, count: int) -> str:
    if doing.startswith("has "):
        return doing if count == 1 else f"have {doing.removeprefix('has ')}"
    if doing.startswith("reads "):
        return doing if count == 1 else f"read {doing.removeprefix('reads ')}"
    if doing.startswith(("raised", "called")):
        return doing
    return f"{'is' if count == 1 else 'are'} {doing}"


def table(heading: str, waiters: Mapping[int, Waiter], others: Mapping[int, str]) -> list[str]:
    """Return the lines of a table.

    Args:
        heading: its first line.
        waiters: the ranks that wait.
        others: what those do for whom they wait and who do not wait themselves; a row for each
            line.
    """
    rows = _rows(waiters, joined=False)
    if len(rows) > _MAX_ROWS:
        rows = _rows(waiters, joined=True)
    left_out = sum(len(ranks) for ranks, _, _ in rows[_MAX_ROWS:])
    rows = rows[:_MAX_ROWS]
    waiting = [(_listed(ranks), _listed(awaited) or "?", w) for ranks, awaited, w in rows]
    groups = defaultdict(list)
    for rank, doing in others.items():
        groups[doing].append(rank)
    doings = [(_listed(ranks), doing) for doing, ranks in groups.items()]
    cells = [("rank", "waits for", "in")]
    first = max(len(row[0]) for row in (*cells, *waiting, *doings))
    second = max(len(row[1]) for row in (*cells, *waiting))
    room = WIDTH - 8 - first - second
    cells += [(ranks, awaited, _cell(w, room)) for ranks, awaited, w in waiting]
    for ranks, doing in doings:
        top, *more = [part for line in doing.split("\n") for part in _wrapped(line, room)]
        cells += [(ranks, "-", top), *(("", "", line) for line in more)]
    lines = [f"    {a:{first}}  {b:{second}}  {text}" for a, b, text in cells]
    if left_out:
        lines.append(f"    and {left_out} more ranks that wait")
    lines += _legend(waiters.values())
    return [_cut(heading, WIDTH - len(PREFIX)), *(_cut(line, WIDTH) for line in lines)]


def _legend(waiters: Iterable[Waiter]) -> list[str]:
    """Say which ranks are in the communicators."""
    names = defaultdict(set)
    for waiter in waiters:
        if waiter.members:
            names[waiter.name].add(waiter.members)
    known = [
        f"{name}: {ranks_text(*all_of) if len(all_of) == 1 else f'{len(all_of)} communicators'}"
        for name, all_of in names.items()
    ]
    if len(known) > _MAX_NAMES:
        known[_MAX_NAMES:] = ["..."]
    line = f"    {'; '.join(known)}"
    if len(line) > WIDTH:
        return [f"    {each}" for each in known]
    return [line] if known else []


Row = tuple[list[int], set[int], list[Waiter]]
"""Ranks that do the same, the ranks they wait for, and what each of them does."""


def _rows(waiters: Mapping[int, Waiter], joined: bool) -> list[Row]:
    """Join ranks that wait in the same call for the same; `joined`: in a call of that name."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, w in sorted(waiters.items()):
        name = w.call.partition("(")[0]
        key = (name, w.where, w.doing)
        groups[key if joined else (*key, w.call, w.which, w.awaited)].append(rank)
    rows = []
    for ranks in groups.values():
        awaited = set().union(*(waiters[rank].awaited for rank in ranks))
        rows.append((ranks, awaited, [waiters[rank] for rank in ranks]))
    return rows


def _cell(waiters: Sequence[Waiter], room: int) -> str:
    """Say what ranks wait in; if that is too long for its room, its arguments are cut first."""
    one, waited_s = waiters[0], [waiter.waited_s for waiter in waiters]
    low, high = _seconds(min(waited_s)), _seconds(max(waited_s))
    where = one.where if len(one.where) <= _MAX_PLACE else f"...{one.where[3 - _MAX_PLACE :]}"
    rest = f" at {where}, {high if low == high else f'{low}-{high}'} s"
    rest += f", {one.doing}" if one.doing else ""
    name, _, arguments = one.call.partition("(")
    if len({(waiter.call, waiter.which) for waiter in waiters}) > 1:
        return f"{_cut(f'{name}(...)', room - len(rest))}{rest}"
    arguments, _, number = arguments.rpartition(")")
    arguments = re.sub(r",? ?algorithm=[^,)]*", "", arguments)
    rest = f"{one.which}{rest}"
    arguments = _cut(arguments, room - len(f"{name}(){number}{rest}"))
    return f"{_cut(f'{name}({arguments}){number}', room - len(rest))}{rest}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _listed(ranks: Iterable[int]) -> str:
    """Ranks in short: "3", "0-2, 5"; of many the first, and how many there are."""
    ranks = list(ranks)
    text = ranks_text(ranks).partition(" ")[2] if ranks else ""
    if len(text) <= _MAX_LIST:
        return text
    return f"{text[: _MAX_LIST - 9].rpartition(', ')[0]}, ... ({len(ranks)})"


def _cut(text: str, width: int) -> str:
    width = max(width, 12)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap  # not sooner: few jobs need a table

    return textwrap.wrap(text, width, max_lines=_MAX_LINES, placeholder=" ...") or [""]
