"""The examples for PyTorch and JAX, on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *packages: str) -> str:
    """Run an example on two ranks; returns what it printed."""
    for package in packages:
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs {package}")
    done = subprocess.run(
        [sys.executable, "-m", "pycoll._launcher", "-n", "2", str(EXAMPLES / name)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensors_stay_on_the_gpu() -> None:
    assert "tensors on cuda, the result on cuda\n" in run("torch_tensors.py")


def test_jax_arrays() -> None:
    assert "the same bits on all 2 ranks: True\n" in run("jax_arrays.py", "jax")


def test_digits_are_learned_equally() -> None:
    output = run("train_digits_torch.py", "sklearn", "tqdm")
    assert "the same bits on all 2 ranks: True\n" in output
