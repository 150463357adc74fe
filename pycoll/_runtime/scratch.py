"""Memory for what is on its way."""

from __future__ import annotations


def new_bytes(nbytes: int) -> memoryview:
    """Return uninitialized writable memory."""
    if nbytes < 4096:
        return memoryview(bytearray(nbytes))
    import numpy as np  # late: a barrier does not need it

    return np.empty(nbytes, np.uint8).data
