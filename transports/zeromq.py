"""ZeroMQ over TCP: the transport that works between any two processes and can encrypt.

Every rank has two sockets (`zmq_sockets`): an inbox, from which all that others send is read, and
an outbox with one connection to each rank it has sent to. ZeroMQ queues without limit here (its
high-water marks drop or block by the message, not by the byte); what bounds memory are the credits
of the transport contract and the window below.

On the wire a message is one or two frames. The first begins with HEAD: kind, sender, id, number.

    EAGER   number = length of the header; then header and payload, in the same frame
    AHEAD   then the header; the second frame is the payload
    READY   number = payload bytes; then the header: a message that waits to be accepted
    GO      id was accepted
    DATA    number = offset; the second frame is a fragment of id's payload
    TAKEN   number = fragments of id that the receiver has stored
    DROP    id was dropped by the receiver
    CANCEL  id was taken back by the sender
    CREDIT  number = buffered bytes consumed; id = 1: they came AHEAD
    BYE     nothing more will come
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from pycoll._support.ports import why_unreachable
from pycoll._support.zmq_auth import Keys
from pycoll._transports.base import (
    AHEAD,
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Handler,
    Parts,
    Transfer,
    Transport,
    Withdrawn,
    nbytes_of,
)
from pycoll._transports.zmq_messages import ZmqArrival, ZmqReceive, ZmqSend
from pycoll._transports.zmq_sockets import NOBLOCK, Sockets
from pycoll.errors import PeerFailed, TransportError

WINDOW = 8
"""Fragments of one message that may be under way: bounds what the receiver's queue holds. With 4,
acknowledged in pairs, 64 MiB cost a third more processor time on 2 cores."""

ACKNOWLEDGE_EVERY = 4
"""Fragments after which a receiver says how many it has stored."""

BURST = 64
"""Messages handled in one call of `progress`, so that it returns to its owner now and then."""

HEAD = struct.Struct("<BxxxIQQ")
_EAGER, _AHEAD, _READY, _GO, _DATA, _TAKEN, _DROP, _CANCEL, _CREDIT, _BYE = range(10)

_MORE = int(zmq.SNDMORE)  # a plain integer, as NOBLOCK


def _done() -> Transfer:
    """A transfer whose message is buffered."""
    transfer = Transfer()
    transfer.done = True
    return transfer


class ZmqTransport(Transport):
    """The zmq transport of one rank; see the module's text.

    Args:
        rank: this rank's number in the job.
        host: the address to listen on; loopback unless the job has other hosts.
        keys: with these CURVE secures the connections; None: PLAIN does, on loopback only.
    """

    name = "zmq"

    def __init__(self, rank: int, host: str = "127.0.0.1", keys: Keys | None = None) -> None:
        if keys is None and host not in ("127.0.0.1", "::1"):
            raise ValueError(f"without keys connections are on loopback only, not on {host}")
        self._rank = rank
        self._token = secrets.token_hex(16)
        if why := why_unreachable(host):
            raise TransportError(f"zmq: rank {rank} cannot be reached at {host}: {why}")
        try:
            self._sockets = Sockets(host, self._token, keys)
        except (OSError, zmq.ZMQError) as exc:
            raise TransportError(
                f"zmq: rank {rank} cannot listen on {host}: {exc.strerror}"
            ) from exc
        self._inbox, self._outbox = self._sockets.inbox, self._sockets.outbox
        self._poller = self._sockets.poller
        self._maybe_more = True  # the inbox has not been found empty
        self._addresses: Sequence[dict[str, Any]] = ()
        self._handler: Handler | None = None
        self._endpoints: dict[str, int] = {}
        self._linked: set[int] = set()
        self._lost: set[int] = set()
        self._forgotten: dict[int, str] = {}
        self._names: dict[int, bytes] = {}
        self._owed: dict[int, int] = {}
        self._ahead: dict[int, int] = {}
        self._unrepaid: dict[int, int] = {}
        self._next_id = 0
        self._sends: dict[int, ZmqSend] = {}
        self._receives: dict[tuple[int, int], ZmqReceive] = {}
        self._waiting: dict[tuple[int, int], ZmqArrival] = {}
        self._pid = os.getpid()
        self._closed = False

    def address(self) -> dict[str, Any]:
        return {"endpoint": self._sockets.endpoint, "token": self._token}

    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        self._addresses = addresses
        self._handler = handler

    # --- sending ---------------------------------------------------------------------------

    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, may_push=False)

    def push(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        """Send for one who will not give it up: larger messages are buffered, too, if they can be.

        That they are withdrawn when a deadline has passed is what `send` keeps the payload for.
        """
        return self._start(peer, header, parts, may_push=True)

    def _start(self, peer: int, header: bytes, parts: Parts, may_push: bool) -> Transfer:
        nbytes = len(parts[0]) if len(parts) == 1 else nbytes_of(parts)
        if nbytes <= EAGER_LIMIT:
            owed = self._owed.get(peer, 0) + nbytes + MESSAGE_COST
            if owed <= CREDIT:
                self._owed[peer] = owed
                head = HEAD.pack(_EAGER, self._rank, 0, len(header))
                if self._put(peer, b"".join((head, header, *parts))):
                    return _done()
        elif may_push and (ahead := self._ahead.get(peer, 0) + nbytes) <= AHEAD:
            self._ahead[peer] = ahead
            head = HEAD.pack(_AHEAD, self._rank, 0, 0)
            payload = parts[0] if len(parts) == 1 else b"".join(parts)
            if self._put(peer, head + header, payload):
                return _done()
        return self.offer(peer, header, parts)

    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        self._next_id += 1
        send = ZmqSend(self, peer, self._next_id, parts)
        self._sends[send.id] = send
        self._put(peer, HEAD.pack(_READY, self._rank, send.id, nbytes_of(parts)) + header)
        if peer in self._forgotten:
            self._fail_sends(peer)
        return send

    def tell(self, peer: int, kind: int, number: int = 0, value: int = 0) -> None:
        """Send a control message; to a peer that is gone it is dropped."""
        self._put(peer, HEAD.pack(kind, self._rank, number, value))

    def take_back(self, send: ZmqSend) -> None:
        """Give up a send; its peer is told if it was under way."""
        if self._sends.pop(send.id, None) is not None and not send.done:
            self.tell(send.peer, _CANCEL, send.id)

    def _put(
        self, peer: int, frame: bytes, payload: bytes | memoryview | None = None, copy: bool = True
    ) -> bool:
        """Queue a message; False if the link is lost."""
        if peer in self._lost:
            return False
        send = self._outbox.send
        try:
            if peer not in self._linked:
                self._connect(peer)
            send(self._names[peer], _MORE)
            if payload is None:
                send(frame)
            else:
                send(frame, _MORE)
                send(payload, 0, copy)
        except zmq.ZMQError:  # lost, and the monitor will say so
            return False
        return True

    def _connect(self, peer: int) -> None:
        address = self._addresses[peer]
        name, endpoint = b"r%d" % peer, address["endpoint"]
        self._sockets.connect(name, endpoint, address["token"])
        self._linked.add(peer)
        self._names[peer] = name
        self._endpoints[endpoint] = peer

    def _pump(self, send: ZmqSend) -> None:
        """Send fragments as the window allows."""
        while send.pending and send.sent - send.taken < WINDOW:
            offset, piece = send.pending.popleft()
            send.sent += 1
            head = HEAD.pack(_DATA, self._rank, send.id, offset)
            # Without a copy: from 1 MiB it costs more than the thread that hears of the end.
            if not self._put(send.peer, head, piece, copy=False):
                return
        if not send.pending and send.taken == send.sent:
            # The receiver has stored it all: neither ZeroMQ nor the kernel needs it any more.
            del self._sends[send.id]
            send.finish()

    # --- receiving -------------------------------------------------------------------------

    def accept(self, arrival: ZmqArrival, into: memoryview) -> Transfer:
        """Let the sender of `arrival` go on, into `into`."""
        receive = ZmqReceive(self, arrival.peer, arrival.id, arrival.nbytes, into)
        key = (arrival.peer, arrival.id)
        if arrival.peer in self._forgotten:
            receive.finish(PeerFailed(arrival.peer, self._forgotten[arrival.peer]))
            return receive
        if self._waiting.pop(key, None) is None:
            receive.finish(Withdrawn())
            return receive
        self._receives[key] = receive
        self.tell(arrival.peer, _GO, arrival.id)
        return receive

    def drop(self, arrival: ZmqArrival) -> None:
        """Tell the sender that nobody wants its message."""
        if self._waiting.pop((arrival.peer, arrival.id), None) is not None:
            self.tell(arrival.peer, _DROP, arrival.id)

    def give_up(self, receive: ZmqReceive) -> None:
        """Give up a receive; its peer is told if it was under way."""
        key = receive.peer, receive.id
        if self._receives.pop(key, None) is not None and not receive.done:
            self.tell(receive.peer, _DROP, receive.id)

    def consumed(self, peer: int, cost: int) -> None:
        """Count buffered bytes of `peer` as used, and tell it before its credit runs out."""
        owed = self._unrepaid.get(peer, 0) + cost
        if owed >= CREDIT // 4:
            self.tell(peer, _CREDIT, 0, owed)
            owed = 0
        self._unrepaid[peer] = owed

    def consumed_ahead(self, peer: int, nbytes: int) -> None:
        """Tell `peer` that a message which it had sent AHEAD is used."""
        self.tell(peer, _CREDIT, 1, nbytes)

    def progress(self) -> bool:
        assert self._handler is not None
        # One look at both sockets: to ask each of them takes several.
        ready = [descriptor for descriptor, _ in self._poller.poll(0)]
        if not ready and not self._maybe_more:
            return False
        worked = False
        self._maybe_more = True
        receive = self._inbox.recv
        for _ in range(BURST):
            try:
                frame = receive(NOBLOCK, False)
            except zmq.Again:
                self._maybe_more = False
                break
            worked = True
            self._handle(frame.buffer)
        if self._sockets.monitor_fd in ready:
            for peer, reason in self._lost_links():
                worked = True
                self._handler.lost(peer, reason)
        return worked

    def _handle(self, first: memoryview) -> None:
        assert self._handler is not None
        kind, peer, number, value = HEAD.unpack_from(first)
        if kind == _EAGER:
            start = HEAD.size + value
            header, payload = first[HEAD.size : start], first[start:]
            self._handler.arrived(ZmqArrival(self, peer, header, len(payload), payload, 0))
        elif kind == _DATA:
            self._store(peer, number, value)
        elif kind == _AHEAD:
            # The second frame is here, too: ZeroMQ hands out whole messages.
            payload = self._inbox.recv(copy=False).buffer
            header = first[HEAD.size :]
            self._handler.arrived(
                ZmqArrival(self, peer, header, len(payload), payload, 0, ahead=True)
            )
        elif kind == _TAKEN:
            send = self._sends.get(number)
            if send is not None:
                send.taken = value
                self._pump(send)
        elif kind == _CREDIT:
            (self._ahead if number else self._owed)[peer] -= value
        elif kind == _READY:
            arrival = ZmqArrival(self, peer, first[HEAD.size :], value, None, number)
            self._waiting[peer, number] = arrival
            self._handler.arrived(arrival)
        elif kind == _GO:
            send = self._sends.get(number)
            if send is not None:
                self._pump(send)
        elif kind == _CANCEL:
            self._cancelled(peer, number)
        elif kind == _DROP:
            send = self._sends.pop(number, None)
            if send is not None:
                send.finish()
        elif kind == _BYE:
            self._handler.finished(peer)

    def _store(self, peer: int, number: int, offset: int) -> None:
        receive = self._receives.get((peer, number))
        if receive is None:
            # Dropped here; the sender has been told or will hear it.
            self._inbox.recv(copy=False)
            return
        # An empty buffer is refused, and one of another byte takes nothing of an empty fragment.
        into = receive.into[offset : receive.nbytes] or memoryview(bytearray(1))
        receive.filled = offset + self._inbox.recv_into(into)
        receive.stored += 1
        complete = receive.filled >= receive.nbytes
        if complete or receive.stored % ACKNOWLEDGE_EVERY == 0:
            self.tell(peer, _TAKEN, number, receive.stored)
        if complete:
            del self._receives[peer, number]
            receive.finish()

    def _cancelled(self, peer: int, number: int) -> None:
        assert self._handler is not None
        arrival = self._waiting.pop((peer, number), None)
        if arrival is not None:
            self._handler.withdrawn(arrival)
        receive = self._receives.pop((peer, number), None)
        if receive is not None:
            receive.finish(Withdrawn())

    # --- links -----------------------------------------------------------------------------

    def _lost_links(self) -> Iterator[tuple[int, str]]:
        """Yield the links that have ended, and why."""
        for endpoint, reason in self._sockets.ended():
            peer = self._endpoints.get(endpoint)
            if peer is None or peer in self._lost:
                continue
            self._lost.add(peer)
            self._sockets.disconnect(endpoint)
            yield peer, reason

    def _fail_sends(self, peer: int) -> None:
        reason = self._forgotten[peer]
        for send in [send for send in self._sends.values() if send.peer == peer]:
            if self._sends.pop(send.id, None) is not None:
                send.finish(PeerFailed(peer, reason))

    def _say_goodbye(self, deadline: float) -> None:
        """Send BYE on every link, and wait until it is out: so is then all that came before.

        ZeroMQ's own linger would not do alone: it waits its whole time for a peer that has
        closed in the meantime.
        """
        self._outbox.copy_threshold = 0  # below it ZeroMQ copies, and there is nothing to track
        frame = HEAD.pack(_BYE, self._rank, 0, 0)
        unsent: dict[int, zmq.MessageTracker] = {}
        for peer in self._linked - self._lost:
            with contextlib.suppress(zmq.ZMQError):
                tracker = self._outbox.send_multipart(
                    (self._names[peer], frame), copy=False, track=True
                )
                assert tracker is not None
                unsent[peer] = tracker
        while True:
            for peer, _ in self._lost_links():
                unsent.pop(peer, None)
            unsent = {peer: tracker for peer, tracker in unsent.items() if not tracker.done}
            remaining = deadline - time.monotonic()
            if not unsent or remaining <= 0:
                return
            with contextlib.suppress(zmq.NotDone):
                next(iter(unsent.values())).wait(min(remaining, 0.02))

    def forget(self, peer: int, reason: str) -> None:
        if peer in self._forgotten:
            return
        self._forgotten[peer] = reason
        self._fail_sends(peer)
        for receive in [receive for receive in self._receives.values() if receive.peer == peer]:
            if self._receives.pop((peer, receive.id), None) is not None:  # one may cancel others
                receive.finish(PeerFailed(peer, reason))
        if peer in self._linked and peer not in self._lost:
            self._sockets.disconnect(self._addresses[peer]["endpoint"])
        self._lost.add(peer)

    def fileno(self) -> int:
        return self._poller.fileno()

    def is_idle(self) -> bool:
        return not self._maybe_more

    def links(self) -> list[int]:
        return sorted(self._linked)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # after a fork: the parent's sockets are the parent's
        deadline = time.monotonic() + timeout_s
        self._say_goodbye(deadline)
        self._sockets.close(deadline)
