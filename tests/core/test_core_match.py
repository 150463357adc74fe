"""Matching in plain C, in programs of its own: random operations, and how it grows.

`tests/core/match_random.c` does everything at random and compares with a model that searches.
`tests/core/match_many.c` counts what is looked at where many messages and receives wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import ADDRESS, PLAIN, TESTS, build, call, counted, needs_gcc, prefix_of
from tiers import exhaustive

SOURCES = ("engine/match.c", "engine/address.c", "base/chains.c")
HOOKS = "-include", TESTS / "match_hooks.h"
KINDS = 8
"""Things that the random operations count."""

WAYS = 13
"""Ways in which things come and go where many wait."""

MOST_LOOKS = 40
"""What is looked at for one of them, in the worst of the ways: 23 with a hundred thousand."""

pytestmark = needs_gcc


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 100, id="few"),
        pytest.param(ADDRESS, 3_000, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 10_000, marks=exhaustive, id="plain"),
    ],
)
def test_random_operations_match_what_a_search_would_find(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    program = build(tmp_path, "match_random", SOURCES, flags, *HOOKS)
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert len(counts) == KINDS
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds for count in counts.values()), counts


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
