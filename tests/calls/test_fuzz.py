"""Random programs give what NumPy gives. For long runs: scripts/fuzz_collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from tiers import few

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/fuzz_collectives"


@pytest.mark.parametrize("size", few([3], [2, 5]))
def test_random_programs_on_all_ranks_give_what_numpy_gives(size: int) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "1.5", "--ranks", str(size), "--seed", str(size)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"steps on {size} ranks with seed {size}" in done.stdout
