"""The tables of docs/parallel are what the transformer holds and sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from example_runs import PYCOLL_RUN, run
from transformer_program import PROGRAM, load_program

pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[2]
RING = {"PYCOLL_ALGORITHM": "all_reduce:ring;all_gather:ring;reduce_scatter:ring"}


def rows_after(page: str, head: str) -> list[list[str]]:
    """The cells of a table of docs/parallel, without commas."""
    text = (ROOT / "docs/parallel" / page).read_text(encoding="utf-8")
    table = text.split(head)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace(",", "") for cell in row.split("|")[1:-1]] for row in table]


def measure(comm: Any, path: str, shape: Any, settings: Any) -> Any:
    """What a rank holds at most, and the busiest sends in a step, by axis."""
    program = load_program(path)
    trainer = program.Trainer(program.make_grid(comm, shape), program.Settings(**settings))
    program.train(trainer, 3)
    report = program.Report(comm, trainer, 3)
    return report.most.tolist(), dict(zip(program.AXES, report.sent.tolist(), strict=True))


@pytest.mark.parametrize("ranks", [(4, (), RING)], indirect=True, scope="module", ids=["4"])
def test_zero_holds_and_sends_what_its_page_says(ranks: Any) -> None:
    rows = rows_after("zero.md", "| stage | parameters | gradients | state | sent |")
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    p, n, m = 546304, 4, 4
    two_layers = 203264
    for stage, *cells in rows:
        [(held, sent), *_] = ranks(measure, PROGRAM, (4, 1, 1, 1), {"zero": int(stage)})
        assert [*held, sent["data"]] == list(map(int, cells))
        assert [*held, sent["data"]] == [
            p if stage < "3" else p // n + two_layers,
            p if stage < "2" else p // n + two_layers,
            2 * p if stage < "1" else 2 * p // n,
            (n - 1) * {"0": 2, "1": 2, "2": m + 1, "3": 3 * m}[stage] * p // n,
        ]


@pytest.mark.parametrize("ranks", [(8, (), RING)], indirect=True, scope="module", ids=["8"])
def test_a_grid_sends_what_its_page_says(ranks: Any) -> None:
    rows = rows_after("three_d.md", "in a step by the busiest rank | data | pipeline | tensor |")
    for sequence, (command, *cells) in zip((False, True), rows, strict=True):
        assert ("--sequence" in command) == sequence
        [(_, sent), *_] = ranks(measure, PROGRAM, (2, 1, 2, 2), {"sequence": sequence})
        assert [sent[n] for n in ("data", "pipeline", "tensor")] == list(map(int, cells))


def test_communication_is_measured_beside_the_bound(tmp_path: Path) -> None:
    words = (PYCOLL_RUN, "-n", "2", "--transport", "tcp", str(ROOT / "examples/parallel/hidden.py"))
    lines = run(*words, "--mib", "1", "--repeats", "2", cwd=tmp_path).splitlines()
    found = [re.fullmatch(r"(\w+) +([\d.]+) +([\d.]+) +1\.25 +-?\d+%", line) for line in lines[2:]]
    assert [match[1] for match in found if match] == ["row_linear", "all_gather"]
    # Nobody waits for less time than asked for.
    assert all(float(match[i]) >= 0.9 for match in found if match for i in (2, 3))
