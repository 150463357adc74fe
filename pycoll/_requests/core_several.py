"""A wait for several requests of the core's that takes long: the core counts their ends."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any

from pycoll._runtime.task import Call, Several, several_call
from pycoll._transports import _core
from pycoll._transports.base import Operation


class CoreSeveral(Several):
    """Done when all of some requests may be done, or any of them, or when one has failed.

    Args:
        pending: requests of the core's, of one engine.
        tasks: others, not done, of which only those count that fail, or any.
        needed: how many: all of both, or 1.

    Raises:
        TypeError: the requests are not in the core, or not of one engine.
    """

    def __init__(self, pending: list[Any], tasks: Sequence[Any], needed: int) -> None:
        Operation.__init__(self)
        self.tasks = tasks
        self.needed = needed
        self._pending = pending
        self._any = needed < len(pending) + len(tasks)
        self._counting = _core.Several(pending, self._any)

    def calls(self) -> list[tuple[Call, Collection[int]]]:
        return [*super().calls(), *(call for each in self._pending for call in each._calls())]

    def _ended(self) -> None:
        """Told by the core, under the engine's lock."""
        self.finish()

    def _tell(self, task: Any) -> None:
        if self._any or task.error is not None or task.unfit is not None:
            self.finish()

    def begin(self) -> bool | None:
        """Have it done when something has ended; with the engine's lock.

        Returns False: there is nothing to wait for; None: another thread waits for one of them.
        """
        for task in self.tasks:
            if task.done:
                self._tell(task)
            else:
                task.watchers[self._tell] = None
        begun: bool | None = self._counting.begin(self)
        return begun

    def forget(self) -> None:
        super().forget()
        self._counting.end()


def wait(what: str, pending: list[Any], needed: int, seconds: float) -> bool:
    """Return when so many of some requests are done, or one has failed.

    Returns False if what is left to wait for is not the core's.
    """
    deadline = time.monotonic() + seconds if seconds != math.inf else math.inf
    engine = pending[0]._group.engine
    in_core: list[Any] = [each for each in pending if isinstance(each, _IN_CORE)]
    if not in_core:
        return False
    tasks = [request._started() for request in pending if not isinstance(request, _IN_CORE)]
    while True:
        try:
            several = CoreSeveral(in_core, tasks, needed)
        except TypeError:
            return False
        try:
            with engine.locked():
                begun = several.begin()
            if begun is None:
                return False
            if not begun:
                is_over = needed < len(pending) or all(task.done for task in tasks)
                return is_over or any(request._has_failed for request in in_core)
            first = next((call for call, _ in several.calls()), None)
            if first is None:  # all are done by now
                continue
            left = max(0.0, deadline - time.monotonic())
            engine.wait(several, several_call(what, len(pending), first), left)
        finally:
            several.forget()
        ends = needed < len(pending)
        if any(task.done and (ends or task.error or task.unfit) for task in tasks):
            return True


_IN_CORE = (_core.Started, _core.Persistent)
