"""What the preparation of all calls has in common: who runs a call, and with which schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycoll._arrays import operators
from pycoll._calls import shared_memory_calls
from pycoll._calls.call_plan import Route, route_of
from pycoll._calls.group import IN_SHARED_MEMORY, SHARED_MEMORY, Group
from pycoll._gpu import cuda_ipc
from pycoll._selection.select import Choice
from pycoll._support.lazy_import import LazyModule
from pycoll._support.wording import a_kind

if TYPE_CHECKING:
    from pycoll import schedules
    from pycoll._arrays.operators import Op
    from pycoll._arrays.value import Value
    from pycoll._calls.arguments import Target
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

    def _route(self, choice: Choice, two_level_nbytes: int | None = None) -> Route:
        return route_of(self._group, choice, self._blocking, two_level_nbytes)

    def _choose_reduction(
        self, collective: str, value: Value, op: Op, algorithm: str | None
    ) -> Choice:
        cut = collective == "reduce_scatter"
        operators.check_operand(op, value, value.array.ndim - cut)
        nbytes = value.array.nbytes
        if cut:
            nbytes //= self._group.size
        return self._choose(
            collective,
            nbytes,
            algorithm,
            rank_order=not op.commutative,
            whole=not op.elementwise,
            shm=self._may_combine(op, value),
        )

    def _may_combine(self, op: Op, value: Value) -> bool:
        return shared_memory_calls.may_combine(self._group.shm is not None, op, value.dtype)

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


def forced_text(algorithm: str | None) -> str:
    return f", algorithm={algorithm}" if algorithm else ""
