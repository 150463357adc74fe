"""Collectives on Python objects: their lengths first (lane 0), then their bytes (lane 1)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from pycoll import objects
from pycoll.executor import Binding, new_bytes
from pycoll.group import Group
from pycoll.task import CallSteps
from pycoll.transports.base import Parts, nbytes_of

_LENGTH = struct.Struct("<Q")


def gather(group: Group, call: bytes, parts: Parts, algorithm: str, root: int) -> CallSteps:
    """Gather to the root: there the list of objects by rank; None elsewhere."""
    number = group.context.begin(call)
    is_root = group.rank == root
    lengths = yield from _gather_lengths(group, number, call, "gather", root, parts)
    result = yield from _gather_bytes(
        group, number, call, ("gather", algorithm, root), parts, lengths if is_root else None
    )
    group.context.end(number)
    return [objects.load(buffer) for buffer in result] if is_root else None


def all_gather(group: Group, call: bytes, parts: Parts, algorithm: str | None) -> CallSteps:
    """Gather to every rank the list of objects by rank."""
    number = group.context.begin(call)
    lengths = yield from _gather_lengths(group, number, call, "all_gather", 0, parts)
    chosen = group.choose("all_gather", max(lengths), algorithm, native=False)
    result = yield from _gather_bytes(
        group, number, call, ("all_gather", chosen, 0), parts, lengths
    )
    group.context.end(number)
    return [objects.load(buffer) for buffer in result]


def all_to_all(group: Group, call: bytes, blocks: Sequence[Parts], algorithm: str) -> CallSteps:
    """Send block i to rank i; returns the list of objects received, by rank."""
    number = group.context.begin(call)
    size = group.size
    schedule = group.schedule("all_to_all", algorithm)
    nothing: list[Any] = [None] * size
    sent = [memoryview(_LENGTH.pack(nbytes_of(parts))) for parts in blocks]
    heard = [new_bytes(_LENGTH.size) for _ in range(size)]
    binding = Binding(
        nbytes=[_LENGTH.size] * (2 * size),
        source=[*[(view,) for view in sent], *nothing],
        target=[*nothing, *heard],
    )
    yield from group.run((number, 0), call, schedule, binding)
    lengths = [_LENGTH.unpack(view)[0] for view in heard]
    buffers = [new_bytes(length) for length in lengths]
    binding = Binding(
        nbytes=[*[nbytes_of(parts) for parts in blocks], *lengths],
        source=[*blocks, *nothing],
        target=[*nothing, *buffers],
    )
    yield from group.run((number, 1), call, schedule, binding)
    group.context.end(number)
    return [objects.load(buffer) for buffer in buffers]


def fold(values: Sequence[Any], fn: Callable[[Any, Any], Any]) -> Any:
    """Combine objects in rank order."""
    result = values[0]
    for value in values[1:]:
        result = fn(result, value)
    return result


def _gather_lengths(
    group: Group, number: int, call: bytes, collective: str, root: int, parts: Parts
) -> CallSteps:
    """Return every rank's length, on the ranks that gather."""
    size = group.size
    everywhere = collective == "all_gather" or group.rank == root
    heard = [new_bytes(_LENGTH.size) for _ in range(size)]
    source: list[Any] = [None] * size
    source[group.rank] = (memoryview(_LENGTH.pack(nbytes_of(parts))),)
    binding = Binding(
        nbytes=[_LENGTH.size] * size,
        source=source,
        target=list(heard) if everywhere else [None] * size,
    )
    schedule = group.schedule(collective, "linear", root)
    yield from group.run((number, 0), call, schedule, binding)
    return [_LENGTH.unpack(view)[0] for view in heard]


def _gather_bytes(
    group: Group,
    number: int,
    call: bytes,
    which: tuple[str, str, int],
    parts: Parts,
    lengths: Sequence[int] | None,
) -> CallSteps:
    """Run the gathering of the bytes; `lengths` on the ranks that gather."""
    size = group.size
    source: list[Any] = [None] * size
    source[group.rank] = parts
    if lengths is None:
        buffers: list[memoryview] = []
        nbytes: list[int | None] = [None] * size
        target: list[memoryview | None] = [None] * size
    else:
        buffers = [new_bytes(length) for length in lengths]
        nbytes, target = list(lengths), list(buffers)
    collective, algorithm, root = which
    schedule = group.schedule(collective, algorithm, root)
    yield from group.run((number, 1), call, schedule, Binding(nbytes, source, target))
    return buffers
