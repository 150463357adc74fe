"""Reductions of arrays that stay on their GPUs: how ranks agree on it, and wait for each other.

A rank cannot know whether the others' arrays are on GPUs. So where all ranks of a host may have
GPUs (`Agreed.gpus`), large reductions ask: blocking ones in shared memory, a byte of each rank; by
messages each tells what the others need to reach its arrays, or nothing. All take part, also those
with NumPy arrays. If one has said nothing, or cannot open the memory of another, all go the usual
way, and arrays are staged.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays.operators import Op, resolve
from pycoll._arrays.value import Value
from pycoll._calls import collectives
from pycoll._calls.group import IN_SHARED_MEMORY, Group, Numbered
from pycoll._calls.shared_memory import ShmComm
from pycoll._gpu import cuda_ipc, kernel_run, kernels, peer_memory
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice

if TYPE_CHECKING:
    from pycoll._calls.arguments import Target
    from pycoll._calls.scheduled import ArrayPlan
    from pycoll._gpu.kernel_run import Reduction

MIN_NBYTES = 256 << 10
"""Bytes of a result from which on ranks ask each other in shared memory; PC_ASK_NBYTES there."""

MIN_NBYTES_BY_MESSAGES = 1 << 20
"""The same by messages, which take longer."""

COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter")

_GATHERING = Choice("bruck")
"""How ranks tell each other by messages: all_gather of some hundred bytes."""


def applies(
    group: Group,
    collective: str,
    op: Op,
    x: Value,
    nbytes: int,
    forced: str | None,
    choice: Choice,
) -> bool:
    """Whether the ranks vote on whether a call runs on GPUs; the same on all ranks.

    Args:
        group: the communicator's ranks.
        collective, op, x: of the call.
        nbytes: of a result.
        forced: the algorithm that the caller wants, or None.
        choice: the one that was chosen.
    """
    in_shared_memory = choice == IN_SHARED_MEMORY
    return (
        collective in COLLECTIVES
        and nbytes >= (MIN_NBYTES if in_shared_memory else MIN_NBYTES_BY_MESSAGES)
        and forced is None
        and group.may_be_on_gpus
        and (in_shared_memory or not group.is_named(collective))
        and resolve(op.name) is op
        and kernels.has(op.name, x.dtype)
    )


def prepare(
    group: Group, collective: str, op: Op, x: Value, target: Target | None, root: int
) -> Reduction | None:
    """Return what this rank could do on its GPU in a call on which ranks vote; None: nothing."""
    if x.stage is None or group.context.stays_off_gpus:
        return None
    if os.environ.get(cuda_ipc.VARIABLE) == "0":  # set since the ranks met
        return None
    if target is not None and (target.value.stage is None or target.memory is not target.array):
        return None
    result = target.value.stage if target is not None else None
    place, kind = (group.rank, group.size), (op.name, x.dtype)
    return kernel_run.prepare(place, collective, root, kind, x.stage, result)


# --- in shared memory --------------------------------------------------------------------------


def in_shared_memory(shm: ShmComm, group: Group, reduction: Reduction) -> bool:
    """Run a reduction for which all ranks have voted; whether it is done, on all of them."""
    steps, answers = reduction.steps(shm.engine), None
    try:
        while True:
            item = next(steps) if answers is None else steps.send(answers)
            answers = None
            if isinstance(item, bytes):
                answers = shm.tell(item)
            elif not item.done or item.error is not None:
                shm.wait(item)
    except StopIteration as stop:
        return _has_ended(group, stop.value)
    finally:
        steps.close()


def _has_ended(group: Group, ended: int) -> bool:
    """Return whether a reduction is done; remember that memory cannot be reached."""
    group.context.stays_off_gpus |= ended == kernel_run.CANNOT
    return ended == kernel_run.DONE


def _bytes_value(data: bytes) -> Value:
    return Value(np.frombuffer(data, np.uint8), dtypes.UINT8, "numpy")


# --- by messages -------------------------------------------------------------------------------


def by_messages(group: Group, call: Numbered, plan: ArrayPlan) -> CallSteps:
    """Run a call on which ranks vote, by messages: on GPUs, or as its schedule says."""
    is_done = False
    if plan.reduction is None:
        yield from _gathered(group, call, 0, peer_memory.NOTHING)
    else:
        is_done = yield from _on_gpus(group, call, plan.reduction)
    if not is_done:
        yield from plan.scheduled(call, FIRST_SUBCALL)


FIRST_SUBCALL = 8
"""Of a schedule that follows; those before it are taken by what ranks tell each other."""


def _on_gpus(group: Group, call: Numbered, reduction: Reduction) -> CallSteps:
    """Reduce on the GPUs; returns whether it is done, the same on all ranks."""
    steps, answers, subcall = reduction.steps(group.engine), None, 0
    try:
        while True:
            item = next(steps) if answers is None else steps.send(answers)
            answers = None
            if isinstance(item, bytes):
                answers = yield from _gathered(group, call, subcall, item)
                subcall += 1
            else:
                yield item
    except StopIteration as stop:
        return _has_ended(group, stop.value)
    finally:
        steps.close()


def _gathered(group: Group, call: Numbered, subcall: int, mine: bytes) -> CallSteps:
    """Tell all ranks some bytes; returns those of all."""
    rows = np.empty((group.size, len(mine)), np.uint8)
    bound = collectives.bind(group, "all_gather", _GATHERING, _bytes_value(mine), rows)
    yield from bound.run(group, call, subcall)
    return [row.tobytes() for row in rows]
