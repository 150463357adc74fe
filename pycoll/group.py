"""What the calls of one communicator share: its ranks, its engine, its schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycoll.context import Context
from pycoll.engine import Engine
from pycoll.late import Late

if TYPE_CHECKING:
    from pycoll import executor, schedules, select
    from pycoll.executor import Binding
    from pycoll.native import Native
    from pycoll.schedule import Schedule
    from pycoll.task import CallSteps
else:
    executor, schedules = Late("pycoll.executor"), Late("pycoll.schedules")
    select = Late("pycoll.select")

SHARED_MEMORY = "shared_memory"
"""The algorithm of the compiled core, which is no schedule."""

CACHED_SCHEDULES = 64
"""Schedules kept by a communicator: one for each (collective, algorithm, root) it uses."""


class Group:
    """The ranks of one communicator, seen from one of them.

    Attributes:
        members: their world ranks, in order.
        rank: this process's rank among them.
        size: their number.
        context: what matches their messages.
        native: their collectives in shared memory; None: not all are on this host, or cannot.
    """

    def __init__(self, engine: Engine, ident: int, members: Sequence[int]) -> None:
        self.engine = engine
        self.members = tuple(members)
        self.rank = self.members.index(engine.rank)
        self.size = len(self.members)
        self.context: Context = engine.open_context(ident, self.members)
        self._from_world = {world: rank for rank, world in enumerate(self.members)}
        self._schedules: OrderedDict[tuple[str, str, int], Schedule] = OrderedDict()
        self.native = self._open_native()

    def _open_native(self) -> Native | None:
        shared = self.engine.shared_memory
        if self.size == 1 or shared is None or not set(self.members) <= set(shared.ranks):
            return None
        from pycoll.native import Native

        native = Native(self.engine, self.context, shared)
        self.context.on_fail = lambda: native.core.allow(False)
        return native

    def close(self) -> None:
        """Forget this communicator; under the engine's lock."""
        self.engine.close_context(self.context)
        if self.native is not None:
            self.context.on_fail = lambda: None
            self.native.close()

    @property
    def number(self) -> int:
        """Number of the next collective call."""
        native = self.native.number if self.native is not None else 0
        return self.context.next_number + native

    def rank_of(self, world: int) -> int:
        """Return the rank here of a world rank."""
        return self._from_world[world]

    def choose(
        self,
        collective: str,
        nbytes: int,
        forced: str | None,
        rank_order: bool = False,
        whole: bool = False,
        native: bool = True,
    ) -> str:
        """Return the algorithm of a call; `native`: shared memory is best where there is any.

        Raises:
            ValueError: `forced` does not exist, or cannot serve this operator.
        """
        if self.native is not None and (forced == SHARED_MEMORY or (forced is None and native)):
            return SHARED_MEMORY
        if forced == SHARED_MEMORY and self.size > 1:
            raise ValueError(self._no_shared_memory(collective))
        if forced in (None, SHARED_MEMORY):
            return select.choose(collective, nbytes, self.size, rank_order=rank_order, whole=whole)
        known = schedules.names(collective)
        if forced not in known:
            listed = ", ".join((SHARED_MEMORY, *known))
            raise ValueError(f"{collective} has no algorithm {forced!r}; it has {listed}")
        reason = select.usable(collective, forced, rank_order=rank_order, whole=whole)
        if reason is not None:
            raise ValueError(reason)
        return forced

    def choose_prefix(self, collective: str, forced: str | None, native: bool) -> str:
        """Return the algorithm of a scan or exscan.

        Raises:
            ValueError: `forced` does not exist, or cannot serve.
        """
        if forced not in (None, SHARED_MEMORY, "linear"):
            raise ValueError(
                f"{collective} has no algorithm {forced!r}; it has {SHARED_MEMORY}, linear"
            )
        if self.native is not None and native and forced != "linear":
            return SHARED_MEMORY
        if forced == SHARED_MEMORY and self.native is None and self.size > 1:
            raise ValueError(self._no_shared_memory(collective))
        return "linear"

    def _no_shared_memory(self, collective: str) -> str:
        prefix = collective in ("scan", "exscan")
        others = "linear" if prefix else " or ".join(schedules.names(collective))
        if self.engine.shared_memory is None:
            why = f"cannot be used: {self.engine.no_shared_memory}"
        else:
            why = "needs all ranks of the communicator on one host"
        return f"{collective} {SHARED_MEMORY} {why}; use {others}"

    def schedule(self, collective: str, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's schedule, compiled once."""
        key = (collective, algorithm, root)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = schedules.schedule(collective, algorithm, self.rank, self.size, root)
            self._schedules[key] = schedule
            if len(self._schedules) > CACHED_SCHEDULES:
                self._schedules.popitem(last=False)
        else:
            self._schedules.move_to_end(key)
        return schedule

    def run(
        self, address: tuple[int, int], call: bytes, schedule: Schedule, binding: Binding
    ) -> CallSteps:
        """Run one schedule to its end, as a part of a call; returns the finished Run."""
        run = executor.Run(self.engine, self.context, address, call, schedule, binding)
        run.start()
        try:
            yield run
        except BaseException:
            run.cancel()
            raise
        return run
