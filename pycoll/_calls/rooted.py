"""Broadcast and scatter: only the root knows what will come, so it announces that first.

The announcement goes down a fixed binomial tree (subcall 0) and names the kind of value, its
description and the algorithm of what follows (subcall 1). A broadcast value of at most
`INLINE_NBYTES`, or objects to scatter that have no more together, are part of it, and nothing
follows, unless the user has named an algorithm. Small objects the core sends and receives itself
(_core/python/collectives/blocks.c), and knows this form.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import schedules
from pycoll._arrays import conversion, objects
from pycoll._arrays.value import Value
from pycoll._calls.collectives import piece_ends, rows, type_text
from pycoll._calls.group import Bound, Group, Numbered
from pycoll._calls.message_steps import Outgoing, pulled
from pycoll._gpu import cuda_ipc
from pycoll._runtime.binding import Binding
from pycoll._runtime.scratch import new_bytes
from pycoll._runtime.task import CallSteps
from pycoll._selection.select import Choice
from pycoll._transports._core import INLINE_NBYTES as INLINE_NBYTES
from pycoll._transports.base import Parts, nbytes_of
from pycoll.errors import MismatchError

if TYPE_CHECKING:
    from pycoll._cuda.late_copies import LateCopies
    from pycoll._dtypes import DType

ANNOUNCING = "broadcast", Choice("tree")
"""Collective and algorithm of the announcement; users append the root."""

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
    group: Group, call: Numbered, root: int, announcement: Announcement | None
) -> CallSteps:
    """Send the root's announcement to all ranks."""
    parts: Parts | None = None
    if announcement is not None:
        parts = (memoryview(announcement.pack()),)
    binding = Binding(nbytes=[None], source=[parts], target=[None])
    run = yield from group.run(call, 0, (*ANNOUNCING, root), binding)
    if announcement is not None:
        return announcement
    return Announcement.unpack(run.value(0))


def offers(group: Group, collective: str, value: Value | None, nbytes: int) -> bool:
    """Whether the root rather offers its value, so many bytes to each, by messages."""
    if value is None or value.stage is None or group.is_named(collective):
        return False
    return cuda_ipc.is_for_all(group.engine, group.context, value.stage, nbytes, value.stage)


# --- broadcast -----------------------------------------------------------------------------


def broadcast(
    group: Group,
    call: Numbered,
    outgoing: Outgoing | None,
    mine: Value | None,
    algorithm: str | None,
    root: int,
    gpu: int | None = None,
) -> CallSteps:
    """Broadcast; off root `mine` is the array to fill, if the caller passed one."""
    announcement: Announcement | None = None
    if outgoing is not None:
        announcement = of_broadcast(group, outgoing, algorithm)
        if announcement.inline is not None:
            yield from pulled(group, outgoing.value)
            announcement = announcement._replace(inline=b"".join(outgoing.parts))
    announcement = yield from _announce(group, call, root, announcement)
    assert announcement is not None
    result = None
    if outgoing is None:
        result = yield from take_broadcast(group, call, root, announcement, mine, gpu)
    elif announcement.inline is None:
        bound = bind_broadcast(group, root, announcement, outgoing.parts, None)
        yield from bound.run(group, call, 1)
    return result


def broadcast_object(group: Group, call: Numbered, root: int, parts: Parts) -> CallSteps:
    """Broadcast, on the root, an object that is too long for its announcement."""
    nbytes = nbytes_of(parts)
    chosen = group.choose("broadcast", nbytes, None, shm=False)
    announcement = Announcement(True, nbytes, chosen, b"")
    yield from _announce(group, call, root, announcement)
    yield from bind_broadcast(group, root, announcement, parts, None).run(group, call, 1)


def of_broadcast(group: Group, outgoing: Outgoing, algorithm: str | None) -> Announcement:
    """Return how a value is announced; `inline` is empty if the value is to stand there."""
    chosen = group.choose("broadcast", outgoing.nbytes, algorithm, shm=False)
    # Who names an algorithm wants to see it run.
    is_free = algorithm is None and not group.is_named("broadcast")
    inline = b"" if is_free and outgoing.nbytes <= INLINE_NBYTES else None
    is_object, nbytes = outgoing.is_object, outgoing.nbytes
    return Announcement(is_object, nbytes, chosen, outgoing.description, inline)


def take_broadcast(
    group: Group,
    call: Numbered,
    root: int,
    announcement: Announcement,
    mine: Value | None,
    gpu: int | None,
) -> CallSteps:
    """Receive what was announced, off root."""
    value, target = broadcast_target(group, root, announcement, mine, gpu)
    if announcement.inline is None:
        bound = bind_broadcast(group, root, announcement, None, target)
        yield from bound.run(group, call, 1)
    else:
        target[:] = announcement.inline
    return broadcast_result(value, target, mine)


def broadcast_result(value: Value | None, target: memoryview, mine: Value | None) -> Any:
    """Return the value, or the object's bytes, when all of `broadcast_target` have come."""
    if value is None:
        return target
    if value is not mine:
        if mine is None:
            return value
        mine.array[...] = value.array
    assert mine is not None
    return mine


