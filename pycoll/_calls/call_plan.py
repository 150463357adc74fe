"""A call whose arguments were checked: what it is, how it goes, where its values are.

The methods of `Calls` make these. A communicator's blocking method runs one (`Running`), its twin
starts one, a persistent request makes and starts one each time. Nothing is sent while one is made.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pycoll._calls.group import SHARED_MEMORY, Group, Numbered
from pycoll._cuda.late_copies import LateCopies
from pycoll._transports.base import Operation

if TYPE_CHECKING:
    from pycoll._arrays.value import Value
    from pycoll._calls.group import Bound
    from pycoll._calls.message_steps import Outgoing
    from pycoll._calls.shared_memory import ShmComm
    from pycoll._runtime.engine import Engine
    from pycoll._runtime.task import CallSteps
    from pycoll._selection.select import Choice


R = TypeVar("R", covariant=True)

ResultOf = Callable[[Any, LateCopies], Any]
"""Makes the caller's value of what a call has returned; the second gets copies under way."""


Steps = Callable[[Numbered], "CallSteps"]
"""Runs a call that has begun by messages."""


class Route(enum.Enum):
    """How a blocking call goes. A non-blocking one goes by messages."""

    SHARED_MEMORY = "all ranks exchange slots of shared memory, in C"
    MESSAGES = "by messages, as its schedule says"


def route_of(group: Group, choice: Choice) -> Route:
    """Return how a call goes whose algorithm was chosen (`Group.choose`); the same on all ranks."""
    is_shared = choice.name == SHARED_MEMORY and group.shm is not None
    return Route.SHARED_MEMORY if is_shared else Route.MESSAGES


class CallPlan(Generic[R]):
    """A call whose arguments were checked, whose caller gets a value of type R. It never changes.

    Args:
        group: the communicator's ranks.
        text: what must be the same on all ranks, for example ``"barrier(algorithm=tree)"``.
        steps: runs it by messages, when it has its number; None: that is one schedule (`bind`).
        route: how it goes, if it is blocking.
        in_shared_memory: runs it there; returns `shared_memory.BY_MESSAGES` if that cannot be.
        result: makes the caller's value of what the call has returned; None: that is it.
        reads: values that must be in host memory before it runs in shared memory.
        is_collective: False: point to point, not numbered.
        receives: a receive, which can be cancelled.
        outgoing: the message that it sends, if it may be taken back.
    """

    def __init__(
        self,
        group: Group,
        text: str,
        steps: Steps | None = None,
        route: Route = Route.MESSAGES,
        in_shared_memory: Callable[[ShmComm], Any] | None = None,
        result: ResultOf | None = None,
        reads: Sequence[Value] = (),
        *,
        is_collective: bool = True,
        receives: bool = False,
        outgoing: Outgoing | None = None,
    ) -> None:
        self.group, self.text, self.route = group, text, route
        self._steps, self._in_shared_memory, self._result = steps, in_shared_memory, result
        self._reads = reads
        self.is_collective, self.receives, self.outgoing = is_collective, receives, outgoing

    @property
    def reads(self) -> Sequence[Value]:
        """Values that must be in host memory before it runs in shared memory."""
        return self._reads

    def steps(self, signature: bytes) -> CallSteps:
        """Run it by messages; `signature`: its text, and where it was made."""
        if not self.is_collective:
            return self.part(Numbered(signature, -1))
        return numbered(self.group, signature, self.part)

    def part(self, call: Numbered) -> CallSteps:
        """Run what is between the begin of a collective call and its end."""
        if self._steps is not None:
            return self._steps(call)
        bound = self.bind()
        assert bound is not None
        return bound.run(self.group, call)

    def in_shared_memory(self, shm: ShmComm) -> Any:
        """Run it in shared memory; returns `shared_memory.BY_MESSAGES` if that cannot be."""
        assert self._in_shared_memory is not None
        return self._in_shared_memory(shm)

    def bind(self) -> Bound | None:
        """Return its schedule and memory, if by messages it is one schedule; None: it is more."""
        return None

    def result(self, got: Any, late: LateCopies) -> Any:
        """Make the caller's value of what the call has returned; `late` gets copies under way."""
        return got if self._result is None else self._result(got, late)

    def conclude(self, got: Any) -> tuple[Any, Sequence[Operation]]:
        """Return what the caller gets, and what must be done before."""
        return conclude(self.group.engine, self.result, got)


def numbered(group: Group, signature: bytes, steps: Steps) -> CallSteps:
    """Run a collective call, from its begin to its end."""
    number = group.context.begin(signature)
    got = yield from steps(Numbered(signature, number))
    group.context.end(number)
    return got


def conclude(engine: Engine, result: ResultOf, got: Any) -> tuple[Any, Sequence[Operation]]:
    """Return what `result` makes of what a call has returned, and what must be done before."""
    late = LateCopies(engine)
    return result(got, late), late.copies
