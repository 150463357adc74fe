"""TCP by plain sockets: the transport that works between any two processes.

Two ranks that talk have one link for both directions, made when it is first needed: dial.py makes
it, and handshake.py proves that both ends are of the job. The compiled core then moves the bytes,
`_core/tcp.h`: small messages are written at once or copied, larger ones go from the sender's memory
to the receiver's. Here that becomes a `Transport`.

Between hosts the ranks authenticate, but nothing is encrypted: zeromq.py does that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pycoll.errors import PeerFailed, TransportError
from pycoll.ports import endpoint_of, listen, why_unreachable
from pycoll.transports.base import (
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Arrival,
    Handler,
    Operation,
    Parts,
    Transfer,
    Transport,
    Withdrawn,
)
from pycoll.transports.dial import Dialer, Link
from pycoll.transports.handshake import Secret

if TYPE_CHECKING:
    from pycoll.transports._core import Tcp

AHEAD = 1024 * 1024
"""Bytes of messages above the eager limit that may be on their way from one rank to another by
`push` without having been accepted: to ask first would take a round trip, as long as it takes to
send some 100 KiB."""

_KEEPALIVE, _KEEPALIVE_BETWEEN_HOSTS = 3, 6  # a cable may be out for 3 s

_SHORT_S = 0.001

_WATCHED = 8
"""The number of the event that the dialer has something to do."""


class _Send(Transfer):
    """A message that was offered, or one that was pushed and is not written yet."""

    __slots__ = ("id", "peer", "transport")

    def __init__(self, transport: TcpTransport, peer: int, number: int) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.id = number

    @property
    def committed(self) -> bool:
        return not self.done and not self.transport.core.stop(self.id)

    def awaited(self) -> Collection[int]:
        return (self.peer,)

    def cancel(self) -> None:
        super().cancel()
        self.transport.take_back(self.id)


class _Receive(Transfer):
    """A message that was accepted and is not here yet."""

    __slots__ = ("handle", "into", "key", "peer", "transport")

    def __init__(
        self,
        transport: TcpTransport,
        peer: int,
        into: memoryview,
        key: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.key = key
        self.into = into
        self.handle = 0

    def cancel(self) -> None:
        super().cancel()
        self.transport.give_up(self)

    def redirect(self, into: memoryview) -> None:
        # What has ended, though that was not handled yet, is all here.
        if self.handle and not self.transport.core.redirect(self.handle, into):
            nbytes = min(len(into), len(self.into))
            into[:nbytes] = self.into[:nbytes]
        self.into = into


class _Buffered(Arrival):
    """A small message, which is here."""

    __slots__ = ("_transport",)

    def __init__(self, transport: TcpTransport, peer: int, header: bytes, payload: bytes) -> None:
        super().__init__(peer, header, len(payload), memoryview(payload))
        self._transport = transport

    def accept(self, into: memoryview) -> Transfer:
        return self.copy(into)

    def release(self) -> None:
        if self.payload is not None:
            self.payload = None
            self._transport.core.consumed(self.peer, self.nbytes)


class _Pushed(Arrival):
    """A larger message that is coming, whether it was asked for or not."""

    __slots__ = ("_handle", "_transport")

    def __init__(
        self, transport: TcpTransport, peer: int, header: bytes, nbytes: int, handle: int
    ) -> None:
        super().__init__(peer, header, nbytes, None)
        self._transport = transport
        self._handle = handle

    @property
    def sender_waits(self) -> bool:
        return False

    def accept(self, into: memoryview) -> Transfer:
        handle, self._handle = self._handle, 0
        return self._transport.place(self.peer, handle, into)

    def release(self) -> None:
        if self._handle:
            self._transport.core.give_up(self._handle)
            self._handle = 0


class _Offered(Arrival):
    """A message whose payload waits at its sender."""

    __slots__ = ("_transport", "id")

    def __init__(
        self, transport: TcpTransport, peer: int, header: bytes, nbytes: int, number: int
    ) -> None:
        super().__init__(peer, header, nbytes, None)
        self._transport = transport
        self.id = number

    def accept(self, into: memoryview) -> Transfer:
        return self._transport.accept(self, into)

    def release(self) -> None:
        self._transport.drop(self)


class TcpTransport(Transport):
    """The tcp transport of one rank; see the module's text.

    Args:
        rank: this rank's number in the job.
        size: number of ranks in the job.
        key: the job's.
        host: the address to listen on; loopback unless the job has other hosts.
        lanes: connections that a link has, if the other rank has as many; 1 to 16.

    Attributes:
        core: the compiled half of this transport.

    Raises:
        TransportError: it cannot listen there.
    """

    name: ClassVar[str] = "tcp"

    def __init__(
        self, rank: int, size: int, key: bytes, host: str = "127.0.0.1", lanes: int = 1
    ) -> None:
        from pycoll.transports._core import Tcp

        if why := why_unreachable(host):
            raise TransportError(f"tcp: rank {rank} cannot be reached at {host}: {why}")
        self._rank = rank
        self._lanes = lanes
        self._closed = False
        self._unhandled: deque[tuple[Any, ...]] = deque()
        is_local = host in ("127.0.0.1", "::1")
        try:
            with contextlib.ExitStack() as undo:
                listener = undo.enter_context(listen(host))
                self._endpoint = endpoint_of(listener)
                self._dialer = Dialer(
                    rank,
                    size,
                    lanes,
                    listener,
                    Secret.derive(key),
                    _KEEPALIVE if is_local else _KEEPALIVE_BETWEEN_HOSTS,
                    self._linked,
                    self._unreachable,
                )
                undo.callback(self._dialer.close)
                limits = EAGER_LIMIT, AHEAD, CREDIT, MESSAGE_COST
                self.core: Tcp = Tcp(rank, size, lanes, *limits, self._unhandled)
                self.core.watch(self._dialer.fileno())
                undo.pop_all()
        except OSError as exc:
            raise TransportError(
                f"tcp: rank {rank} cannot listen on {host}: {exc.strerror}"
            ) from exc
        self._addresses: Sequence[dict[str, Any]] = ()
        self._handler: Handler | None = None
        self._begun: set[int] = set()  # ranks to which there is a link, or will be
        self._forgotten: dict[int, str] = {}
        self._sends: dict[int, _Send] = {}
        self._receives: dict[int, _Receive] = {}
        self._accepted: dict[tuple[int, int], _Receive] = {}
        self._waiting: dict[tuple[int, int], _Offered] = {}
        self._pid = os.getpid()
        # By the number of the event.
        self._events = (
            self._arrived,
            self._offered,
            self._pushed,
            self._sent,
            self._received,
            self._cancelled,
            self._bye,
            self._lost,
            self._dialer.progress,
        )
        _open.add(self)

    def address(self) -> dict[str, Any]:
        return {"endpoint": self._endpoint, "lanes": self._lanes}

    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        self._addresses = addresses
        self._handler = handler

    # --- links -----------------------------------------------------------------------------

    def _dial(self, peer: int) -> None:
        self._begun.add(peer)
        self._dialer.dial(Link(peer, 0), self._addresses[peer]["endpoint"])

    def _linked(self, link: Link, connection: socket.socket, dialed: bool) -> None:
        self._begun.add(link.peer)
        descriptor = connection.detach()
        try:
            self.core.attach(link.peer, link.lane, descriptor)
        except OSError as exc:
            os.close(descriptor)
            if exc.errno != errno.ENOTCONN and link.lane == 0:  # else it has ended meanwhile
                self.core.lose(link.peer, f"its link cannot be used ({exc.strerror})")
            return
        if dialed and link.lane == 0 and not self._closed:
            address = self._addresses[link.peer]
            for lane in range(1, min(self._lanes, address.get("lanes", 1))):
                self._dialer.dial(Link(link.peer, lane), address["endpoint"])

    def _unreachable(self, peer: int, why: str) -> None:
        self.core.lose(peer, why)

    def links(self) -> list[int]:
        return self.core.links()

    # --- sending ---------------------------------------------------------------------------

    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, False)

    def push(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        """Send for one who will not give it up: a larger message does not wait to be accepted.

        It is done when the kernel has taken it.
        """
        return self._start(peer, header, parts, True)

    def _start(self, peer: int, header: bytes, parts: Parts, may_push: bool) -> Transfer:
        if peer in self._forgotten:
            return self._failed(peer)
        if peer not in self._begun:
            self._dial(peer)
        number = self.core.send(peer, header, parts, may_push)
        if number:
            return self._started(peer, number)
        transfer = Transfer()
        transfer.done = True
        return transfer

    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        if peer in self._forgotten:
            return self._failed(peer)
        if peer not in self._begun:
            self._dial(peer)
        return self._started(peer, self.core.offer(peer, header, parts))

    def _started(self, peer: int, number: int) -> Transfer:
        send = self._sends[number] = _Send(self, peer, number)
        return send

    def _failed(self, peer: int) -> Transfer:
        transfer = Transfer()
        transfer.finish(PeerFailed(peer, self._forgotten[peer]))
        return transfer

    def take_back(self, number: int) -> None:
        """Give up a send."""
        if self._sends.pop(number, None) is not None:
            self.core.take_back(number)

    # --- receiving -------------------------------------------------------------------------

    def accept(self, arrival: _Offered, into: memoryview) -> Transfer:
        """Have an offered payload written to `into`."""
        peer, key = arrival.peer, (arrival.peer, arrival.id)
        if peer in self._forgotten:
            return self._failed(peer)
        receive = _Receive(self, peer, into, key)
        if self._waiting.pop(key, None) is None:
            receive.finish(Withdrawn())
            return receive
        receive.handle = self.core.accept(peer, arrival.id, arrival.nbytes, into)
        self._receives[receive.handle] = self._accepted[key] = receive
        return receive

    def place(self, peer: int, handle: int, into: memoryview) -> Transfer:
        """Have what was pushed written to `into`."""
        receive = _Receive(self, peer, into)
        if self.core.place(handle, into):
            receive.finish()
        elif peer in self._forgotten:
            return self._failed(peer)
        else:
            receive.handle = handle
            self._receives[handle] = receive
        return receive

    def drop(self, arrival: _Offered) -> None:
        """Tell the sender that nobody wants its message."""
        if self._waiting.pop((arrival.peer, arrival.id), None) is not None:
            self.core.drop(arrival.peer, arrival.id)

    def give_up(self, receive: _Receive) -> None:
        """Give up a receive."""
        if self._receives.pop(receive.handle, None) is not None:
            if receive.key is not None:
                del self._accepted[receive.key]
            self.core.give_up(receive.handle)

    # --- progress --------------------------------------------------------------------------

    def progress(self) -> bool:
        # A handler may let this transport progress, too: then first with what came before.
        worked = self.core.progress()
        while self._unhandled:
            worked = True
            kind, *event = self._unhandled.popleft()
            self._events[kind](*event)
        return worked

    def _arrived(self, peer: int, header: bytes, payload: bytes) -> None:
        assert self._handler is not None
        self._handler.arrived(_Buffered(self, peer, header, payload))

    def _offered(self, peer: int, header: bytes, nbytes: int, number: int) -> None:
        assert self._handler is not None
        arrival = self._waiting[peer, number] = _Offered(self, peer, header, nbytes, number)
        self._handler.arrived(arrival)

    def _pushed(self, peer: int, header: bytes, nbytes: int, handle: int) -> None:
        assert self._handler is not None
        self._handler.arrived(_Pushed(self, peer, header, nbytes, handle))

    def _sent(self, number: int) -> None:
        send = self._sends.pop(number, None)
        if send is not None:
            send.finish()

    def _received(self, handle: int) -> None:
        receive = self._receives.pop(handle, None)
        if receive is not None:
            if receive.key is not None:
                del self._accepted[receive.key]
            receive.finish()

    def _cancelled(self, peer: int, number: int) -> None:
        assert self._handler is not None
        arrival = self._waiting.pop((peer, number), None)
        receive = self._accepted.get((peer, number))
        if arrival is not None:
            self._handler.withdrawn(arrival)
        elif receive is not None:
            self.give_up(receive)
            receive.finish(Withdrawn())

    def _bye(self, peer: int) -> None:
        assert self._handler is not None
        self._handler.finished(peer)

    def _lost(self, peer: int, why: str) -> None:
        assert self._handler is not None
        self._dialer.forget(peer)
        self._handler.lost(peer, why)

    @property
    def is_behind(self) -> bool:
        return self.core.is_behind()

    @property
    def is_receiving(self) -> bool:
        return bool(self._receives)

    def fileno(self) -> int:
        return self.core.fileno()

    def callers_fileno(self) -> int:
        return self._dialer.fileno()

    def is_idle(self) -> bool:
        return not self._unhandled and self.core.is_idle()

    # --- the end ---------------------------------------------------------------------------

    def forget(self, peer: int, reason: str) -> None:
        if peer in self._forgotten:
            return
        self._forgotten[peer] = reason
        self._dialer.forget(peer)
        self.core.forget(peer)
        transfers: list[Operation] = [s for s in self._sends.values() if s.peer == peer]
        transfers += [r for r in self._receives.values() if r.peer == peer]
        self._sends = {n: send for n, send in self._sends.items() if send.peer != peer}
        self._receives = {n: r for n, r in self._receives.items() if r.peer != peer}
        self._accepted = {key: r for key, r in self._accepted.items() if r.peer != peer}
        for transfer in transfers:  # the end of one may cancel others
            transfer.finish(PeerFailed(peer, reason))

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        if os.getpid() == self._pid:
            self.core.say_goodbye()
            self._deliver(time.monotonic() + timeout_s)
        self.abandon()

    def _deliver(self, deadline: float) -> None:
        """Wait until the kernels of the peers have all that was written, or until the deadline."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        while not self.core.flush():
            while self._unhandled:
                if self._unhandled.popleft()[0] == _WATCHED:
                    self._dialer.progress()
            if time.monotonic() >= deadline:
                return
            # That a peer's kernel has something makes no descriptor readable.
            poller.poll(1000 * _SHORT_S)

    def abandon(self) -> None:
        """Close every descriptor, without a word."""
        self._dialer.close()
        self.core.close()


_open: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


def _after_fork() -> None:
    # The connections are the parent's: as long as the child had them, too, their ends would not be.
    for transport in _open:
        transport.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
