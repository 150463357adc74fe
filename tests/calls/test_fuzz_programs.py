"""Random programs of mixed operations give what NumPy gives; for long: scripts/fuzz_programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from tiers import exhaustive

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/fuzz_programs"


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--timeout=60", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
        check=False,
    )


def some(words: str, *marks: Any) -> Any:
    return pytest.param(words.split(), id=words, marks=marks)


@pytest.mark.parametrize(
    "options",
    [
        some("--seeds=1 --ranks=3 --steps=60", exhaustive),
        some("--seeds=2 --ranks=4 --steps=60 --emulate-hosts=2", exhaustive),
        some("--seeds=1 --ranks=2,3 --steps=150", exhaustive),
        some("--seeds=3 --ranks=5 --steps=150", exhaustive),
        some("--seeds=4 --ranks=4 --steps=150 --emulate-hosts=2", exhaustive),
        some("--seeds=5 --ranks=3 --steps=100 --threads=2", exhaustive),
    ],
)
def test_a_random_program_gives_what_numpy_gives(options: list[str]) -> None:
    done = fuzz(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "programs gave what NumPy gives" in done.stdout


def test_one_wrong_bit_is_found_and_the_program_named() -> None:
    done = fuzz("--seeds=6", "--ranks=2", "--transports=shm", "--steps=60", "--fault=5")
    assert done.returncode == 1
    assert "wrong values" in done.stderr
    assert "in step " in done.stderr
    assert "--ranks=2 --seeds=6 --transports=shm" in done.stdout
