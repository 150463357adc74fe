"""Arrays of several kinds, and what tests of their conversion share."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

from pycoll._arrays import conversion
from pycoll._arrays.value import Value


def wrapped(x: object) -> Value:
    value = conversion.wrap(x)
    assert value is not None
    return value


class Exported:
    """An array of a library that pycoll does not know."""

    def __init__(self, x: np.ndarray[Any, Any], device: int = 1) -> None:
        self.x = x
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def from_dlpack(x: Any) -> Exported:
    return Exported(np.from_dlpack(x))


def a_library(x: Any) -> Any:
    """Return an array of a library that can be imported here, and is made now if it cannot."""
    if "a_library" not in sys.modules:
        made = type("Array", (Exported,), {"__module__": "a_library"})
        sys.modules["a_library"] = types.ModuleType("a_library")
        vars(sys.modules["a_library"]).update(Array=made, from_dlpack=made)
    return vars(sys.modules["a_library"])["from_dlpack"](x)


class Metres(np.ndarray[Any, Any]):
    """An array with a unit, as NumPy's own example of a subclass: it says nothing of pickling."""

    unit: str | None

    def __new__(cls, x: Any, unit: str = "m") -> Metres:
        made = np.asarray(x, float).view(cls)
        made.unit = unit
        return made

    def __array_finalize__(self, x: object) -> None:
        self.unit = getattr(x, "unit", None)

    def __repr__(self) -> str:
        return f"{self.tolist()} {self.unit}"

    def in_metres(self) -> Metres:
        return Metres(np.asarray(self) * {"m": 1, "km": 1000}[self.unit or "m"])


class Slotted(np.ndarray[Any, Any]):
    """An array with a name in a slot."""

    __slots__ = ("name",)


class Methodical(np.ndarray[Any, Any]):
    """Numbers, with a method of its own."""

    def norm(self) -> float:
        return float(np.sqrt((self * self).sum()))
