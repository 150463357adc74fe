"""What the living ranks of a communicator agree on, as one of them waits for it.

The launcher decides (`launcher/agreement.py`), for it knows who lives.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pycoll._transports.base import Operation
from pycoll.errors import MismatchError


class Agreement(Operation):
    """An agreement under way.

    Args:
        number: counts those of its communicator.
        others: world ranks that must call it, too, while they live.

    Attributes:
        number: the same.
        flag: the logical and of the flags of `ranks`.
        ranks: world ranks of those that have agreed, all of them alive when that was decided.
    """

    __slots__ = ("_others", "flag", "number", "ranks")

    def __init__(self, number: int, others: Collection[int]) -> None:
        super().__init__()
        self.number = number
        self._others = others
        self.flag = False
        self.ranks: Collection[int] = ()

    def awaited(self) -> Collection[int]:
        return self._others

    def decide(self, flag: bool, ranks: Collection[int], different: str = "") -> None:
        """Hear what was decided; `different`: the ranks' calls are not the same, and how."""
        self.flag, self.ranks = flag, ranks
        self.finish(MismatchError(different) if different else None)

    def hear(self, fields: dict[str, Any]) -> None:
        """Hear it from the launcher: the fields of its event "agreed"."""
        self.decide(fields["flag"], fields["ranks"], fields["different"])
