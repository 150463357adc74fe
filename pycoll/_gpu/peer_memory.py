"""Memory of other ranks' GPUs, kept open: what a rank says of its arrays, and what others open.

To open memory takes longer than to reduce a small array. So an allocation of another process stays
open until `MOST` others were used after it, or until that process has other memory in its place.
Memory that its owner frees meanwhile is not used any more, but still taken on the GPU.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from pycoll._cuda import cuda
from pycoll._cuda.cuda import Device, IpcHandle
from pycoll._gpu import gate
from pycoll.errors import TransportError

MOST: Final = 32
"""Allocations of others that are kept open, beside those in use."""

_FORM: Final = struct.Struct("<16s64s4Q")

NBYTES: Final = _FORM.size

NOTHING: Final = bytes(1 + 16 + gate.NBYTES + 2 * NBYTES)
"""What a rank tells of a reduction whose arrays must be staged; see `kernel_run.Told`."""


class Described(NamedTuple):
    """An array on a GPU, as other processes reach it.

    Attributes:
        process: a number that no other process has.
        handle: of its allocation.
        offset: where it begins there, in bytes.
        base, nbytes: of the allocation, in that process.
        buffer: the allocation's number in that process.
    """

    process: bytes
    handle: bytes
    offset: int
    base: int
    nbytes: int
    buffer: int

    def pack(self) -> bytes:
        """Return the bytes that `read` takes."""
        return _FORM.pack(*self)


def read(data: bytes) -> Described:
    return Described(*_FORM.unpack(data))


class _Exports:
    """What this process has said of its allocations, by their numbers."""

    def __init__(self) -> None:
        self.process = os.urandom(16)
        self._pid = os.getpid()
        self._handles: OrderedDict[int, IpcHandle] = OrderedDict()

    def describe(self, device: Device, pointer: int) -> Described | None:
        """Return how others reach an array; None: they cannot."""
        if self._pid != os.getpid():  # a fork's child is another process
            self.__init__()  # type: ignore[misc]
        try:
            buffer = device.buffer_id(pointer)
        except TransportError:
            return None
        handle = self._handles.get(buffer)
        if handle is None:
            handle = device.ipc_handle(pointer)
            if handle is None:
                return None
            self._handles[buffer] = handle
            if len(self._handles) > 4 * MOST:
                self._handles.popitem(last=False)
        offset = pointer - handle.base
        return Described(self.process, handle.handle, offset, handle.base, handle.nbytes, buffer)


class Mapping:
    """An allocation of another process that is open here.

    Attributes:
        described: what was said of it.
        base: its address here.
        num_users: calls that use it now.
    """

    __slots__ = ("_device", "base", "described", "num_users")

    def __init__(self, device: Device, described: Described) -> None:
        self._device = device
        self.described = described
        self.base = device.open_ipc(described.handle)
        self.num_users = 0

    def close(self) -> None:
        """Let go of it."""
        try:
            self._device.close_ipc(self.base)
        except TransportError:  # after an error nothing works any more
            return


class _Mappings:
    """The allocations of others that are open; those used last are last."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, bytes, int], Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def use(self, device: Device, described: Described) -> Mapping:
        """Return the allocation of an array, open until `leave` at least.

        Raises:
            TransportError: it cannot be reached from this GPU.
        """
        key = device.number, described.process, described.buffer
        with self._lock:
            found = self._open.get(key)
            if found is None:
                self._close_replaced(described)
                found = self._open[key] = Mapping(device, described)
            self._open.move_to_end(key)
            found.num_users += 1
            return found

    def leave(self, mapping: Mapping) -> None:
        """Say that a call uses an allocation no more."""
        with self._lock:
            mapping.num_users -= 1
            idle = [key for key, kept in self._open.items() if not kept.num_users]
            for key in idle[: max(0, len(idle) - MOST)]:
                self._open.pop(key).close()

    def close_all(self) -> None:
        """Let go of all that is not in use."""
        with self._lock:
            for key, kept in list(self._open.items()):
                if not kept.num_users:
                    self._open.pop(key).close()

    def _close_replaced(self, new: Described) -> None:
        """Let go of what its process has freed: other memory has its addresses."""
        for key, kept in list(self._open.items()):
            old = kept.described
            is_there = old.base < new.base + new.nbytes and new.base < old.base + old.nbytes
            if old.process == new.process and is_there and not kept.num_users:
                self._open.pop(key).close()


mappings = _Mappings()
"""Those of this process."""

_exports = _Exports()


def describe(device: cuda.Device, pointer: int) -> Described | None:
    """Return how others reach an array of this process; None: they cannot."""
    return _exports.describe(device, pointer)
