"""How much longer tests wait than a quiet machine would need.

Deadlines in tests end what hangs; they measure nothing. So they are written for a quiet machine of
two cores and multiplied by PATIENCE, which grows with what a small program takes on this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

QUIET_S = 0.2
"""What `import numpy, zmq` takes in a new interpreter on the quiet machine (2 cores, 2026)."""

NAME = "TEST_PATIENCE_OF_PYCOLL"
"""The variable that hands the factor to processes that tests start, and to pytest-xdist's."""


def measure() -> float:
    """The factor for this machine as it is now: 2 at least, for it may get busy later."""
    slowest = 0.0
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import numpy, zmq"], check=True)
        slowest = max(slowest, time.perf_counter() - started)
    return round(min(max(2.0, 2 * slowest / QUIET_S), 20.0), 1)


if NAME not in os.environ:
    os.environ[NAME] = str(measure())
PATIENCE = float(os.environ[NAME])
