"""RDMA devices without hardware: what transports/verbs.py offers, for several ranks of one process.

Posting only queues: things happen when some device is polled, in an order that the seed chooses
among all that hardware may choose, and while a device sleeps: from `arm` to `disarm`, or to the
completion that wakes it. What hardware punishes only sometimes is a *fault* here, each time.

A work request on its way: queued, moving (a large write in several pieces), arrived (the peer may
have its completion), acknowledged (its own completion comes), known (that, or one of a later work
request of the same queue pair, has been polled). Only then its memory and its place are free.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import inspect
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import fake_cuda

from pycoll._transports import verbs
from pycoll._transports.verbs import FLUSHED, SUCCESS, Peer, VerbsError

RECEIVED = 128  # opcode of the completion of a receive that a send has used up (IBV_WC_RECV)
TOO_LONG, LOCAL_PROTECTION, REMOTE_INVALID, REMOTE_ACCESS, REMOTE_OPERATION = 1, 4, 9, 10, 11
PACKET = 4096  # bytes that are written in one piece
POISON = 0xDB  # what a receive that is posted again finds in its memory: it is the device's now
MOVING, WAITING = -1, -2  # instead of a status: there is more to do; there is no receive

_Class = TypeVar("_Class", bound=type)


class Completion(NamedTuple):
    """What `poll` returns; None is what hardware leaves undefined."""

    wr_id: int
    status: int
    qp_num: int
    opcode: int | None = None
    byte_len: int | None = None
    imm_data: int | None = None


class _Errno(Exception):
    def __init__(self, code: int) -> None:
        self.error_code = code


@dataclass(eq=False)
class _Work:
    """A send (`into` is None) or a write."""

    number: int
    address: int
    nbytes: int
    key: int
    signaled: bool = True
    data: bytes | None = None  # of an inline send
    into: int | None = None
    remote_key: int = 0
    immediate: int | None = None
    written: int = 0
    tries: int = 0


@dataclass(eq=False)
class Receive:
    """A receive. It is the device's from being posted until its completion has been polled."""

    number: int
    address: int
    nbytes: int
    key: int
    is_posted: bool = False
    used: int = 0

    def known(self) -> None:
        self.is_posted = False


def _locked(cls: _Class) -> _Class:
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


@_locked
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


@_locked
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


def _holds(region: SimulatedRegion | None, address: int, nbytes: int, writing: bool) -> bool:
    """Whether memory lies in a region, and may be used so; no bytes need none."""
    if region is None or nbytes == 0:
        return nbytes == 0
    ends = address + nbytes <= region.address + region.nbytes
    return region.address <= address and ends and (region.writable or not writing)


