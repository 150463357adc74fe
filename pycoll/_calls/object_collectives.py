"""Collectives on Python objects, by messages: lengths first (subcall 0), then bytes (subcall 1).

All return the bytes of objects, which `loaded` makes of them when the call is over: what is raised
there breaks nothing.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll import schedules
from pycoll._arrays import objects, user_operators
from pycoll._calls.group import Group, How, Numbered
from pycoll._runtime.binding import Binding, fill_from
from pycoll._runtime.scratch import new_bytes
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._transports.base import Parts, nbytes_of

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._cuda.late_copies import LateCopies

LINEAR = Choice("linear")

STRAIGHT = ("pairwise", "linear")
"""Algorithms of all_to_all in which every block goes straight to its rank."""

_LENGTH = struct.Struct("<Q")


def gather(group: Group, call: Numbered, parts: Parts, choice: Choice, root: int) -> CallSteps:
    """Gather to the root: there the objects by rank; None elsewhere."""
    is_root = group.rank == root
    how = "gather", choice, root
    # Who passes on what others have sent must know their lengths, too.
    straight = choice == LINEAR
    lengths_how: How = ("gather", LINEAR, root) if straight else ("all_gather", LINEAR)
    lengths = yield from _gather_lengths(group, call, lengths_how, nbytes_of(parts))
    known = lengths if is_root or not straight else None
    result = yield from _gather_bytes(group, call, how, parts, known)
    return result if is_root else None


def all_gather(group: Group, call: Numbered, parts: Parts, algorithm: str | None) -> CallSteps:
    """Gather to every rank the objects by rank."""
    how: How = "all_gather", LINEAR
    lengths = yield from _gather_lengths(group, call, how, nbytes_of(parts))
    chosen = group.choose("all_gather", max(lengths), algorithm, shm=False)
    how = "all_gather", chosen
    return (yield from _gather_bytes(group, call, how, parts, lengths))


def all_to_all(group: Group, call: Numbered, blocks: Sequence[Parts], choice: Choice) -> CallSteps:
    """Send block i to rank i; returns the objects received, by rank."""
    size = group.size
    how = "all_to_all", choice
    if choice.name in STRAIGHT:
        sent = [(memoryview(_LENGTH.pack(nbytes_of(parts))),) for parts in blocks]
        lengths = [new_bytes(_LENGTH.size) for _ in range(size)]
        yield from group.run(call, 0, how, _exchange(group, how, sent, lengths))
        buffers = [new_bytes(_LENGTH.unpack(length)[0]) for length in lengths]
        yield from group.run(call, 1, how, _exchange(group, how, blocks, buffers))
        return buffers
    # Others keep blocks on their way, and must know how long they are: as long as the longest.
    mine = max(nbytes_of(parts) for parts in blocks)
    known = yield from _gather_lengths(group, call, ("all_gather", LINEAR), mine)
    longest = _LENGTH.size + max(known)
    padded = []
    for parts in blocks:
        block = new_bytes(longest)
        fill_from((memoryview(_LENGTH.pack(nbytes_of(parts))), *parts), block)
        padded.append((block,))
    buffers = [new_bytes(longest) for _ in range(size)]
    yield from group.run(call, 1, how, _exchange(group, how, padded, buffers))
    ends = [_LENGTH.size + _LENGTH.unpack_from(buffer)[0] for buffer in buffers]
    return [buffer[_LENGTH.size : end] for buffer, end in zip(buffers, ends, strict=True)]


def _exchange(
    group: Group, how: How, sent: Sequence[Parts], received: Sequence[memoryview]
) -> Binding:
    """Bind the blocks of an all_to_all to what is sent to each rank, and received from it."""
    count = schedules.find(how[0], how[1].name).chunks(group.size) - 2 * group.size
    between: list[Any] = [None] * count  # blocks on their way to other ranks
    nothing: list[Any] = [None] * group.size
    lengths = [nbytes_of(parts) for parts in sent]
    return Binding(
        nbytes=[*lengths, *map(len, received), *[lengths[0]] * count],
        source=[*sent, *nothing, *between],
        target=[*nothing, *received, *between],
    )


def _gather_lengths(group: Group, call: Numbered, how: How, nbytes: int) -> CallSteps:
    """Return every rank's length, on the ranks that gather."""
    size = group.size
    everywhere = how[0] == "all_gather" or group.rank == how[-1]
    heard = [new_bytes(_LENGTH.size) for _ in range(size)]
    source: list[Any] = [None] * size
    source[group.rank] = (memoryview(_LENGTH.pack(nbytes)),)
    binding = Binding(
        nbytes=[_LENGTH.size] * size,
        source=source,
        target=list(heard) if everywhere else [None] * size,
    )
    yield from group.run(call, 0, how, binding)
    return [_LENGTH.unpack(view)[0] for view in heard]


def _gather_bytes(
    group: Group,
    call: Numbered,
    how: How,
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
    yield from group.run(call, 1, how, Binding(nbytes, source, target))
    return buffers


def loaded(got: Sequence[memoryview] | None, late: LateCopies) -> list[Any] | None:
    """Return the objects whose bytes a call has returned; `CallPlan.result` of most."""
    return None if got is None else [objects.load(buffer) for buffer in got]


def folded(values: Sequence[Any], op: Op) -> Any:
    """Combine objects in rank order; None of no objects.

    Nothing is under way: what `op` raises breaks nothing.
    """
    assert callable(op.fn)
    call = functools.partial(user_operators.call, op.fn, op.name)
    return functools.reduce(call, values) if values else None
