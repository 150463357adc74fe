"""A schedule as text, for a terminal: who sends what to whom, and what each rank holds then."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from pycoll._drawing.rounds import Delivery, Replay, Value
from pycoll._drawing.shape import phases

WIDTH = 100
"""Columns of a line of messages."""

FLAWS = 12
"""So many places are told where an algorithm is wrong."""

MASKED = 9
"""Up to so many ranks a chunk has a place for each rank's contribution; with more it has ranges."""


def draw(replay: Replay) -> str:
    """Draw all rounds."""
    program = replay.program
    begins = dict(phases(replay))
    table = _Table(replay)
    lines = [headline(replay), cost_line(replay), *_legend(replay), ""]
    lines += table.heads()
    lines += table.rows("start", replay.start, frozenset(), 0)
    for number, each in enumerate(replay.rounds, 1):
        phase = f", {begins[number]} begins" if number in begins else ""
        lines += ["", f"round {number}{phase}"]
        lines += _messages(replay, each.messages)
        lines += table.rows("", each.holds, each.changed, number)
    if replay.stuck:
        lines += ["", "nothing moves any more; these messages wait:"]
        lines += _messages(replay, replay.stuck)
    if replay.fault is not None:
        lines += ["", *(f"WRONG: {line}" for line in str(replay.fault).splitlines()[:1])]
        lines += str(replay.fault).splitlines()[1:]
        lines += [f"  {line}" for line in flaws(replay)]
    elif program.size == 1:
        lines += ["", "one rank has nothing to exchange"]
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
    program = replay.program
    said = f"{_count(len(replay.rounds), 'round')}, {_count(replay.num_messages, 'message')}"
    if program.algorithm.collective == "barrier":
        return said
    blocks = program.algorithm.collective in _BLOCKS
    whole = {"all_to_all": program.size, "exscan": 1}.get(
        program.algorithm.collective, program.chunks
    )
    meaning = "all blocks together" if blocks else "one rank's value"
    share = f"{replay.load() / whole:.3g} S"
    return f"{said}; the busiest rank sends or receives {share} (S: {meaning})"


def flaws(replay: Replay) -> list[str]:
    """Say where it shows that an algorithm is wrong."""
    names = replay.rows()
    said = [
        f"{_when(flaw.round, replay)}, rank {flaw.rank}, {names[flaw.chunk]}: {flaw.what}"
        for flaw in replay.flaws[:FLAWS]
    ]
    more = len(replay.flaws) - FLAWS
    return [*said, f"and {more} more"] if more > 0 else said


_BLOCKS = frozenset({"gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"})


def _legend(replay: Replay) -> list[str]:
    program = replay.program
    lines = [
        f"host {host}: ranks {ranges(rank for rank, on in enumerate(program.hosts) if on == host)}"
        for host in sorted(set(program.hosts))
        if len(set(program.hosts)) > 1
    ]
    if replay.reduces:
        lines.append("a chunk shows whose contributions are in it; [ ]: it has changed")
    else:
        what = "whose data is in it"
        if program.algorithm.collective in ("broadcast", "scatter"):
            what = "which piece of the root's value is in it"
        if program.algorithm.collective == "scatter":
            what = "for whom the block in it is"
        if program.algorithm.collective == "all_to_all":
            what = "from whom, and for whom, the block in it is"
        lines.append(f"a chunk shows {what}; [ ]: it has changed")
    return [*lines, "a round: each rank sends at most one message and receives at most one"]


class _Table:
    """The chunks of all ranks: a line for each chunk, a column for each rank."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._names = replay.rows()
        states = [replay.start, *(each.holds for each in replay.rounds)]
        cells = {self.cell(value) for holds in states for held in holds for value in held.values()}
        self._width = max(len(f"rank {replay.program.size - 1}"), *map(len, cells), 1)
        self._marked = {(flaw.round, flaw.rank, flaw.chunk) for flaw in replay.flaws}

    def heads(self) -> list[str]:
        """The line above all."""
        ranks = range(self._replay.program.size)
        return [self._line("", [f" {f'rank {rank}':<{self._width}} " for rank in ranks])]

    def rows(
        self,
        first: str,
        holds: Sequence[Mapping[int, Value]],
        changed: frozenset[tuple[int, int]],
        number: int,
    ) -> list[str]:
        """What all ranks hold."""
        lines = [first] if first else []
        for chunk, name in enumerate(self._names):
            cells = []
            for rank, held in enumerate(holds):
                text = self.cell(held.get(chunk))
                left, right = "[]" if (rank, chunk) in changed else "  "
                if (number, rank, chunk) in self._marked:
                    left, right = "!!"
                cells.append(f"{left}{text}{right}{' ' * (self._width - len(text))}")
            lines.append(self._line(name, cells))
        return lines

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
        if replay.program.algorithm.collective == "all_to_all":
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


def _when(number: int, replay: Replay) -> str:
    if number > len(replay.rounds):
        return "after the last round"
    return f"round {number}" if number else "before the first round"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
