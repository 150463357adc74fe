"""GPUDirect RDMA: arrays on a GPU that the network device reads and writes itself.

Point to point, a large array does not travel by way of its staging buffer then: the staging buffer
only names it below. Each end decides for itself, so the other one's array may be anywhere. What
cannot be reached so is staged: other transports, memory that the driver does not export, arrays
with gaps.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from pycoll._cuda import staging
from pycoll._cuda.cuda import Device
from pycoll._cuda.staging import DeviceMemory, Stage
from pycoll._runtime.engine import Engine
from pycoll._transports.base import Arrival, Operation, Reach

MIN_NBYTES: Final = 1 << 20
"""Shorter messages are staged: the memory must be registered for each. Nobody has measured where
that begins to be worth while; no transport buffers as much."""

VARIABLE: Final = "PYCOLL_GPUDIRECT"


class GpuMemory:
    """Memory on a GPU, for a transport that reaches it: an `Elsewhere`.

    Args:
        gpu: where it is.
        pointer: its address there.
        nbytes: its length.
        keep: what must live as long as this.
    """

    def __init__(self, gpu: Device, pointer: int, nbytes: int, keep: object = None) -> None:
        self.device = gpu.number
        self._gpu = gpu
        self._pointer = pointer
        self._nbytes = nbytes
        self._keep = keep

    def export(self) -> tuple[int, int] | None:
        return self._gpu.export(self._pointer, self._nbytes)

    def read(self, into: memoryview) -> None:
        self._gpu.flush()
        staging.fetch(None, self._gpu, self._pointer, into).wait()

    def write(self, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        stage = Stage(self._gpu, self._pointer, source.dtype, source.shape, (1,), None, self)
        buffer = stage.make_buffer()
        buffer[:] = source
        stage.push(None).wait()

    def another(self, nbytes: int) -> GpuMemory:
        memory = DeviceMemory(self._gpu, nbytes)
        return GpuMemory(self._gpu, memory.pointer, nbytes, memory)


def for_send(engine: Engine, stage: Stage, part: memoryview, peer: int) -> Reach | None:
    """Have an array, when it is ready, sent to the world rank `peer` out of the GPU's memory.

    Args:
        part: its staging buffer.

    None: it must be staged.
    """
    if not _is_fit(stage, len(part)) or not stage.device.direct.reads:
        return None
    place = GpuMemory(stage.device, stage.pointer, len(part), stage)
    return engine.reach(peer, part, place)


def for_receive(arrival: Arrival, stage: Stage, into: memoryview) -> Reach | None:
    """Have a message written to the GPU's memory, when the array there may be written.

    Args:
        into: as much of the array's staging buffer as the message is long.

    None: it must be staged.
    """
    if not _is_fit(stage, len(into)) or not stage.device.direct.writes:
        return None
    return arrival.reach(into, GpuMemory(stage.device, stage.pointer, len(into), stage))


def _is_fit(stage: Stage, nbytes: int) -> bool:
    return nbytes >= MIN_NBYTES and stage.is_contiguous and os.environ.get(VARIABLE) != "0"


class DirectSend(Operation):
    """A send out of memory that is reached until it has ended."""

    __slots__ = ("_reach", "_transfer")

    def __init__(self, transfer: Operation, reach: Reach) -> None:
        super().__init__()
        self._transfer = transfer
        self._reach = reach
        transfer.then(self._ended)

    @property
    def committed(self) -> bool:
        return self._transfer.committed

    def cancel(self) -> None:
        super().cancel()
        self._transfer.cancel()
        self._reach.close()

    def _ended(self, transfer: Operation) -> None:
        self._reach.close()
        self.finish(transfer.error)
