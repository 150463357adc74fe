"""A communicator for each run of ranks that stay: what one run breaks, the next does not see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from pycoll._communicator.communicator import Communicator
from pycoll._runtime.envelope import LastCall
from pycoll._runtime.last_calls import MAX_TOLD as MAX_TOLD
from pycoll.errors import Error, MismatchError, PeerFailed


class RenewedWorld:
    """The world of one run, and all communicators that are made in it.

    Args:
        world: what `pycoll.init` has returned; nothing is sent on it.
        number: of the run, the same on all ranks.

    Attributes:
        comm: all ranks, in the order of the world's.
    """

    def __init__(self, world: Communicator, number: int) -> None:
        self._world = world
        self._engine = world._group.engine
        self._before = set(self._engine.contexts)
        with self._engine.locked():
            self._engine.last_calls.forget()
        comm = world.sub(range(world.size), key=number, name="world")
        assert comm is not None
        self.comm = comm

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that fn has raised here: who waits for this rank shall go on."""
        if self._engine.closed is not None:
            return
        kind = type(error).__name__
        rank = self._world.rank
        failed = PeerFailed(rank, f"raised {kind}", f"rank {rank} failed: raised {kind}: {error}")
        with self._engine.locked():
            for ident, context in list(self._engine.contexts.items()):
                if ident not in self._before and context.broken is None:
                    self._engine.break_context(context, failed)

    def close(self) -> MismatchError | None:
        """Close all; returns how the calls of other ranks differ, as can be seen by now."""
        engine = self._engine
        if engine.closed is not None:
            return None
        with engine.locked():
            found = []
            for ident in set(engine.contexts) - self._before:
                context = engine.contexts.get(ident)
                if context is not None:  # else it ended with another, or was dropped
                    found.append(engine.look_back(context))
                    engine.close_context(context)
            found.append(engine.last_calls.different)
        return next((error for error in found if isinstance(error, MismatchError)), None)

    def told(self) -> list[LastCall]:
        """Return what to tell the other ranks of calls by messages, after `close`."""
        if self._engine.closed is not None:  # fn has left the job, and told it so
            return []
        with self._engine.locked():
            return self._engine.last_calls.told()

    def hear(self, told: dict[int, Iterable[Iterable[Any]]]) -> MismatchError | None:
        """Return how the last calls of other ranks differ from this one's."""
        if self._engine.closed is not None:
            return None
        with self._engine.locked():
            last = self._engine.last_calls
            found = [last.compare(rank, calls) for rank, calls in told.items()]
        return next(filter(None, found), None)

    @property
    def is_renewable(self) -> bool:
        """Whether there can be another run: this rank has not left, and no other has failed."""
        if self._engine.closed is not None:
            return False
        with contextlib.suppress(Error), self._engine.locked():
            self._engine.check(self._world._group.context)
            return True
        return False
