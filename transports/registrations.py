"""Memory that the RDMA device may reach: registered once, found again while it lives.

To register memory pins its pages, which takes as long as copying a part of it, so what is used
again is kept. That is only safe while nobody gives the pages back: freed and mapped anew, the same
addresses are other pages, and the device would go on with the old ones. So what is kept is memory
that NumPy has allocated for one array, and memory of the core's for values on their way: a weak
reference to the array, or to what stands for the core's memory, takes its registration back before
the memory is freed. Any other memory (of bytes, bytearray, a mapped file, another library) is
registered for one message only.

Such memory is registered as a whole, so that all pieces of it that travel need one registration.

Bytes in host memory may be the staging buffer of what is in a GPU's memory, which the device then
reaches itself. They remain its name: a lease of them is one of the GPU's memory. Who looks into
payloads with the processor asks `Registrations.find` first. That memory may be given back unseen,
too, so it is registered for one message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from pycoll._transports._core import Scratch
from pycoll._transports.base import Elsewhere, Reach
from pycoll._transports.verbs import Region
from pycoll._transports.verbs_errors import VerbsError

MOST_ENTRIES = 1024
"""Owners of memory whose registrations are kept."""

_CAP_IPC_LOCK = 14

WHOLE = 64 << 20
"""Bytes up to which memory is registered whole, however little of it travels."""

WHOLE_SHARE = 64
"""Larger memory is registered whole, too, if it has at most so many times the piece's length."""


class Lease:
    """The use of a registration by one message.

    Attributes:
        address: of the message's first byte.
        local_key: of the region it is in.
        remote_key: likewise.
    """

    __slots__ = ("_entry", "_region", "_view", "address", "local_key", "remote_key")

    def __init__(self, address: int, region: Region, view: memoryview, entry: Stays | None) -> None:
        self.address = address
        self.local_key = region.local_key
        self.remote_key = region.remote_key
        self._region: Region | None = region
        self._view: memoryview | None = view  # keeps the memory
        self._entry = entry

    def close(self) -> None:
        """End the use; the device may not be at work on it any more. May be called again."""
        region, self._region = self._region, None
        if region is None:
            return
        if self._entry is not None:
            self._entry.uses -= 1
        else:
            region.close()
        self._view = None


class Stays(Protocol):
    """A registration that stays when a lease ends.

    Attributes:
        uses: leases of it.
    """

    uses: int


class _Entry:
    """The registration of all that an array, or what stands for memory of the core's, owns."""

    __slots__ = ("address", "nbytes", "owner", "region", "uses")

    def __init__(self, owner: Any, address: int, nbytes: int, region: Region) -> None:
        self.owner = owner  # a weak reference
        self.address = address
        self.nbytes = nbytes
        self.region = region
        self.uses = 0


class GpuRegistration(Reach):
    """Memory of a GPU, registered for one message, which is known by its staging buffer.

    Attributes:
        uses: leases of it.
    """

    __slots__ = ("_address", "_offset", "_others", "_region", "_view", "uses")

    def __init__(
        self,
        others: list[GpuRegistration],
        view: memoryview,
        elsewhere: Elsewhere,
        region: Region,
        offset: int,
    ) -> None:
        super().__init__(elsewhere)
        self.uses = 0
        self._others = others
        self._view = view  # while it lives, nothing else has its addresses
        self._address = _address(view)
        self._region = region
        self._offset = offset

    def has(self, address: int) -> bool:
        """Whether something in host memory is in the staging buffer."""
        return 0 <= address - self._address < len(self._view)

    def lease(self, address: int, view: memoryview) -> Lease:
        """Return the use of what a view of the staging buffer stands for."""
        self.uses += 1
        return Lease(self._offset + address - self._address, self._region, view, self)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._others.remove(self)
            self._region.close()


