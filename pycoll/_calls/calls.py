"""Calls whose arguments were checked: what a communicator runs, starts, or starts again and again.

For each method of a communicator there is one here that finds everything a user can get wrong
alone, before anything is sent, and returns the call as a `CallPlan`. The blocking method runs it,
its non-blocking twin starts it, a persistent request prepares and starts it each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll._calls import uneven_plans
from pycoll._calls.call_plan import CallPlan
from pycoll._calls.moves import Moves
from pycoll._calls.point_to_point import PointToPointCalls
from pycoll._calls.reductions import Reductions

if TYPE_CHECKING:
    from pycoll._arrays.types import A, MaybeNone, Reducer


class Calls(Moves, Reductions, PointToPointCalls):
    """Prepares the calls of one communicator; arguments as of the methods of `Communicator`.

    Args:
        group: the communicator's ranks.
        blocking: whether the caller waits in the call. Only then it may go through shared memory.
    """

    def gatherv(self, x: A, root: int = 0, out: Any = None) -> CallPlan[list[A] | MaybeNone]:
        return uneven_plans.prepare_gatherv(self._group, x, root, out, self._blocking)

    def all_gatherv(self, x: A, out: Any = None) -> CallPlan[list[A]]:
        return uneven_plans.prepare_all_gatherv(self._group, x, out, self._blocking)

    def scatterv(self, xs: Sequence[A] | None, root: int = 0, out: Any = None) -> CallPlan[A | Any]:
        return uneven_plans.prepare_scatterv(self._group, xs, root, out, self._blocking)

    def all_to_allv(self, xs: Sequence[A], out: Any = None) -> CallPlan[list[A]]:
        return uneven_plans.prepare_all_to_allv(self._group, xs, out, self._blocking)

    def reduce_scatterv(
        self,
        x: A,
        counts: Sequence[int],
        op: Reducer = "sum",
        out: Any = None,
        *,
        algorithm: str | None = None,
    ) -> CallPlan[A]:
        self._check_algorithm("reduce_scatter", algorithm)
        return uneven_plans.prepare_reduce_scatterv(
            self._group, x, counts, op, out, algorithm, self._blocking
        )
