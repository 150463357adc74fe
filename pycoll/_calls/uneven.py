"""Collectives on blocks that differ in shape: gatherv, all_gatherv, scatterv, all_to_allv, and
reduce_scatterv, whose blocks differ in length only.

Their schedules are those of the even collectives: a schedule does not know how long a chunk is.
What nobody but the sender knows of a block comes with it (`blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll._arrays import conversion
from pycoll._arrays.operators import Op, reduction
from pycoll._arrays.value import Value
from pycoll._calls import blocks, shared_memory_uneven
from pycoll._calls.group import Bound, Group, Numbered
from pycoll._calls.message_steps import pulled
from pycoll._calls.rooted import INLINE_NBYTES
from pycoll._calls.uneven_out import BlockTargets
from pycoll._dtypes import Array
from pycoll._runtime.binding import Binding
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._transports.base import nbytes_of

LINEAR, PAIRWISE = Choice("linear"), Choice("pairwise")


def gatherv(group: Group, call: Numbered, x: Value, root: int, targets: BlockTargets) -> CallSteps:
    """Gather to the root: there the list of blocks by rank; None elsewhere."""
    yield from pulled(group, x)
    size = group.size
    source: list[Any] = [None] * size
    source[group.rank] = blocks.pack(x)
    binding = Binding([None] * size, source, [None] * size)
    run = yield from group.run(call, 0, ("gather", LINEAR, root), binding)
    if group.rank != root:
        return None
    return [
        targets.copied(rank, x) if rank == root else blocks.unpack(run.value(rank))
        for rank in range(size)
    ]


def all_gatherv(group: Group, call: Numbered, x: Value, targets: BlockTargets) -> CallSteps:
    """Gather heads and what is small (subcall 0); then, all lengths known, the rest (subcall 1)."""
    yield from pulled(group, x)
    size, me = group.size, group.rank
    packed = blocks.pack(x)
    source: list[Any] = [None] * size
    source[me] = packed if x.array.nbytes <= INLINE_NBYTES else packed[:1]
    binding = Binding([None] * size, list(source), [None] * size)
    run = yield from group.run(call, 0, ("all_gather", LINEAR), binding)
    first: list[memoryview] = [run.value(rank) for rank in range(size)]
    heads = [blocks.read_head(data) for data in first]
    lengths = [head.nbytes if head.nbytes > INLINE_NBYTES else 0 for head in heads]
    places = targets.places(heads)
    values = [
        targets.copied(rank, x)
        if rank == me
        else (places[rank] or head.fresh())
        if lengths[rank]
        else blocks.unpack(data)
        for rank, (head, data) in enumerate(zip(heads, first, strict=True))
    ]
    if any(lengths):
        source[me] = packed[1:] if lengths[me] else (memoryview(b""),)
        target: list[memoryview | None] = [None] * size
        for rank, length in enumerate(lengths):
            if length and rank != me:
                target[rank] = conversion.as_bytes(values[rank].array)
        chosen = group.choose("all_gather", max(lengths), None, shm=False)
        binding = Binding(list(lengths), source, target)
        yield from group.run(call, 1, ("all_gather", chosen), binding)
    return values


def scatterv(
    group: Group, call: Numbered, xs: Sequence[Value], root: int, target: BlockTargets
) -> CallSteps:
    """Give rank i the root's block i, as a list of that; `xs`, the blocks, is empty off root."""
    yield from pulled(group, *xs)
    size = group.size
    nothing: list[Any] = [None] * size
    source: list[Any] = [blocks.pack(x) for x in xs] or nothing
    binding = Binding(list(nothing), source, list(nothing))
    run = yield from group.run(call, 0, ("scatter", LINEAR, root), binding)
    return [target.copied(0, xs[root]) if xs else blocks.unpack(run.value(group.rank))]


def all_to_allv(
    group: Group, call: Numbered, xs: Sequence[Value], targets: BlockTargets
) -> CallSteps:
    """Send block i to rank i; returns the blocks received, by rank."""
    yield from pulled(group, *xs)
    size, me = group.size, group.rank
    sent = [blocks.pack(x) for x in xs]
    sent[me] = ()
    nothing: list[Any] = [None] * size
    nbytes: list[int | None] = [None] * (2 * size)
    nbytes[size + me] = nbytes_of(sent[me])
    # Nobody knows the lengths of others' blocks, so each must travel alone, straight to its rank.
    binding = Binding(nbytes, [*sent, *nothing], [None] * (2 * size))
    run = yield from group.run(call, 0, ("all_to_all", PAIRWISE), binding)
    return [
        targets.copied(me, xs[me]) if rank == me else blocks.unpack(run.value(size + rank))
        for rank in range(size)
    ]


def bind_reduce_scatterv(
    group: Group, x: Value, counts: Sequence[int], op: Op, choice: Choice, result: Array
) -> Bound:
    """Bind what reduces rows of all ranks' x: this rank's ``counts[rank]`` rows into `result`."""
    source = shared_memory_uneven.cut(conversion.operand(x.array), counts)
    target: list[memoryview | None] = [None] * group.size
    target[group.rank] = conversion.as_bytes(result)
    binding = Binding(
        nbytes=[len(view) for view in source],
        source=[(view,) for view in source],
        target=target,
        combine=reduction(op, x, (-1, *x.array.shape[1:]), group.size),
    )
    return Bound(("reduce_scatter", choice), binding, x.array.itemsize)
