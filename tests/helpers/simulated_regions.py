"""Memory of the host or of a fake GPU that a simulated RDMA device may reach."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import fake_cuda

if TYPE_CHECKING:
    from simulated_device import SimulatedDevice

_Class = TypeVar("_Class", bound=type)


def locked(cls: _Class) -> _Class:
    """Have the public methods of a class take the fabric's lock: ranks may be in threads."""

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **options: Any) -> Any:
            with self.fabric.lock:
                return method(self, *args, **options)

        return run

    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(cls, name, locked(member))
    return cls


@locked
class SimulatedRegion:
    """Memory that the device may reach, as `verbs.Region`."""

    def __init__(self, device: SimulatedDevice, address: int, nbytes: int, writable: bool) -> None:
        self.device, self.fabric = device, device.fabric
        self.local_key, self.remote_key = (self.fabric.number(32) for _ in range(2))
        self.address, self.nbytes, self.writable = address, nbytes, writable

    def read(self, address: int, nbytes: int) -> bytes:
        """What is in its memory now."""
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Write to its memory."""
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        device, key = self.device, self.local_key
        if device.regions.pop(key, None) is None:
            return
        del device.targets[self.remote_key]
        for pair in device.pairs:
            if any(work.key == key and work.nbytes and not work.data for work in pair.unknown):
                device.fault("a region was closed under a work request")
        if device.pairs and any(receive.key == key for receive in device.posted):
            device.fault("a region was closed under a receive")


class DmaBufRegion(SimulatedRegion):
    """Memory of a (fake) GPU; in work requests it begins at its offset in the dma-buf."""

    def __init__(
        self, device: SimulatedDevice, memory: fake_cuda.DmaBuf, offset: int, nbytes: int
    ) -> None:
        super().__init__(device, offset, nbytes, True)
        self._memory = memory

    def read(self, address: int, nbytes: int) -> bytes:
        try:
            return self._memory.read(address, nbytes)
        except ValueError as exc:
            self.device.fault(str(exc))
            return bytes(nbytes)

    def write(self, address: int, data: bytes) -> None:
        try:
            self._memory.write(address, data)
        except ValueError as exc:
            self.device.fault(str(exc))


def holds(region: SimulatedRegion | None, address: int, nbytes: int, writing: bool) -> bool:
    """Whether memory lies in a region, and may be used so; no bytes need none."""
    if region is None or nbytes == 0:
        return nbytes == 0
    ends = address + nbytes <= region.address + region.nbytes
    return region.address <= address and ends and (region.writable or not writing)
