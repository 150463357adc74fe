"""What the preparation of all calls has in common: who runs a call, and with which schedule."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from pycoll._arrays import operators
from pycoll._calls import (
    folding,
    gathered_reductions,
    object_collectives,
    shared_memory_calls,
    shared_memory_uneven,
)
from pycoll._calls.call_plan import CallPlan, Route, route_of
from pycoll._calls.group import IN_SHARED_MEMORY, SHARED_MEMORY, Group
from pycoll._gpu import cuda_ipc
from pycoll._selection.select import Choice
from pycoll._support.lazy_import import LazyModule
from pycoll._support.wording import a_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pycoll import schedules
    from pycoll._arrays.operators import Op
    from pycoll._arrays.value import Value
    from pycoll._calls.arguments import Target
    from pycoll._calls.call_plan import Steps
    from pycoll._cuda.late_copies import LateCopies
    from pycoll._transports.base import Parts
else:  # a program that only calls barrier() imports no NumPy
    schedules = LazyModule("pycoll.schedules")


class Preparing:
    """Prepares calls of one communicator; a part of `Calls`.

    Args:
        group: the communicator's ranks.
        blocking: whether the caller waits in the call. Only then it may go through shared memory.
    """

    def __init__(self, group: Group, blocking: bool) -> None:
        self._group = group
        self._blocking = blocking
        self._prefix = "" if blocking else "i"

    def _choose(
        self,
        collective: str,
        nbytes: int,
        algorithm: str | None,
        rank_order: bool = False,
        whole: bool = False,
        shm: bool = True,
    ) -> Choice:
        if not isinstance(algorithm, str | None):
            raise TypeError(f"algorithm is a name, not {a_kind(algorithm)}")
        self._refuse_core(collective, algorithm)
        return self._group.choose(
            collective, nbytes, algorithm, rank_order, whole, shm and self._blocking
        )

    def _check_algorithm(self, collective: str, algorithm: str | None) -> None:
        self._choose(collective, 0, algorithm)

    def _refuse_core(self, collective: str, algorithm: str | None) -> None:
        if algorithm == SHARED_MEMORY and not self._blocking and self._group.size > 1:
            raise ValueError(
                f"i{collective} cannot use {SHARED_MEMORY}, which takes all ranks at the same "
                f"time; use {' or '.join(schedules.names(collective))}"
            )

    def _route(self, choice: Choice) -> Route:
        return route_of(self._group, choice)

    def _choose_reduction(
        self, collective: str, value: Value, op: Op, algorithm: str | None
    ) -> Choice:
        cut = collective == "reduce_scatter"
        operators.check_operand(op, value, value.array.ndim - cut)
        nbytes = value.array.nbytes
        if cut:
            nbytes //= self._group.size
        if self._is_gathered(collective, op, value, algorithm):
            return self._choose(folding.moves_for(collective), nbytes, algorithm)
        return self._choose(
            collective,
            nbytes,
            algorithm,
            rank_order=not op.commutative,
            whole=not op.elementwise,
            shm=shared_memory_calls.serves(op, value.dtype),
        )

    def _is_gathered(self, collective: str, op: Op, value: Value, algorithm: str | None) -> bool:
        call = self._group, collective, op, value, algorithm
        return self._blocking and gathered_reductions.is_gathered(*call)

    def _in_pieces(self, op: Op, x: Value, target: Target | None) -> bool:
        """Whether the core's all_reduce copies to and from a GPU while it reduces."""
        shm = self._group.shm
        if shm is None or target is None or target.memory is not target.array:
            return False
        if x.stage is None and target.value.stage is None:
            return False
        return x.array.nbytes > shm.core.piece_nbytes and shared_memory_calls.serves(op, x.dtype)

    def _offers(
        self, forced: str | None, choice: Choice, x: Value, nbytes: int, target: Target | None
    ) -> bool:
        """Whether this rank would offer x, in messages of so many bytes, instead of using the core.

        Without `target` it has no part of the result.
        """
        if x.stage is None or choice != IN_SHARED_MEMORY or forced:
            return False
        result = target.value.stage if target is not None else x.stage
        group = self._group
        return cuda_ipc.is_for_all(group.engine, group.context, x.stage, nbytes, result)

    def _of_objects(
        self,
        text: str,
        collective: str,
        algorithm: str | None,
        steps: Steps,
        own: Sequence[Parts],
        root: int = 0,
        op: Op | None = None,
        count: int = 0,
    ) -> CallPlan[Any]:
        """Prepare a collective of objects.

        Args:
            text: as of `CallPlan`.
            collective: what moves them: gather, all_gather or all_to_all.
            algorithm: what the caller has named, or None.
            steps: as of `CallPlan`.
            own: this rank's object, or one for each rank, pickled.
            root: the root, if it has one.
            op: combines the first `count`, where they come; None: the caller gets all.
        """

        def result(got: Sequence[memoryview] | None, late: LateCopies) -> Any:
            values = object_collectives.loaded(got, late)
            if op is None or values is None:
                return values
            return object_collectives.folded(values[:count], op)

        salt = zlib.crc32(text.encode()) if op is not None else 0
        return CallPlan(
            self._group,
            text,
            steps,
            self._route(self._choose(collective, 0, algorithm)),
            lambda shm: shared_memory_uneven.run_objects(shm, collective, own, root, salt),
            result,
        )


def forced_text(algorithm: str | None) -> str:
    return f", algorithm={algorithm}" if algorithm else ""
