"""Broadcast and scatter: only the root knows what will come, so it announces that first.

The announcement goes down a fixed binomial tree (lane 0) and names the kind of value, its
description and the algorithm of what follows (lane 1). A broadcast value of at most
`INLINE_NBYTES` is part of it, and nothing follows, unless the user has named an algorithm.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import arrays, objects, schedules
from pycoll.arrays import Value
from pycoll.collectives import piece_ends, rows, type_text
from pycoll.dtypes import DType
from pycoll.errors import MismatchError
from pycoll.executor import Binding
from pycoll.group import Group
from pycoll.late import Late
from pycoll.p2p import Outgoing, contiguous, pulled
from pycoll.scratch import new_bytes
from pycoll.select import Choice
from pycoll.task import CallSteps
from pycoll.transports.base import Parts

if TYPE_CHECKING:
    from pycoll import lending
else:  # for arrays on a GPU alone
    lending = Late("pycoll.lending")

INLINE_NBYTES = 4096
"""Bytes of a broadcast value that travel with its announcement."""

_HEAD = struct.Struct("<B?QHHQ")


class Announcement(NamedTuple):
    """What the root says before the data comes.

    Attributes:
        is_object: a Python object (its bytes follow), else an array.
        nbytes: length of the value, or of all blocks together.
        choice: how what follows runs.
        description: of the array, or of a block; the objects' lengths in a scatter.
        inline: the value itself, if it is here; None: it follows.
    """

    is_object: bool
    nbytes: int
    choice: Choice
    description: bytes
    inline: bytes | None = None

    def pack(self) -> bytes:
        """Return the bytes that `unpack` reads."""
        name, segments = self.choice.name.encode(), self.choice.segments
        head = _HEAD.pack(
            self.is_object,
            self.inline is not None,
            self.nbytes,
            segments,
            len(name),
            len(self.description),
        )
        return b"".join((head, name, self.description, self.inline or b""))

    @classmethod
    def unpack(cls, data: memoryview) -> Announcement:
        """Read an announcement."""
        is_object, is_here, nbytes, segments, name_length, length = _HEAD.unpack_from(data)
        start = _HEAD.size
        name = bytes(data[start : start + name_length]).decode()
        start += name_length
        description = bytes(data[start : start + length])
        inline = bytes(data[start + length :]) if is_here else None
        return cls(bool(is_object), nbytes, Choice(name, segments), description, inline)


def _announce(
    group: Group, number: int, call: bytes, root: int, announcement: Announcement | None
) -> CallSteps:
    """Have all ranks know the root's announcement."""
    parts: Parts | None = None
    if announcement is not None:
        parts = (memoryview(announcement.pack()),)
    binding = Binding(nbytes=[None], source=[parts], target=[None])
    how = "broadcast", Choice("tree"), root
    run = yield from group.run((number, 0), call, how, binding)
    if announcement is not None:
        return announcement
    return Announcement.unpack(run.location[0][0])


def lends(group: Group, collective: str, value: Value | None, nbytes: int) -> bool:
    """Whether the root rather lends its value, so many bytes to each, by messages."""
    if value is None or value.stage is None or group.is_named(collective):
        return False
    return lending.is_for_all(group.engine, group.context, value.stage, nbytes, value.stage)


# --- broadcast -----------------------------------------------------------------------------


def broadcast(
    group: Group,
    call: bytes,
    outgoing: Outgoing | None,
    mine: Value | None,
    algorithm: str | None,
    root: int,
    gpu: int | None = None,
) -> CallSteps:
    """Broadcast; off root `mine` is the array to fill, if the caller passed one."""
    number = group.context.begin(call)
    announcement: Announcement | None = None
    if outgoing is not None:
        chosen = group.choose("broadcast", outgoing.nbytes, algorithm, native=False)
        # Who names an algorithm wants to see it run.
        is_free = algorithm is None and not group.is_named("broadcast")
        inline = None
        if is_free and outgoing.nbytes <= INLINE_NBYTES:
            yield from pulled(group, outgoing.value)
            inline = b"".join(outgoing.parts)
        announcement = Announcement(
            outgoing.is_object, outgoing.nbytes, chosen, outgoing.description, inline
        )
    announcement = yield from _announce(group, number, call, root, announcement)
    assert announcement is not None
    if outgoing is not None:
        if announcement.inline is None:
            yield from _spread(group, number, call, root, announcement, outgoing.parts, None)
        group.context.end(number)
        return None
    value, target = broadcast_target(group, root, announcement, mine, gpu)
    if announcement.inline is None:
        yield from _spread(group, number, call, root, announcement, None, target)
    else:
        target[:] = announcement.inline
    group.context.end(number)
    return broadcast_result(value, target, mine)


def broadcast_result(value: Value | None, target: memoryview, mine: Value | None) -> Any:
    """Return the value, or the object, when all bytes of `broadcast_target` have come."""
    if value is None:
        return objects.load(target)
    if value is not mine:
        if mine is None:
            return value
        mine.array[...] = value.array
    assert mine is not None
    return mine


