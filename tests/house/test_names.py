"""A name stands for one thing: no two classes have the same."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = "transports/_core.pyi"

FACES = {"Both", "Collectives", "Context", "Persistent", "Request"}
"""Classes of Python's that show what the core has under the same name."""

STEPS = {"Send"}
"""Public is a step of a schedule, `pycoll.schedule.Send`; the core's is a message on its way."""


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for folder in ("pycoll", "transports", "launcher"):
        for path in sorted((ROOT / folder).rglob("*.py*")):
            if path.suffix in (".py", ".pyi") and not path.is_symlink():
                text = path.read_text(encoding="utf-8")
                for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
                    places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 400, "the source is elsewhere"
    twice = {name for name, where in places.items() if len(where) > 1}
    assert twice == FACES | STEPS
    assert all(CORE in places[name] and len(places[name]) == 2 for name in twice)
