"""Queue pairs of the simulated device."""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import pytest
import simulated_device

SLOT = 256


LARGE = 1 << 20


class End:
    """A device with memory: the first half is sent and written from, the second is written to."""

    def __init__(self, fabric: Any, nbytes: int = 2 * LARGE, **limits: int) -> None:
        self.fabric = fabric
        self.device = fabric.device(**{"receives": 128, "completions": 512, **limits})
        self.memory = np.zeros(nbytes, np.uint8)
        self.address: int = self.memory.ctypes.data
        self.region = self.device.register(self.address, nbytes, True)
        self.pair = self.device.queue_pair()
        self.other: End

    def connect(self, other: End) -> None:
        self.other = other
        self.pair.connect(other.device.peer(other.pair))

    def receive(self, number: int, nbytes: int = SLOT) -> Any:
        address = self.address + LARGE + number * SLOT
        return self.device.receive(number, address, nbytes, self.region.local_key)

    def send(
        self, work: int, data: bytes = b"", inline: bool = False, signaled: bool = True
    ) -> None:
        begin = (work % 64) * SLOT
        self.memory[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        key = 0 if inline else self.region.local_key
        self.pair.send(work, self.address + begin, len(data), key, inline, signaled)

    def write(self, work: int, nbytes: int, immediate: int | None = None, **where: int) -> None:
        into = where.get("into", self.other.address + LARGE)
        key = where.get("remote_key", self.other.region.remote_key)
        local = where.get("key", self.region.local_key)
        self.pair.write(work, self.address, nbytes, local, into, key, immediate)

    def received(self, number: int, nbytes: int) -> bytes:
        begin = LARGE + number * SLOT
        return self.memory[begin : begin + nbytes].tobytes()

    def completions(self) -> list[Any]:
        """Return all that come."""
        self.fabric.run()
        return list(self.device.poll(1000))

    def statuses(self) -> list[tuple[int, int]]:
        return [(completion.wr_id, completion.status) for completion in self.completions()]

    def is_ready(self) -> bool:
        return bool(select.select([self.device.fileno()], [], [], 0)[0])


def ends(seed: int = 0, **options: Any) -> tuple[Any, End, End]:
    """Return a fabric, and two connected ends."""
    fabric = simulated_device.Fabric(seed, **options)
    a, b = End(fabric), End(fabric)
    a.connect(b)
    b.connect(a)
    return fabric, a, b


def assert_fault(fabric: Any, text: str) -> None:
    assert len(fabric.faults) == 1
    with pytest.raises(AssertionError, match=text):
        fabric.check()
