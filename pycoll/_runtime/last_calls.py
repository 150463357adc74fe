"""What ranks called last: told when one leaves, and compared by those that leave later.

Not every collective waits for everybody: the root of a small broadcast has sent it and is done. If
ranks disagree in such a call, and it was their last, no message of a later one tells. So a rank
that leaves says which calls were its last, and nobody waits for that: whoever leaves later has
heard it. (Calls in shared memory are compared there;
with calls by messages they are compared by how many of each there were.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from pycoll._runtime.context import Context
from pycoll._runtime.envelope import LastCall, different_last
from pycoll.errors import Error, MismatchError

MAX_TOLD = 16
"""A rank that leaves tells its last calls on so many communicators: those it has closed last."""


class LastCalls:
    """The last calls on one rank's communicators, open and closed ones.

    Args:
        me: world rank of this process.
        contexts: the open communicators, by number.

    Attributes:
        different: a difference that was found on a communicator which is closed here, or None.
    """

    def __init__(self, me: int, contexts: Mapping[int, Context]) -> None:
        self._me = me
        self._contexts = contexts
        self._closed: dict[int, tuple[str, LastCall, dict[int, bytes]]] = {}
        self._dropped: set[int] = set()  # of those that are closed
        self.different: MismatchError | None = None

    def close(self, context: Context) -> None:
        """Remember the calls of a communicator that is closed now, unless it is broken."""
        if context.broken is None:
            closed = context.name, context.last_call(), context.recent_calls()
            self._closed[context.ident] = closed
            if len(self._closed) > MAX_TOLD:
                oldest = next(iter(self._closed))
                del self._closed[oldest]
                self._dropped.discard(oldest)

    def drop(self, context: Context) -> None:
        """Know that a communicator which was closed was dropped: no call of it could raise."""
        if context.ident in self._closed:
            self._dropped.add(context.ident)

    def note(self, error: MismatchError | None) -> None:
        """Keep what is to be raised when this rank leaves, if nothing else is."""
        self.different = self.different or error

    def forget(self) -> None:
        """Forget the communicators that were closed until now."""
        self._closed.clear()
        self._dropped.clear()
        self.different = None

    def told(self) -> list[LastCall]:
        """Return what this rank, which has closed all its communicators, tells the others."""
        return [last for _, last, _ in self._closed.values()]

    def hear(self, rank: int, told: Iterable[Iterable[Any]]) -> None:
        """Compare what a rank that has left tells with the calls of this one."""
        for last in itertools.starmap(LastCall, told):
            if last.context in self._contexts:
                self._contexts[last.context].peer_left(rank, last)
            elif last.context in self._closed:
                name, mine, calls = self._closed[last.context]
                self.note(different_last(name, self._me, mine, calls, rank, last))

    def compare(self, rank: int, told: Iterable[Iterable[Any]]) -> MismatchError | None:
        """Return how what a rank tells differs from the calls of this one, as far as is known."""
        self.different = None
        self.hear(rank, told)
        return self.different

    def hear_broken(self, ident: int, error: Error) -> None:
        """Hear that a communicator which is closed here has broken elsewhere."""
        if ident in self._dropped and isinstance(error, MismatchError):
            self.note(error)
