"""The lane: RDMA writes into the peer's memory, for what is large.

A lane can be thrown away. When an end destroys its queue pair, nothing can be written any more to
memory that is the user's again; both ends then make a new lane, whose number is its epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pycoll._transports.base import Parts, nbytes_of
from pycoll._transports.rdma_frames import Frames
from pycoll._transports.rdma_queues import SEND_SLOTS, SLOT, Endpoint, Queue
from pycoll._transports.verbs_errors import VerbsError

FRAGMENT = 1024 * 1024
"""Bytes of one write."""

MOST_WRITES = 16
"""Writes that a lane may have under way."""

WORTH = 64 * 1024
"""Bytes that the parts of a payload must have on average, if it has many: each has to be registered
and written by itself, and smaller ones are better copied into frames."""

MANY = 16
"""Parts."""


def is_worth_writing(parts: Parts) -> bool:
    """Whether a payload shall be written, not copied into frames."""
    return len(parts) <= MANY or nbytes_of(parts) >= len(parts) * WORTH


class Source(Protocol):
    """Memory that may be sent from."""

    address: int
    local_key: int

    def close(self) -> None:
        """Say that it is not needed any more."""


class _Copied:
    """A small part of a payload, copied to memory that is registered anyway."""

    __slots__ = ("_endpoint", "_slot", "address", "local_key")

    def __init__(self, endpoint: Endpoint, part: memoryview) -> None:
        self._endpoint = endpoint
        self._slot = endpoint.free.pop()
        endpoint.sending.view(self._slot)[: len(part)] = part
        self.address = endpoint.sending.address(self._slot)
        self.local_key = endpoint.sending.region.local_key

    def close(self) -> None:
        self._endpoint.free.append(self._slot)


class Write:
    """A payload on its way over a lane.

    Args:
        endpoint: of this rank.
        number_id: the message's.
        parts: the payload, not empty.
        into: address of the first byte at the peer.
        remote_key: of the region there.

    Attributes:
        id: the message's.
        remote_key: of the region there.
        under_way: writes that have not ended.

    Raises:
        VerbsError: a part cannot be registered.
    """

    __slots__ = ("_address", "_fragment", "_into", "_left", "_nbytes", "_part", "_sources", "id",
                 "remote_key", "under_way")  # fmt: skip

    def __init__(
        self,
        endpoint: Endpoint,
        number_id: int,
        parts: Parts,
        into: int,
        remote_key: int,
    ) -> None:
        self.id = number_id
        self.remote_key = remote_key
        self.under_way = 0
        self._sources: list[tuple[Source, int]] = []
        self._fragment = min(FRAGMENT, endpoint.device.max_message)
        self._into = into
        self._part = self._address = self._nbytes = 0
        self._left = sum(map(len, parts))
        try:
            for part in parts:
                if part:
                    self._sources.append((_source(endpoint, part), len(part)))
        except VerbsError:
            self.close()
            raise

    @property
    def is_posted(self) -> bool:
        """Whether nothing is left to be posted."""
        return self._left == 0

    @property
    def is_last(self) -> bool:
        """Whether the next piece is the last."""
        nbytes = self._nbytes or self._sources[self._part][1]
        return min(nbytes, self._fragment) == self._left

    def next(self) -> tuple[int, int, int, int]:
        """Take the next piece: its address, its length, the key of its memory, where it goes."""
        if self._nbytes == 0:
            source, self._nbytes = self._sources[self._part]
            self._address = source.address
            self._part += 1
        nbytes = min(self._nbytes, self._fragment)
        key = self._sources[self._part - 1][0].local_key
        piece = (self._address, nbytes, key, self._into)
        self._address += nbytes
        self._into += nbytes
        self._nbytes -= nbytes
        self._left -= nbytes
        return piece

    def close(self) -> None:
        """End the use of the payload's memory."""
        for source, _ in self._sources:
            source.close()
        self._sources.clear()


def _source(endpoint: Endpoint, part: memoryview) -> Source:
    if len(part) <= SLOT and len(endpoint.free) > SEND_SLOTS // 2:
        return _Copied(endpoint, part)
    return endpoint.registrations.lease(part, into=False)


class Lane:
    """One end of a lane.

    Args:
        endpoint: of this rank.
        owner: gets what arrives.
        epoch: number of the lane, from 1.
        written: called with a payload's id when the peer has it all.

    Attributes:
        queue: the queue pair, and what it has under way.
        epoch: the same.
        is_connected: whether the peer may write.
        is_ready: whether we may: the peer's end is connected.
        last_writes: how many that use up a receive were posted.
    """

    def __init__(
        self, endpoint: Endpoint, owner: Any, epoch: int, written: Callable[[int], None]
    ) -> None:
        self.queue = Queue(endpoint, owner)
        self.epoch = epoch
        self.is_connected = False
        self.is_ready = False
        self.last_writes = 0
        self._written = written
        self._writes: deque[Write] = deque()

    def add(self, write: Write) -> None:
        """Have a payload written, after those before it."""
        self._writes.append(write)

    def discard(self, write: Write) -> None:
        """Take back a payload of which nothing is under way."""
        if write in self._writes:
            self._writes.remove(write)

    def pump(self, frames: Frames) -> None:
        """Write as much as there is room for.

        Args:
            frames: to the same peer: the last write of a payload uses up a receive.

        Raises:
            VerbsError: the device refuses.
        """
        while self._writes and self.is_ready and len(self.queue) < MOST_WRITES:
            write = self._writes[0]
            immediate = None
            if write.is_last:
                if not frames.credits:
                    return
                frames.credits -= 1
                self.last_writes += 1
                immediate = write.id
            address, nbytes, key, into = write.next()
            write.under_way += 1
            work = self.queue.begin(partial(self._done, write))
            self.queue.pair.write(work, address, nbytes, key, into, write.remote_key, immediate)
            if write.is_posted:
                self._writes.popleft()

    def _done(self, write: Write) -> None:
        write.under_way -= 1
        if write.is_posted and not write.under_way:
            self._written(write.id)
