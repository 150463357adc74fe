"""Blocks that differ in shape, through shared memory.

The core moves rows of one length. So the first round has rows of a fixed length, in which a rank
says what its block is, with room for a small one. When all blocks were small that is the whole
call; else a second round brings the others, in rows as long as the longest of them. Where that
would move much more than there is, every rank takes the way over messages, which are as long as
their blocks.

Both rounds compare the call's text, as `salt`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pycoll import arrays, blocks
from pycoll.arrays import Value
from pycoll.blocks import ALIGNMENT, aligned
from pycoll.dtypes import UINT8, Array
from pycoll.executor import new_bytes
from pycoll.native import BY_MESSAGES, KINDS, OPS, Native
from pycoll.native_calls import combine, serves
from pycoll.ops import Op
from pycoll.p2p import contiguous

BARRIER, REDUCE, REDUCE_SCATTER = map(KINDS.index, ("barrier", "reduce", "reduce_scatter"))
GATHER, ALL_GATHER = map(KINDS.index, ("gather", "all_gather"))
SCATTER, ALL_TO_ALL = map(KINDS.index, ("scatter", "all_to_all"))

SLOT_NBYTES = 8192
"""What the core exchanges at once: all rows of a rank in the first round together."""

MAX_ROW_NBYTES, MIN_ROW_NBYTES = 2048, 512
"""Length of a row of the first round, from few ranks to many."""

PADDED_NBYTES = 64 * 1024
"""Up to this length of the longest block, rows are padded to it, whatever the others are."""

MAX_PADDED_NBYTES, MAX_PADDED_RATIO = 512 * 1024, 2
"""Up to this length, only if all rows together have at most so many times the bytes of the blocks.

On a machine with 2 cores, blocks between L / 2 and 3 L / 2, an all_gatherv took, in us,

    L                    8 KiB   64 KiB   256 KiB   1 MiB
    2 ranks, padded         26       38        77     199
             messages       84      102       158     292
    4 ranks, padded        141      208       408    1800
             messages      530      696       925    1767

and an all_to_allv of 1 MiB ten times as long padded, because of all the fresh memory.
"""

_LARGE = struct.Struct("<QQ")
"""Before the head: of the sender's blocks that have no room here, the longest, and all together."""

_BY_MESSAGES = (1 << 64) - 1
"""Instead of the longest: a head has no room."""


def gatherv(native: Native, salt: int, x: Value, root: int) -> Any:
    """Gather to the root: there the list of blocks by rank; None elsewhere."""
    return _gather(native, salt, GATHER, x, root)


def all_gatherv(native: Native, salt: int, x: Value) -> Any:
    """Gather to every rank the list of blocks by rank."""
    return _gather(native, salt, ALL_GATHER, x, 0)


def _gather(native: Native, salt: int, kind: int, x: Value, root: int) -> Any:
    size, me = native.size, native.rank
    heard = memoryview(bytearray(size * MAX_ROW_NBYTES))
    # Everybody hears everything, also in a gatherv: all must know alike what comes next.
    _run(native, ALL_GATHER, root, salt, _rows([x], MAX_ROW_NBYTES), heard, MAX_ROW_NBYTES)
    padded = _padded_nbytes(heard, MAX_ROW_NBYTES, size)
    if padded < 0:
        return BY_MESSAGES
    takes = kind == ALL_GATHER or me == root
    large: memoryview | None = None
    if padded:
        if takes:
            large = new_bytes(size * padded)
        mine = _in_rows([x], padded)
        _run(native, kind, root, salt, mine, large, padded)
    return _values(heard, size, large) if takes else None


def all_to_allv(native: Native, salt: int, xs: Sequence[Value]) -> Any:
    """Send block i to rank i; returns the blocks received, by rank."""
    size = native.size
    nbytes = _row_nbytes(size)
    heard = memoryview(bytearray(size * nbytes))
    _run(native, ALL_TO_ALL, 0, salt, _rows(xs, nbytes), heard, nbytes)
    padded = _padded_nbytes(heard, nbytes, size * size)
    if padded < 0:
        return BY_MESSAGES
    large: memoryview | None = None
    if padded:
        large = new_bytes(size * padded)
        _run(native, ALL_TO_ALL, 0, salt, _in_rows(xs, padded), large, padded)
    return _values(heard, size, large)


def scatterv(native: Native, salt: int, xs: Sequence[Value] | None, root: int) -> Any:
    """Give rank i the root's block i."""
    size, core = native.size, native.core
    nbytes = _row_nbytes(size)
    if xs is not None:
        heard = _rows(xs, nbytes)
        _run(native, SCATTER, root, salt, heard, None, nbytes)
    else:
        heard = memoryview(bytearray(nbytes))
        _run(native, SCATTER, root, salt, None, heard, nbytes)
    padded = _padded_nbytes(heard[:nbytes], nbytes, size)
    if padded < 0:
        return BY_MESSAGES
    if xs is not None:
        if padded:
            core.announce(None, SCATTER, root, 0, 0, b"", _in_rows(xs, padded), None, padded)
        return blocks.copied(xs[root])
    large: memoryview | None = None
    if padded:
        large = new_bytes(padded)
        core.hear(None, SCATTER, root)
        core.receive(None, SCATTER, root, large)
    return _values(heard, 1, large)[0]


