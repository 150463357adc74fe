"""The pages of docs/learn show what their commands print."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tiers import exhaustive

LEARN = Path(__file__).resolve().parents[2] / "docs" / "learn"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(LEARN.glob("*.md"))}


def blocks(language: str) -> list[str]:
    """The fenced blocks of all pages."""
    return [
        text
        for page in PAGES.values()
        for text in re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)
    ]


SHOWN = [
    (command.split(), output)
    for text in blocks("console")
    for command, _, output in (part.partition("\n") for part in text.split("$ ")[1:])
]
"""Each command, with what the pages show below it."""

JOBS = defaultdict(list)
"""Commands that start ranks and differ only in algorithms, which one job can run."""
for words, output in SHOWN:
    if words[0] == "pycoll-run":
        at = words.index("count.py") + 2
        JOBS[tuple(words[1:at])].append((words[at:], output))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs of the pages, which is the current one."""
    for text in blocks("python"):
        (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@exhaustive
def test_what_is_estimated_is_on_the_pages(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    estimates = [(words[1:], output) for words, output in SHOWN if words[0] == "python"]
    assert len(estimates) > 8
    for words, output in estimates:
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(str(programs / words[0]))
        assert capsys.readouterr().out == output, words


@exhaustive
@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_the_bytes_that_are_counted_are_on_the_pages(job: tuple[str, ...], programs: Path) -> None:
    names = [name for words, _ in JOBS[job] for name in words]
    command = [sys.executable, "-P", "-m", "pycoll._launcher", *job, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(output for _, output in JOBS[job])


def test_every_command_that_prints_something_on_a_page_is_run() -> None:
    assert {words[0] for words, _ in SHOWN} == {"pycoll-run", "python"}
    assert sum(map(len, JOBS.values())) + len([w for w, _ in SHOWN if w[0] == "python"]) == len(
        SHOWN
    )
