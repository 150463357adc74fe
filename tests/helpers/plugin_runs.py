"""Runs of a user's pytest with the plugin."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

# pytester drops modules that are first imported in an inner pytest, and NumPy and zmq must not be
# imported twice in one process.
import pycoll._communicator.communicator
import pycoll._functions.function

INSTALLED = bool(importlib.metadata.entry_points(group="pytest11", name="pycoll"))


ROOT = Path(pycoll.__file__).resolve().parent.parent


def run_tests(pytester: pytest.Pytester, text: str, *args: str) -> pytest.RunResult:
    """Run a test module in a pytest in this process; its ranks are processes in any case."""
    pytester.makepyfile(f"import os, pytest\n{text}")
    return pytester.runpytest_inprocess("-p", "no:randomly", *args)
