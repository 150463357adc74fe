"""Runs of the programs in examples/."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path

import pytest
from patience import PATIENCE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PYCOLL_RUN = str(Path(sysconfig.get_path("scripts")) / "pycoll-run")

needs_example_packages = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("sklearn", "tqdm")),
    reason="needs scikit-learn and tqdm: pip install '.[examples]'",
)


def run(*command: str, cwd: Path) -> str:
    """Run to success; the standard output."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(name: str, size: int, cwd: Path, *arguments: str) -> str:
    return run(PYCOLL_RUN, "-n", str(size), str(EXAMPLES / name), *arguments, cwd=cwd)
