"""Gathers into a list of arrays, one for each rank, instead of one array.

By messages each row comes to its array. Shared memory has one array, whose rows are copied then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import arguments, collectives, shared_memory_calls
from pycoll._calls.call_plan import CallPlan, Route
from pycoll._calls.group import Group, Numbered
from pycoll._calls.shared_memory import ShmComm
from pycoll._cuda.late_copies import LateCopies
from pycoll._dtypes import Array
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice


def gather(
    group: Group,
    text: str,
    route: Route,
    collective: str,
    choice: Choice,
    x: Value,
    out: Sequence[Any],
    root: int,
) -> CallPlan[Any]:
    """Prepare a gather, or all_gather, whose rows go to arrays of the caller's.

    Args:
        group, text, route: as of `CallPlan`.
        collective, choice, x, root: as of `scheduled.ArrayPlan`.
        out: a list or tuple of arrays, one for each rank.

    Raises:
        TypeError: an item of it is no array.
        ValueError: it has another length; an item cannot be filled, is of another dtype or shape,
            or overlaps `x` and is not ``out[rank] is x`` of an all_gather.
    """
    if len(out) != group.size:
        raise ValueError(
            f"out is a list of {group.size} arrays, one for each rank; it has {len(out)}"
        )
    values = [
        conversion.check_out(item, x.dtype, x.array.shape, f"out[{rank}]")
        for rank, item in enumerate(out)
    ]
    for rank, value in enumerate(values):
        own = collective == "all_gather" and rank == group.rank
        if own and arguments.same_memory(value.place, x.place):
            continue
        if conversion.overlap(value.place, x.place):
            others = ", or x itself as out[rank]" if collective == "all_gather" else ""
            raise ValueError(f"out[{rank}] overlaps x. Pass an array of its own{others}.")

    def steps(call: Numbered) -> CallSteps:
        places = [_place(value) for value in values]
        bound = collectives.bind(group, collective, choice, x, places, root=root)
        yield from bound.run(group, call)
        return places

    def in_shared_memory(shm: ShmComm) -> Array:
        rows = np.empty((group.size, *x.array.shape), x.dtype.storage)
        shared_memory_calls.move(shm, collective, x, rows, root)
        return rows

    def result(got: Any, late: LateCopies) -> Any:
        for value, row in zip(values, got, strict=True):
            if row is not value.array:
                value.array[...] = row
            conversion.unwrap(value, late)
        return out

    return CallPlan(group, text, steps, route, in_shared_memory, result, (x,))


def _place(value: Value) -> Array:
    """Return where a row can come to: its array, or memory of pycoll's."""
    array = value.array
    if value.stage is None and array.flags.c_contiguous:
        return array
    return np.empty(array.shape, value.dtype.storage)
