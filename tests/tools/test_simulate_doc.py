"""What docs/simulate.md shows is what is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pycoll._tools.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/simulate.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
MANY_RANKS = re.compile(r"-n (256|6:24576|10000)")
"""Some 15 seconds."""


def commands() -> list[Any]:
    """Each command, with what it prints."""
    found = []
    for text in [text.replace("\\\n", "") for language, text in BLOCKS if language == "console"]:
        command, _, printed = text.removeprefix("$ pycoll ").partition("\n")
        marks = [pytest.mark.exhaustive] if MANY_RANKS.search(command) else []
        found.append(pytest.param(command, printed, id=command[:60], marks=marks))
    return found


def words(text: str) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("command", "printed"), commands())
def test_a_command_prints_what_the_page_shows(
    command: str,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # with no table of this machine's user
    monkeypatch.delenv("PYCOLL_COSTS", raising=False)
    assert main(shlex.split(command)) == 0
    assert words(capsys.readouterr().out) == words(printed)


def test_the_program_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = [text for language, text in BLOCKS if language == "python"]
    [printed] = [text for language, text in BLOCKS if language == "text"]
    exec(program, {})
    assert capsys.readouterr().out == printed


def test_each_option_that_describes_the_network_is_on_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M)) - {"--root"}
    assert len(options) > 15
    assert [option for option in sorted(options) if f"`{option}" not in PAGE] == []
