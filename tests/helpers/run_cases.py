"""Functions that ranks run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patience import PATIENCE

import pycoll

LIMIT_S = 60 * PATIENCE


ROOT = Path(pycoll.__file__).resolve().parent.parent


def rank_plus(comm: Any, number: int) -> int:
    return int(comm.rank) + number
