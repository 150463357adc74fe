"""Where the chunks of a schedule lie in the arrays of a call, for all calls that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from pycoll._calls.group import Bound
    from pycoll._runtime.binding import ChunkPlace
else:
    np = LazyModule("numpy")


def elements(x: Any) -> Any:
    """Return an array of any library as NumPy's; None is none."""
    value = conversion.wrap(x) if x is not None else None  # a barrier imports no NumPy
    return value.array if value is not None else None


def _address(array: Any) -> tuple[int, int]:
    """Return where an array begins and ends; None is nowhere."""
    if array is None:
        return 0, 0
    begin = array.__array_interface__["data"][0]
    return begin, begin + array.nbytes


def _offset(view: memoryview | None, within: tuple[int, int]) -> int | None:
    """Return where a view begins in some memory, -1 for no view; None: it is elsewhere."""
    if view is None:
        return -1
    if not len(view):
        return 0
    offset: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0] - within[0]
    return offset if 0 <= offset <= within[1] - within[0] - len(view) else None


def places_of(bound: Bound, x: Any, result: Any) -> list[ChunkPlace] | None:
    """Return where the chunks are; None: some are elsewhere, or it is not known."""
    source, target = _address(x), _address(result)
    binding = bound.binding
    places = []
    for nbytes, parts, view in zip(binding.nbytes, binding.source, binding.target, strict=True):
        if nbytes is None or (parts is not None and len(parts) != 1):
            return None
        begin = _offset(parts[0] if parts is not None else None, source)
        end = _offset(view, target)
        if begin is None or end is None:
            return None
        places.append((nbytes, begin, end))
    return places
