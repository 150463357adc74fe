"""The two ZeroMQ sockets of a rank: how they are made, secured and watched.

The *inbox* is a DEALER bound to a free port, from which all that others send is read. The *outbox*
is a ROUTER with one connection to each rank it has sent to, made by the first message. So a
connection carries messages one way, and two ranks that talk both ways have two. Connections are
authenticated before a byte of theirs is believed: on one machine by PLAIN, a random token per
inbox, handed out by the rendezvous; between machines, and everywhere in an encrypted job, by CURVE,
with keys that all ranks derive from the job's, which encrypts, too.

ZeroMQ would reconnect behind our back and lose what was in flight: reconnecting is off, and a
connection that ends is reported by the outbox's monitor.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator

import zmq

# Imported now, not by the first zero-copy send: its exit handler, which ends the thread behind
# those, is so registered before, and runs after, that of whoever closes a transport at exit.
from zmq.utils import garbage, z85
from zmq.utils.monitor import parse_monitor_message

from pycoll._support.ports import endpoint_of, listen
from pycoll._support.zmq_auth import Authenticator, Keys, guard, open_context
from pycoll._transports.zmq_messages import FRAGMENT

MAX_FRAME = FRAGMENT + 64 * 1024
"""ZeroMQ refuses larger frames, so a length on the wire is never believed beyond this."""

HANDSHAKE_MS = 60_000
"""Within it who has begun to speak to the inbox must have shown the token: it costs a descriptor.
A rank that is stopped in this millisecond, for longer, looks as if its link had been cut."""

NOBLOCK = int(zmq.NOBLOCK)
"""As a plain integer: combining members of an enumeration takes longer than the call it is for."""

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Sockets:
    """Both sockets, and what watches them.

    Args:
        host: the address to listen on.
        token: who shows it is let in, where there are no keys.
        keys: with these CURVE secures the connections; None: PLAIN does.

    Attributes:
        keys: as given.
        endpoint: where the inbox can be reached.
        inbox: all that others send.
        outbox: to each rank by the name that `connect` gave it.
        poller: is readable when the inbox or the monitor may have something.
        monitor_fd: the monitor's descriptor there.

    Raises:
        OSError, zmq.ZMQError: it cannot listen there, or too few threads or descriptors are left.
    """

    def __init__(self, host: str, token: str, keys: Keys | None) -> None:
        self.keys = keys
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(listen(host))
            self.endpoint = endpoint_of(listener)
            self.poller = select.epoll()
            undo.callback(self.poller.close)
            self._context = open_context()
            undo.callback(self._context.destroy, 0)
            self._authenticator = Authenticator(self._context)
            undo.callback(self._authenticator.close)
            self.inbox = self._open_inbox(listener.fileno(), token)
            self.outbox = self._open(zmq.ROUTER)
            self.outbox.router_mandatory = True
            self._monitor = self.outbox.get_monitor_socket(_LOST)
            self.monitor_fd = int(self._monitor.fileno())
            undo.pop_all()
            listener.close()
        self.poller.register(self.inbox.fileno(), select.EPOLLIN)
        self.poller.register(self.monitor_fd, select.EPOLLIN)
        # ZeroMQ's descriptors tell of nothing until a socket has been found empty.
        with contextlib.suppress(zmq.Again):
            self._monitor.recv(NOBLOCK)

    def _open_inbox(self, listener: int, token: str) -> zmq.Socket[bytes]:
        inbox = self._open(zmq.DEALER)
        if self.keys is None:
            self._authenticator.allow_plain("pycoll", token.encode())
            inbox.plain_server = True
        else:
            self._authenticator.allow_curve("pycoll", z85.decode(self.keys.client_public))
            inbox.curve_server = True
            inbox.curve_publickey = self.keys.server_public
            inbox.curve_secretkey = self.keys.server_secret
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
        socket.tcp_keepalive_cnt = 3 if self.keys is None else 6  # a cable may be out for 3 s
        socket.ipv6 = self.keys is not None
        return socket

    def connect(self, name: bytes, endpoint: str, token: str) -> None:
        """Connect the outbox to another rank's inbox.

        Args:
            name: what that rank is called in the outbox's messages.
            endpoint: of its inbox.
            token: its.
        """
        if not garbage.gc.is_alive():
            # The thread behind zero-copy sends and their trackers: at exit, when the goodbyes are
            # tracked, Python starts no more threads.
            garbage.gc.start()
        if self.keys is None:
            self.outbox.plain_username = b"pycoll"
            self.outbox.plain_password = token.encode()
        else:
            self.outbox.curve_publickey = self.keys.client_public
            self.outbox.curve_secretkey = self.keys.client_secret
            self.outbox.curve_serverkey = self.keys.server_public
        self.outbox.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        self.outbox.connect(endpoint)

    def disconnect(self, endpoint: str) -> None:
        """End a connection of the outbox; nothing if it has ended."""
        # Else what is queued for it would be kept, and waited for at the end.
        with contextlib.suppress(zmq.ZMQError):
            self.outbox.disconnect(endpoint)

    def ended(self) -> Iterator[tuple[str, str]]:
        """Read the monitor's events; yield the endpoints whose connections have ended, and why."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(NOBLOCK))
            except zmq.Again:
                return
            reason = {
                zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this rank's token",
                zmq.EVENT_CLOSED: "it does not answer",
            }.get(zmq.Event(event["event"]), "its link was closed")
            yield event["endpoint"].decode(), reason

    def close(self, deadline: float) -> None:
        """Close both; what is queued in the outbox may leave until then, by time.monotonic()."""
        self.poller.close()
        self.outbox.disable_monitor()
        self._monitor.close(linger=0)
        self.inbox.close(linger=0)
        self.outbox.close(linger=max(0, round((deadline - time.monotonic()) * 1000)))
        self._authenticator.close()
        self._context.term()
