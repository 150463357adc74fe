"""Point to point of the message engine in plain C, in a program of its own.

`tests/core/engine_random.c` has three engines that do everything at random over a link that does
all that a link may do, and compares them with a naive model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import ADDRESS, ENGINE, PLAIN, TESTS, build, counted, needs_gcc, prefix_of
from tiers import exhaustive

SOURCES = (*ENGINE, "engine/link_self.c")
KINDS = 21
"""Things that the random calls count."""

pytestmark = needs_gcc


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 60, id="few"),
        pytest.param(ADDRESS, 1_500, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 5_000, marks=exhaustive, id="plain"),
    ],
)
def test_random_calls_of_engines_match_a_naive_model(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    program = build(tmp_path, "engine_random", SOURCES, flags, "-include", TESTS / "engine_hooks.h")
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert len(counts) == KINDS
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds / 10 for count in counts.values()), counts
