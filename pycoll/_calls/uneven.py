"""Collectives on blocks that differ in shape: gatherv, all_gatherv, scatterv, all_to_allv.

Their schedules are those of the even collectives: a schedule does not know how long a chunk is.
What nobody but the sender knows of a block comes with it (`blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import blocks
from pycoll._calls.group import Group, Numbered
from pycoll._calls.message_steps import pulled
from pycoll._calls.object_collectives import LINEAR, came, of_one, straight
from pycoll._calls.uneven_out import BlockTargets
from pycoll._runtime.binding import Binding
from pycoll._runtime.task import CallSteps
from pycoll._transports._core import INLINE_NBYTES


def gatherv(group: Group, call: Numbered, x: Value, root: int, targets: BlockTargets) -> CallSteps:
    """Gather to the root: there the list of blocks by rank; None elsewhere."""
    yield from pulled(group, x)
    binding = of_one(group, blocks.pack(x))
    run = yield from group.run(call, 0, ("gather", LINEAR, root), binding)
    if group.rank != root:
        return None
    return (yield from taken(group, call, [x], came(group, run), targets))


def all_gatherv(group: Group, call: Numbered, x: Value, targets: BlockTargets) -> CallSteps:
    """Gather heads and what is small (subcall 0); then, all lengths known, the rest (subcall 1)."""
    yield from pulled(group, x)
    packed = blocks.pack(x)
    binding = of_one(group, packed if x.array.nbytes <= INLINE_NBYTES else packed[:1])
    run = yield from group.run(call, 0, ("all_gather", LINEAR), binding)
    return (yield from taken(group, call, [x], came(group, run), targets, is_left=True))


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
    data = [None if xs else run.value(group.rank)]
    return (yield from taken(group, call, xs, data, target))


def all_to_allv(
    group: Group, call: Numbered, xs: Sequence[Value], targets: BlockTargets
) -> CallSteps:
    """Send block i to rank i; returns the blocks received, by rank."""
    yield from pulled(group, *xs)
    run = yield from group.run(call, 0, *straight(group, [blocks.pack(x) for x in xs]))
    data = came(group, run, group.size)
    return (yield from taken(group, call, xs, data, targets))


def taken(
    group: Group,
    call: Numbered,
    xs: Sequence[Value],
    messages: Sequence[memoryview | None],
    targets: BlockTargets,
    is_left: bool = False,
) -> CallSteps:
    """Return the blocks of a call, when its messages have come; the core begins here, too.

    Args:
        group, call: the ranks, and the call.
        xs: what this rank gave.
        messages: by the index of their blocks; None: that is this rank's own.
        targets: where blocks go.
        is_left: what is too long for the first round of an all_gatherv is left.
    """
    own = xs[group.rank if len(xs) > 1 else 0] if xs else None
    if is_left:
        assert own is not None
        return (yield from _rest(group, call, own, messages, targets))
    return [_value(index, own, data, targets) for index, data in enumerate(messages)]


def _rest(
    group: Group,
    call: Numbered,
    own: Value,
    messages: Sequence[memoryview | None],
    targets: BlockTargets,
) -> CallSteps:
    """Gather the large blocks, of which the heads have come."""
    heads = [blocks.read_head(memoryview(blocks.head(own)) if x is None else x) for x in messages]
    lengths = [head.nbytes if head.nbytes > INLINE_NBYTES else 0 for head in heads]
    places = targets.places(heads)
    values = [
        (places[rank] or heads[rank].fresh())
        if data is not None and lengths[rank]
        else _value(rank, own, data, targets)
        for rank, data in enumerate(messages)
    ]
    if any(lengths):
        source: list[Any] = [None] * group.size
        source[group.rank] = (blocks.elements(own) if lengths[group.rank] else memoryview(b""),)
        target: list[memoryview | None] = [
            conversion.as_bytes(value.array) if length and data is not None else None
            for value, length, data in zip(values, lengths, messages, strict=True)
        ]
        chosen = group.choose("all_gather", max(lengths), None, shm=False)
        binding = Binding(list(lengths), source, target)
        yield from group.run(call, 1, ("all_gather", chosen), binding)
    return values


def _value(index: int, own: Value | None, data: memoryview | None, targets: BlockTargets) -> Value:
    if data is not None:
        return blocks.unpack(data)
    assert own is not None
    return targets.copied(index, own)
