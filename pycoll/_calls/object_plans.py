"""The plans of collectives on Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._arrays import objects, user_operators
from pycoll._calls import object_collectives, shared_memory_calls
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.group import Group
from pycoll._calls.shared_memory import ShmComm
from pycoll._cuda.late_copies import LateCopies
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._transports.base import Parts

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op


class GatherPlan(CallPlan[Any]):
    """A gather of objects.

    Args:
        group, text: as of `CallPlan`.
        x: this rank's object.
        choice: the algorithm.
        root: who gets the list.
    """

    __slots__ = ("choice", "parts", "root")

    def __init__(self, group: Group, text: str, x: Any, choice: Choice, root: int) -> None:
        super().__init__(group, text)
        self.parts: Parts = objects.dump(x)
        self.choice = choice
        self.root = root

    def steps(self, signature: bytes) -> CallSteps:
        return object_collectives.gather(self.group, signature, self.parts, self.choice, self.root)


class AllGatherPlan(CallPlan[Any]):
    """An all_gather of objects.

    Args:
        group, text, route: as of `CallPlan`.
        x: this rank's object.
        algorithm: for messages, or None.
    """

    __slots__ = ("algorithm", "parts")

    def __init__(
        self, group: Group, text: str, route: Route, x: Any, algorithm: str | None = None
    ) -> None:
        super().__init__(group, text, route)
        self.parts: Parts = objects.dump(x)
        self.algorithm = algorithm

    def steps(self, signature: bytes) -> CallSteps:
        return object_collectives.all_gather(self.group, signature, self.parts, self.algorithm)

    def in_shared_memory(self, shm: ShmComm) -> list[Any]:
        return shared_memory_calls.all_gather_objects(shm, self.parts)


class AllToAllPlan(CallPlan[Any]):
    """An all_to_all of objects.

    Args:
        group, text, route: as of `CallPlan`.
        xs: an object for each rank.
        choice: the algorithm, for messages.
    """

    __slots__ = ("blocks", "choice")

    def __init__(
        self, group: Group, text: str, route: Route, xs: Sequence[Any], choice: Choice
    ) -> None:
        super().__init__(group, text, route)
        self.blocks: list[Parts] = [objects.dump(x) for x in xs]
        self.choice = choice

    def steps(self, signature: bytes) -> CallSteps:
        return object_collectives.all_to_all(self.group, signature, self.blocks, self.choice)

    def in_shared_memory(self, shm: ShmComm) -> list[Any]:
        return shared_memory_calls.all_to_all_objects(shm, self.blocks)


class ReducePlan(GatherPlan):
    """A reduce of objects: they are gathered, and combined on the root, in rank order.

    Args:
        group, text, x, root: as of `GatherPlan`.
        op: combines two of them.
    """

    __slots__ = ("op",)

    def __init__(self, group: Group, text: str, x: Any, op: Op, root: int) -> None:
        super().__init__(group, text, x, object_collectives.LINEAR, root)
        self.op = op

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the combined object on the root, None elsewhere."""
        return None if got is None else _folded(got, self.op)


class AllReducePlan(AllGatherPlan):
    """An all_reduce or a scan of objects: every rank gathers, and combines in rank order.

    Args:
        group, text, x: as of `AllGatherPlan`.
        op: combines two of them.
        count: so many ranks' are combined; None: all.
    """

    __slots__ = ("count", "op")

    def __init__(self, group: Group, text: str, x: Any, op: Op, count: int | None = None) -> None:
        super().__init__(group, text, Route.MESSAGES, x)
        self.op = op
        self.count = count

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the combined object; None of no objects."""
        values = got[: self.count]
        return _folded(values, self.op) if values else None


def _folded(values: Sequence[Any], op: Op) -> Any:
    """Combine objects in rank order. Nothing is under way: what `op` raises breaks nothing."""
    assert callable(op.fn)
    result = values[0]
    for value in values[1:]:
        result = user_operators.call(op.fn, op.name, result, value)
    return result
