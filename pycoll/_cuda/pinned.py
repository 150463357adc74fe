"""Page-locked host memory, from a pool: blocks that staging buffers use one after the other.

A block returns to the pool when nobody sees its staging buffer any more, and is used again when no
copy that was begun is still under way, whatever became of the call.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from typing import Any, Final

import numpy as np

from pycoll._cuda.copies import GpuCopy
from pycoll._cuda.cuda import Device
from pycoll._dtypes import Array
from pycoll.errors import TransportError

KEPT_NBYTES: Final = 512 << 20
"""Page-locked bytes that are kept for later calls; to lock them again costs more than to copy."""

_PAGE: Final = mmap.PAGESIZE
_COARSE: Final = 1 << 20  # lengths of blocks: powers of two up to this, then multiples of it


class Block:
    """Host memory; nothing but addresses until it is used."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self._memory.madvise(mmap.MADV_DONTFORK)  # a child's pages would take the GPU's place
        self.address: int = np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0]
        self._device: Device | None = None
        self._is_tried = False

    def pin(self, device: Device) -> None:
        """Page-lock it, if that can be."""
        if self._is_tried:
            return
        self._is_tried = True
        # At a limit copies go through the driver's own memory.
        with contextlib.suppress(TransportError):
            device.pin(self.address, self.nbytes)
            self._device = device

    def close(self) -> None:
        if self._device is not None:
            with contextlib.suppress(TransportError):  # after an error nothing works any more
                self._device.unpin(self.address)
        self._memory.close()


class Loan:
    """A block in use by one staging buffer; NumPy makes it the staging buffer's base.

    Attributes:
        stage: whose staging buffer it is.
        block: the block.
        copies: those that use it.
    """

    stage: Any
    __array_interface__: dict[str, object]

    def __init__(self, pool: PinnedPool, block: Block) -> None:
        self._pool = pool
        self.block = block
        self.copies: list[GpuCopy] = []

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return the block's front as an array."""
        self.__array_interface__ = {
            "version": 3,
            "data": (self.block.address, False),
            "shape": shape,
            "typestr": dtype.str,
        }
        return np.asarray(self)

    def __del__(self) -> None:
        self._pool.returned.append((self.block, self.copies))


class PinnedPool:
    """Blocks that staging buffers use one after the other.

    Attributes:
        returned: blocks whose staging buffer is gone, with the copies that may still use them.
    """

    def __init__(self) -> None:
        self.returned: deque[tuple[Block, list[GpuCopy]]] = deque()  # filled by whatever thread
        self._lock = threading.Lock()
        self._free: list[Block] = []  # what came back last is last

    def take(self, nbytes: int) -> Loan:
        """Return memory of at least so many bytes."""
        wanted = _rounded(nbytes)
        with self._lock:
            self._collect()
            for index in reversed(range(len(self._free))):
                if wanted <= self._free[index].nbytes <= 2 * wanted:
                    return Loan(self, self._free.pop(index))
        return Loan(self, Block(wanted))

    def _collect(self) -> None:
        for _ in range(len(self.returned)):
            block, copies = self.returned.popleft()
            left = [copy for copy in copies if not copy.is_over()]
            if left:
                self.returned.append((block, left))
            else:
                self._free.append(block)
        kept = sum(block.nbytes for block in self._free)
        while kept > KEPT_NBYTES:
            block = self._free.pop(0)
            kept -= block.nbytes
            block.close()


def _rounded(nbytes: int) -> int:
    if nbytes <= _COARSE:
        return max(_PAGE, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // _COARSE) * _COARSE


pool = PinnedPool()
"""The pool of this process."""
