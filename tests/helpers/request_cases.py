"""What tests of requests share."""

from __future__ import annotations

from typing import Any

Comm = Any


LARGE = 300_000
"""Elements of a value that waits for its receiver."""
