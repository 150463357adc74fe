"""Transports in Python as links of the core's engine.

What the engine asks of such a link stands in a queue of orders (_core/engine/link_queue.h). They
are done here, and what the transports tell is handed to the engine: both in `pump`, under the
owner's lock. Between two calls of it each transport sleeps, so that its descriptor, which the
engine watches, says when there is something to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pycoll._transports._core import (
    ORDER_ACCEPT,
    ORDER_GIVE_UP,
    ORDER_REDIRECT,
    ORDER_SEND,
    ORDER_TAKE_BACK,
)
from pycoll._transports.base import (
    Arrival,
    Elsewhere,
    Handler,
    Operation,
    Reach,
    Transfer,
    Transport,
    Withdrawn,
)
from pycoll.errors import TransportError

if TYPE_CHECKING:
    from pycoll._transports._core import MessageEngine

RECEIVED, WITHDRAWN, SENT, COMMITTED = range(4)
"""What `MessageEngine.tell_over` tells."""

NOW, NO_ROOM, NO_SENSE = 0, -1, -2
"""What `MessageEngine.tell_arrived` returns in place of a number."""

FAILED = -200_000
"""The status of a send that failed alone, for the first of `Links.failures`; one less: the next."""

ROUNDS = 16
"""Rounds of one `pump` in which something was done; then others have their turn."""


class Links:
    """The transports of one rank that are not the core's; a `Handler` of theirs.

    Args:
        peers: the transport to each rank that one of them reaches.

    Attributes:
        failures: why single sends have failed, each text once.
    """

    def __init__(self, peers: Mapping[int, Transport]) -> None:
        self.peers = peers
        self.failures: list[str] = []
        self._transports = list(dict.fromkeys(peers.values()))
        self._started: list[Transport] = []
        self._asleep = False
        self._pumping = False
        self._closed = False
        self._arrivals: dict[int, Arrival] = {}
        self._numbers: dict[Arrival, int] = {}  # of those that may be withdrawn
        self._sends: dict[int, Transfer] = {}
        self._receives: dict[int, Transfer] = {}
        # By rank what the engine has no room for, and what must be told after it.
        self._later: dict[int, deque[Arrival | str | None]] = {}

    def open(self, core: MessageEngine) -> None:
        """Be the links of an engine."""
        self._core = core

    def start(
        self, transport: Transport, addresses: Sequence[dict[str, Any]], handler: Handler
    ) -> None:
        """Start one of the transports; notes go to `handler`, which hands over those it gets."""
        self._handler = handler
        transport.start(addresses, self)
        self._started.append(transport)
        self._core.watch(transport.fileno())
        self.pump()

    # --- driving ---------------------------------------------------------------------------

    def pump(self) -> bool:
        """Do what can be done without waiting; True if that was something."""
        if self._pumping or not (self._transports or self._started):
            return False  # who has called the one that called this goes on
        self._pumping = True
        worked = False
        try:
            self._awake()
            for _ in range(ROUNDS):
                if self._turn():
                    worked = True
                elif self._closed or self._sleep():
                    break
                else:
                    self._awake()
            else:
                self._core.post_work()
        finally:
            self._pumping = False
        self._core.tell_lag(any([transport.is_behind for transport in self._started]))
        return worked

    def _turn(self) -> bool:
        worked = self._do_orders()
        for transport in self._started:
            worked |= transport.progress()
        if self._later:
            worked |= self._tell_later()
        return worked

    def _sleep(self) -> bool:
        self._asleep = True
        return all([transport.sleep() for transport in self._started])

    def _awake(self) -> None:
        if self._asleep:
            self._asleep = False
            for transport in self._started:
                transport.awake()

    # --- orders ----------------------------------------------------------------------------

    def _do_orders(self) -> bool:
        worked = False
        while (order := self._core.next_order()) is not None:
            kind, number, *rest = order
            worked = True
            if kind == ORDER_SEND:
                self._send(number, *rest)
            elif kind == ORDER_TAKE_BACK:
                if (send := self._sends.pop(number, None)) is not None:
                    send.cancel()
            elif kind == ORDER_ACCEPT:
                self._accept(number, memoryview(*rest))
            elif kind == ORDER_REDIRECT:
                if (receive := self._receives.get(number)) is not None:
                    receive.redirect(memoryview(*rest))
            elif kind == ORDER_GIVE_UP:
                if (receive := self._receives.pop(number, None)) is not None:
                    receive.cancel()
            else:
                arrival = self._arrivals.pop(number)
                self._numbers.pop(arrival, None)
                arrival.release()
        return worked

    def _send(self, number: int, peer: int, way: int, header: bytes, parts: list[Any]) -> None:
        if self._closed:
            return
        transport = self.peers[peer]
        start: Callable[..., Transfer] = (transport.send, transport.push, transport.offer)[way]
        try:
            transfer = start(peer, header, [memoryview(part) for part in parts])
        except TransportError as exc:
            self.lost(peer, str(exc))  # then what is sent there waits
            return
        self._sends[number] = transfer
        transfer.then(lambda transfer: self._sent(number, transfer))

    def _sent(self, number: int, transfer: Operation) -> None:
        self._sends.pop(number, None)
        if transfer.error is None:
            self._core.tell_over(number, SENT)
        elif isinstance(transfer.error, TransportError):  # else its peer is about to be forgotten
            text = str(transfer.error)
            if text not in self.failures:
                self.failures.append(text)
            self._core.tell_over(number, SENT, FAILED - self.failures.index(text))

    def _accept(self, number: int, into: memoryview) -> None:
        arrival = self._arrivals.pop(number, None)
        if arrival is None or self._closed:
            return
        self._numbers.pop(arrival, None)
        receive = arrival.accept(into)
        self._receives[number] = receive
        receive.then(lambda receive: self._received(number, receive))

    def _received(self, number: int, receive: Operation) -> None:
        self._receives.pop(number, None)
        if receive.error is None:
            self._core.tell_over(number, RECEIVED)
        elif isinstance(receive.error, Withdrawn):
            self._core.tell_over(number, WITHDRAWN)

    def ask_committed(self, number: int) -> None:
        """Say of a send whether it is too late to stop it."""
        send = self._sends.get(number)
        if send is None or send.committed:
            self._core.tell_over(number, COMMITTED)

    # --- what the transports tell ----------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """A message has come."""
        later = self._later.get(arrival.peer)
        if later is None and self._tell(arrival):
            return
        arrival.header = bytes(arrival.header)
        self._later.setdefault(arrival.peer, deque()).append(arrival)

    def _tell(self, arrival: Arrival) -> bool:
        """Hand a message to the engine; False: there is no room for it."""
        number = self._core.tell_arrived(
            arrival.peer, arrival.header, arrival.payload, arrival.nbytes, arrival.sender_waits
        )
        if number > 0:
            self._arrivals[number] = arrival
            if arrival.payload is None:
                self._numbers[arrival] = number
        elif number == NOW:
            arrival.release()
        elif number == NO_SENSE:
            arrival.release()
            self._core.tell_end(arrival.peer, "it sent what makes no sense")
        return number != NO_ROOM

    def withdrawn(self, arrival: Arrival) -> None:
        """The sender took back a message that was not accepted yet."""
        number = self._numbers.pop(arrival, None)
        if number is not None:
            self._core.tell_over(number, WITHDRAWN)
            del self._arrivals[number]
            return
        later = self._later.get(arrival.peer, ())
        if arrival in later:
            assert isinstance(later, deque)
            later.remove(arrival)

    def finished(self, peer: int) -> None:
        """`peer` closed its transport in good order."""
        self._tell_end(peer, None)

    def lost(self, peer: int, reason: str) -> None:
        """The link to `peer` is gone."""
        self._tell_end(peer, reason)

    def _tell_end(self, peer: int, why: str | None) -> None:
        if peer in self._later:
            self._later[peer].append(why)
        else:
            self._core.tell_end(peer, why)

    def _tell_later(self) -> bool:
        worked = False
        for peer, later in list(self._later.items()):
            while later:
                first = later[0]
                if not isinstance(first, Arrival):
                    self._core.tell_end(peer, first)
                elif not self._tell(first):
                    break
                later.popleft()
                worked = True
            if not later:
                self._later.pop(peer, None)
        return worked

    def tell(self, peer: int, note: bytes) -> None:
        """Have a note given to the transport of the peer."""
        self._handler.tell(peer, note)

    def listen(self, timeout_s: float) -> Collection[int]:
        """Give notes that come to the transports."""
        return self._handler.listen(timeout_s)

    def hear(self, peer: int, note: bytes) -> None:
        """Hand over a note that has come."""
        self.peers[peer].hear(peer, note)
        self._core.post_work()

    # --- memory elsewhere ------------------------------------------------------------------

    def reach(self, peer: int, part: memoryview, elsewhere: Elsewhere) -> Reach | None:
        """See `Transport.reach`."""
        transport = self.peers.get(peer)
        return transport.reach(part, elsewhere) if transport is not None else None

    def arrival(self, number: int) -> Arrival | None:
        """Return a message that was not accepted."""
        return self._arrivals.get(number)

    # --- the end ---------------------------------------------------------------------------

    def links(self) -> list[int]:
        """Return the ranks to which messages were sent."""
        return sorted({peer for transport in self._started for peer in transport.links()})

    def forget(self, peer: int, reason: str) -> None:
        """Learn that a rank has ended, before the engine does."""
        transport = self.peers.get(peer)
        if transport is None:
            return
        self.pump()
        transport.forget(peer, reason)
        self._later.pop(peer, None)
        for number, arrival in list(self._arrivals.items()):
            if arrival.peer == peer and arrival.payload is None:
                del self._arrivals[number]
                self._numbers.pop(arrival, None)

    def close(self, timeout_s: float) -> None:
        """Deliver what is buffered, and end."""
        if self._closed:
            return
        self.pump()
        self._closed = True
        self._awake()
        for transport in dict.fromkeys([*self._transports, *self._started]):
            transport.close(timeout_s)
        self._started.clear()
