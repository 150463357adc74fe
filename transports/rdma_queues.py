"""What the links of one rank share of its RDMA device: memory for frames, and its completions.

A `Queue` is a queue pair that knows what it has under way. Receives are shared by all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pycoll._transports.registrations import Registrations
from pycoll._transports.verbs import DevicePort
from pycoll._transports.verbs_errors import SUCCESS, VerbsError
from pycoll._transports.verbs_queue_pair import QueuePair

SLOT = 16 * 1024
"""Bytes of a frame: of the memory behind a receive."""

SEND_SLOTS = 64
"""Frames that one rank may have under way, inline ones not counted."""

BURST = 64
"""Completions that are polled at once."""

DRAIN_S = 2.0
"""Seconds that a queue pair in error may take to end what it has under way. It takes microseconds;
a device that does not do it is broken, and the queue pair is destroyed without."""

_SEQUENCE_BITS = 40
_SEQUENCES = (1 << _SEQUENCE_BITS) - 1

Done = Callable[[], object]


class FrameSlots:
    """Registered memory for frames.

    Args:
        device: that shall reach it.
        count: number of frames.
    """

    def __init__(self, device: DevicePort, count: int) -> None:
        import numpy as np  # late: only who communicates needs it

        array = np.zeros(count * SLOT, np.uint8)
        self._address: int = array.ctypes.data
        self._memory: memoryview = array.data
        self.region = device.register(self._address, len(self._memory), writable=True)

    def view(self, number: int) -> memoryview:
        return self._memory[number * SLOT : (number + 1) * SLOT]

    def address(self, number: int) -> int:
        """Return where that is."""
        return self._address + number * SLOT


class Endpoint:
    """One rank's end of all its links.

    Args:
        device: opened; it is closed with this.

    Attributes:
        device: the same.
        registrations: of payloads.
        sending: memory for frames to be sent; `free` of it.
        behind: those with frames that wait, for whatever.
        is_short: whether some frame waits for such memory.
        failing: those to whom nothing can be sent any more, and have not been told: who, and why.
        failure: why the device is of no use any more, or "".
        arrived: completions that were polled and not looked at yet, in order.
        owners: by number of its queue pair: who gets what arrives there.
    """

    def __init__(self, device: DevicePort) -> None:
        self.device = device
        self.registrations = Registrations(device.register)
        self.sending = FrameSlots(device, SEND_SLOTS)
        self.free = list(range(SEND_SLOTS))
        self.behind: set[Any] = set()
        self.is_short = False
        self.failing: deque[tuple[Any, str]] = deque()
        self.failure = ""
        self.arrived: deque[Any] = deque()
        self.owners: dict[int, Any] = {}
        self._receives: list[tuple[Any, memoryview]] = []  # work requests, and where they land
        self._queues: dict[int, Queue] = {}
        self._next_serial = 0

    def add(self, queue: Queue) -> int:
        """Return the number by which the completions of a queue are told from others'."""
        self._next_serial += 1
        self._queues[self._next_serial] = queue
        return self._next_serial

    def remove(self, serial: int) -> None:
        """Forget a queue; completions of it that are still to come are dropped."""
        self._queues.pop(serial, None)

    def post_receives(self, count: int) -> None:
        """Give the shared receives so many more.

        Raises:
            VerbsError: the device takes no more of them.
        """
        slots, device = FrameSlots(self.device, count), self.device
        for number in range(count):
            address, key = slots.address(number), slots.region.local_key
            request = device.receive(len(self._receives), address, SLOT, key)
            self._receives.append((request, slots.view(number)))

    def frame(self, completion: Any) -> memoryview:
        """Return what a completed receive has received."""
        slot: memoryview = self._receives[completion.wr_id][1]
        return slot[: completion.byte_len]

    def receive_again(self, completion: Any) -> None:
        """Post a receive that was used up again."""
        try:
            self.device.receive_again(self._receives[completion.wr_id][0])
        except VerbsError as exc:
            self.failure = str(exc)

    def is_receive(self, completion: Any) -> bool:
        """Whether a completion is that of a receive, and not of something sent."""
        return bool(completion.wr_id <= _SEQUENCES)

    def queue_of(self, completion: Any) -> Queue | None:
        """Return the queue that has sent what is completed, if it still exists."""
        return self._queues.get(completion.wr_id >> _SEQUENCE_BITS)

    def take_out(self, number: int) -> list[Any]:
        """Take the completions of what a queue pair has received out of `arrived`."""
        out: list[Any] = []
        rest: deque[Any] = deque()
        for completion in self.arrived:
            mine = (
                self.is_receive(completion)
                and completion.status == SUCCESS
                and completion.qp_num == number
            )
            (out if mine else rest).append(completion)
        self.arrived = rest
        return out

    def close(self) -> None:
        """Take back what is registered."""
        self.registrations.close()

    def poll(self) -> bool:
        """Add to `arrived` what has come since; whether there was anything."""
        if self.failure:
            return False
        try:
            completions = self.device.poll(BURST)
        except VerbsError as exc:
            self.failure = str(exc)
            return False
        self.arrived.extend(completions)
        return bool(completions)

    def arm(self) -> None:
        """Have the next completion end a sleep."""
        try:
            self.device.arm()
        except VerbsError as exc:
            self.failure = str(exc)


