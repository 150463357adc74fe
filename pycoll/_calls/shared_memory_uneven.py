"""Blocks that differ in shape, through shared memory.

In the first round a rank says what its blocks are, in rows of a fixed length, with room for small
ones. When all blocks were small that is the whole call; else each rank reads, in a second round,
what it needs of the others' memory. Where ranks cannot do that, all take the way over messages.

Both rounds compare the call's text, as `salt`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pycoll._arrays import conversion
from pycoll._arrays.operators import Op
from pycoll._arrays.value import Value
from pycoll._calls import blocks
from pycoll._calls.blocks import ALIGNMENT
from pycoll._calls.numbering import KINDS, OPS
from pycoll._calls.shared_memory import BY_MESSAGES, ShmComm
from pycoll._calls.shared_memory_calls import combine, serves
from pycoll._calls.uneven_out import BlockTargets
from pycoll._dtypes import UINT8, Array

BARRIER = KINDS.index("barrier")
GATHER, ALL_GATHER = map(KINDS.index, ("gather", "all_gather"))
SCATTER, ALL_TO_ALL = map(KINDS.index, ("scatter", "all_to_all"))

SLOT_NBYTES = 8192
"""What the core exchanges at once: all rows of a rank in the first round together."""

MAX_ROW_NBYTES, MIN_ROW_NBYTES = 2048, 512
"""Length of a row of the first round, from few ranks to many."""

_FIRST = struct.Struct("<QQ")
"""Before the head: what the sender has left to say, and the address of the block."""

_NOTHING, _LARGE_BLOCKS, _LONG_HEADS = range(3)


# `heard` is what the others have said, if the first round is done
# (_core/python/exchange/shared_uneven.c); else None.


def gather(
    shm: ShmComm,
    salt: int,
    kind: int,
    x: Value,
    root: int,
    targets: BlockTargets,
    heard: memoryview | None,
) -> Any:
    """Gather to the root (`GATHER`) or every rank (`ALL_GATHER`) the list of blocks by rank."""
    x, size, me = _contiguous(x), shm.size, shm.rank
    if heard is None:
        heard = memoryview(bytearray(size * MAX_ROW_NBYTES))
        # Everybody hears everything, also in a gatherv: all must know alike what comes next.
        _run(shm, ALL_GATHER, root, salt, _rows([x], MAX_ROW_NBYTES), heard, MAX_ROW_NBYTES)
    sources = range(size) if kind == ALL_GATHER or me == root else ()
    got = _blocks(shm, salt, root, heard, MAX_ROW_NBYTES, {me: x}, sources, targets)
    return got if got is BY_MESSAGES or sources else None


def all_to_allv(
    shm: ShmComm, salt: int, xs: Sequence[Value], targets: BlockTargets, heard: memoryview | None
) -> Any:
    """Send block i to rank i; returns the blocks received, by rank."""
    xs, size, me = [_contiguous(x) for x in xs], shm.size, shm.rank
    nbytes = _row_nbytes(size)
    if heard is None:
        heard = memoryview(bytearray(size * nbytes))
        _run(shm, ALL_TO_ALL, 0, salt, _rows(xs, nbytes), heard, nbytes)
    return _blocks(shm, salt, 0, heard, nbytes, {me: xs[me]}, range(size), targets)


def scatterv(
    shm: ShmComm,
    salt: int,
    xs: Sequence[Value] | None,
    root: int,
    target: BlockTargets,
    heard: memoryview | None,
) -> Any:
    """Give rank i the root's block i."""
    nbytes = _row_nbytes(shm.size)
    if xs is not None:
        xs = [_contiguous(x) for x in xs]
        if heard is None:
            heard = _rows(xs, nbytes)
            _run(shm, SCATTER, root, salt, heard, None, nbytes)
        done = _blocks(shm, salt, root, heard[:nbytes], nbytes, {}, (), target)
        return done if done is BY_MESSAGES else target.copied(0, xs[root])
    if heard is None:
        heard = memoryview(bytearray(nbytes))
        _run(shm, SCATTER, root, salt, None, heard, nbytes)
    got = _blocks(shm, salt, root, heard, nbytes, {}, (root,), target)
    return got if got is BY_MESSAGES else got[0]