# --- the first round -----------------------------------------------------------------------

# A row has `_LARGE`, the head of the block, and the block itself if that fits.


def _row_nbytes(size: int) -> int:
    return max(MIN_ROW_NBYTES, min(MAX_ROW_NBYTES, SLOT_NBYTES // size // ALIGNMENT * ALIGNMENT))


def _rows(xs: Sequence[Value], nbytes: int) -> memoryview:
    """Return what a rank says: a row for each of its blocks."""
    rows = bytearray(len(xs) * nbytes)
    longest = total = 0
    for index, x in enumerate(xs):
        said = blocks.head(x)
        start = index * nbytes + _LARGE.size
        room = nbytes - _LARGE.size - len(said)
        if room < 0:
            longest = _BY_MESSAGES
            continue
        if x.array.nbytes <= room:
            said += x.array.tobytes()
        else:
            longest, total = max(longest, x.array.nbytes), total + x.array.nbytes
        rows[start : start + len(said)] = said
    if longest:
        for start in range(0, len(rows), nbytes):
            _LARGE.pack_into(rows, start, longest, total)
    return memoryview(rows)


def _padded_nbytes(heard: memoryview, nbytes: int, width: int) -> int:
    """Return the length of the second round's rows, which is the same on all ranks.

    0: there is no second round; -1: every rank takes the way over messages.

    Args:
        heard: rows of the first round, one of each rank that says something.
        nbytes: their length.
        width: how many rows all ranks together send in the second.
    """
    longest = total = 0
    for length, together in struct.iter_unpack(f"<QQ{nbytes - _LARGE.size}x", heard):
        longest, total = max(longest, length), total + together
    even = longest <= MAX_PADDED_NBYTES and longest * width <= MAX_PADDED_RATIO * total
    return aligned(longest) if longest <= PADDED_NBYTES or even else -1


def _values(heard: memoryview, count: int, large: memoryview | None) -> list[Value]:
    """Return the blocks: small ones from `heard`, the others as views into the rows of `large`."""
    nbytes = len(heard) // count
    padded = len(large) // count if large is not None else 0
    values = []
    for index in range(count):
        start = index * nbytes + _LARGE.size
        head = blocks.read_head(heard, start)
        start += head.start
        if start + head.nbytes <= (index + 1) * nbytes:
            value = head.view(heard, start)
            value.array = value.array.copy()
        else:
            assert large is not None
            value = head.view(large, index * padded)
        values.append(value)
    return values


# --- the second round ----------------------------------------------------------------------


def _in_rows(xs: Sequence[Value], nbytes: int) -> memoryview:
    """Return the blocks in rows of `nbytes`; one that was in the first round may be cut."""
    if len(xs) == 1 and xs[0].array.nbytes == nbytes:
        return blocks.elements(xs[0])
    rows = new_bytes(len(xs) * nbytes)
    for index, x in enumerate(xs):
        own = blocks.elements(x)[:nbytes]
        rows[index * nbytes : index * nbytes + len(own)] = own
    return rows


# --- reduce_scatterv -----------------------------------------------------------------------


def reduce_scatterv(
    native: Native, salt: int, x: Value, counts: Sequence[int], op: Op, result: Array
) -> None:
    """Reduce part r of all ranks' x into rank r's C-contiguous `result`."""
    me = native.rank
    source = cut(contiguous(x.array), counts)
    if not serves(op, x):
        _run(native, BARRIER, 0, salt, None, None, 0)
        for root, view in enumerate(source):
            part = np.frombuffer(view, x.dtype.storage).reshape(counts[root], *x.array.shape[1:])
            value = Value(part, x.dtype, "numpy")
            combine(native, "reduce", value, result if root == me else None, op, root)
        return
    code = OPS.index(op.name)
    out = arrays.as_bytes(result)
    if min(counts) == max(counts):
        everything, nbytes = arrays.as_bytes(contiguous(x.array)), len(out)
        _run(native, REDUCE_SCATTER, 0, salt, everything, out, nbytes, x.dtype.code, code)
        return
    for root, view in enumerate(source):
        into = out if root == me else None
        _run(native, REDUCE, root, salt, view, into, len(view), x.dtype.code, code)


def cut(array: Array, counts: Sequence[int]) -> list[memoryview]:
    """Return byte views of the parts of a C-contiguous array: so many rows each."""
    view = arrays.as_bytes(array)
    nbytes = len(view) // len(array) if len(array) else 0
    ends = accumulate((count * nbytes for count in counts), initial=0)
    return [view[begin:end] for begin, end in pairwise(ends)]


def _run(
    native: Native,
    kind: int,
    root: int,
    salt: int,
    x: memoryview | None,
    out: memoryview | None,
    nbytes: int,
    dtype: int = UINT8.code,
    op: int = 0,
) -> None:
    native.core.run(None, kind, dtype, op, root, (nbytes,), salt, x, out, nbytes)