class Queue:
    """A queue pair, and what it has under way.

    Args:
        endpoint: that it belongs to.
        owner: gets what arrives here.

    Attributes:
        pair: the queue pair.
        owner: the same.
    """

    def __init__(self, endpoint: Endpoint, owner: Any) -> None:
        self.pair: QueuePair = endpoint.device.queue_pair()
        self.owner = owner
        self._endpoint = endpoint
        self._serial = endpoint.add(self)
        self._next = 0
        self._under_way: deque[tuple[int, Done | None]] = deque()
        endpoint.owners[self.pair.number] = owner

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, done: Done | None) -> int:
        """Return the number of a new work request; `done` is called when it has ended well."""
        self._next += 1
        self._under_way.append((self._next, done))
        return self._serial << _SEQUENCE_BITS | self._next

    def complete(self, completion: Any) -> None:
        """Take in that a work request has ended well, and so have all before it."""
        for done in self._ended(completion):
            done()

    def fail(self, completion: Any) -> None:
        """Take in that a work request has failed: what was to be called for it is not."""
        for _ in self._ended(completion):
            pass

    def _ended(self, completion: Any) -> Iterator[Done]:
        sequence = completion.wr_id & _SEQUENCES
        while self._under_way and self._under_way[0][0] <= sequence:
            done = self._under_way.popleft()[1]
            if done is not None:
                yield done

    def drain(self) -> None:
        """Put it into error, and wait until the device has done with what was under way.

        Of a queue whose sends all have completions. What has arrived until then is in
        `Endpoint.arrived`; nothing more will.
        """
        with contextlib.suppress(VerbsError):  # the device is gone
            self.pair.fail()
        deadline = time.monotonic() + DRAIN_S
        while True:
            while self._endpoint.poll():
                pass
            ended = [c.wr_id & _SEQUENCES for c in self._endpoint.arrived if self._is_own(c)]
            if not self._under_way or self._under_way[-1][0] in ended:
                return
            if self._endpoint.failure or time.monotonic() > deadline:
                return

    def _is_own(self, completion: Any) -> bool:
        return bool(completion.wr_id >> _SEQUENCE_BITS == self._serial)

    def close(self) -> list[Done]:
        """Destroy the queue pair: nothing is sent from, or written to, memory of ours any more.

        Returns what was still to be called.
        """
        self._endpoint.remove(self._serial)
        self._endpoint.owners.pop(self.pair.number, None)
        left = [done for _, done in self._under_way if done is not None]
        self._under_way.clear()
        self.pair.close()
        return left
