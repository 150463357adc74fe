"""Algorithms with faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycoll.schedule import Step
from pycoll.schedules import (
    Algorithm,
)

Steps = list[Step]


def _edited(
    algorithm: Algorithm, rank: int, edit: Callable[[Steps], object]
) -> Callable[..., Steps]:
    """The algorithm's steps, those of one rank changed by `edit` in place."""

    def steps(me: int, *where: Any) -> Steps:
        mine = list(algorithm.steps(me, *where))
        if me == rank:
            edit(mine)
        return mine

    return steps
