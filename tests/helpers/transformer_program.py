"""The transformer of examples/parallel, imported on a rank."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "examples/parallel"
PROGRAM = str(FOLDER / "transformer.py")


def load_program(path: str) -> Any:
    """Import the program, once, as its own folder is where it imports from."""
    import torch

    torch.set_num_threads(1)
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(Path(path).stem)
