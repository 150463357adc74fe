"""A schedule as text, for a terminal: who sends what to whom, and what each rank holds then."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from pycoll._drawing.rounds import READABLE, Delivery, Replay, Value
from pycoll._drawing.shape import phases

WIDTH = 100
"""Columns of a line of messages."""

FLAWS = 12
"""So many places are told where an algorithm is wrong."""

MASKED = 9
"""Up to so many ranks a chunk has a place for each rank's contribution; with more it has ranges."""


def draw(replay: Replay) -> str:
    """Draw all rounds."""
    begins = dict(phases(replay))
    table = _Table(replay)
    lines = [headline(replay), cost_line(replay), *_legend(replay)]
    if replay.states[0]:
        lines += ["", table.heads(), "start", *table.rows(0)]
    for number, messages in enumerate(replay.rounds, 1):
        phase = f", {begins[number]} begins" if number in begins else ""
        lines += ["", f"round {number}{phase}", *_messages(replay, messages), *table.rows(number)]
    if replay.stuck:
        lines += ["", "nothing moves any more; these messages wait:"]
        lines += _messages(replay, replay.stuck)
    if replay.fault is not None:
        lines += ["", f"WRONG: {replay.fault}", *(f"  {line}" for line in flaws(replay))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def headline(replay: Replay) -> str:
    """Say what is drawn."""
    program = replay.program
    algorithm = program.algorithm
    ranks = f"{program.size} rank{'s' if program.size > 1 else ''}"
    hosts = len(set(program.hosts))
    on_hosts = f", {hosts} hosts" if hosts > 1 else ""
    root = f", root {program.root}" if program.root else ""
    return f"{algorithm.collective} {algorithm.name} on {ranks}{on_hosts}{root}"


def cost_line(replay: Replay) -> str:
    """Say what it takes: rounds, messages, and bytes in S, as in docs/algorithms.md."""
    sent, received = Counter[int](), Counter[int]()
    messages = [message for each in replay.rounds for message in each]
    for message in messages:
        sent[message.sender] += len(message.chunks)
        received[message.receiver] += len(message.chunks)
    said = f"{_count(len(replay.rounds), 'round')}, {_count(len(messages), 'message')}"
    if replay.collective == "barrier":
        return said
    whole = {"all_to_all": replay.program.size, "exscan": 1}
    load = max(0, *sent.values(), *received.values()) if messages else 0
    share = f"{load / whole.get(replay.collective, replay.program.chunks):.3g} S"
    meaning = "all blocks together" if replay.collective in _BLOCKS else "one rank's value"
    return f"{said}; the busiest rank sends or receives {share} (S: {meaning})"


def flaws(replay: Replay) -> list[str]:
    """Say where it shows that an algorithm is wrong."""
    names = replay.rows()
    said = [
        f"{_when(flaw.round)}, rank {flaw.rank}, {names[flaw.chunk]}: {flaw.what}"
        for flaw in replay.flaws[:FLAWS]
    ]
    more = len(replay.flaws) - FLAWS
    return [*said, f"and {more} more"] if more > 0 else said


_BLOCKS = frozenset({"gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"})


def _legend(replay: Replay) -> list[str]:
    hosts = replay.program.hosts
    lines = [
        f"host {host}: ranks {ranges(rank for rank, on in enumerate(hosts) if on == host)}"
        for host in sorted(set(hosts))
        if len(set(hosts)) > 1
    ]
    if not replay.states[0]:
        return [*lines, f"more than {READABLE} ranks: the messages only, not the chunks", _ROUND]
    what = "whose contributions are in it" if replay.reduces else "whose data is in it"
    what = _SHOWN.get(replay.collective, what)
    return [
        *lines,
        f"a chunk shows {what}; [ ]: it has changed",
        _ROUND,
    ]


_ROUND = "a round: each rank sends at most one message and receives at most one"

_SHOWN = {
    "broadcast": "which piece of the root's value is in it",
    "scatter": "for whom the block in it is",
    "all_to_all": "from whom, and for whom, the block in it is",
}


class _Table:
    """The chunks of all ranks: a line for each chunk, a column for each rank."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._names = replay.rows()
        values = [value for holds in replay.states for held in holds for value in held.values()]
        self._width = max(
            len(f"rank {replay.program.size - 1}"), 0, *map(len, map(self.cell, values))
        )

    def heads(self) -> str:
        """The line above all."""
        ranks = range(self._replay.program.size)
        return self._line("", [f" {f'rank {rank}':<{self._width}} " for rank in ranks])

    def rows(self, number: int) -> Iterator[str]:
        """What all ranks hold after a round; nothing if they are too many."""
        replay = self._replay
        if not replay.states[0]:
            return
        changed = replay.changed(number)
        wrong = {(flaw.rank, flaw.chunk) for flaw in replay.flaws if flaw.round == number}
        for chunk, name in enumerate(self._names):
            cells = []
            for rank, held in enumerate(replay.states[number]):
                place, text = (rank, chunk), self.cell(held.get(chunk))
                left, right = "!!" if place in wrong else "[]" if place in changed else "  "
                cells.append(f"{left}{text}{right}{' ' * (self._width - len(text))}")
            yield self._line(name, cells)

    def _line(self, name: str, cells: Sequence[str]) -> str:
        hosts = self._replay.program.hosts
        line = f"  {name:<{max(map(len, self._names))}}"
        for rank, cell in enumerate(cells):
            parted = rank > 0 and hosts[rank] != hosts[rank - 1]
            line += ("  | " if parted else "  ") + cell
        return line

    def cell(self, value: Value | None) -> str:
        """What a chunk holds, in characters."""
        replay, size = self._replay, self._replay.program.size
        if not value:
            return "-"
        if replay.collective == "all_to_all":
            return " ".join(f"{rank}>{to}" for rank, to in sorted(value))
        owners = sorted({replay.owner(part) for part in value})
        if not replay.reduces:
            return ranges(owners)
        if size > MASKED:
            return "all" if len(owners) == size else ranges(owners)
        return "".join(str(rank) if rank in owners else "." for rank in range(size))


def _messages(replay: Replay, messages: Sequence[Delivery]) -> list[str]:
    """Who sends what to whom: ``0>1 chunk 2``, with a plus before the chunk if it is combined."""
    said = []
    for message in messages:
        named = message.chunks or message.into
        plus = "+" if message.combines else ""
        text = f"{message.sender}>{message.receiver}"
        if replay.program.chunks > 1:
            text += f" {plus}{ranges(named)}"
            if message.chunks and message.into and message.chunks != message.into:
                text += f" to {ranges(message.into)}"
        elif plus:
            text += " +"
        if not message.chunks:
            text += " (not sent)"
        elif not message.into:
            text += " (not received)"
        said.append(text.replace(" ", "\0"))
    filled = textwrap.fill("; ".join(said), WIDTH, initial_indent="  ", subsequent_indent="  ")
    return filled.replace("\0", " ").splitlines()


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers in short: 0-2,5."""
    ordered = sorted(set(numbers))
    runs = []
    for _, group in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(runs)


def _when(number: int) -> str:
    return f"round {number}" if number else "before the first round"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
