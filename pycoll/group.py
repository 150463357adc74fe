"""What the calls of one communicator share: its ranks, its engine, its schedules."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from pycoll import schedules, select
from pycoll.context import Context
from pycoll.engine import Engine
from pycoll.executor import Binding, Run
from pycoll.schedule import Schedule
from pycoll.task import CallSteps

CACHED_SCHEDULES = 64
"""Schedules kept by a communicator: one for each (collective, algorithm, root) it uses."""


class Group:
    """The ranks of one communicator, seen from one of them.

    Attributes:
        members: their world ranks, in order.
        rank: this process's rank among them.
        size: their number.
        context: what matches their messages.
    """

    def __init__(self, engine: Engine, ident: int, members: Sequence[int]) -> None:
        self.engine = engine
        self.members = tuple(members)
        self.rank = self.members.index(engine.rank)
        self.size = len(self.members)
        self.context: Context = engine.open_context(ident, self.members)
        self._from_world = {world: rank for rank, world in enumerate(self.members)}
        self._schedules: OrderedDict[tuple[str, str, int], Schedule] = OrderedDict()

    def rank_of(self, world: int) -> int:
        """Return the rank here of a world rank."""
        return self._from_world[world]

    def child_ident(self, number: int, members: Sequence[int]) -> int:
        """Return the number of a communicator made by collective call `number`.

        Every rank computes the same without asking anyone; 62 bits of a hash do not meet twice.
        """
        seed = f"{self.context.ident}:{number}:{','.join(map(str, members))}"
        digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2 | 1 << 61

    def choose(
        self,
        collective: str,
        nbytes: int,
        forced: str | None,
        rank_order: bool = False,
        whole: bool = False,
    ) -> str:
        """Return the algorithm of a call.

        Raises:
            ValueError: `forced` does not exist, or cannot serve this operator.
        """
        if forced is None:
            return select.choose(collective, nbytes, self.size, rank_order=rank_order, whole=whole)
        reason = select.usable(collective, forced, rank_order=rank_order, whole=whole)
        if reason is not None:
            raise ValueError(reason)
        return forced

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
        run = Run(self.engine, self.context, address, call, schedule, binding)
        run.start()
        try:
            yield run
        except BaseException:
            run.cancel()
            raise
        return run
