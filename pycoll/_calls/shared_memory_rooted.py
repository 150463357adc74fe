"""Broadcast and scatter through shared memory: the root announces what comes, in its slot.

What the root cannot describe there (very long dtypes), and what it offers to ranks that share its
GPU, it announces as such, and then every rank takes the way over messages. Objects to scatter
follow what announces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import lists, rooted, shared_memory_uneven
from pycoll._calls.group import SHARED_MEMORY, Group
from pycoll._calls.message_steps import Outgoing
from pycoll._calls.rooted import Announcement
from pycoll._calls.shared_memory import BY_MESSAGES, ShmComm
from pycoll._calls.shared_memory_calls import type_salt
from pycoll._selection.select import Choice
from pycoll._transports._core import KINDS
from pycoll._transports.base import Parts

BROADCAST, SCATTER = KINDS.index("broadcast"), KINDS.index("scatter")

MAX_DESCRIPTION = 512
"""Bytes of an array's description that fit into an announcement."""

_ARRAY, _OBJECT, _BY_MESSAGES, _OBJECTS = range(4)


def broadcast(
    shm: ShmComm,
    group: Group,
    outgoing: Outgoing | None,
    mine: Value | None,
    root: int,
    gpu: int | None,
    offers: bool,
) -> Any:
    """Broadcast; off root `mine` is the array to fill, if the caller passed one."""
    core = shm.core
    if outgoing is not None:
        description, parts, nbytes = outgoing.description, outgoing.parts, outgoing.nbytes
        form = _OBJECT if outgoing.is_object else _ARRAY
        if offers or len(description) > MAX_DESCRIPTION:
            form, description, parts, nbytes = _BY_MESSAGES, b"", (), 0
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        value = _value_hash(core, description) if form == _ARRAY else 0
        core.announce(BROADCAST, root, value, form, description, whole, None, nbytes)
        return BY_MESSAGES if form == _BY_MESSAGES else None
    form, nbytes, _, description = core.hear(BROADCAST, root)
    if form == _BY_MESSAGES:
        return BY_MESSAGES
    announcement = Announcement(form == _OBJECT, nbytes, Choice(SHARED_MEMORY), description)
    result, target = rooted.broadcast_target(group, root, announcement, mine, gpu)
    core.receive(BROADCAST, root, target)
    return rooted.broadcast_result(result, target, mine)


def scatter(
    shm: ShmComm, blocks: Any, root: int, gpu: int | None, out: Value | None, offers: bool
) -> Any:
    """Scatter; `blocks`, on the root, is an array (size, ...), or an array or dumped object a rank.

    Returns (Value, None); the Value is `out` if that can have it.
    """
    core = shm.core
    if blocks is not None:
        if isinstance(blocks, list) and isinstance(blocks[0], Value):
            blocks = lists.stacked(blocks)
        if not isinstance(blocks, Value):
            core.announce(SCATTER, root, 0, _OBJECTS, b"", b"", None, 0)
            return _object(shm, blocks, root)
        block = Value(blocks.array[0], blocks.dtype, blocks.kind)
        description = conversion.describe(block)
        if offers or len(description) > MAX_DESCRIPTION:
            core.announce(SCATTER, root, 0, _BY_MESSAGES, b"", b"", None, 0)
            return BY_MESSAGES
        shape, gpu = block.array.shape, blocks.gpu
        result = rooted.scatter_target(out, block.dtype, block.kind, shape, gpu)
        source, target = (
            conversion.as_bytes(conversion.contiguous(blocks.array)),
            conversion.as_bytes(result.array),
        )
        value = _value_hash(core, description)
        core.announce(SCATTER, root, value, _ARRAY, description, source, target, len(target))
        return result, None
    form, _, _, description = core.hear(SCATTER, root)
    if form == _BY_MESSAGES:
        return BY_MESSAGES
    if form == _OBJECTS:
        return _object(shm, (), root)
    dtype, kind, shape = conversion.from_description(description)
    result = rooted.scatter_target(out, dtype, kind, shape, gpu)
    core.receive(SCATTER, root, conversion.as_bytes(result.array))
    return result, None


def _object(shm: ShmComm, own: Sequence[Parts], root: int) -> Any:
    """Return (None, bytes of this rank's object) of a scatter that was announced as such."""
    got = shared_memory_uneven.run_objects(shm, "scatter", own, root)
    return BY_MESSAGES if got is BY_MESSAGES else (None, got[0])


def _value_hash(core: Any, description: bytes) -> int:
    dtype, _, shape = conversion.from_description(description)
    value: int = core.value_hash(dtype.code, shape, type_salt(dtype))
    return value
