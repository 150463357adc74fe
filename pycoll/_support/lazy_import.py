"""Modules that are imported when they are first used: a barrier need not wait for NumPy."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module until one of its names is asked for; each name is looked up once."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        self.__dict__[name] = value
        return value