def broadcast_target(
    group: Group,
    root: int,
    announcement: Announcement,
    mine: Value | None,
    gpu: int | None,
) -> tuple[Value | None, memoryview]:
    """Return the array to receive into (None: an object) and its bytes; `gpu`: where, on one."""
    if announcement.is_object:
        if mine is not None:
            raise MismatchError(
                f"broadcast: the root, rank {root}, passed a Python object, "
                f"rank {group.rank} the array {type_text(mine)}. Pass None off root."
            )
        return None, new_bytes(announcement.nbytes)
    dtype, kind, shape = arrays.from_description(announcement.description)
    if mine is not None and (mine.dtype != dtype or mine.array.shape != shape):
        raise MismatchError(
            f"broadcast: the root, rank {root}, passed {dtype}{list(shape)}, "
            f"rank {group.rank} {type_text(mine)}. Pass an array like the root's, or None."
        )
    if mine is not None and mine.array.flags.c_contiguous:
        return mine, arrays.as_bytes(mine.array)
    value = arrays.fresh(dtype, mine.kind if mine is not None else kind, shape, gpu)
    return value, arrays.as_bytes(value.array)


def _spread(
    group: Group,
    number: int,
    call: bytes,
    root: int,
    announcement: Announcement,
    parts: Parts | None,
    target: memoryview | None,
) -> CallSteps:
    """Run the broadcast of the value itself."""
    count = schedules.find("broadcast", announcement.choice.name).chunks(group.size)
    ends = piece_ends(announcement.nbytes, 1, count)
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    if parts is not None and len(parts) > 1 and count > 1:
        parts = (memoryview(b"".join(parts)),)
    source: list[Any] = [None] * count
    if parts is not None:
        source = [parts] if count == 1 else [(parts[0][span],) for span in spans]
    value = parts[0] if parts is not None and len(parts) == 1 else None
    binding = Binding(
        nbytes=[span.stop - span.start for span in spans],
        source=source,
        target=[target[span] for span in spans] if target is not None else [None] * count,
        blocks=(value, target),
    )
    how = "broadcast", announcement.choice, root
    yield from group.run((number, 1), call, how, binding)


# --- scatter -------------------------------------------------------------------------------


def scatter(
    group: Group,
    call: bytes,
    blocks: Value | Sequence[Parts] | None,
    algorithm: str | None,
    root: int,
    gpu: int | None = None,
    out: Value | None = None,
) -> CallSteps:
    """Scatter; `blocks`, on the root, is an array (size, ...) or each rank's object, dumped.

    Returns (Value, None) or (None, bytes of an object); the Value is `out` if that can have it.
    """
    number = group.context.begin(call)
    announcement, views = _scatter_blocks(group, blocks, algorithm)
    announcement = yield from _announce(group, number, call, root, announcement)
    assert announcement is not None
    value: Value | None = None
    if announcement.is_object:
        lengths = list(struct.unpack(f"<{group.size}Q", announcement.description))
        target = new_bytes(lengths[group.rank])
    else:
        dtype, kind, shape = arrays.from_description(announcement.description)
        gpu = blocks.gpu if isinstance(blocks, Value) else gpu
        value = scatter_target(out, dtype, kind, shape, gpu)
        target = arrays.as_bytes(value.array)
        lengths = [len(target)] * group.size
    targets: list[memoryview | None] = [None] * group.size
    targets[group.rank] = target
    binding = Binding(
        nbytes=list(lengths),
        source=list(views) if views is not None else [None] * group.size,
        target=targets,
    )
    how = "scatter", announcement.choice, root
    yield from group.run((number, 1), call, how, binding)
    group.context.end(number)
    return value, target


def scatter_target(
    out: Value | None, dtype: DType, kind: str, shape: tuple[int, ...], gpu: int | None
) -> Value:
    """Return the array for a rank's block: `out`, if it is one for it."""
    fits = out is not None and (out.dtype, out.array.shape) == (dtype, shape)
    if out is not None and fits and out.array.flags.c_contiguous:
        return out
    return arrays.fresh(dtype, kind, shape, gpu)


def _scatter_blocks(
    group: Group, blocks: Value | Sequence[Parts] | None, algorithm: str | None
) -> tuple[Announcement | None, Sequence[Parts] | None]:
    if blocks is None:
        return None, None
    if isinstance(blocks, Value):
        block = Value(blocks.array[0], blocks.dtype, blocks.kind)
        views: Sequence[Parts] = [(row,) for row in rows(contiguous(blocks.array))]
        nbytes = block.array.nbytes
        description = arrays.describe(block)
    else:
        views = blocks
        lengths = [sum(len(part) for part in parts) for parts in blocks]
        nbytes = max(lengths)
        description = struct.pack(f"<{group.size}Q", *lengths)
    chosen = group.choose("scatter", nbytes, algorithm, native=False)
    return Announcement(not isinstance(blocks, Value), nbytes, chosen, description), views
