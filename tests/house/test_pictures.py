"""The pictures in docs/design.md show the source as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tiers import exhaustive

ROOT = Path(__file__).resolve().parents[2]
MOST_FUNCTIONS = 15


def check(picture: str) -> None:
    command = [sys.executable, ROOT / "docs/draw_house.py", picture, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_picture_of_the_packages_is_up_to_date() -> None:
    check("house")


@exhaustive
def test_the_picture_of_a_bytes_way_is_up_to_date() -> None:
    check("way")


def test_few_functions_stand_between_a_call_and_the_socket() -> None:
    drawn = (ROOT / "docs/pictures/way.svg").read_text(encoding="utf-8")
    functions = re.findall(r">(\w+)</text>\n<text[^>]*>[\w/]+\.c<", drawn)
    assert 5 < len(functions) <= MOST_FUNCTIONS
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{name}`" for name in functions[:-1]) in " ".join(design.split())
