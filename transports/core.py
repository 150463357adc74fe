"""The message engine in the compiled core, as a transport: it reaches all ranks at once.

The core (`_core/engine`) matches, waits and moves by itself. Here it becomes a `Transport` for what
Python still does: collectives by messages, objects, arrays on a GPU. Who connects by tcp is decided
in Python (`core_tcp`). Transports that are not the core's are links of it (`link`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pycoll._transports._core import (
    EVENT_ARRIVED,
    EVENT_ASKED,
    EVENT_ENDED,
    EVENT_FINISHED,
    EVENT_HELD,
    EVENT_LOST,
    EVENT_STARTED,
    EVENT_WANTED,
    EVENT_WATCHED,
    RECEIVE_ENDED,
    STATUS_TAKEN_BACK,
    WAY_BUFFER,
    WAY_MAY_PUSH,
    WAY_OFFER,
)
from pycoll._transports.base import (
    AHEAD,
    CREDIT,
    EAGER_LIMIT,
    MESSAGE_COST,
    Arrival,
    Elsewhere,
    Handler,
    Parts,
    Reach,
    Transfer,
    Transport,
    Withdrawn,
)
from pycoll._transports.link import FAILED, Links
from pycoll.errors import Error, PeerFailed, TransportError

if TYPE_CHECKING:
    from pycoll._transports._core import MappedHost, MessageEngine, Receive, Send
    from pycoll._transports.core_tcp import TcpLinks, TcpNetwork

_SHORT_MS = 1


class LinkMemory(NamedTuple):
    """The memory of this host, for the link over it.

    Attributes:
        host: as this rank has mapped it.
        doorbell: this rank's eventfd, not blocking; it stays the caller's.
        ranks: the ranks of this host, in the order of their local ranks.
        single_copy: try to copy from memory to memory; else large payloads go in fragments.
    """

    host: MappedHost
    doorbell: int
    ranks: Sequence[int]
    single_copy: bool


class CoreSend(Transfer):
    """A message that is under way."""

    __slots__ = ("handle", "peer", "transport")

    def __init__(self, transport: CoreTransport, peer: int, handle: Send) -> None:
        super().__init__()
        self.transport = transport
        self.peer = peer
        self.handle = handle

    @property
    def committed(self) -> bool:
        return not self.done and not self.handle.stop()

    def awaited(self) -> Collection[int]:
        return (self.peer,)

    def ended(self, status: int) -> None:
        """Called when it has ended, with how."""
        self.finish(self.transport.error_of(status))

    def cancel(self) -> None:
        super().cancel()
        self.transport.disown(self.handle)
        self.handle.take_back()


class CoreReceive(Transfer):
    """A message that was accepted and is not here yet.

    Attributes:
        reach: how it comes to where its bytes are to be, if its memory is only a staging buffer of
            that.
    """

    __slots__ = ("handle", "reach", "transport")

    def __init__(self, transport: CoreTransport, handle: Receive, reach: Reach | None) -> None:
        super().__init__()
        self.transport = transport
        self.handle = handle
        self.reach = reach

    def ended(self, status: int) -> None:
        """Called when it has ended, with how."""
        self.finish(self.transport.error_of(status))

    def held(self) -> None:
        """Called when it has come, which was seen before this was told."""

    def cancel(self) -> None:
        super().cancel()
        self.transport.disown(self.handle)
        self.handle.drop()

    def redirect(self, into: memoryview) -> None:
        is_here = self.handle.state == RECEIVE_ENDED
        self.handle.redirect(into)
        reach, self.reach = self.reach, None
        if is_here and reach is not None and reach.is_open and not reach.is_in_buffer:
            reach.elsewhere.read(into)  # while it was on its way, its transport has seen to that


class CoreArrival(Arrival):
    """A message that has come, and that a receive of the core holds."""

    __slots__ = ("_reach", "handle", "on_withdrawal", "transport")

    def __init__(
        self, transport: CoreTransport, handle: Receive, on_withdrawal: Callable[[Arrival], object]
    ) -> None:
        super().__init__(handle.peer, handle.header, handle.nbytes, handle.payload)
        self.transport = transport
        self.handle = handle
        self.on_withdrawal = on_withdrawal
        self._reach: Reach | None = None

    @property
    def sender_waits(self) -> bool:
        return self.handle.sender_waits

    def accept(self, into: memoryview) -> Transfer:
        transfer = CoreReceive(self.transport, self.handle, self._reach)
        self.payload = None
        status = self.handle.into(into)
        if status is None:
            self.transport.own(self.handle, transfer)
        else:
            self.transport.disown(self.handle)
            transfer.finish(self.transport.error_of(status))
        return transfer

    def release(self) -> None:
        self.payload = None
        self.transport.disown(self.handle)
        self.handle.drop()

    def read_there(self) -> None:
        self.handle.count()
        self.release()

    def reach(self, into: memoryview, elsewhere: Elsewhere) -> Reach | None:
        arrival = self.transport.outside.arrival(self.handle.link_id)
        self._reach = arrival.reach(into, elsewhere) if arrival is not None else None
        return self._reach

    def held(self) -> None:
        """Called when it has come, which was seen before this was told."""

    def ended(self, status: int) -> None:
        """Called when it can be received no more."""
        if status == STATUS_TAKEN_BACK:
            self.on_withdrawal(self)


class CoreTransport(Transport):
    """The core's message engine, for Python; see the module's text.

    Args:
        rank, size: of the job.
        memory: of this host; None: it is not shared.
        network: how others reach this rank; None: they need not.
        outside: the transport to each rank that one of Python's reaches.

    Attributes:
        rank: as given.
        core: the engine.
        outside: those transports.
        hold: calls a function under the owner's lock, if that can be.

    Raises:
        TransportError: it cannot listen there.
        OSError: the system does not give what is needed.
    """

    name: ClassVar[str] = "core"

    def __init__(
        self,
        rank: int,
        size: int,
        memory: LinkMemory | None = None,
        network: TcpNetwork | None = None,
        outside: Mapping[int, Transport] | None = None,
    ) -> None:
        from pycoll._transports._core import MessageEngine

        self.rank = rank
        self._closed = False
        self._handler: Handler | None = None
        self.hear_work: Callable[[], None] = lambda: None
        self.hold: Callable[[Callable[[], object]], bool] = _call
        self.outside = Links(outside or {})
        self._forgotten: dict[int, str] = {}
        self._owners: dict[Any, Any] = {}
        self._later: list[tuple[Any, ...]] = []  # events
        self._tcp: TcpLinks | None = None
        self._doorbell = memory.doorbell if memory is not None else -1
        self._sharing = frozenset(memory.ranks if memory is not None else ())
        self._pid = os.getpid()
        limits = EAGER_LIMIT, AHEAD, CREDIT, MESSAGE_COST
        options: dict[str, Any] = {}
        if memory is not None:
            options |= memory._asdict()
        with contextlib.ExitStack() as undo:
            if network is not None:
                self._tcp = _listen(rank, size, network)
                undo.callback(self._tcp.close)
                options |= {"lanes": network.lanes, "dialer": self._tcp.dialer.fileno()}
            if outside:
                options |= {
                    "queued": list(outside),
                    "on_orders": self._order,
                    "on_stop": self._stop,
                }
            self.core: MessageEngine = MessageEngine(rank, size, limits, self._work, **options)
            self.outside.open(self.core)
            if self._tcp is not None:
                self._tcp.open(self.core)
            undo.pop_all()
        _open.add(self)

    def _work(self) -> None:
        self.hear_work()

    def _order(self) -> None:
        if not self.hold(self.outside.pump):
            self.core.post_work()

    def _stop(self, number: int) -> None:
        self.hold(lambda: self.outside.ask_committed(number))

    def address(self) -> dict[str, Any]:
        return self._tcp.address() if self._tcp is not None else {}

    def start(self, addresses: Sequence[dict[str, Any]], handler: Handler) -> None:
        if self._tcp is not None:
            self._tcp.start(addresses)
        self._handler = handler

    # --- links -----------------------------------------------------------------------------

    def link_name(self, peer: int) -> str:
        """Return the name of the transport by which messages to a rank go."""
        if peer == self.rank:
            return "self"
        if peer in self.outside.peers:
            return self.outside.peers[peer].name
        return "shm" if peer in self._sharing else "tcp"

    def links(self) -> list[int]:
        return sorted({*self.core.links(), *self.outside.links()})

    # --- sending ---------------------------------------------------------------------------

    def send(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, WAY_BUFFER)

    def push(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, WAY_MAY_PUSH)

    def offer(self, peer: int, header: bytes, parts: Parts) -> Transfer:
        return self._start(peer, header, parts, WAY_OFFER)

    def _start(self, peer: int, header: bytes, parts: Parts, way: int) -> Transfer:
        started = self.core.send(peer, header, parts, way)
        if started is None or isinstance(started, int):
            transfer = Transfer()
            transfer.finish(self.error_of(started or 0))
            return transfer
        send = CoreSend(self, peer, started)
        self.own(started, send)
        return send

    def error_of(self, status: int) -> BaseException | None:
        """Return why something has failed that has ended so; None: it has not."""
        if status == 0:
            return None
        if status == STATUS_TAKEN_BACK:
            return Withdrawn()
        if status in (-errno.ENOMEM, -errno.ENOBUFS):
            return MemoryError()
        if status <= FAILED:
            return TransportError(self.outside.failures[FAILED - status])
        if status < 0:
            return TransportError(f"a message could not be moved: status {status}")
        peer = status - 1
        if peer in self._forgotten:
            return PeerFailed(peer, self._forgotten[peer])
        return Error("this communicator is closed or broken")

    # --- what happens ----------------------------------------------------------------------

    def own(self, handle: Send | Receive, owner: Any) -> None:
        """Have `owner.ended(status)` called when that has ended, and `owner.held()` before."""
        self._owners[handle] = owner

    def disown(self, handle: Send | Receive) -> None:
        """Tell nobody any more."""
        self._owners.pop(handle, None)

    def arrival_of(self, handle: Receive) -> CoreArrival:
        """Return the message that a receive holds."""
        assert self._handler is not None
        arrival = CoreArrival(self, handle, self._handler.withdrawn)
        self.own(handle, arrival)
        return arrival

    def progress(self) -> bool:
        worked = self.outside.pump()
        worked |= self.core.progress()
        if not self._later and not self.core.has_work:
            return worked
        later, self._later = self._later, []
        return self._handle([*later, *self.core.events()]) or worked

    def _handle(self, events: Sequence[tuple[Any, ...]]) -> bool:
        assert self._handler is not None
        for kind, *event in events:
            if kind == EVENT_ENDED:
                owner = self._owners.pop(event[0], None)
                if owner is not None:
                    owner.ended(event[1])
            elif kind == EVENT_ARRIVED:
                self._handler.arrived(self.arrival_of(event[0]))
            elif kind == EVENT_HELD:
                owner = self._owners.get(event[0])
                if owner is not None:
                    owner.held()
            elif kind == EVENT_STARTED:
                event[0]._ended()
            elif kind == EVENT_ASKED:
                event[0]._asked()
            else:
                self._handle_link(kind, *event)
        return bool(events)

    def _handle_link(self, kind: int, peer: int = -1, why: str = "") -> None:
        assert self._handler is not None
        if kind == EVENT_FINISHED:
            self._handler.finished(peer)
        elif kind == EVENT_LOST:
            if self._tcp is not None:
                self._tcp.forget(peer)
            self._handler.lost(peer, why)
        elif kind == EVENT_WANTED and peer not in self._forgotten:
            assert self._tcp is not None
            self._tcp.dial(peer)
        elif kind == EVENT_WATCHED and self._tcp is not None:
            self._tcp.progress()

    @property
    def is_behind(self) -> bool:
        return self.core.is_behind

    @property
    def is_receiving(self) -> bool:
        """Whether a message that was accepted is still on its way."""
        return self.core.is_receiving

    def fileno(self) -> int:
        return self._doorbell  # who waits, waits in the core

    def callers_fileno(self) -> int:
        """Return a descriptor that is readable while another rank waits for a link to this one.

        Then somebody should call `progress` even if no thread of this rank is in a call. -1: no
        rank has to wait.
        """
        return self._tcp.dialer.fileno() if self._tcp is not None else -1

    def is_idle(self) -> bool:
        return not self._later and not self.core.has_work

    # --- transports of Python's ------------------------------------------------------------

    def hear(self, peer: int, note: bytes) -> None:
        self.outside.hear(peer, note)

    def reach_to(self, peer: int, part: memoryview, elsewhere: Elsewhere) -> Reach | None:
        """See `Transport.reach`, of the transport to `peer`."""
        return self.outside.reach(peer, part, elsewhere)

    # --- the end ---------------------------------------------------------------------------

    def forget(self, peer: int, reason: str) -> None:
        if peer in self._forgotten:
            return
        self._forgotten[peer] = reason
        if self._tcp is not None:
            self._tcp.forget(peer)
        self.outside.forget(peer, reason)
        self.core.forget(peer)
        # Receives that wait hear of it by the next progress: then it is known why.
        for event in self.core.events():
            ends = event[0] == EVENT_ENDED and isinstance(self._owners.get(event[1]), Transfer)
            self._later.append(event)
            if ends:
                self._handle([self._later.pop()])
        if self._later:
            self.core.post_work()

    def close(self, timeout_s: float) -> None:
        """Deliver what is buffered; `end` must follow, without the owner's lock."""
        if self._closed:
            return
        self._closed = True
        if self._tcp is not None:
            self._tcp.is_closing = True
        _open.discard(self)
        if os.getpid() == self._pid:
            self.outside.close(timeout_s)
            self.core.say_goodbye()
            self._deliver(time.monotonic() + timeout_s)
        if self._tcp is not None:
            self._tcp.close()

    def _deliver(self, deadline: float) -> None:
        poller = select.poll()
        if self._doorbell >= 0:
            poller.register(self._doorbell, select.POLLIN)
        while not self.core.flush():
            for kind, *event in self.core.events():
                if kind in (EVENT_WANTED, EVENT_WATCHED):
                    self._handle_link(kind, *event)
            if time.monotonic() >= deadline:
                return
            # That a peer has taken something makes no descriptor readable.
            poller.poll(_SHORT_MS)

    def end(self) -> None:
        """End the engine: who still waits in it returns. It may be called again."""
        self.core.close()
        if self._handler is not None and not isinstance(self._handler, weakref.ProxyTypes):
            self._handler = weakref.proxy(self._handler)  # who has this

    def _forked(self) -> None:
        """In the child of a fork: close every descriptor. The background thread is the parent's."""
        if self._tcp is not None:
            self._tcp.close()
        self.core.forked()


def _listen(rank: int, size: int, network: TcpNetwork) -> TcpLinks:
    from pycoll._transports.core_tcp import TcpLinks  # not sooner: ranks of one host do without

    return TcpLinks(rank, size, network)


def _call(action: Callable[[], object]) -> bool:
    action()
    return True


_open: weakref.WeakSet[CoreTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in _open:
        transport._forked()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