@_locked
class SimulatedPair:
    """One end of a reliable connection, as `verbs.QueuePair`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.fabric, self.inline = device, device.fabric, device.inline
        self.number = self.fabric.number(24)
        self.psn = self.fabric.random.getrandbits(24)
        self.state = "new"  # then "connected", "broken", "closed"
        self.peer: Peer | None = None
        self.queue: deque[_Work] = deque()  # has not arrived
        self.arrived: deque[_Work] = deque()  # is not acknowledged
        self.unknown: deque[_Work] = deque()  # is not known to be complete: these two, and more
        self._status = FLUSHED

    def connect(self, peer: Peer) -> None:
        if self.device.is_dead:
            return
        if self.state != "new":
            raise self.device.refusal("no connection", f"the pair is {self.state}", errno.EINVAL)
        other = self.fabric.pairs.get((peer.gid, peer.number))
        if other is not None and other.device.peer(other) != peer:
            self.device.fault("connected with a wrong psn, lid or mtu")
        if other is not None and other.peer not in (None, self.device.peer(self)):
            self.device.fault("connected with one that is connected with another")
        self.peer, self.state = peer, "connected"

    def send(self, work: int, address: int, nbytes: int, key: int,
             inline: bool, signaled: bool) -> None:  # fmt: skip
        data = ctypes.string_at(address, nbytes) if inline else None
        self._post("send", _Work(work, address, nbytes, key, signaled, data))

    def write(self, work: int, address: int, nbytes: int, key: int,
              into: int, remote_key: int, immediate: int | None) -> None:  # fmt: skip
        to = (into, remote_key, immediate)
        self._post("write", _Work(work, address, nbytes, key, True, None, *to))

    def fail(self) -> None:
        if self.state == "closed" and not self.device.is_dead:
            raise self.device.refusal("cannot stop a queue pair", "it is closed", errno.EINVAL)
        self.break_off(FLUSHED)
        self.fabric.wake()

    def close(self) -> None:
        self.state = "closed"
        self.fabric.pairs.pop((self.device.gid, self.number), None)
        self.fabric.busy.pop(self, None)
        if self.fabric.forgets:
            self.device.forget(self)
        self.fabric.wake()

    def _post(self, verb: str, work: _Work) -> None:
        device, fabric, what, other = self.device, self.fabric, f"cannot {verb}", self._other()
        if device.is_dead:
            return
        if self.state in ("new", "closed"):
            raise device.refusal(what, f"the queue pair is {self.state}", errno.EINVAL)
        if len(self.unknown) >= verbs.MAX_SENDS:
            raise device.refusal(what, "too many work requests under way", errno.ENOMEM)
        if work.nbytes > (device.max_message if work.data is None else self.inline):
            raise device.refusal(what, f"{work.nbytes} bytes are too many", errno.EINVAL)
        if other is not None and other.state == "new":
            device.fault("sent before the other end has connected")
        fabric.counts[verb] += 1
        fabric.counts["inline"] += work.data is not None
        fabric.counts["bytes_sent" if verb == "send" else "bytes_written"] += work.nbytes
        self.queue.append(work)
        self.unknown.append(work)
        fabric.busy[self] = None
        fabric.wake()

    # --- what happens ----------------------------------------------------------------------

    def advance(self) -> bool:
        """Let one thing happen; False if nothing can, for want of a receive."""
        if self.state == "broken":
            self._complete((self.arrived or self.queue).popleft(), self._status)
            self._status = FLUSHED
            return True
        chance = self.fabric.random
        if self.arrived and (not self.queue or chance.random() < 0.5):
            self._acknowledge(chance.randint(1, len(self.arrived)))
            return True
        status = self._move(self.queue[0])
        if status == SUCCESS:
            self.arrived.append(self.queue.popleft())
        elif status == WAITING and not self.arrived:
            return False
        elif status != MOVING:
            self._acknowledge(len(self.arrived))
            if status != WAITING:
                self.break_off(status)
        return True

    def break_off(self, status: int) -> None:
        """Put it into error; the first work request that is under way ends with `status`."""
        if self.state in ("new", "connected"):
            self.state, self._status = "broken", status

    def known(self, work: _Work) -> None:
        """Learn that a completion was polled: all up to this work request are complete."""
        while self.unknown and self.unknown.popleft() is not work:
            pass

    def _other(self) -> SimulatedPair | None:
        peer = self.peer
        return None if peer is None else self.fabric.pairs.get((peer.gid, peer.number))

    def _complete(self, work: _Work, status: int) -> None:
        completion = Completion(work.number, status, self.number)
        self.device.complete(completion, functools.partial(self.known, work))

    def _acknowledge(self, count: int) -> None:
        for _ in range(count):
            if self.device.failures:
                return self.break_off(self.device.failures.popleft())
            work = self.arrived.popleft()
            if work.signaled:
                self._complete(work, SUCCESS)
        return None

    def _move(self, work: _Work) -> int:
        """Bring a work request on; returns its status, MOVING or WAITING."""
        device, other, chance = self.device, self._other(), self.fabric.random
        region = device.regions.get(work.key)
        if not (work.data or _holds(region, work.address, work.nbytes, writing=False)):
            return LOCAL_PROTECTION
        if other is None or other.state != "connected" or other.peer != device.peer(self):
            work.tries += 1
            return MOVING if work.tries <= self.fabric.retries else verbs.RETRIES_EXCEEDED
        if device.failures and not self.arrived and chance.random() < 0.5:
            return device.failures.popleft()
        if work.into is not None:
            target = other.device.targets.get(work.remote_key)
            if not _holds(target, work.into, work.nbytes, writing=True):
                other.break_off(FLUSHED)
                return REMOTE_ACCESS
            for side, status in ((region, LOCAL_PROTECTION), (target, REMOTE_ACCESS)):
                if isinstance(side, DmaBufRegion) and not side.device.reaches_gpus:
                    return status
            if work.written < work.nbytes:
                assert region is not None
                assert target is not None
                self._write_piece(work, region, target, work.into)
                return MOVING
            if work.immediate is None:
                return SUCCESS
        return other._take(work)

    def _write_piece(
        self, work: _Work, source: SimulatedRegion, target: SimulatedRegion, into: int
    ) -> None:
        chance, done, left = self.fabric.random, work.written, work.nbytes - work.written
        piece = left if left <= PACKET or chance.random() < 0.5 else chance.randrange(1, left)
        target.write(into + done, source.read(work.address + done, piece))
        work.written += piece

    def _take(self, work: _Work) -> int:
        """Use up a receive, as the end that a message comes to; returns the sender's status."""
        device = self.device
        if not device.posted:
            if not work.tries:
                self.device.fault("a message has met no receive")
            work.tries += 1
            return WAITING
        receive = device.posted.popleft()
        here, theirs, opcode = SUCCESS, SUCCESS, verbs.RECEIVED_WRITE
        if work.into is None:
            opcode, region = RECEIVED, device.regions.get(receive.key)
            if work.nbytes > receive.nbytes:
                here, theirs = TOO_LONG, REMOTE_INVALID
            elif not _holds(region, receive.address, work.nbytes, writing=True):
                here, theirs = LOCAL_PROTECTION, REMOTE_OPERATION
            else:
                ctypes.memmove(receive.address, work.data or work.address, work.nbytes)
                receive.used = work.nbytes
        told = (opcode, work.nbytes, work.immediate) if here == SUCCESS else ()
        device.complete(Completion(receive.number, here, self.number, *told), receive.known)
        if theirs != SUCCESS:
            self.break_off(FLUSHED)
        return theirs


@_locked
class SimulatedDevice:
    """One port of one device, as `verbs.Device`; `Fabric.device` makes them."""

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

    def peer(self, pair: SimulatedPair) -> Peer:
        return Peer(self.gid, self.lid, self.mtu, pair.number, pair.psn)

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
        if _holds(region, request.address, request.used, writing=True):
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
