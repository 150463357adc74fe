"""The engine's link over sockets, in a program of its own.

`tests/core/link_tcp_random.c` has two engines that do everything at random over real sockets, and
checks what comes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from core_programs import ADDRESS, ENGINE, PLAIN, TESTS, build, counted, needs_gcc, prefix_of
from tiers import exhaustive

SOURCES = (
    *ENGINE,
    "engine/link_tcp.c",
    "tcp/tcp.c",
    "tcp/tcp_read.c",
    "tcp/tcp_write.c",
    "base/table.c",
)
KINDS = 16
"""Things that the random calls count."""

pytestmark = needs_gcc


@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        pytest.param(ADDRESS, 60, id="few"),
        pytest.param(ADDRESS, 1_000, marks=exhaustive, id="address"),
        pytest.param(PLAIN, 3_000, marks=exhaustive, id="plain"),
    ],
)
def test_random_messages_between_engines_come_whole_and_once(
    tmp_path: Path, flags: tuple[str, ...], worlds: int
) -> None:
    prefix = prefix_of(flags)
    small = ["-DPC_MOST_UNOPENED=10", "-DPC_NO_FREE_LIST", "-include", TESTS / "tcp_hooks.h"]
    program = build(tmp_path, "link_tcp_random", SOURCES, flags, *small)
    counts = counted([*prefix, program, str(worlds), "1"], tmp_path)
    assert len(counts) == KINDS
    # Each of these must have happened often enough to say something.
    assert all(count >= worlds / 20 for count in counts.values()), counts
