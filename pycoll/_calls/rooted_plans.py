"""The plans of broadcast and scatter: only the root knows what comes, so it announces that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll._arrays import conversion, objects
from pycoll._arrays.value import Value
from pycoll._calls import arguments, lists, rooted, shared_memory_rooted
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.group import SHARED_MEMORY, Group
from pycoll._calls.message_steps import Outgoing
from pycoll._calls.scheduled import BY_CUDA_IPC
from pycoll._calls.shared_memory import ShmComm
from pycoll._cuda.late_copies import LateCopies
from pycoll._runtime.task import CallSteps
from pycoll._transports.base import Parts


class _RootedPlan(CallPlan[Any]):
    """What both have in common.

    Args:
        group, text, route: as of `CallPlan`.
        root: who announces.
        algorithm: what the caller has named, or None; the attribute: what runs by messages.
        value: on the root, its array; None: it has objects, or this is not the root.
        nbytes: of what goes to each rank.
    """

    __slots__ = ("_value", "algorithm", "gpu", "offers", "root")

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        collective: str,
        root: int,
        algorithm: str | None,
        value: Value | None,
        nbytes: int,
    ) -> None:
        super().__init__(group, text, route)
        self.root = root
        self.offers = algorithm is None and rooted.offers(group, collective, value, nbytes)
        by_messages = None if algorithm == SHARED_MEMORY else algorithm
        self.algorithm = BY_CUDA_IPC.name if self.offers else by_messages
        self.gpu = conversion.here()
        self._value = value

    @property
    def reads(self) -> Sequence[Value]:
        """The root's array, unless it is offered."""
        return () if self.offers or self._value is None else (self._value,)


class BroadcastPlan(_RootedPlan):
    """A broadcast.

    Args:
        group, text, route, root, algorithm: as of `_RootedPlan`.
        x: the root's value; elsewhere an array to fill, or None.
    """

    __slots__ = ("mine", "outgoing", "x")

    def __init__(
        self, group: Group, text: str, route: Route, root: int, algorithm: str | None, x: Any
    ) -> None:
        self.x = x
        self.outgoing = outgoing = Outgoing(x) if group.rank == root else None
        self.mine = None if outgoing is not None else arguments.fillable(x)
        value = outgoing.value if outgoing is not None else None
        nbytes = outgoing.nbytes if outgoing is not None else 0
        super().__init__(group, text, route, "broadcast", root, algorithm, value, nbytes)

    def steps(self, signature: bytes) -> CallSteps:
        """Announce it, and send it along a schedule."""
        return rooted.broadcast(
            self.group, signature, self.outgoing, self.mine, self.algorithm, self.root, self.gpu
        )

    def in_shared_memory(self, shm: ShmComm) -> Any:
        """Announce it in the root's slot, from where all copy it."""
        return shared_memory_rooted.broadcast(
            shm, self.group, self.outgoing, self.mine, self.root, self.gpu, self.offers
        )

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the root's own value, elsewhere what has come."""
        return self.x if self.outgoing is not None else conversion.unwrapped(got, late)


class ScatterPlan(_RootedPlan):
    """A scatter.

    Args:
        group, text, route, root, algorithm: as of `_RootedPlan`.
        x: on the root an array (size, ...), or a list of equal arrays, or of any objects.
        out: array for this rank's block, or None.
    """

    __slots__ = ("blocks", "out", "wanted")

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        root: int,
        algorithm: str | None,
        x: Any,
        out: Any,
    ) -> None:
        self.blocks = _blocks(x, group.size) if group.rank == root else None
        self.out = out
        self.wanted = arguments.fillable_out(out)
        value, nbytes = None, 0
        if isinstance(self.blocks, Value):
            value, nbytes = self.blocks, self.blocks.array.nbytes // group.size
            if out is not None:
                arguments.Target(out, value, value.array.shape[1:]).check_overlap(value)
        elif arrays := [block for block in self.blocks or () if isinstance(block, Value)]:
            nbytes = arrays[0].array.nbytes
            if out is not None:
                target = arguments.Target(out, arrays[0], arrays[0].array.shape)
                for block in arrays:
                    target.check_overlap(block)
        elif self.blocks is not None:
            arguments.no_out(out)
        super().__init__(group, text, route, "scatter", root, algorithm, value, nbytes)

    def steps(self, signature: bytes) -> CallSteps:
        """Announce the blocks, and send them along a schedule."""
        return rooted.scatter(
            self.group, signature, self.blocks, self.algorithm, self.root, self.gpu, self.wanted
        )

    def in_shared_memory(self, shm: ShmComm) -> Any:
        """Announce the blocks in the root's slot, from where each rank copies its own."""
        return shared_memory_rooted.scatter(
            shm, self.blocks, self.root, self.gpu, self.wanted, self.offers
        )

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return this rank's block, in `out` if there is one."""
        return scattered(self.out, self.wanted, got, late)


def _blocks(x: Any, size: int) -> Value | list[Value] | list[Parts]:
    arrays = lists.equal(x, size)
    if arrays is not None:
        return arrays
    if x is None or conversion.wrap(x) is None:
        arguments.check_objects("scatter", x, size)
        dumped: list[Parts] = [objects.dump(item) for item in x]
        return dumped
    return arguments.split_value("scatter", x, size)


def scattered(
    out: Any, wanted: Value | None, got: tuple[Value | None, memoryview], late: LateCopies
) -> Any:
    """Return what a scatter returns.

    Args:
        out: the caller's, `wanted` what it is as a Value; or None.
        got: the block that has come, which is `wanted` if that could have it, and its bytes; or
            None, and those of an object.
        late: gets the copies that the result waits for.
    """
    value, data = got
    if value is None:
        arguments.no_out(out)
        return objects.load(data)
    if wanted is None or value is wanted:
        return conversion.unwrap(value, late)
    conversion.check_fits(wanted, value.dtype, value.array.shape)
    wanted.array[...] = value.array
    return conversion.unwrap(wanted, late)
