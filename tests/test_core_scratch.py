"""Memory that is kept from call to call, in a program of plain C."""

from __future__ import annotations

from pathlib import Path

from core_programs import ADDRESS, COMPILER, CORE, TESTS, call, counted, needs_gcc, prefix_of

pytestmark = needs_gcc

ROUNDS = 20_000
LIMITS = "-DPC_SCRATCH_KEPT=((size_t)8192)", "-DPC_SCRATCH_WORTH=((size_t)64)"


def test_memory_is_used_again_by_one_at_a_time_and_no_more_is_kept_than_may_be(
    tmp_path: Path,
) -> None:
    sources = TESTS / "scratch_random.c", CORE / "engine/scratch.c"
    words = [*COMPILER, *ADDRESS, *LIMITS, "-I", CORE / "engine", *sources, "-o", "scratch_random"]
    made = call(words, tmp_path)
    assert made.returncode == 0, made.stdout
    program = [*prefix_of(ADDRESS), tmp_path / "scratch_random", str(ROUNDS)]
    counts = counted(program, tmp_path)
    # Each of these must have happened often enough to say something.
    assert all(count > ROUNDS / 100 for count in counts.values()), counts