class Registrations:
    """What one device has registered.

    Args:
        register: makes a region of (address, bytes, whether peers may write).
        most_nbytes: bytes that are kept registered without being used.

    """

    def __init__(
        self, register: Callable[[int, int, bool], Region], most_nbytes: int | None = None
    ) -> None:
        self._register = register
        self._most = default_limit() if most_nbytes is None else most_nbytes
        # By id, the latest used last. Any thread may free an array, at any moment: each change is
        # one operation, and nothing is counted beside it.
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._elsewhere: list[GpuRegistration] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept registered."""
        return sum(entry.nbytes for _, entry in self._all())

    def lease(self, view: memoryview, into: bool) -> Lease:
        """Return the registration of some memory, which is kept until the lease is closed.

        Args:
            view: bytes, at least one.
            into: whether a peer shall write to it.

        Raises:
            VerbsError: the device does not take it.
        """
        address = _address(view)
        for direct in self._elsewhere:
            if direct.has(address):
                return direct.lease(address, view)
        owner = _owner(view.obj)
        if owner is None or not self._is_worth_it(owner.nbytes, len(view)):
            return Lease(address, self._make(address, len(view), into), view, None)
        entry = self._find(owner, address, len(view))
        entry.uses += 1
        return Lease(address, entry.region, view, entry)

    def reach(
        self, view: memoryview, elsewhere: Elsewhere, region: Region, offset: int
    ) -> GpuRegistration:
        """Have bytes of a staging buffer stand for memory of another device, until that is closed.

        Args:
            view: the staging buffer.
            elsewhere: the memory.
            region: its registration, which is closed, too.
            offset: where it begins in work requests.
        """
        direct = GpuRegistration(self._elsewhere, view, elsewhere, region, offset)
        self._elsewhere.append(direct)
        return direct

    def find(self, view: memoryview) -> GpuRegistration | None:
        """Return the other device's memory that a staging buffer names; None: it is host memory."""
        if not self._elsewhere or not len(view):
            return None
        address = _address(view)
        return next((direct for direct in self._elsewhere if direct.has(address)), None)

    def close(self) -> None:
        """Take back all that is kept."""
        for number, _ in self._all():
            self._take_back(number)

    def _all(self) -> list[tuple[int, _Entry]]:
        while True:
            try:
                return list(self._entries.items())
            except RuntimeError:  # meanwhile the garbage collection has freed an array of these
                continue

    def _is_worth_it(self, whole: int, piece: int) -> bool:
        return whole <= self._most // 2 and whole <= max(WHOLE, WHOLE_SHARE * piece)

    def _find(self, owner: Any, address: int, nbytes: int) -> _Entry:
        number = id(owner)
        entry = self._entries.get(number)
        if entry is not None:
            end = entry.address + entry.nbytes
            if entry.owner() is owner and entry.address <= address <= end - nbytes:
                self._entries.move_to_end(number)
                return entry
            self._take_back(number)  # it was resized
        begin, whole = _extent(owner)
        self._make_room(whole)
        # Never for reading only, which may leave the device with the page of zeros that all
        # untouched memory shares, when the array gets pages of its own.
        region = self._make(begin, whole, True)
        reference = weakref.ref(owner, lambda _: self._take_back(number))
        entry = self._entries[number] = _Entry(reference, begin, whole, region)
        return entry

    def _make(self, address: int, nbytes: int, into: bool) -> Region:
        try:
            return self._register(address, nbytes, into)
        except VerbsError as exc:
            if exc.code != errno.ENOMEM or not self._make_room(self._most):
                raise
            return self._register(address, nbytes, into)

    def _make_room(self, nbytes: int) -> bool:
        """Take back what was used longest ago, for `nbytes` more; returns whether there was any."""
        left, worked = self.nbytes, False
        for number, entry in self._all():
            if left + nbytes <= self._most and len(self._entries) < MOST_ENTRIES:
                break
            if not entry.uses:
                self._take_back(number)
                left -= entry.nbytes
                worked = True
        return worked

    def _take_back(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            entry.region.close()


def default_limit() -> int:
    """Return how many bytes may be kept registered.

    A quarter of the memory; no more than half of what the process may lock (ulimit -l).
    """
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    locked = locked_limit()
    return most if locked is None else min(most, locked // 2)


def locked_limit() -> int | None:
    """Return the bytes that this process may lock; None: any number."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY or _may_lock_more() else soft


def _may_lock_more() -> bool:
    """Whether the limit is not for this process: root's, unless in a container, for example."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _address(view: memoryview) -> int:
    import numpy as np  # late: a barrier does not need it

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _extent(owner: Any) -> tuple[int, int]:
    """Return where what belongs to an owner begins, and its length in bytes."""
    address = owner.address if isinstance(owner, Scratch) else owner.ctypes.data
    return int(address), int(owner.nbytes)


def _owner(exporter: object) -> Any | None:
    """Return the NumPy array, or the `Scratch`, that has the memory of `exporter`, if one has."""
    exporter = getattr(exporter, "keeper", exporter)  # of a `_core.Piece`
    if isinstance(exporter, Scratch):
        return exporter
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(exporter, memoryview):
        exporter = exporter.obj
    while isinstance(exporter, numpy.ndarray):
        if exporter.base is None:
            return exporter if exporter.flags.owndata else None
        exporter = exporter.base
    return None
