"""RDMA devices without hardware: what transports/verbs.py offers, for several ranks of one process.

Posting only queues: things happen when some device is polled, in an order that the seed chooses
among all that hardware may choose, and while a device sleeps: from `arm` to `disarm`, or to the
completion that wakes it. What hardware punishes only sometimes is a *fault* here, each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable

import fake_cuda
from simulated_queue_pair import Completion, Receive, SimulatedPair
from simulated_regions import DmaBufRegion, SimulatedRegion, holds, locked

from pycoll._transports import verbs
from pycoll._transports.verbs_errors import VerbsError
from pycoll._transports.verbs_queue_pair import RemoteQueuePair

POISON = 0xDB  # what a receive that is posted again finds in its memory: it is the device's now


class _Errno(Exception):
    def __init__(self, code: int) -> None:
        self.error_code = code


@locked
class Fabric:
    """What connects the devices of one test.

    Args:
        seed: of the order in which things happen.
        pace: most things that happen in one poll.
        retries: how often a message to one that does not answer is repeated.
        forgets: whether completions of a queue pair that wait to be polled vanish when it is
            closed (mlx5), those of receives too, or stay (soft-RoCE).
    """

    def __init__(
        self, seed: int = 0, *, pace: int = 8, retries: int = 20, forgets: bool = False
    ) -> None:
        self.fabric, self.lock = self, threading.RLock()
        self.random = random.Random(seed)
        self.pace, self.retries, self.forgets = pace, retries, forgets
        self.faults: list[str] = []  # what was done wrong, in words
        # "send" (of these "inline"), "write", "register", "register_dmabuf", "bytes_sent",
        # "bytes_written"
        self.counts: Counter[str] = Counter()
        self.registrations = 0  # regions that were made, of host memory or a GPU's
        self.devices: list[SimulatedDevice] = []
        self.pairs: dict[tuple[str, int], SimulatedPair] = {}  # that are not closed
        self.busy: dict[SimulatedPair, None] = {}  # a set that keeps its order
        self.refuses: Callable[[SimulatedDevice, int, int], bool] = lambda *_: False
        self._numbers: set[int] = set()

    def device(self, receives: int, completions: int, **limits: int) -> SimulatedDevice:
        """Return a new device, of another process as it were; limits: max_message, inline."""
        device = SimulatedDevice(self, receives, completions, **limits)
        self.devices.append(device)
        return device

    def step(self) -> bool:
        """Let one thing happen somewhere; False if nothing can."""
        for pair in self.random.sample(list(self.busy), len(self.busy)):
            if pair.advance():
                if not pair.queue and not pair.arrived:
                    self.busy.pop(pair, None)
                return True
        return False

    def run(self) -> None:
        """Let everything happen that can."""
        while self.step():
            pass

    def wake(self) -> None:
        """Let things happen while a device sleeps: it may be that nobody polls any more."""
        while any(device.sleeps for device in self.devices) and self.step():
            pass

    def kill(self, device: SimulatedDevice) -> None:
        """End the process of a device; what is called on its things later does nothing."""
        device.is_dead, device.sleeps, device.armed = True, False, False
        for pair in device.pairs:
            pair.close()
        for things in (device.regions, device.targets, device.posted, device.waiting):
            things.clear()

    def refuse_registration(self, predicate: Callable[[SimulatedDevice, int, int], bool]) -> None:
        """Refuse, with ENOMEM, to register what `predicate(device, address, nbytes)` is true of."""
        self.refuses = predicate

    def fail_next(self, device: SimulatedDevice, status: int) -> None:
        """Have the device's next send or write that ends fail so; it may have arrived."""
        device.failures.append(status)

    def check(self) -> None:
        """Raise AssertionError if there were faults."""
        if self.faults:
            raise AssertionError("\n".join(self.faults))

    def number(self, bits: int) -> int:
        """Return a number that nothing else has, so that none is taken for another."""
        while (number := self.random.randrange(2, 1 << bits)) in self._numbers:
            pass
        self._numbers.add(number)
        return number


