"""The transport contract: how bytes move between the ranks of a job.

A transport carries *messages*: a small header, which it never looks into, and a payload of any
length, given as a sequence of byte views. It knows ranks (numbered in the whole job) and nothing
of communicators, tags or collectives: matching is done by its user, the engine.

Order       Messages from one rank to another arrive in the order of their `send` calls. Their
            payloads may come in any order, as they are accepted.
Eager       A message of at most `EAGER_LIMIT` bytes is buffered: its transfer is done when
            `send` returns, and its payload arrives with its header. That holds while the peer
            has consumed all but `CREDIT` bytes of what was buffered for it; past that, and
            above the limit, only the header travels at once, and the payload follows when the
            receiver has accepted the message. (Shared memory sends the payload of a very short
            one that `push` was given with its header even then; its transfer is done when it was
            received.) So a slow receiver bounds the memory of both sides,
            and a header is never stuck behind a payload nobody asked for.
Ownership   The payload views given to `send` must stay unchanged until the transfer is done; the
            view given to `Arrival.accept` belongs to the transport until that transfer is done.
            After `Transfer.cancel` returns, nothing of the caller's memory is written any more.
            The same holds for memory that is `reach`ed, from then until `Reach.close`.
Threads     The owner calls everything under one lock of its own. Nothing here starts a callback
            from another thread: handlers and completions run inside `progress`, `send` or `accept`.
Waiting     `progress` does what can be done without blocking. When it returns False the owner may
            sleep until `fileno()` is readable: after it has called `sleep` and that has returned
            True. Awake again it calls `awake`, whatever `sleep` has returned. Several threads may
            sleep so. When another thread has left work behind (not `is_idle`), sleeps must end.
Errors      A peer that cannot be reached any more is reported once by `Handler.lost`. What is sent
            to it then waits: a lost link says neither why nor what is still coming from there.
            When the owner knows what became of the peer it calls `forget`, and every transfer
            with it finishes with PeerFailed. Foreign exceptions never pass this boundary.
Close       `close(timeout_s)` delivers what was buffered, for at most that long, tells every
            linked peer that nothing more will come (`Handler.finished` there), and is idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar, Protocol

EAGER_LIMIT = 65 * 1024
"""Bytes up to which a message is buffered: the public contract's 64 KiB, and what pickling adds."""

CREDIT = 1024 * 1024
"""Buffered bytes that one rank may have waiting at another: bounds memory at CREDIT per pair."""

AHEAD = 1024 * 1024
"""Bytes that one rank may have waiting at another of messages above the eager limit that `push` has
sent. A credit of their own: else one of them would leave none for small messages. To ask first
would take two more trips, as long as it takes to send 256 KiB."""

MESSAGE_COST = 512
"""Bytes that a buffered message is charged beyond its payload, so that empty ones count too."""

Parts = Sequence[memoryview]
"""A payload: one-dimensional byte views, sent one after the other."""


def nbytes_of(parts: Parts) -> int:
    """Return the length of a payload in bytes."""
    return sum(len(part) for part in parts)


class Elsewhere(Protocol):
    """Memory of another device, a GPU's; its staging buffer in host memory names it here."""

    @property
    def device(self) -> Hashable:
        """The same for all that is on one device."""

    def export(self) -> tuple[int, int] | None:
        """Return a dma-buf, to be closed by the caller, and where the memory begins in it.

        None: that cannot be.
        """

    def read(self, into: memoryview) -> None:
        """Copy its front to host memory; returns when that is done.

        Raises:
            TransportError: the device has failed.
        """

    def write(self, data: bytes) -> None:
        """Write its front; returns when that is done, and raises as `read` does."""

    def another(self, nbytes: int) -> Elsewhere:
        """Return new memory on the same device, which goes with this object.

        Raises:
            TransportError: there is not so much.
        """


class Reach(ABC):
    """A transport moves a buffer's bytes from, or to, the other device itself, until `close`.

    Where it cannot after all, it uses the staging buffer.

    Args:
        elsewhere: where they really are.

    Attributes:
        elsewhere: as given.
        is_open: `close` was not called.
        is_in_buffer: of a receive: some of it has come into the staging buffer.
    """

    __slots__ = ("elsewhere", "is_in_buffer", "is_open")

    def __init__(self, elsewhere: Elsewhere) -> None:
        self.elsewhere = elsewhere
        self.is_open = True
        self.is_in_buffer = False

    @abstractmethod
    def close(self) -> None:
        """Give it up; no transfer uses it any more. May be called again."""


