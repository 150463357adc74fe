"""Channels of shared memory, the core's code in a program of its own, where no Python is.

`tests/core/channel_random.c` has ranks that do everything at random and checks what they are told
and given.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import ADDRESS, PLAIN, TESTS, build, counted, needs_gcc, prefix_of
from tiers import exhaustive

# All that channels need: plain C, and no stub of Python.h.
SOURCES = (
    "host/host.c",
    "host/region.c",
    "host/arena.c",
    "channel/channel.c",
    "channel/progress.c",
    "base/copy.c",
    "base/processor.c",
    "base/chains.c",
    "base/table.c",
    "host/wait.c",
)

pytestmark = needs_gcc


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 40, id="few"),
        pytest.param(ADDRESS, 200, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 500, marks=exhaustive, id="plain"),
    ],
)
def test_random_calls_of_ranks_of_a_host_deliver_every_byte_and_touch_no_other(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    program = build(
        tmp_path, "channel_random", SOURCES, flags, "-include", TESTS / "channel_hooks.h"
    )
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert counts["messages"] >= 30 * worlds
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds / 10 for count in counts.values()), counts
