"""A block of a gatherv, or of its like, as bytes: what it is, then its elements.

    length         of the description (4 bytes, little-endian)
    description    of the array (`conversion.describe`)
    zeros          up to a multiple of `ALIGNMENT`
    elements

So a receiver that knows nothing of a block learns it, and has it, with one message, and the array
it gets is a view into the bytes that came.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import numpy as np

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._dtypes import DType
from pycoll._transports.base import Parts

ALIGNMENT = 64
"""Elements begin at a multiple of this many bytes: no dtype needs more, and cache lines like it."""

_LENGTH = struct.Struct("<I")

_NBYTES = struct.Struct("<Q")


class Head(NamedTuple):
    """What a block is.

    Attributes:
        dtype: of its elements.
        kind: of the array to make here: the sender's, or numpy where its library is missing.
        shape: of the array.
        start: bytes before the elements.
        nbytes: bytes of the elements.
    """

    dtype: DType
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def view(self, data: memoryview, offset: int) -> Value:
        """Return the array whose elements lie in `data` from `offset` on; no copy."""
        array = np.ndarray(self.shape, self.dtype.storage, data, offset)
        return Value(array, self.dtype, self.kind)

    def fresh(self) -> Value:
        """Return host memory for the array, whatever its kind."""
        return Value(np.empty(self.shape, self.dtype.storage), self.dtype, self.kind)


def head(x: Value) -> bytes:
    """Return what goes before the elements of `x`."""
    return _head(x.dtype, x.kind, x.array.shape)


def object_head(nbytes: int) -> bytes:
    """Return what goes before the bytes of a pickled object."""
    return (_LENGTH.pack(_NBYTES.size) + _NBYTES.pack(nbytes)).ljust(ALIGNMENT, b"\0")


def object_nbytes(data: bytes) -> int:
    """Read what `object_head` wrote."""
    (nbytes,) = _NBYTES.unpack_from(data, _LENGTH.size)
    return int(nbytes)


def elements(x: Value) -> memoryview:
    """Return the elements of `x`: its own memory if that is C-contiguous, else a copy."""
    return conversion.as_bytes(conversion.contiguous(x.array))


def pack(x: Value) -> Parts:
    """Return a block as a message: its head and its elements."""
    return memoryview(head(x)), elements(x)


def read_head(data: memoryview, offset: int = 0) -> Head:
    """Read what `head` wrote, at `offset`.

    Raises:
        ValueError: it is damaged.
        TypeError: the block is of a type that only ml_dtypes has, and that is missing here.
    """
    (length,) = _LENGTH.unpack_from(data, offset)
    offset += _LENGTH.size
    return _understood(data[offset : offset + length].tobytes())


def unpack(data: memoryview) -> Value:
    """Return the block in a message; it is a view into `data`."""
    block = read_head(data)
    return block.view(data, block.start)


def copied(x: Value) -> Value:
    """Return a block of this rank's own as its caller gets it: never the memory passed in."""
    own = conversion.fresh(x.dtype, x.kind, x.array.shape, x.gpu)
    own.array[...] = x.array
    return own


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# Programs send the same shapes over and over: both ways are looked up.


@functools.lru_cache(256)
def _head(dtype: DType, kind: str, shape: tuple[int, ...]) -> bytes:
    nowhere = np.broadcast_to(np.empty((), dtype.storage), shape)
    description = conversion.describe(Value(nowhere, dtype, kind))
    unpadded = _LENGTH.pack(len(description)) + description
    return unpadded.ljust(aligned(len(unpadded)), b"\0")


@functools.lru_cache(256)
def _understood(description: bytes) -> Head:
    dtype, kind, shape = conversion.from_description(description)
    start = aligned(_LENGTH.size + len(description))
    nbytes = dtype.itemsize * math.prod(shape)
    return Head(dtype, conversion.fresh(dtype, kind, (0,)).kind, shape, start, nbytes)
