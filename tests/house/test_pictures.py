"""The pictures in docs/ show the source as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import exhaustive

from pycoll import schedules
from pycoll._tools import show
from pycoll._tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
MOST_FUNCTIONS = 17


def check(*words: str) -> None:
    command = [sys.executable, ROOT / "docs" / words[0], *words[1:], "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_picture_of_the_packages_is_up_to_date() -> None:
    check("draw_house.py", "house")


@exhaustive
def test_the_picture_of_a_bytes_way_is_up_to_date() -> None:
    check("draw_house.py", "way")


def test_few_functions_stand_between_a_call_and_the_socket() -> None:
    drawn = (ROOT / "docs/pictures/way.svg").read_text(encoding="utf-8")
    functions = re.findall(r">(\w+)</text>\n<text[^>]*>[\w/]+\.c<", drawn)
    assert 5 < len(functions) <= MOST_FUNCTIONS
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{name}`" for name in functions[:-1]) in " ".join(design.split())


SHOW = (ROOT / "docs/show.md").read_text(encoding="utf-8")
PAGES = {"show.md": SHOW} | {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/learn").glob("*.md")
}
COMMAND = re.compile(r"^`pycoll (show .*) --svg docs/pictures/(\w+\.svg)`$", re.M)


def test_each_picture_of_an_algorithm_is_what_the_command_below_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "TABLE", {c: dict(n) for c, n in schedules.TABLE.items()})
    monkeypatch.setattr(show, "_FILES", {})
    monkeypatch.chdir(ROOT)
    for page, text in PAGES.items():
        commands = COMMAND.findall(text)
        assert [name for _, name in commands] == re.findall(r"\(\S*pictures/(\w+\.svg)\)", text), (
            page
        )
        for command, name in commands:
            main([*command.split(), "--svg", str(tmp_path / name)])
            made = (tmp_path / name).read_text(encoding="utf-8")
            drawn = (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")
            assert made == drawn, f"pycoll {command} --svg docs/pictures/{name}"


def test_beside_each_curve_stands_the_command_that_draws_it() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    drawn = {
        picture.name: page.read_text(encoding="utf-8")
        for page in pages
        for picture in (ROOT / "docs").rglob("*.png")
        if f"{picture.name})" in page.read_text(encoding="utf-8")
    }
    assert set(drawn) == {picture.name for picture in (ROOT / "docs").rglob("*.png")}
    without = [n for n, page in drawn.items() if not re.search(rf"--(plot|picture) \S*{n}", page)]
    assert without == []


def test_the_gallery_has_every_algorithm_as_it_is() -> None:
    check("draw_gallery.py")


def test_the_page_of_drawings_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", SHOW, re.M | re.S)
    [printed] = re.findall(r"^```text\n(.*?)^```$", SHOW, re.M | re.S)
    exec(program, {})
    assert capsys.readouterr().out == printed
