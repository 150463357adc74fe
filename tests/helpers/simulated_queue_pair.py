"""Queue pairs of simulated RDMA devices: work requests, receives, and their completions.

A work request on its way: queued, moving (a large write in several pieces), arrived (the peer may
have its completion), acknowledged (its own completion comes), known (that, or one of a later work
request of the same queue pair, has been polled). Only then its memory and its place are free.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from simulated_regions import DmaBufRegion, SimulatedRegion, holds, locked

from pycoll._transports import verbs
from pycoll._transports.verbs_errors import FLUSHED, RETRIES_EXCEEDED, SUCCESS
from pycoll._transports.verbs_queue_pair import RemoteQueuePair

if TYPE_CHECKING:
    from simulated_device import SimulatedDevice

RECEIVED = 128  # opcode of the completion of a receive that a send has used up (IBV_WC_RECV)
TOO_LONG, LOCAL_PROTECTION, REMOTE_INVALID, REMOTE_ACCESS, REMOTE_OPERATION = 1, 4, 9, 10, 11
PACKET = 4096  # bytes that are written in one piece
MOVING, WAITING = -1, -2  # instead of a status: there is more to do; there is no receive


class Completion(NamedTuple):
    """What `poll` returns; None is what hardware leaves undefined."""

    wr_id: int
    status: int
    qp_num: int
    opcode: int | None = None
    byte_len: int | None = None
    imm_data: int | None = None


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


@locked
class SimulatedPair:
    """One end of a reliable connection, as `verbs_queue_pair.QueuePair`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.fabric, self.inline = device, device.fabric, device.inline
        self.number = self.fabric.number(24)
        self.psn = self.fabric.random.getrandbits(24)
        self.state = "new"  # then "connected", "broken", "closed"
        self.peer: RemoteQueuePair | None = None
        self.queue: deque[_Work] = deque()  # has not arrived
        self.arrived: deque[_Work] = deque()  # is not acknowledged
        self.unknown: deque[_Work] = deque()  # is not known to be complete: these two, and more
        self._status = FLUSHED

    def connect(self, peer: RemoteQueuePair) -> None:
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
        if not (work.data or holds(region, work.address, work.nbytes, writing=False)):
            return LOCAL_PROTECTION
        if other is None or other.state != "connected" or other.peer != device.peer(self):
            work.tries += 1
            return MOVING if work.tries <= self.fabric.retries else RETRIES_EXCEEDED
        if device.failures and not self.arrived and chance.random() < 0.5:
            return device.failures.popleft()
        if work.into is not None:
            target = other.device.targets.get(work.remote_key)
            if not holds(target, work.into, work.nbytes, writing=True):
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
            elif not holds(region, receive.address, work.nbytes, writing=True):
                here, theirs = LOCAL_PROTECTION, REMOTE_OPERATION
            else:
                ctypes.memmove(receive.address, work.data or work.address, work.nbytes)
                receive.used = work.nbytes
        told = (opcode, work.nbytes, work.immediate) if here == SUCCESS else ()
        device.complete(Completion(receive.number, here, self.number, *told), receive.known)
        if theirs != SUCCESS:
            self.break_off(FLUSHED)
        return theirs
