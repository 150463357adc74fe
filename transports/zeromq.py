"""ZeroMQ over TCP: the transport that works between any two processes and can encrypt.

Every rank has two sockets. The *inbox* is a DEALER bound to a free port, from which all that
others send is read. The *outbox* is a ROUTER with one connection to each rank it has sent to,
made by the first message. So a connection carries messages one way, and two ranks that talk both
ways have two. Connections are authenticated before a byte of theirs is believed: on one machine by
PLAIN, a random token per inbox, handed out by the rendezvous; between machines, and everywhere in
an encrypted job, by CURVE, with keys that all ranks derive from the job's, which encrypts, too.

ZeroMQ queues without limit here (its high-water marks drop or block by the message, not by the
byte); what bounds memory are the credits of the transport contract and the window below. ZeroMQ
would also reconnect behind our back and lose what was in flight: reconnecting is off, and a
connection that ends is reported by the outbox's monitor.

On the wire a message is one or two frames. The first begins with HEAD: kind, sender, id, number.

    EAGER   number = length of the header; then header and payload, in the same frame
    AHEAD   then the header; the second frame is the payload
    READY   number = payload bytes; then the header: a message that waits to be accepted
    GO      id was accepted
    DATA    number = offset; the second frame is a segment of id's payload
    TAKEN   number = segments of id that the receiver has stored
    DROP    id was dropped by the receiver
    CANCEL  id was taken back by the sender
    CREDIT  number = buffered bytes consumed; id = 1: they came AHEAD
    BYE     nothing more will come
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import struct
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import zmq

# Imported now, not by the first zero-copy send: its exit handler, which ends the thread behind
# those, is so registered before, and runs after, that of whoever closes a transport at exit.
from zmq.utils import garbage, z85
from zmq.utils.monitor import parse_monitor_message

from pycoll._support.ports import endpoint_of, listen, why_unreachable
from pycoll._support.zmq_auth import Authenticator, Keys, guard, open_context
from pycoll._transports.base import (
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Arrival,
    Handler,
    Parts,
    Transfer,
    Transport,
    Withdrawn,
    nbytes_of,
)
from pycoll.errors import PeerFailed, TransportError

SEGMENT = 1024 * 1024
"""Bytes of one DATA message. ZeroMQ on loopback was quickest in messages of about 1 MiB
(4.7 GB/s; 3 at 4 MiB, 1.4 at 64 MiB)."""

WINDOW = 8
"""Segments of one message that may be under way: bounds what the receiver's queue holds. With 4,
acknowledged in pairs, 64 MiB cost a third more processor time on 2 cores."""

ACKNOWLEDGE_EVERY = 4
"""Segments after which a receiver says how many it has stored."""

MAX_FRAME = SEGMENT + 64 * 1024
"""ZeroMQ refuses larger frames, so a length on the wire is never believed beyond this."""

BURST = 64
"""Messages handled in one call of `progress`, so that it returns to its owner now and then."""

AHEAD = SEGMENT
"""Bytes that one rank may have waiting at another of messages above the eager limit that were sent
by `push`. A credit of their own: else one of them would leave none for small messages. To ask
first would take two more trips, as long as it takes to send 256 KiB."""

HANDSHAKE_MS = 60_000
"""Within it who has begun to speak to the inbox must have shown the token: it costs a descriptor.
A rank that is stopped in this millisecond, for longer, looks as if its link had been cut."""

HEAD = struct.Struct("<BxxxIQQ")
_EAGER, _AHEAD, _READY, _GO, _DATA, _TAKEN, _DROP, _CANCEL, _CREDIT, _BYE = range(10)

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

# As plain integers: combining members of an enumeration takes longer than the call they are for.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)


def _segments(parts: Parts) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, view) of the pieces in which a payload travels: at least one."""
    offset = 0
    for part in parts:
        for start in range(0, len(part), SEGMENT):
            piece = part[start : start + SEGMENT]
            yield offset, piece
            offset += len(piece)
    if offset == 0:
        yield 0, memoryview(b"")


def _done() -> Transfer:
    """A transfer whose message is buffered."""
    transfer = Transfer()
    transfer.done = True
    return transfer


class _Send(Transfer):
    """A message that waits for its GO, or whose segments are under way."""

    __slots__ = ("id", "peer", "pending", "sent", "taken", "transport")

    def __init__(self, transport: ZmqTransport, peer: int, number: int, parts: Parts) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.id = number
        self.pending = deque(_segments(parts))
        self.sent = 0
        self.taken = 0

    @property
    def committed(self) -> bool:
        # A receiver is done when it has stored the last segment, and hears of a CANCEL later.
        return not self.pending

    def awaited(self) -> Collection[int]:
        return (self.peer,) if self.sent == 0 else ()

    def cancel(self) -> None:
        super().cancel()
        if self.transport.forget_send(self) and not self.done:
            self.transport.tell(self.peer, _CANCEL, self.id)


