"""Collectives on Python objects; the core runs all but those with a named algorithm, too.

Where each object goes straight to its rank that is one message each, which is as long as it is. In
an all_gather an object of more than `INLINE_NBYTES` follows in a second round (subcall 1), when all
ranks know how long it is: at first comes its length, 8 bytes, which no object has. Where others
pass objects on, all lengths go first.

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
from pycoll._transports._core import INLINE_NBYTES
from pycoll._transports.base import Parts, nbytes_of

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._calls.core_runs import CoreRun
    from pycoll._cuda.late_copies import LateCopies

LINEAR, PAIRWISE = Choice("linear"), Choice("pairwise")

STRAIGHT = ("pairwise", "linear")
"""Algorithms of all_to_all in which every block goes straight to its rank."""

_LENGTH = struct.Struct("<Q")


def gather(group: Group, call: Numbered, parts: Parts, choice: Choice, root: int) -> CallSteps:
    """Gather to the root: there the bytes of all objects by rank; None elsewhere."""
    is_root = group.rank == root
    how = "gather", choice, root
    if choice == LINEAR:
        run = yield from group.run(call, 0, how, of_one(group, parts))
        return _with_own(parts, came(group, run)) if is_root else None
    # Who passes on what others have sent must know their lengths, too.
    lengths = yield from _gather_lengths(group, call, nbytes_of(parts))
    buffers = yield from _gather_bytes(group, call, how, parts, lengths)
    return buffers if is_root else None


def all_gather(group: Group, call: Numbered, parts: Parts, algorithm: str | None) -> CallSteps:
    """Gather to every rank the bytes of all objects by rank."""
    first = parts
    if algorithm is not None or nbytes_of(parts) > INLINE_NBYTES:
        first = (memoryview(_LENGTH.pack(nbytes_of(parts))),)
    run = yield from group.run(call, 0, ("all_gather", LINEAR), of_one(group, first))
    messages = came(group, run)
    messages[group.rank] = first[0] if first is not parts else None
    lengths = [
        _LENGTH.unpack(data)[0] if data is not None and len(data) == _LENGTH.size else 0
        for data in messages
    ]
    if not any(lengths):
        return _with_own(parts, messages)
    chosen = group.choose("all_gather", max(lengths), algorithm, shm=False)
    how: How = "all_gather", chosen
    rest = parts if lengths[group.rank] else (memoryview(b""),)
    buffers = yield from _gather_bytes(group, call, how, rest, lengths)
    for rank, length in enumerate(lengths):
        if length:
            messages[rank] = buffers[rank]
    return _with_own(parts, messages)


def of_one(group: Group, parts: Parts) -> Binding:
    """Bind what gathers blocks, of which nobody knows the length but the sender."""
    source: list[Any] = [None] * group.size
    source[group.rank] = parts
    return Binding([None] * group.size, source, [None] * group.size)


def straight(group: Group, sent: Sequence[Parts], choice: Choice = PAIRWISE) -> tuple[How, Binding]:
    """Return what exchanges blocks, of which nobody knows the length but the sender.

    So each must travel alone, straight to its rank. This rank's own stays here.
    """
    size, me = group.size, group.rank
    source: list[Any] = [*sent, *[None] * size]
    source[me] = ()
    nbytes: list[int | None] = [None] * (2 * size)
    nbytes[size + me] = 0
    return ("all_to_all", choice), Binding(nbytes, source, [None] * (2 * size))


def came(group: Group, run: CoreRun, first: int = 0) -> list[memoryview | None]:
    """Return what has come from each rank, as the chunks from `first` on; None: this rank's own."""
    return [None if rank == group.rank else run.value(first + rank) for rank in range(group.size)]


def _with_own(own: Parts, messages: Sequence[memoryview | None]) -> list[memoryview]:
    """Return messages, with a copy of what this rank gave where there is None."""
    return [_copy(own) if data is None else data for data in messages]


def _copy(parts: Parts) -> memoryview:
    copy = new_bytes(nbytes_of(parts))
    fill_from(parts, copy)
    return copy


def all_to_all(group: Group, call: Numbered, blocks: Sequence[Parts], choice: Choice) -> CallSteps:
    """Send block i to rank i; returns the bytes of what comes, by rank."""
    size = group.size
    if choice.name in STRAIGHT:
        run = yield from group.run(call, 0, *straight(group, blocks, choice))
        return _with_own(blocks[group.rank], came(group, run, size))
    # Others keep blocks on their way, and must know how long they are: as long as the longest.
    how = "all_to_all", choice
    mine = max(nbytes_of(parts) for parts in blocks)
    known = yield from _gather_lengths(group, call, mine)
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


def _gather_lengths(group: Group, call: Numbered, nbytes: int) -> CallSteps:
    """Return every rank's length."""
    own = (memoryview(_LENGTH.pack(nbytes)),)
    lengths = [_LENGTH.size] * group.size
    heard = yield from _gather_bytes(group, call, ("all_gather", LINEAR), own, lengths, 0)
    return [_LENGTH.unpack(view)[0] for view in heard]


def _gather_bytes(
    group: Group,
    call: Numbered,
    how: How,
    parts: Parts,
    lengths: Sequence[int],
    subcall: int = 1,
) -> CallSteps:
    """Run a gathering of bytes; returns those of all ranks, on the ranks that gather."""
    buffers = [new_bytes(length) for length in lengths]
    source: list[Any] = [None] * group.size
    source[group.rank] = parts
    yield from group.run(call, subcall, how, Binding(list(lengths), source, list(buffers)))
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
