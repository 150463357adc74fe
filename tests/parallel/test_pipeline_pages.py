"""The page about pipelines, and its program, say what the schedules do."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import EXAMPLES, PYCOLL_RUN, run, run_example

from pycoll.parallel import PIPELINE_SCHEDULES, prove_pipeline

diagrams = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "parallel/pipeline_diagrams.py")))
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/parallel/pipeline.md").read_text(encoding="utf-8")


def test_the_diagrams_of_the_page_are_those_of_the_schedules() -> None:
    drawn = re.findall(r"<!-- (\S+) (\d) (\d) (\d) -->\n```text\n(.*?)\n```", PAGE, re.S)
    assert [name for name, *_ in drawn] == list(PIPELINE_SCHEDULES)
    for name, p, m, v, diagram in drawn:
        assert diagrams.draw_text(diagrams.time_pipeline(name, int(p), int(m), int(v))) == diagram


def test_the_times_of_the_page_are_those_of_the_schedules() -> None:
    table = PAGE.split("| a message takes |")[1].split("\n\n")[0].splitlines()
    messages = [float(cell) for cell in table[0].split("|")[:-1]]
    assert len(table[2:]) == 5
    for name, chunks, cells in re.findall(r"^\| `([^`]+)`(?:, `v = (\d)`)? \|(.*)\|$", PAGE, re.M):
        if len(cells.split("|")) == len(messages):
            v = int(chunks or 1)
            costs = {"F": 1 / v, "B": 2 / v} if "zb" not in name else None
            for message, time in zip(messages, cells.split("|"), strict=True):
                times = diagrams.time_pipeline(name, 4, 16, v, costs=costs, message=message)
                took = max(line[-1].end - line[0].start for line in times)
                assert took == pytest.approx(float(time), abs=0.05), name


def test_the_formulas_of_the_page_are_those_of_the_schedules() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `?([^|`]+)`? \| `([^`]+)`.* \| [A-Z]", PAGE, re.M)
    assert [name for name, *_ in rows] == list(PIPELINE_SCHEDULES)
    for name, idle, held in rows:
        _, _, holds, bubble, many = PIPELINE_SCHEDULES[name]
        assert holds is not None
        assert bubble is not None
        for p, m, v in ((4, 8, 2 if many else 1), (2, 12, 3 if many else 1), (5, 10, 1)):
            numbers = dict(p=p, m=m, v=v)
            assert value(idle, **numbers) == pytest.approx(bubble(p, m, v))
            for r in range(p):
                assert min(m * v, value(held, r=r, **numbers)) == holds(r, p, m, v)


def value(formula: str, **numbers: int) -> Any:
    """Of a formula as mathematicians write it: m v is a product."""
    return eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula), {}, numbers)


def test_what_the_page_shows_of_the_program_are_bytes_by_formula_and_proved_numbers() -> None:
    (_, shown) = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.S)[1]
    rows = [re.split("  +", line) for line in shown.splitlines()[3:]]
    assert [row[0] for row in rows] == list(PIPELINE_SCHEDULES)
    for name, _, _, sent, held in rows:
        v = 2 if name == "interleaved" else 1
        assert int(sent) == value("2 (p v - 1) b", p=4, v=v, b=8 * 32 * 64)
        numbers = [int(each) for each in held.split(" (")[0].split()]
        assert numbers == list(prove_pipeline(name, 4, 8, v).held)


@pytest.mark.parallel
def test_the_program_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(# stages.py\n.*?)```", PAGE, re.S)
    (command, shown) = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.S)[0]
    (tmp_path / "stages.py").write_text(program)
    assert run(*command.replace("pycoll-run", PYCOLL_RUN).split(), cwd=tmp_path) == shown


@pytest.mark.parallel
def test_the_example_comes_to_what_one_process_does(tmp_path: Path) -> None:
    small = ("--rows", "3", "--width", "5", "--steps", "2", "--micro-batches", "4")
    lines = run_example("parallel/pipeline.py", 2, tmp_path, *small).splitlines()
    rows = [re.split("  +", line) for line in lines[3:]]
    assert [row[0] for row in rows] == list(PIPELINE_SCHEDULES)
    assert len({row[1] for row in rows}) == 1
    assert all(float(row[2]) < 1e-12 for row in rows)
    # 3 x 5 float64 go to each stage but the first, and as many come back.
    assert [row[3] for row in rows] == ["240", "240", "720", "240", "240"]
    assert [row[4].split(" (")[0] for row in rows] == ["4 4", "2 1", "5 3", "2 2", "3 3"]


def test_the_example_measures_bubbles_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ("--micro-batches", "4", "--compute-ms", "10", "--plot", "drawn.png")
    lines = run_example("parallel/pipeline.py", 2, tmp_path, *words).splitlines()
    found = [re.fullmatch(r"(\S+) +bubble +(\S+)%, by the formula +(\S+)%", li) for li in lines[2:]]
    rows = [match.groups() for match in found if match]
    assert [(name, formula) for name, _, formula in rows] == [
        ("gpipe", "25.0"),
        ("1f1b", "25.0"),
        ("interleaved", "12.5"),
        ("zb-h1", "8.3"),
        ("zb-h2", "0.0"),
    ]
    # Nobody sleeps less than asked for; how much longer depends on what else the machine does.
    assert all(float(measured) >= float(formula) - 0.1 for _, measured, formula in rows)
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