@locked
class SimulatedDevice:
    """One port of one device, as `verbs.DevicePort`; `Fabric.device` makes them."""

    def __init__(self, fabric: Fabric, receives: int, completions: int,
                 max_message: int = 1 << 30, inline: int = verbs.INLINE) -> None:  # fmt: skip
        self.fabric = fabric
        self.lid, self.mtu = len(fabric.devices) + 1, 5
        self.gid = f"fe80:0000:0000:0000:0000:0000:0000:{self.lid:04x}"
        self.receives, self.completions = receives, completions
        self.max_message, self.inline = max_message, inline
        self.regions: dict[int, SimulatedRegion] = {}  # by local key
        self.targets: dict[int, SimulatedRegion] = {}  # the same by remote key
        self.posted: deque[Receive] = deque()
        self.waiting: deque[tuple[Completion, Callable[[], None]]] = deque()  # to be polled
        self.failures: deque[int] = deque()
        self.armed = self.sleeps = self.is_dead = False
        self.knows_dmabufs = self.reaches_gpus = True
        self.refuses_dmabufs = False
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def pairs(self) -> list[SimulatedPair]:
        """Its queue pairs that are not closed."""
        return [pair for pair in self.fabric.pairs.values() if pair.device is self]

    @property
    def live_regions(self) -> int:
        """How many are not closed."""
        return len(self.regions)

    def peer(self, pair: SimulatedPair) -> RemoteQueuePair:
        return RemoteQueuePair(self.gid, self.lid, self.mtu, pair.number, pair.psn)

    def queue_pair(self) -> SimulatedPair:
        pair = SimulatedPair(self)
        if not self._is_gone("no queue pair left"):
            self.fabric.pairs[self.gid, pair.number] = pair
        return pair

    def register(self, address: int, nbytes: int, writable: bool) -> SimulatedRegion:
        what = f"cannot register {nbytes} bytes"
        region = SimulatedRegion(self, address, nbytes, writable)
        if self._is_gone(what):
            return region
        if nbytes <= 0:
            raise self.refusal(what, "there are none", errno.EINVAL)
        if self.fabric.refuses(self, address, nbytes):
            raise VerbsError(what, _Errno(errno.ENOMEM))
        self.fabric.registrations += 1
        self.fabric.counts["register"] += 1
        self.regions[region.local_key] = self.targets[region.remote_key] = region
        return region

    def register_dmabuf(self, descriptor: int, offset: int, nbytes: int) -> SimulatedRegion:
        what = f"cannot register {nbytes} bytes of a dma-buf"
        if not self.knows_dmabufs:
            raise self.refusal(what, "it knows none", errno.EOPNOTSUPP)
        memory = fake_cuda.DmaBuf(descriptor)
        region = DmaBufRegion(self, memory, offset, nbytes)
        if self._is_gone(what):
            return region
        if nbytes <= 0 or offset + nbytes > memory.nbytes:
            raise self.refusal(what, f"it has {memory.nbytes}", errno.EINVAL)
        if self.refuses_dmabufs:
            raise VerbsError(what, _Errno(errno.ENOMEM))
        self.fabric.registrations += 1
        self.fabric.counts["register_dmabuf"] += 1
        self.regions[region.local_key] = self.targets[region.remote_key] = region
        return region

    def can_register_dmabuf(self) -> bool:
        return self.knows_dmabufs

    def receive(self, work: int, address: int, nbytes: int, key: int) -> Receive:
        request = Receive(work, address, nbytes, key)
        self.receive_again(request)
        return request

    def receive_again(self, request: Receive) -> None:
        what, region = "cannot post a receive", self.regions.get(request.key)
        if self._is_gone(what):
            return
        if request.is_posted:
            raise self.refusal(what, "it is posted, or not known to be used", errno.EINVAL)
        if len(self.posted) >= self.receives:
            raise self.refusal(what, "too many are posted", errno.ENOMEM)
        if holds(region, request.address, request.used, writing=True):
            ctypes.memset(request.address, POISON, request.used)
        request.is_posted, request.used = True, 0
        self.posted.append(request)
        self.fabric.wake()

    def poll(self, most: int) -> list[Completion]:
        if self._is_gone("the completion queue has failed"):
            return []
        for _ in range(self.fabric.random.randint(0, self.fabric.pace)):
            self.fabric.step()
        self.fabric.wake()
        polled = [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]
        for _, known in polled:
            known()
        return [completion for completion, _ in polled]

    def fileno(self) -> int:
        return self._descriptor

    def arm(self) -> None:
        """Have the next completion make the descriptor readable: one that waits does not."""
        if not self._is_gone("the completion queue has failed"):
            self.armed, self.sleeps = True, not self.waiting
            self.fabric.wake()

    def disarm(self) -> None:
        self.sleeps = False
        if self._descriptor < 0:
            return  # a thread that slept on it comes to it when another one has closed the device
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def complete(self, completion: Completion, known: Callable[[], None]) -> None:
        """Add a completion, and what to call when it is polled; wake who sleeps."""
        if len(self.waiting) >= self.completions:
            self.fault("completion queue overflow")
        self.waiting.append((completion, known))
        if self.armed:
            self.armed = self.sleeps = False
            os.eventfd_write(self._descriptor, 1)

    def forget(self, pair: SimulatedPair) -> None:
        """Drop the completions of a queue pair."""
        for item in [item for item in self.waiting if item[0].qp_num == pair.number]:
            self.waiting.remove(item)
            item[1]()

    def close(self) -> None:
        if self._descriptor < 0:
            return
        self.armed = self.sleeps = False
        for pair in self.pairs:
            pair.close()
        self.regions.clear()
        os.close(self._descriptor)
        self._descriptor = -1

    def fault(self, what: str) -> None:
        self.fabric.faults.append(f"device {self.lid}: {what}")

    def refusal(self, what: str, why: str, code: int) -> VerbsError:
        """Return the error of a misuse, which is a fault too."""
        self.fault(f"{what}: {why}")
        return VerbsError(what, _Errno(code))

    def _is_gone(self, what: str) -> bool:
        """Whether the process is dead; raise if the device is closed."""
        if self._descriptor < 0:
            raise self.refusal(what, "the device is closed", errno.EBADF)
        return self.is_dead
