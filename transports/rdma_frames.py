"""Messages between two ranks by RDMA sends: an ordered stream, for what is small and for control.

A *frame* is a send, and uses up one receive of the other end. Each end may send RECEIVES frames
before the other has given receives back, so that there always is one.

    frame     RETURNED (receives given back to the other end), then as much as fits of the stream of
    message   HEAD (kind, length of the header, id, number, bytes after HEAD), header, body

A message that finds room is a frame of its own. What must wait is packed: then a frame has several,
and pieces of others. One that only gives back needs no receive that was granted: for two of these
there are always some more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pycoll._transports.base import EAGER_LIMIT
from pycoll._transports.rdma_queues import SLOT, Done, Endpoint, Queue
from pycoll._transports.verbs import MAX_SENDS
from pycoll._transports.verbs_errors import VerbsError
from pycoll._transports.verbs_queue_pair import RemoteQueuePair

RECEIVES = 16
"""Frames that each end of a link may send before the other has taken them in."""

SPARE_RECEIVES = 2
"""Receives for frames that only give back. One is sent when half of RECEIVES are to be given back,
so two are under way at most."""

PACKED_RECEIVES = 4
"""The last of RECEIVES, which only full frames may use, and the last that there are: of what small
messages are packed into them, much more reaches a peer that computes. One that takes frames in
gives receives back before they come to these."""

SIGNAL_EVERY = 8
"""Inline sends after which one has a completion: that of all of them."""

_RETURNED = struct.Struct("<HH")
_HEAD = struct.Struct("<BxHIQQ")

PIECE = SLOT - _RETURNED.size - _HEAD.size
"""Bytes of header and body of a message that fits into one frame."""

_LONGEST = EAGER_LIMIT + (1 << 16) + _HEAD.size
"""Bytes of a message: a length on the wire is not believed beyond this."""


class FramedMessage(NamedTuple):
    """A message that has come; its views are valid until the frame is given back."""

    kind: int
    id: int
    number: int
    header: memoryview
    body: memoryview


class Frames:
    """The stream of messages to one peer, and the one from it.

    Args:
        endpoint: of this rank.
        owner: gets the frames that arrive.

    Attributes:
        queue: their queue pair, and what it has under way.
        is_open: whether the peer's end is connected, so that something may be sent.
        credits: receives that the peer has for us.
        failure: why nothing can be sent any more, or "".
        is_last: whether every frame from now on shall have a completion, so that `is_empty` tells
            when the last has arrived.
    """

    def __init__(self, endpoint: Endpoint, owner: Any) -> None:
        endpoint.post_receives(RECEIVES + SPARE_RECEIVES)
        self._endpoint = endpoint
        self.queue = Queue(endpoint, owner)
        self.is_open = False
        self.credits = RECEIVES
        self.failure = ""
        self.is_last = False
        self._unreturned = 0
        self._unsignaled = 0
        self._backlog = bytearray()  # of the stream: what waits for room
        self._begun = bytearray()  # of a message that is arriving in several frames

    def connect(self, peer: RemoteQueuePair) -> None:
        """Connect with the peer's end.

        Raises:
            VerbsError: there is no way to it.
        """
        self.queue.pair.connect(peer)

    # --- sending ---------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether everything that was put here is where it shall go."""
        return not self._backlog and not self.queue

    @property
    def has_room(self) -> bool:
        """Whether the next message of one frame would be sent at once."""
        return not self._backlog and self._may_post(is_full=False)

    def _may_post(self, is_full: bool) -> bool:
        busy = len(self.queue) >= MAX_SENDS - SPARE_RECEIVES
        kept = 0 if is_full or self.is_last else PACKED_RECEIVES
        if busy or not self.is_open or self.credits <= kept:
            return False
        if not self._endpoint.free:
            self._endpoint.is_short = True
            return False
        return True

    def put(
        self,
        kind: int,
        number_id: int = 0,
        number: int = 0,
        header: bytes | memoryview = b"",
        parts: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Send a message, now or when there is room; the memory is free when this returns."""
        if self.failure:
            return
        nbytes = len(header) + sum(map(len, parts))
        head = _HEAD.pack(kind, len(header), number_id, number, nbytes)
        if nbytes <= PIECE and self.has_room:
            self._post((head, header, *parts), _HEAD.size + nbytes)
            return
        for part in (head, header, *parts):
            self._backlog += part
        self._endpoint.behind.add(self)
        self.pump()

    def pump(self) -> None:
        """Send what waits, as far as there is room, and give receives back if it is time."""
        most = SLOT - _RETURNED.size
        while self._backlog and self._may_post(is_full=len(self._backlog) >= most):
            with memoryview(self._backlog)[:most] as content:
                nbytes = len(content)
                self._post((content,), nbytes)
            del self._backlog[:nbytes]
        if not self._backlog:
            self._endpoint.behind.discard(self)
        if self.is_open and self._unreturned >= RECEIVES // 2:
            if not self._endpoint.free:
                self._endpoint.is_short = True
                return
            self.credits += 1  # one of the spare ones is used
            self._post((), 0)

    def _post(self, content: Sequence[bytes | memoryview], nbytes: int) -> None:
        nbytes += _RETURNED.size
        self.credits -= 1
        returned, self._unreturned = self._unreturned, 0
        pair, endpoint = self.queue.pair, self._endpoint
        slot = endpoint.free.pop()
        view, end = endpoint.sending.view(slot), _RETURNED.size
        _RETURNED.pack_into(view, 0, returned, 0)
        for part in content:
            begin, end = end, end + len(part)
            view[begin:end] = part
        inline = nbytes <= pair.inline
        done: Done | None = None
        if inline:
            endpoint.free.append(slot)  # when the work request is posted it is free again
            self._unsignaled = (self._unsignaled + 1) % SIGNAL_EVERY
        else:
            self._unsignaled = 0
            done = partial(endpoint.free.append, slot)
        address, key = endpoint.sending.address(slot), endpoint.sending.region.local_key
        signaled = self._unsignaled == 0 or self.is_last
        try:
            pair.send(self.queue.begin(done), address, nbytes, key, inline, signaled)
        except VerbsError as exc:
            self.failure = str(exc)
            self._endpoint.failing.append((self.queue.owner, self.failure))

    # --- receiving -------------------------------------------------------------------------

    def take(self, frame: memoryview) -> Iterator[FramedMessage]:
        """Take in a frame; yields the messages that it completes.

        Raises:
            ValueError: what has come makes no sense.
        """
        self.credits += _RETURNED.unpack_from(frame)[0]
        content = frame[_RETURNED.size :]
        if content:
            self._unreturned += 1
        while content:
            if self._begun or len(content) < _HEAD.size or _length(content) > len(content):
                content = self._go_on(content)
                if len(self._begun) < _HEAD.size or len(self._begun) < _length(self._begun):
                    return
                message, self._begun = memoryview(self._begun), bytearray()
            else:
                nbytes = _length(content)
                message, content = content[:nbytes], content[nbytes:]
            yield _message(message)

    def _go_on(self, content: memoryview) -> memoryview:
        """Add to the message that has begun what belongs to it; returns the rest."""
        missing = max(0, _HEAD.size - len(self._begun))
        self._begun += content[:missing]
        content = content[missing:]
        if len(self._begun) >= _HEAD.size:
            missing = _length(self._begun) - len(self._begun)
            self._begun += content[:missing]
            content = content[missing:]
        return content

    def used(self) -> None:
        """Count a receive that a write has used up."""
        self._unreturned += 1

    def close(self) -> None:
        """Destroy the queue pair."""
        self.is_open = False
        self.failure = self.failure or "it is closed"
        self._backlog.clear()
        self._endpoint.behind.discard(self)
        for give_back in self.queue.close():
            give_back()


def _length(content: memoryview | bytearray) -> int:
    """Return the bytes of the message that begins here."""
    nbytes: int = _HEAD.size + _HEAD.unpack_from(content)[-1]
    if nbytes > _LONGEST:
        raise ValueError(f"a message of {nbytes} bytes")
    return nbytes


def _message(content: memoryview) -> FramedMessage:
    kind, header_nbytes, number_id, number, _ = _HEAD.unpack_from(content)
    end = _HEAD.size + header_nbytes
    return FramedMessage(kind, number_id, number, content[_HEAD.size : end], content[end:])
