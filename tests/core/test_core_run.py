"""Collective calls of the message engine in plain C, in a program of its own.

`tests/core/run_random.c` has engines that run every algorithm of pycoll, several calls at a time,
over a link that does all that a link may do. What every chunk must hold at the end is what the
proof of the algorithm says: which contributions were combined, and in which order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from core_programs import ADDRESS, ENGINE, PLAIN, TESTS, build, counted, needs_gcc, prefix_of
from tiers import exhaustive

from pycoll import schedules
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send
from pycoll.schedules.program import Program
from pycoll.schedules.proof import Execution
from pycoll.schedules.symbols import Expressions

SOURCES = (*ENGINE, "engine/run.c", "engine/link_self.c")
KINDS = 36
"""Things that the random calls count."""

SIZES = range(1, 6)
HOSTS = {
    1: [(0,)],
    2: [(0, 1)],
    3: [(0, 1, 0)],
    4: [(0, 0, 1, 1), (0, 1, 1, 2)],
    5: [(0, 1, 0, 1, 0)],
}
"""Where ranks may be, besides all on one host."""

# How long chunks may be: all of them as they like, alike on all ranks; all equal; the blocks of
# all_to_all, by sender and receiver; without bytes.
FREE, EQUAL, BLOCKS, EMPTY = range(4)
UNWRITTEN = -2
"""Stands for the expression of a target that stays as it was."""

pytestmark = needs_gcc


def lengths_of(collective: str, chunks: int, size: int) -> int:
    match collective:
        case "barrier":
            return EMPTY
        case "exscan":
            return EQUAL
        case "all_to_all":
            return BLOCKS if chunks == 2 * size else EQUAL
        case _:
            return FREE


def targets_of(program: Program, rank: int) -> range:
    """Return the chunks that a rank needs at the end."""
    size, chunks, is_root = program.size, program.chunks, rank == program.root
    match program.algorithm.collective:
        case "reduce" | "gather":
            return range(chunks if is_root else 0)
        case "scatter" | "reduce_scatter":
            return range(rank, rank + 1)
        case "all_to_all":
            return range(size, 2 * size)
        case "exscan":
            return range(1, 2)
        case "barrier":
            return range(0)
        case _:
            return range(chunks)


def tokens_of(value: object) -> list[int]:
    """Write an expression of the proof with the operator, -1, before its operands."""
    parts = value.parts  # type: ignore[attr-defined]
    if parts is not None:
        return [-1, *tokens_of(parts[0]), *tokens_of(parts[1])]
    rank: int = value.mask.bit_length() - 1  # type: ignore[attr-defined]
    return [1000 * rank + value.chunk]  # type: ignore[attr-defined]


def steps_of(schedule: Schedule) -> Iterator[list[int]]:
    """Give each step as the table of a run has it."""
    for position, step in enumerate(schedule.steps):
        match step:
            case Send(peer):
                kind, other, first = 0, peer, False
            case Recv(peer, _, scratch):
                kind, other, first = (2 if scratch else 1), peer, False
            case Reduce(_, first):
                kind, other = 3, 0
            case Copy(other):
                kind, first = 4, False
        chunks, successors = schedule.chunks[position], schedule.successors[position]
        yield [kind, int(first), other, schedule.number[position], schedule.waits[position]]
        yield [len(chunks), *chunks, len(successors), *successors]


def lines_of(program: Program) -> Iterator[list[object]]:
    """Give all that a C program needs to run a schedule and to know what must come of it."""
    algorithm, size = program.algorithm, program.size
    values = Expressions()
    run = Execution(program, window=2, values=values)
    given = [set(held) for held in run.holds]
    run.prove()
    lengths = lengths_of(algorithm.collective, program.chunks, size)
    yield [algorithm.collective, algorithm.name, size, program.root, program.chunks, lengths]
    for rank in range(size):
        schedule = schedules.schedule(
            algorithm.collective, algorithm.name, rank, size, program.root, program.hosts
        )
        yield [len(schedule.steps), sum(map(len, schedule.chunks))]
        yield [sum(map(len, schedule.successors))]
        yield list(chain.from_iterable(steps_of(schedule)))
        yield [int(chunk in given[rank]) for chunk in range(program.chunks)]
        targets = targets_of(program, rank)
        for chunk in range(program.chunks):
            tokens: list[object] = []
            if chunk in targets:
                held = run.holds[rank].get(chunk)
                tokens += tokens_of(held) if held is not None else [UNWRITTEN]
            yield [len(tokens), *tokens]


def programs() -> Iterator[Program]:
    """Give every algorithm of every collective, for all sizes and roots."""
    for algorithm in chain.from_iterable(table.values() for table in schedules.TABLE.values()):
        for size in SIZES:
            roots = range(size if algorithm.collective in schedules.ROOTED else 1)
            for hosts in [(0,) * size, *(HOSTS[size] if algorithm.hosts else [])]:
                for root in roots:
                    yield Program(algorithm, size, root, hosts)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the compiled schedules of all algorithms to a file."""
    path = tmp_path_factory.mktemp("run") / "tables"
    lines = [line for program in programs() for line in lines_of(program)]
    path.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 200, id="few"),
        pytest.param(ADDRESS, 3_000, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 15_000, marks=exhaustive, id="plain"),
    ],
)
def test_random_collectives_of_engines_give_what_their_proofs_say(
    tmp_path: Path, tables: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    program = build(tmp_path, "run_random", SOURCES, flags, "-include", TESTS / "engine_hooks.h")
    counts = counted([*prefix, program, tables, str(worlds), "1"], tmp_path)
    assert len(counts) == KINDS
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds / 10 for count in counts.values()), counts
