"""The message engine's link over shared memory, in a program of its own, where no Python is.

`tests/core/link_shm_random.c` has three engines that send and receive at random over one host's
memory, and checks what is received.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import ADDRESS, ENGINE, PLAIN, TESTS, build, counted, needs_gcc, prefix_of
from tiers import exhaustive

SOURCES = (
    *ENGINE,
    "engine/link_self.c",
    "engine/link_shm.c",
    "host/host.c",
    "host/region.c",
    "host/arena.c",
    "channel/channel.c",
    "channel/progress.c",
    "base/copy.c",
    "base/processor.c",
    "base/table.c",
    "host/wait.c",
)
KINDS = 19
"""Things that the random calls count."""

pytestmark = needs_gcc


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 30, id="few"),
        pytest.param(ADDRESS, 300, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 1_000, marks=exhaustive, id="plain"),
    ],
)
def test_engines_joined_by_shared_memory_receive_what_was_sent(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    small = ["-DPC_MOST_UNOPENED=5", "-DPC_NO_FREE_LIST", "-include", TESTS / "channel_hooks.h"]
    program = build(tmp_path, "link_shm_random", SOURCES, flags, *small)
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert len(counts) == KINDS
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds / 10 for count in counts.values()), counts
