"""Values that are gathered in shared memory, and combined in rank order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pycoll._arrays import operators, user_operators
from pycoll._calls import shared_memory_calls
from pycoll._calls.shared_memory import ShmComm, part_of

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._arrays.value import Value
    from pycoll._dtypes import Array


def moves_for(collective: str) -> str:
    """Return the collective that gathers the values of a reduction."""
    return {"reduce": "gather", "reduce_scatter": "all_to_all"}.get(collective, "all_gather")


def combine(
    shm: ShmComm, collective: str, x: Value, result: Array | None, op: Op, root: int = 0
) -> None:
    """Reduce, or all_reduce, into `result` (None: not on this rank), as a part of a call."""
    rows = np.empty((shm.size, *result.shape), x.dtype.storage) if result is not None else None
    gather(shm, collective, x, rows, op, root)
    if rows is not None and result is not None:
        fold(op, x, rows, result)


def gather(
    shm: ShmComm, collective: str, x: Value, rows: Array | None, op: Op | None, root: int
) -> None:
    """Gather in `rows` (None: not on this rank) what a reduction combines."""
    assert op is not None
    salt = salt_of(collective, op.signature)
    shared_memory_calls.move(shm, moves_for(collective), x, rows, root, salt=salt)


def salt_of(collective: str, signature: str) -> int:
    """Return the salt, as of `part_of`, of what gathers for an operator."""
    return part_of("operator", f"{collective} {signature}")


def fold(op: Op, x: Value, rows: Array, result: Array) -> None:
    """Combine values like `x`, which nobody else has, in their order.

    What the function raises leaves `result` as it was.
    """
    rows.flags.writeable = False
    kind, total = user_operators.kind_of(x), rows[0, ...]
    into = result if len(rows) == 2 else np.empty_like(result)
    for row in range(1, len(rows)):
        operators.combine(op, x.dtype, kind, total, rows[row, ...], into)
        total = into
    if total is not result:
        np.copyto(result, total)
