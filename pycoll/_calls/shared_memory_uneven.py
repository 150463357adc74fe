"""Blocks that differ in shape, objects, and rows that differ in number, through shared memory.

The core exchanges what the blocks are, has the places found here, and brings the blocks there
(_core/python/exchange/uneven.c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import blocks, collectives, folding
from pycoll._calls.shared_memory import BY_MESSAGES, ShmComm
from pycoll._calls.shared_memory_calls import serves, type_salt
from pycoll._calls.uneven_out import BlockTargets
from pycoll._runtime.scratch import new_bytes
from pycoll._transports._core import METHODS, OPS
from pycoll._transports.base import Parts, nbytes_of

if TYPE_CHECKING:
    from pycoll._calls.scheduled import ArrayPlan


def run(shm: ShmComm, method: str, xs: Sequence[Value], root: int, targets: BlockTargets) -> Any:
    """Run a call on blocks that differ in shape; returns those that come here, by sender.

    Args:
        shm: of the communicator.
        method: gatherv, all_gatherv, scatterv or all_to_allv.
        xs: this rank's block, or one for each rank; nothing in a scatterv off root.
        root: the root, if it has one.
        targets: where blocks go.

    Returns BY_MESSAGES if the blocks must go by messages.
    """
    values: list[Value] = []
    array = [conversion.contiguous(x.array) for x in xs]
    given = [(blocks.head(x), conversion.as_bytes(a)) for x, a in zip(xs, array, strict=True)]
    senders = range(shm.size) if method != "scatterv" else (root,)

    def places(said: list[bytes]) -> list[memoryview | None]:
        heads = [blocks.read_head(memoryview(head)) for head in said]
        found = targets.places(heads)
        for index, sender in enumerate(senders):
            own = sender == shm.rank
            values.append(
                targets.copied(index, xs[sender if len(xs) > 1 else 0])
                if own
                else found[index] or heads[index].fresh()
            )
        return [
            None if sender == shm.rank else conversion.as_bytes(value.array)
            for sender, value in zip(senders, values, strict=True)
        ]

    # Of a scatterv only the root knows the dtype.
    dtype = xs[0].dtype if method != "scatterv" else None
    code, salt = (dtype.code, type_salt(dtype)) if dtype is not None else (0, 0)
    by_messages = shm.core.uneven(METHODS.index(method), code, salt, root, given, places)
    return BY_MESSAGES if by_messages else values


def run_objects(
    shm: ShmComm, method: str, own: Sequence[Parts], root: int = 0, salt: int = 0
) -> Any:
    """Run a call on pickled objects; returns the bytes of those that come here, by sender.

    Args:
        shm: of the communicator.
        method: gather, all_gather, all_to_all or scatter.
        own: this rank's object, or one for each rank; nothing in a scatter off root.
        root: the root, if it has one.
        salt: tells calls apart that have the same method and root.

    Returns None where none come, and BY_MESSAGES if they must go by messages.
    """
    buffers: list[memoryview] = []
    given = [
        (blocks.object_head(nbytes_of(parts)), parts[0] if len(parts) == 1 else b"".join(parts))
        for parts in own
    ]

    def places(said: list[bytes]) -> list[memoryview]:
        buffers.extend(new_bytes(blocks.object_nbytes(head)) for head in said)
        return buffers

    by_messages = shm.core.uneven(METHODS.index(method), 0, salt, root, given, places)
    return BY_MESSAGES if by_messages else buffers or None


def reduce_scatterv(shm: ShmComm, salt: int, plan: ArrayPlan) -> None:
    """Reduce part r of all ranks' x into rank r's result; its arguments are those of `plan`."""
    x, counts, op, result = plan.x, plan.counts, plan.op, plan.memory
    assert counts is not None
    assert op is not None
    assert result is not None
    array = conversion.operand(x.array)
    if serves(op, x.dtype):
        source, out = conversion.as_bytes(array), conversion.as_bytes(result)
        code = OPS.index(op.name)
        shm.core.reduce_rows(x.dtype.code, code, array.shape, counts, source, out)
        return
    shm.barrier(salt)
    for root, view in enumerate(collectives.cut(array, counts)):
        part = np.frombuffer(view, x.dtype.storage).reshape(counts[root], *array.shape[1:])
        value = Value(part, x.dtype, x.kind)
        mine = result if root == shm.rank else None
        folding.combine(shm, "reduce", value, mine, op, root)
