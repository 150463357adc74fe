"""How Python's numbers travel where they are reduced."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple


class Packing(NamedTuple):
    """How numbers of a type travel: as an array of a dtype.

    Attributes:
        text: how a call's text shows them.
        code: of the dtype (see `_dtypes`).
        layout: of the struct module.
        refused: operators that do not take them.
    """

    text: str
    code: int
    layout: str
    refused: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return struct.calcsize(self.layout)


INT64: Final = Packing("int", 5, "q")

_BITWISE: Final = ("band", "bor", "bxor")

_PACKINGS: Final = {
    bool: Packing("bool[]", 1, "?", ("avg",)),
    float: Packing("float64[]", 13, "d", _BITWISE),
    complex: Packing("complex128[]", 15, "2d", ("min", "max", *_BITWISE)),
}


def is_int(x: object) -> bool:
    """Whether `x` is a Python int, and no bool."""
    return isinstance(x, int) and not isinstance(x, bool)


def packing_of(x: object) -> Packing | None:
    """Return how a number travels; None: `x` is no number of Python's."""
    return INT64 if is_int(x) else _PACKINGS.get(type(x))
