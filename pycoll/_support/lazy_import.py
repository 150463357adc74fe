"""Modules that are imported when they are first used: a barrier need not wait for NumPy."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class LazyModule:
    """Stands for a module until one of its names is asked for; from then on it has its names."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        self.__dict__ = module.__dict__
        return getattr(module, name)


def import_lazily(package: str) -> None:
    """Have ``from package import module`` give a `LazyModule`, until that module was imported."""

    def find(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return LazyModule(f"{package}.{name}")

    vars(sys.modules[package])["__getattr__"] = find
