"""A name stands for one thing in its package: no two classes there have the same."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_two_classes_of_a_package_have_the_same_name() -> None:
    places: Counter[tuple[str, str]] = Counter()
    for folder in ("pycoll", "transports", "launcher"):
        for path in sorted((ROOT / folder).rglob("*.py*")):
            if path.suffix in (".py", ".pyi") and not path.is_symlink():
                text = path.read_text(encoding="utf-8")
                package = path.parent.relative_to(ROOT).as_posix()
                names = re.findall(r"^class (\w+)", text, re.MULTILINE)
                places.update((package, name) for name in names)
    assert len(places) > 400, "the source is elsewhere"
    assert [place for place, times in places.items() if times > 1] == []