class _Receive(Transfer):
    """An accepted message whose segments are arriving."""

    __slots__ = ("filled", "id", "into", "nbytes", "peer", "stored", "transport")

    def __init__(
        self, transport: ZmqTransport, peer: int, number: int, nbytes: int, into: memoryview
    ) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.id = number
        self.nbytes = nbytes
        self.into = into
        self.filled = 0
        self.stored = 0

    def cancel(self) -> None:
        super().cancel()
        if self.transport.forget_receive(self) and not self.done:
            self.transport.tell(self.peer, _DROP, self.id)

    def redirect(self, into: memoryview) -> None:
        into[: self.filled] = self.into[: self.filled]
        self.into = into


class _ZmqArrival(Arrival):
    __slots__ = ("ahead", "id", "transport")

    def __init__(
        self,
        transport: ZmqTransport,
        peer: int,
        header: bytes | memoryview,
        nbytes: int,
        payload: memoryview | None,
        number: int,
        ahead: bool = False,
    ) -> None:
        super().__init__(peer, header, nbytes, payload)
        self.transport = transport
        self.id = number
        self.ahead = ahead

    def accept(self, into: memoryview) -> Transfer:
        if self.payload is not None:
            return self.copy(into)
        return self.transport.accept(self, into)

    def release(self) -> None:
        if self.payload is None:
            self.transport.drop(self)
        else:
            self.payload = None
            if self.ahead:
                self.transport.tell(self.peer, _CREDIT, 1, self.nbytes)
            else:
                self.transport.consumed(self.peer, self.nbytes + MESSAGE_COST)


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
        self._keys = keys
        self._token = secrets.token_hex(16)
        if why := why_unreachable(host):
            raise TransportError(f"zmq: rank {rank} cannot be reached at {host}: {why}")
        try:
            self._open_all(host)
        except (OSError, zmq.ZMQError) as exc:
            raise TransportError(
                f"zmq: rank {rank} cannot listen on {host}: {exc.strerror}"
            ) from exc
        self._poller.register(self._inbox.fileno(), select.EPOLLIN)
        self._poller.register(self._monitor_fd, select.EPOLLIN)
        # ZeroMQ's descriptors tell of nothing until a socket has been found empty.
        self._maybe_more = True
        with contextlib.suppress(zmq.Again):
            self._monitor.recv(_NOBLOCK)
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
        self._sends: dict[int, _Send] = {}
        self._receives: dict[tuple[int, int], _Receive] = {}
        self._waiting: dict[tuple[int, int], _ZmqArrival] = {}
        self._pid = os.getpid()
        self._closed = False

    def _open_all(self, host: str) -> None:
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(listen(host))
            self._endpoint = endpoint_of(listener)
            self._poller = select.epoll()
            undo.callback(self._poller.close)
            self._context = open_context()
            undo.callback(self._context.destroy, 0)
            self._authenticator = Authenticator(self._context)
            undo.callback(self._authenticator.close)
            self._inbox = self._open_inbox(listener.fileno())
            self._outbox = self._open(zmq.ROUTER)
            self._outbox.router_mandatory = True
            self._monitor = self._outbox.get_monitor_socket(_LOST)
            self._monitor_fd = int(self._monitor.fileno())
            undo.pop_all()
            listener.close()

    def _open_inbox(self, listener: int) -> zmq.Socket[bytes]:
        inbox = self._open(zmq.DEALER)
        if self._keys is None:
            self._authenticator.allow_plain("pycoll", self._token.encode())
            inbox.plain_server = True
        else:
            self._authenticator.allow_curve("pycoll", z85.decode(self._keys.client_public))
            inbox.curve_server = True
            inbox.curve_publickey = self._keys.server_public
            inbox.curve_secretkey = self._keys.server_secret
        guard(inbox, "pycoll")
        inbox.handshake_ivl = HANDSHAKE_MS
        inbox.use_fd = os.dup(listener)
        inbox.bind("tcp://127.0.0.1:*")  # the listener's own address is what counts
        return inbox

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.linger = 0
        socket.maxmsgsize = MAX_FRAME
        socket.reconnect_ivl = -1
        # A stopped process must not look like a lost one: no limit on the handshake for who
        # connects, and cut links are found by the kernel's keep-alives, which a stopped process
        # still answers.
        socket.handshake_ivl = 0
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = 2
        socket.tcp_keepalive_intvl = 1
        socket.tcp_keepalive_cnt = 3 if self._keys is None else 6  # a cable may be out for 3 s
        socket.ipv6 = self._keys is not None
        return socket

    def address(self) -> dict[str, Any]:
        return {"endpoint": self._endpoint, "token": self._token}

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
        send = _Send(self, peer, self._next_id, parts)
        self._sends[send.id] = send
        self._put(peer, HEAD.pack(_READY, self._rank, send.id, nbytes_of(parts)) + header)
        if peer in self._forgotten:
            self._fail_sends(peer)
        return send

    def tell(self, peer: int, kind: int, number: int = 0, value: int = 0) -> None:
        """Send a control message; to a peer that is gone it is dropped."""
        self._put(peer, HEAD.pack(kind, self._rank, number, value))

    def forget_send(self, send: _Send) -> bool:
        """Drop a send; False if it was not under way."""
        return self._sends.pop(send.id, None) is not None

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
        endpoint = address["endpoint"]
        if not garbage.gc.is_alive():
            # The thread behind zero-copy sends and their trackers: at exit, when the goodbyes are
            # tracked, Python starts no more threads.
            garbage.gc.start()
        self._linked.add(peer)
        self._names[peer] = b"r%d" % peer
        self._endpoints[endpoint] = peer
        if self._keys is None:
            self._outbox.plain_username = b"pycoll"
            self._outbox.plain_password = address["token"].encode()
        else:
            self._outbox.curve_publickey = self._keys.client_public
            self._outbox.curve_secretkey = self._keys.client_secret
            self._outbox.curve_serverkey = self._keys.server_public
        self._outbox.setsockopt(zmq.CONNECT_ROUTING_ID, self._names[peer])
        self._outbox.connect(endpoint)

    def _pump(self, send: _Send) -> None:
        """Send segments as the window allows."""
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

    def accept(self, arrival: _ZmqArrival, into: memoryview) -> Transfer:
        """Let the sender of `arrival` go on, into `into`."""
        receive = _Receive(self, arrival.peer, arrival.id, arrival.nbytes, into)
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

    def drop(self, arrival: _ZmqArrival) -> None:
        """Tell the sender that nobody wants its message."""
        if self._waiting.pop((arrival.peer, arrival.id), None) is not None:
            self.tell(arrival.peer, _DROP, arrival.id)

    def forget_receive(self, receive: _Receive) -> bool:
        """Drop a receive; False if it was not under way."""
        return self._receives.pop((receive.peer, receive.id), None) is not None

    def consumed(self, peer: int, cost: int) -> None:
        """Count buffered bytes of `peer` as used, and tell it before its credit runs out."""
        owed = self._unrepaid.get(peer, 0) + cost
        if owed >= CREDIT // 4:
            self.tell(peer, _CREDIT, 0, owed)
            owed = 0
        self._unrepaid[peer] = owed

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
                frame = receive(_NOBLOCK, False)
            except zmq.Again:
                self._maybe_more = False
                break
            worked = True
            self._handle(frame.buffer)
        if self._monitor_fd in ready:
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
            self._handler.arrived(_ZmqArrival(self, peer, header, len(payload), payload, 0))
        elif kind == _DATA:
            self._store(peer, number, value)
        elif kind == _AHEAD:
            # The second frame is here, too: ZeroMQ hands out whole messages.
            payload = self._inbox.recv(copy=False).buffer
            header = first[HEAD.size :]
            self._handler.arrived(
                _ZmqArrival(self, peer, header, len(payload), payload, 0, ahead=True)
            )
        elif kind == _TAKEN:
            send = self._sends.get(number)
            if send is not None:
                send.taken = value
                self._pump(send)
        elif kind == _CREDIT:
            (self._ahead if number else self._owed)[peer] -= value
        elif kind == _READY:
            arrival = _ZmqArrival(self, peer, first[HEAD.size :], value, None, number)
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
        # An empty buffer is refused, and one of another byte takes nothing of an empty segment.
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

    @property
    def is_receiving(self) -> bool:
        return bool(self._receives)

    # --- links -----------------------------------------------------------------------------

    def _lost_links(self) -> Iterator[tuple[int, str]]:
        """Read the monitor's events; yield the links that have ended, and why."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(_NOBLOCK))
            except zmq.Again:
                return
            endpoint = event["endpoint"].decode()
            peer = self._endpoints.get(endpoint)
            if peer is None or peer in self._lost:
                continue
            reason = {
                zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this rank's token",
                zmq.EVENT_CLOSED: "it does not answer (connection refused)",
            }.get(zmq.Event(event["event"]), "its link was closed")
            self._lost.add(peer)
            self._unlink(endpoint)
            yield peer, reason

    def _unlink(self, endpoint: str) -> None:
        # Else what is queued for it would be kept, and waited for at the end.
        with contextlib.suppress(zmq.ZMQError):
            self._outbox.disconnect(endpoint)

    def _fail_sends(self, peer: int) -> None:
        reason = self._forgotten[peer]
        for send in [send for send in self._sends.values() if send.peer == peer]:
            if self.forget_send(send):
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
            if self.forget_receive(receive):  # the end of one may cancel others
                receive.finish(PeerFailed(peer, reason))
        if peer in self._linked and peer not in self._lost:
            self._unlink(self._addresses[peer]["endpoint"])
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
        self._poller.close()
        self._outbox.disable_monitor()
        self._monitor.close(linger=0)
        self._inbox.close(linger=0)
        self._outbox.close(linger=max(0, round((deadline - time.monotonic()) * 1000)))
        self._authenticator.close()
        self._context.term()
