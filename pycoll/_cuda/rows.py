"""Rows of equal length on a GPU and in host memory, which one copy moves."""

from __future__ import annotations

from typing import Final, NamedTuple

_MAX_PITCH: Final = (1 << 31) - 1


class Rows(NamedTuple):
    """Rows of equal length on a GPU and in host memory.

    Attributes:
        device: where the first row begins on the GPU, in bytes from the array's first element.
        host: the same in the host's memory, from its beginning.
        width: bytes of a row.
        height: how many there are.
        pitch: bytes from one row to the next on the GPU.
        step: the same in the host's memory.
    """

    device: int
    host: int
    width: int
    height: int
    pitch: int
    step: int


def bearable(rows: Rows) -> list[Rows]:
    """Return rows as CUDA copies them at once: apart from each other, not too far."""
    width, pitch, step = rows.width, rows.pitch, rows.step
    if width <= pitch <= _MAX_PITCH and step <= _MAX_PITCH:
        return [rows]
    return [
        Rows(rows.device + i * pitch, rows.host + i * step, width, 1, width, width)
        for i in range(rows.height)
    ]
