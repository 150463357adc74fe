"""The plans of calls that run one schedule by messages, or one exchange in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._calls import (
    collectives,
    on_gpus,
    shared_memory_calls,
    shared_memory_uneven,
    wide_averages,
)
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.group import IN_SHARED_MEMORY, Bound, Group, Numbered
from pycoll._calls.shared_memory import part_of
from pycoll._cuda.late_copies import LateCopies
from pycoll._selection.select import Choice

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._arrays.value import Value
    from pycoll._calls.arguments import Target
    from pycoll._calls.shared_memory import ShmComm
    from pycoll._dtypes import Array
    from pycoll._gpu.kernel_run import Reduction
    from pycoll._runtime.task import CallSteps


BY_CUDA_IPC = Choice("linear")
"""The algorithm of ranks that read each other's GPUs instead of sharing host memory: one copy."""


class BarrierPlan(CallPlan[None]):
    """A barrier, by the algorithm `choice`."""

    def __init__(self, group: Group, text: str, route: Route, choice: Choice) -> None:
        super().__init__(group, text, route=route)
        self.choice = choice

    def bind(self) -> Bound:
        """Return the schedule, with chunks of no bytes."""
        return collectives.barrier(self.group, self.choice)

    def in_shared_memory(self, shm: ShmComm) -> None:
        shm.barrier()


class ArrayPlan(CallPlan[Any]):
    """A collective that moves or combines arrays which all ranks know.

    Args:
        group, text, route: as of `CallPlan`.
        collective: for example ``"all_reduce"``.
        choice: its algorithm.
        x: this rank's value.
        target: where its result goes; None: it has none.
        op: what combines; None: values are only moved.
        root: the root, if it has one.
        offers: `x` is on a GPU, and this rank would rather offer it, by messages (CUDA IPC).
        in_pieces: it goes piece by piece between a GPU and the core.
        may_use_gpus: the ranks vote first on whether the call runs on GPUs (`on_gpus`).
        reduction: what this rank would do then; None: its arrays are not, or must be staged.
        counts: of a reduce_scatter, how many rows of x each rank gets; None: one.
    """

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        collective: str,
        choice: Choice,
        x: Value,
        target: Target | None,
        op: Op | None = None,
        root: int = 0,
        offers: bool = False,
        in_pieces: bool = False,
        may_use_gpus: bool = False,
        reduction: Reduction | None = None,
        counts: list[int] | None = None,
    ) -> None:
        super().__init__(group, text, route=route)
        self.collective = collective
        self.choice = choice
        self.x = x
        self.target = target
        self.op = op
        self.root = root
        self.offers = offers
        self.in_pieces = in_pieces
        self.may_use_gpus = may_use_gpus
        self.reduction = reduction
        self.counts = counts

    @property
    def memory(self) -> Array | None:
        """What the call writes to, C-contiguous; None: nothing on this rank."""
        return self.target.memory if self.target is not None else None

    @property
    def reads(self) -> Sequence[Value]:
        """`x`, unless it comes to the host later, or not at all."""
        later = self.offers or self.in_pieces or self.reduction is not None
        return () if later else (self.x,)

    def bind(self) -> Bound | None:
        """Return the schedule, with its memory in `x` and the target; None: it is not there."""
        if self.may_use_gpus or wide_averages.applies(self.op, self.x.dtype):
            return None
        return self._bind(self.x, self.memory)

    def _bind(self, x: Value, memory: Array | None) -> Bound:
        choice = BY_CUDA_IPC if self.choice == IN_SHARED_MEMORY else self.choice
        if self.counts is not None:
            assert self.op is not None
            assert memory is not None
            return collectives.bind_rows(self.group, choice, x, self.counts, self.op, memory)
        return collectives.bind(self.group, self.collective, choice, x, memory, self.op, self.root)

    def part(self, call: Numbered) -> CallSteps:
        """Run the schedule, or ask before."""
        if self.may_use_gpus:
            return on_gpus.by_messages(self.group, call, self)
        return self.scheduled(call)

    def scheduled(self, call: Numbered, subcall: int = 0) -> CallSteps:
        """Run the schedule, from a subcall on."""
        x, memory = self.x, self.memory
        if wide_averages.applies(self.op, x.dtype):
            return wide_averages.run(self.group, call, subcall, x, memory, self._bind)
        return self._bind(x, memory).run(self.group, call, subcall)

    def in_shared_memory(self, shm: ShmComm) -> Any:
        """Exchange it in shared memory; BY_MESSAGES if all ranks rather offer."""
        if self.counts is not None:
            return shared_memory_uneven.reduce_scatterv(shm, part_of("uneven", self.text), self)
        return shared_memory_calls.run(shm, self)

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the target's array; None where there is no result."""
        if self.target is None or (self.collective == "exscan" and self.group.rank == 0):
            return None
        return self.target.result(late)