class Operation:
    """Something under way that will be done once.

    Attributes:
        done: whether it has ended.
        error: why it failed, or None.
    """

    __slots__ = ("_callback", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._callback: Callable[[Operation], None] | None = None

    @property
    def committed(self) -> bool:
        """Whether it is too late to give it up: the peer will have it, but has not said so yet.

        To ask is the first step of giving up: what answers False goes no further, and is to be
        cancelled.
        """
        return False

    def awaited(self) -> Collection[int]:
        """Return the ranks that it waits for.

        A schedule waits until all of them have entered the call, anything else until one has called
        what it must. Empty: unknown, or there is none.
        """
        return ()

    def then(self, callback: Callable[[Operation], None]) -> None:
        """Call `callback(self)` when done, now if it already is; there is one callback at most."""
        if self.done:
            callback(self)
        else:
            self._callback = callback

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done, once; a second call changes nothing."""
        if self.done:
            return
        self.error = error
        self.done = True  # last: who looks without a lock sees why
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)

    def cancel(self) -> None:
        """Give it up: it will not be done, and its callback is never called."""
        self._callback = None

    def abort(self, error: BaseException) -> None:
        """Give it up, and be done with `error`."""
        if not self.done:
            callback = self._callback
            self.cancel()
            self._callback = callback
            self.finish(error)


class Withdrawn(Exception):
    """The sender took back a message after it was accepted: the error of that receive."""


class Transfer(Operation):
    """A send, or the receive of an accepted message."""

    __slots__ = ()

    def redirect(self, into: memoryview) -> None:
        """Let a receive go on into `into`, to which what has arrived is copied."""
        raise NotImplementedError


class Arrival(ABC):
    """A message that has come: its header, and its payload if that came with it.

    Attributes:
        peer: the rank that sent it.
        header: its header.
        nbytes: length of its payload.
        payload: the payload, if it is here; valid until `release` or `accept`.
        sender_waits: whether the sender may wait until it is accepted.
    """

    __slots__ = ("header", "nbytes", "payload", "peer")

    def __init__(
        self, peer: int, header: bytes | memoryview, nbytes: int, payload: memoryview | None
    ) -> None:
        self.peer = peer
        self.header = header
        self.nbytes = nbytes
        self.payload = payload

    @property
    def sender_waits(self) -> bool:
        return self.payload is None

    @abstractmethod
    def accept(self, into: memoryview) -> Transfer:
        """Have the payload written to the front of `into` (at least `nbytes` long)."""

    @abstractmethod
    def release(self) -> None:
        """Say that the payload was used in place, or drop a message nobody wants."""

    def read_there(self) -> None:
        """Release a message whose value was read where its sender has it."""
        self.release()

    def reach(self, into: memoryview, elsewhere: Elsewhere) -> Reach | None:
        """Have the payload written there, not to its staging buffer `into`, which will be accepted.

        None: it must go to the staging buffer.
        """
        return None

    def copy(self, into: memoryview) -> Transfer:
        """Accept a payload that is here."""
        assert self.payload is not None
        into[: self.nbytes] = self.payload
        self.release()
        transfer = Transfer()
        transfer.finish()
        return transfer


class Handler(Protocol):
    """What a transport tells its owner, always under the owner's lock."""

    def arrived(self, arrival: Arrival) -> None:
        """A message has come."""

    def withdrawn(self, arrival: Arrival) -> None:
        """The sender took back a message that was not accepted yet."""

    def finished(self, peer: int) -> None:
        """`peer` closed its transport in good order: everything it sent has arrived."""

    def lost(self, peer: int, reason: str) -> None:
        """The link to `peer` is gone."""

    def tell(self, peer: int, note: bytes) -> None:
        """Have `note` (short) given to `Transport.hear` of the peer's transport."""

    def listen(self, timeout_s: float) -> Collection[int]:
        """Give notes that come within `timeout_s` to `hear`: for a transport that closes.

        Returns the ranks of which it is known that they have ended or left.
        """


class Transport(ABC):
    """One way of moving bytes; see the module's text for the rules.

    Life: make one, hand `address()` to the other ranks, `start` with theirs, use, `close`.
    """

    name: ClassVar[str]

    @abstractmethod
    def address(self) -> dict[str, Any]:
        """Return what other ranks need to reach this one (small, msgpack-able)."""

    @abstractmethod
    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        """Begin: `addresses` by rank. Links are made when first needed."""

    @abstractmethod
    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        """Start sending a message to `peer`."""

    @abstractmethod
    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        """Start sending a message that is never buffered, however short: its header only.

        The transfer is done when the receiver has accepted it and the payload's memory is free.
        """

    def push(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        """Send for one who will not give it up: larger messages may be buffered, too."""
        return self.send(peer, header, parts)

    def reach(self, part: memoryview, elsewhere: Elsewhere) -> Reach | None:
        """Have a payload, which will be sent, taken from there, not from its staging buffer `part`.

        None: it must be in the staging buffer.
        """
        return None

    def hear(self, peer: int, note: bytes) -> None:
        """Take a note of the peer's transport, which came another way; it is read later."""
        raise NotImplementedError

    @abstractmethod
    def progress(self) -> bool:
        """Do what can be done without blocking; True if something was done."""

    @property
    def is_behind(self) -> bool:
        """Whether something that was buffered waits here for the peer.

        Then somebody should call `progress` even if no operation is under way.
        """
        return False

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable when `progress` may have something to do.

        Only between `sleep` and `awake`, which a thread calls around its sleep.
        """

    def sleep(self) -> bool:
        """Announce that a thread is going to sleep; False: something has come meanwhile."""
        return self.is_idle()

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether `progress` would find nothing to do, as far as that has been seen.

        Who has called other methods while a thread sleeps asks: the descriptor may not tell.
        """

    def awake(self) -> None:  # noqa: B027 - most have nothing to take back
        """Take that back."""

    @abstractmethod
    def forget(self, peer: int, reason: str) -> None:
        """Learn that `peer` has ended: transfers with it fail, and nothing is sent to it again."""

    @abstractmethod
    def links(self) -> list[int]:
        """Return the ranks to which messages were sent."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Deliver what is buffered, for at most `timeout_s` seconds, and end."""
