"""The copies to a GPU that a result still waits for, handed from the call to who makes the result.

It imports nothing of CUDA: most results are of arrays in host memory, and leave it empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycoll._transports.base import Operation

if TYPE_CHECKING:
    from pycoll._cuda.copies import OperationOwner


class LateCopies:
    """What must be done before a result may be seen.

    Args:
        engine: under whose lock copies end.

    Attributes:
        engine: the same.
        copies: what is under way; whoever concludes the call waits for it.
    """

    __slots__ = ("copies", "engine")

    def __init__(self, engine: OperationOwner) -> None:
        self.engine = engine
        self.copies: list[Operation] = []
