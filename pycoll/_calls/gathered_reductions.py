"""Reductions by operators that the core does not have: functions, minloc and maxloc.

Short values are gathered, on every rank that gets a result, and combined there in rank order when
the call is over. Nothing is under way then: a function may raise, and breaks nothing. Longer ones
are combined as they come, by the steps of a schedule (`operators.reduction`). The core gathers what
it can (`attempt_function` in collectives_type.c), and asks here for the rest (`folding`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll._arrays import conversion, operators
from pycoll._calls import collectives, shared_memory_calls
from pycoll._calls.folding import fold, gather, moves_for, salt_of
from pycoll._calls.group import SHARED_MEMORY, Bound, Group
from pycoll._calls.scheduled import ArrayPlan
from pycoll._calls.shared_memory import ShmComm
from pycoll._support.public_edge import edge
from pycoll._transports._core import GATHERED_NBYTES, GATHERED_RANKS

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._arrays.value import Value
    from pycoll._cuda.late_copies import LateCopies
    from pycoll._dtypes import Array
    from pycoll._selection.agreed import Agreed

Folding = tuple[int, str, Callable[[Any, Any], None]]
"""Of a function: the salt of its calls in shared memory, its signature, and what combines rows."""


def is_gathered(group: Group, collective: str, op: Op, x: Value, algorithm: str | None) -> bool:
    """Whether a blocking reduction gathers; the same on all ranks. `algorithm`: what is named."""
    if shared_memory_calls.serves(op, x.dtype):
        return False
    if algorithm is not None:
        return algorithm == SHARED_MEMORY and group.shm is not None
    nbytes = x.array.nbytes // (group.size if collective == "reduce_scatter" else 1)
    return are_short(group.engine.agreed, group.size, collective, nbytes)


def are_short(agreed: Agreed, size: int, collective: str, nbytes: int) -> bool:
    """Whether values are gathered; `nbytes`: of one rank's value, or of one block."""
    fit = size <= GATHERED_RANKS and nbytes * size <= GATHERED_NBYTES
    return fit and _may_be(agreed, collective)


def _may_be(agreed: Agreed, collective: str) -> bool:
    """In a scan a rank waits for those below it only."""
    return collective not in (*agreed.rules, "scan", "exscan")


class GatheredReduction(ArrayPlan):
    """A reduction that gathers; its `choice` is the algorithm of that."""

    @functools.cached_property
    def rows(self) -> Array | None:
        """What is gathered; None: nothing on this rank."""
        if self.target is None:
            return None
        shape = self.x.array.shape
        rows_shape = shape if self.collective == "reduce_scatter" else (self.group.size, *shape)
        return np.empty(rows_shape, self.x.dtype.storage)

    def _bind(self, x: Value, memory: Array | None) -> Bound:
        moves = moves_for(self.collective)
        return collectives.bind(self.group, moves, self.choice, x, self.rows, None, self.root)

    def in_shared_memory(self, shm: ShmComm) -> None:
        gather(shm, self.collective, self.x, self.rows, self.op, self.root)

    def result(self, got: Any, late: LateCopies) -> Any:
        """Combine what was gathered; returns the target's array, None where there is no result."""
        group = self.group
        count = {"scan": group.rank + 1, "exscan": group.rank}.get(self.collective, group.size)
        if self.target is None or self.rows is None or not count:
            return None
        assert self.op is not None
        fold(self.op, self.x, self.rows[:count], self.target.memory)
        return self.target.result(late)


def folding(group: Group, collective: str, op: Any) -> Folding | None:
    """Return how a function combines what the core gathers for a call; None: Python must do all."""
    try:
        resolved = operators.resolve(op)
    except Exception:
        return None  # it will be said there
    fn = resolved.fn
    if not (callable(fn) and resolved.is_known) or fn is min or fn is max:
        return None
    if not _may_be(group.engine.agreed, collective):
        return None
    signature = sys.intern(resolved.signature)
    return salt_of(collective, signature), signature, functools.partial(_folded, resolved)


@edge
def _folded(op: Op, rows: Any, result: Any) -> None:
    """Write the combination of rows to `result`."""
    x, into = conversion.wrap(rows), conversion.wrap(result)
    assert x is not None
    assert into is not None
    fold(op, x, x.array, into.array)
