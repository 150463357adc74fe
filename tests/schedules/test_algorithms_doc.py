"""docs/algorithms.md agrees with the source: its formulas, lists, programs and messages."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from patience import PATIENCE

from pycoll import schedules
from pycoll.schedule import Send, chunks_of
from pycoll.schedules import REDUCING, TABLE, Cost, cost_of, find, program, proof, steps_of
from pycoll.schedules.powers import ceil_lg, floor_lg, power_below
from pycoll.schedules.ring_2d import shape
from pycoll.simulate import PIECES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
COSTS, _, OWN = TEXT.partition("\n## Write your own\n")

HIERARCHICAL = "hierarchical"


class Row(NamedTuple):
    """A row of a table of costs: what is stated of one algorithm."""

    collective: str
    name: str
    order: bool
    formulas: dict[str, str]


def tables(section: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in a section, their heads apart."""
    for line in re.findall(r"^\| (`.*) \|$", section, re.M):
        yield line.split(" | ")


def sections() -> dict[str, str]:
    parts = re.split(r"^### (.+)\n", COSTS, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def code(cell: str) -> str:
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found, f"{cell} is no formula"
    return found[1]


def rows() -> list[Row]:
    found = []
    for title, section in sections().items():
        for cells in tables(section):
            first = re.fullmatch(r"`(\w+)`( \(order\))?", cells[0])
            assert first, cells
            formulas = dict(zip(("steps", "bytes", "messages"), map(code, cells[1:4]), strict=True))
            if title == "Several hosts":
                formulas["crossing"] = code(cells[4])
                found.append(Row(first[1], HIERARCHICAL, False, formulas))
            else:
                found.append(Row(title, first[1], bool(first[2]), formulas))
    return found


ROWS = rows()
FLAT = [row for row in ROWS if row.name != HIERARCHICAL]
PLACED = [row for row in ROWS if row.name == HIERARCHICAL]


def title_of(row: Row) -> str:
    return f"{row.collective}-{row.name}"


def value(formula: str, size: int, hosts: int = 1) -> float:
    """What a formula says for so many ranks, on so many hosts; S is 1."""
    core = power_below(size)
    names: dict[str, Any] = {
        "P": size,
        "S": 1.0,
        "Q": core,
        "F": int(size != core),
        "B": sum(number.bit_count() for number in range(size)),
        "R": shape(size)[0],
        "C": shape(size)[1],
        "H": hosts,
        "n": size // hosts,
        "floor_lg": floor_lg,
        "ceil_lg": ceil_lg,
        "early": lambda p: int(4 * p <= 3 << ceil_lg(p)),
        "min": min,
    }
    return float(eval(formula, {"__builtins__": {}}, names))


def figures(row: Row, cost: Cost, size: int) -> dict[str, float]:
    """What the source states, in the units of the tables."""
    blocks = row.collective not in PIECES | {"exscan"}
    chunks = size if blocks else find(row.collective, row.name).chunks(size)
    if row.collective == "exscan":
        chunks = 1
    nbytes = 0.0 if row.collective == "barrier" else cost.load / chunks
    return {"steps": cost.steps, "bytes": nbytes, "messages": cost.messages}


# Costs


@pytest.mark.parametrize("row", FLAT, ids=title_of)
def test_formulas_are_what_the_algorithm_takes(row: Row) -> None:
    algorithm = find(row.collective, row.name)
    for size in range(2, 34):
        cost = cost_of(algorithm, size)
        assert cost is not None
        for what, takes in figures(row, cost, size).items():
            formula = row.formulas[what]
            bound = formula.startswith("<= ")
            says = value(formula.removeprefix("<= "), size)
            if bound and size != power_below(size):
                assert takes <= says < 2.0 * takes, (what, size)
            else:
                assert takes == pytest.approx(says), (what, size)


@pytest.mark.parametrize("row", PLACED, ids=title_of)
def test_formulas_of_several_hosts_are_what_the_algorithm_takes(row: Row) -> None:
    algorithm = find(row.collective, HIERARCHICAL)
    for hosts in range(2, 8):
        for each in range(2, 6):
            size = hosts * each
            placed = [rank // each for rank in range(size)]
            cost = cost_of(algorithm, size, 0, placed)
            assert cost is not None
            takes = figures(row, cost, size)
            takes["crossing"] = crossing(row.collective, size, placed) / size
            for what, figure in takes.items():
                says = value(row.formulas[what], size, hosts)
                assert figure == pytest.approx(says), (what, hosts, each)


def crossing(collective: str, size: int, hosts: list[int]) -> int:
    """The most chunks that enter one host, or leave it if they are combined on their way."""
    if collective == "barrier":
        return 0
    crossed = [0] * (max(hosts) + 1)
    leaving = collective in ("reduce", "reduce_scatter")
    for rank in range(size):
        for step in steps_of(find(collective, HIERARCHICAL), rank, size, 0, hosts):
            if isinstance(step, Send) and hosts[rank] != hosts[step.peer]:
                crossed[hosts[rank if leaving else step.peer]] += len(chunks_of(step))
    return max(crossed)


@pytest.mark.parametrize("row", ROWS, ids=title_of)
def test_one_rank_has_nothing_to_do(row: Row) -> None:
    assert cost_of(find(row.collective, row.name), 1) == Cost(0, 0, 0, 0, 0)


def test_every_algorithm_is_listed_and_no_other() -> None:
    listed = [(row.collective, row.name) for row in ROWS]
    assert len(listed) == len(set(listed))
    assert set(listed) == {(a.collective, a.name) for kind in TABLE.values() for a in kind.values()}


@pytest.mark.parametrize("row", FLAT, ids=title_of)
def test_rank_order_is_marked_where_it_is_kept(row: Row) -> None:
    kept = find(row.collective, row.name).rank_order
    assert row.order == (kept and row.collective in REDUCING)


# Write your own


def blocks(kind: str) -> str:
    return "\n".join(re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.M | re.S))


def test_the_programs_run_and_print_what_is_shown(tmp_path: Path) -> None:
    """All blocks are one program; of its three ranks only rank 0 is heard."""
    program = tmp_path / "program.py"
    silence = 'import os, sys\nif os.environ["PYCOLL_RANK"] != "0":\n    sys.stdout = None\n'
    program.write_text(silence + blocks("python"))
    command = [sys.executable, "-m", "pycoll._launcher", "-n", "3", str(program)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == blocks("text").replace("\n\n", "\n").splitlines()


def test_the_messages_of_the_proof_are_those_in_the_source() -> None:
    table = OWN.split("### What the proof says, and what to do\n", 1)[1]
    listed = [text for cells in tables(table) for text in re.findall(r"`([^`]+)`", cells[0])]
    assert len(listed) > 15
    source = "".join(inspect.getsource(module) for module in (program, proof, schedules))
    for text in listed:
        assert text in source, text


def test_what_a_chunk_is_is_said_of_every_collective() -> None:
    table = OWN.split("### What a chunk is\n", 1)[1].split("\n### ", 1)[0]
    assert {code(cells[0]) for cells in tables(table)} == set(TABLE)
