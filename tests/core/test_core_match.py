"""How matching in plain C grows: `tests/core/match_many.c` counts what is looked at where many
messages and receives wait.

That it matches right is shown by random calls of engines (test_core_engine.py, test_core_run.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import PLAIN, TESTS, build, call, needs_gcc, prefix_of

SOURCES = ("engine/match.c", "engine/address.c", "base/chains.c")
HOOKS = "-include", TESTS / "match_hooks.h"
WAYS = 13
"""Ways in which things come and go where many wait."""

MOST_LOOKS = 40
"""What is looked at for one of them, in the worst of the ways: 23 with a hundred thousand."""

pytestmark = needs_gcc


@pytest.mark.parametrize("things", [1_000, 100_000])
def test_what_an_operation_looks_at_does_not_grow_with_what_waits(
    tmp_path: Path, things: int
) -> None:
    prefix = prefix_of(PLAIN)
    program = build(tmp_path, "match_many", SOURCES, PLAIN, *HOOKS)
    run = call([*prefix, program, str(things)], tmp_path)
    assert run.returncode == 0, run.stdout
    looks = {
        name: int(count) for count, name in (line.split(" ", 1) for line in run.stdout.splitlines())
    }
    assert len(looks) == WAYS
    assert all(0 < count <= MOST_LOOKS for count in looks.values()), looks