def _contiguous(x: Value) -> Value:
    array = conversion.contiguous(x.array)
    return x if array is x.array else Value(array, x.dtype, x.kind)


# --- the two rounds ------------------------------------------------------------------------

# A row has `_FIRST`, the head of the block, and the block itself if that fits.


def _row_nbytes(size: int) -> int:
    return max(MIN_ROW_NBYTES, min(MAX_ROW_NBYTES, SLOT_NBYTES // size // ALIGNMENT * ALIGNMENT))


def _rows(xs: Sequence[Value], nbytes: int) -> memoryview:
    """Return what a rank says: a row for each of its blocks."""
    rows = bytearray(len(xs) * nbytes)
    left = _NOTHING
    addresses = [0] * len(xs)
    for index, x in enumerate(xs):
        said = blocks.head(x)
        start = index * nbytes + _FIRST.size
        room = nbytes - _FIRST.size - len(said)
        if room < 0:
            left = _LONG_HEADS
            continue
        if x.array.nbytes <= room:
            said += x.array.tobytes()
        else:
            left = max(left, _LARGE_BLOCKS)
            addresses[index] = x.array.__array_interface__["data"][0]
        rows[start : start + len(said)] = said
    if left:
        for index, address in enumerate(addresses):
            _FIRST.pack_into(rows, index * nbytes, left, address)
    return memoryview(rows)


def _blocks(
    shm: ShmComm,
    salt: int,
    root: int,
    heard: memoryview,
    nbytes: int,
    own: dict[int, Value],
    sources: Sequence[int],
    targets: BlockTargets,
) -> Any:
    """Return the blocks of the first round's rows, one from each source.

    All ranks come here: what has not come is read from the sources' memory, and nobody leaves
    before all have read. BY_MESSAGES: that cannot be.
    """
    said = list(struct.iter_unpack(f"<QQ{nbytes - _FIRST.size}x", heard))
    left = max(left for left, _ in said)
    if left == _LONG_HEADS or (left and not shm.core.direct):
        return BY_MESSAGES
    values, pieces = [], []
    starts = [index * nbytes + _FIRST.size for index in range(len(sources))]
    heads = [blocks.read_head(heard, start) for start in starts]
    places = targets.places(heads) if sources else []
    for index, (source, head) in enumerate(zip(sources, heads, strict=True)):
        start = starts[index] + head.start
        if start + head.nbytes <= (index + 1) * nbytes:
            value = head.view(heard, start)
            value.array = value.array.copy()
        elif source in own:
            value = targets.copied(index, own[source])
        else:
            value = places[index] or head.fresh()
            pieces.append((source, said[index][1], conversion.as_bytes(value.array)))
        values.append(value)
    if left:
        shm.core.fetch(None, root, salt, pieces)
    return values


# --- reduce_scatterv -----------------------------------------------------------------------


def reduce_scatterv(
    shm: ShmComm, salt: int, x: Value, counts: list[int], op: Op, result: Array
) -> None:
    """Reduce part r of all ranks' x into rank r's C-contiguous `result`."""
    array = conversion.operand(x.array)
    if serves(op, x.dtype):
        source, out = conversion.as_bytes(array), conversion.as_bytes(result)
        code = OPS.index(op.name)
        shm.core.reduce_rows(x.dtype.code, code, array.shape, counts, source, out)
        return
    _run(shm, BARRIER, 0, salt, None, None, 0)
    for root, view in enumerate(cut(array, counts)):
        part = np.frombuffer(view, x.dtype.storage).reshape(counts[root], *array.shape[1:])
        value = Value(part, x.dtype, x.kind)
        combine(shm, "reduce", value, result if root == shm.rank else None, op, root)


def cut(array: Array, counts: Sequence[int]) -> list[memoryview]:
    """Return byte views of the parts of a C-contiguous array: so many rows each."""
    view = conversion.as_bytes(array)
    nbytes = len(view) // len(array) if len(array) else 0
    ends = accumulate((count * nbytes for count in counts), initial=0)
    return [view[begin:end] for begin, end in pairwise(ends)]


def _run(
    shm: ShmComm,
    kind: int,
    root: int,
    salt: int,
    x: memoryview | None,
    out: memoryview | None,
    nbytes: int,
) -> None:
    shm.core.run(None, kind, UINT8.code, 0, root, (nbytes,), salt, x, out, nbytes)