def broadcasted(got: Any, late: LateCopies | None = None) -> Any:
    """Return what the caller gets; `late` as of `conversion.unwrap`."""
    return objects.load(got) if isinstance(got, memoryview) else conversion.unwrapped(got, late)


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
    dtype, kind, shape = conversion.from_description(announcement.description)
    if mine is not None and (mine.dtype != dtype or mine.array.shape != shape):
        raise MismatchError(
            f"broadcast: the root, rank {root}, passed {dtype}{list(shape)}, "
            f"rank {group.rank} {type_text(mine)}. Pass an array like the root's, or None."
        )
    if mine is not None and mine.array.flags.c_contiguous:
        return mine, conversion.as_bytes(mine.array)
    value = conversion.fresh(dtype, mine.kind if mine is not None else kind, shape, gpu)
    return value, conversion.as_bytes(value.array)


def bind_broadcast(
    group: Group,
    root: int,
    announcement: Announcement,
    parts: Parts | None,
    target: memoryview | None,
) -> Bound:
    """Bind what brings the value itself: on the root its bytes, elsewhere where they go."""
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
    return Bound(("broadcast", announcement.choice, root), binding)


# --- scatter -------------------------------------------------------------------------------


def scatter(
    group: Group,
    call: Numbered,
    blocks: Value | Sequence[Value] | Sequence[Parts] | None,
    algorithm: str | None,
    root: int,
    gpu: int | None = None,
    out: Value | None = None,
) -> CallSteps:
    """Scatter; `blocks`, on the root, is an array (size, ...), or an array or dumped object a rank.

    Returns (Value, None) or (None, bytes of an object); the Value is `out` if that can have it.
    """
    announcement, views = of_scatter(group, blocks, algorithm)
    announcement = yield from _announce(group, call, root, announcement)
    assert announcement is not None
    if isinstance(blocks, Value):
        gpu = blocks.gpu
    return (yield from take_scatter(group, call, root, announcement, views, gpu, out))


def take_scatter(
    group: Group,
    call: Numbered,
    root: int,
    announcement: Announcement,
    views: Sequence[Parts] | None,
    gpu: int | None,
    out: Value | None,
) -> CallSteps:
    """Send, on the root, and receive the blocks that were announced; returns as `scatter`."""
    value: Value | None = None
    if announcement.is_object:
        lengths = list(struct.unpack(f"<{group.size}Q", announcement.description))
        if announcement.inline is not None:
            begin = sum(lengths[: group.rank])
            own = announcement.inline[begin : begin + lengths[group.rank]]
            return None, memoryview(bytearray(own))
        target = new_bytes(lengths[group.rank])
    else:
        dtype, kind, shape = conversion.from_description(announcement.description)
        value = scatter_target(out, dtype, kind, shape, gpu)
        target = conversion.as_bytes(value.array)
        lengths = [len(target)] * group.size
    bound = bind_scatter(group, root, announcement, lengths, views, target)
    yield from bound.run(group, call, 1)
    return value, target


def bind_scatter(
    group: Group,
    root: int,
    announcement: Announcement,
    lengths: Sequence[int],
    views: Sequence[Parts] | None,
    target: memoryview,
) -> Bound:
    """Bind blocks, whose bytes are `views` on the root, and this rank's to its place."""
    targets: list[memoryview | None] = [None] * group.size
    targets[group.rank] = target
    binding = Binding(
        nbytes=list(lengths),
        source=list(views) if views is not None else [None] * group.size,
        target=targets,
    )
    return Bound(("scatter", announcement.choice, root), binding)


def scatter_target(
    out: Value | None, dtype: DType, kind: str, shape: tuple[int, ...], gpu: int | None
) -> Value:
    """Return the array for a rank's block: `out`, if it is one for it."""
    fits = out is not None and (out.dtype, out.array.shape) == (dtype, shape)
    if out is not None and fits and out.array.flags.c_contiguous:
        return out
    return conversion.fresh(dtype, kind, shape, gpu)


def of_block(group: Group, block: Value, algorithm: str | None) -> Announcement:
    """Return how a scatter of arrays is announced, of which each rank gets one like `block`."""
    nbytes = block.array.nbytes
    chosen = group.choose("scatter", nbytes, algorithm, shm=False)
    return Announcement(False, nbytes, chosen, conversion.describe(block))


def of_scatter(
    group: Group,
    blocks: Value | Sequence[Value] | Sequence[Parts] | None,
    algorithm: str | None,
) -> tuple[Announcement | None, Sequence[Parts] | None]:
    """Return how the root announces its blocks, and their bytes; elsewhere None."""
    if blocks is None:
        return None, None
    if isinstance(blocks, Value):
        block = Value(blocks.array[0], blocks.dtype, blocks.kind)
        views = [(row,) for row in rows(conversion.contiguous(blocks.array))]
        return of_block(group, block, algorithm), views
    arrays = [block for block in blocks if isinstance(block, Value)]
    if arrays:
        views = [(conversion.as_bytes(conversion.contiguous(x.array)),) for x in arrays]
        return of_block(group, arrays[0], algorithm), views
    dumped = [block for block in blocks if not isinstance(block, Value)]
    lengths = [nbytes_of(parts) for parts in dumped]
    nbytes = max(lengths)
    description = struct.pack(f"<{group.size}Q", *lengths)
    chosen = group.choose("scatter", nbytes, algorithm, shm=False)
    is_free = algorithm is None and not group.is_named("scatter")
    inline = None
    if is_free and sum(lengths) <= INLINE_NBYTES:
        inline = b"".join([part for parts in dumped for part in parts])
    return Announcement(True, nbytes, chosen, description, inline), dumped
