"""The point-to-point messages of one communicator, as far as Python has to do with them.

The core matches. What it cannot take back, because parts of it are elsewhere, waits here.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

import pycoll._transports._core as _core
from pycoll._runtime.envelope import ANY, P2P, Held, Incoming
from pycoll._runtime.matching import Found, Match, ParkedArrival
from pycoll._runtime.scratch import new_bytes
from pycoll._transports._core import (
    RECEIVE_ENDED,
    RECEIVE_HELD,
    RECEIVE_POSTED,
    RECEIVE_READING,
    STATUS_REFUSED,
    STATUS_TAKEN_BACK,
)
from pycoll._transports.base import Arrival, Operation, Transfer
from pycoll._transports.core import CoreArrival, CoreReceive, CoreTransport
from pycoll.errors import Error, PeerFailed

if TYPE_CHECKING:
    from pycoll._transports._core import Receive

_HAS_MESSAGE = RECEIVE_HELD, RECEIVE_READING


class Inbox:
    """What waits for messages of one communicator, and what has come for it.

    Args:
        transport: the core's engine.

    Attributes:
        ident: the communicator's number, the same on all its ranks.
        members: world ranks of its ranks, in order.
        me: this rank.
        core: the same in the core.
        broken: why no call on it can work any more, or None.
        gone: the ranks that have ended in good order, and how that is said.
        being_read: messages whose value is being copied from where it lies, and whether it is still
            there: their senders may take them back.
        turns: by rank here, the last send that waits for its value, or for one before it.
        matches: receives and probes of Python's that wait, by number.
    """

    def __init__(
        self, ident: int, members: tuple[int, ...], me: int, transport: CoreTransport
    ) -> None:
        self.ident = ident
        self.members = members
        self.me = me
        self.transport = transport
        self.core = _core.Context(transport.core, ident, members, me)
        self.broken: BaseException | None = None
        self.gone: dict[int, PeerFailed] = {}
        self.matches: dict[int, Match] = {}
        self.turns: dict[int, Operation] = {}
        self.being_read: dict[Arrival, bool] = {}
        self._closed = False
        # Messages that the core cannot take back: parts of them are elsewhere.
        self._returned: list[Incoming] = []
        self._message_of: dict[Arrival, Incoming] = {}
        self._held: dict[int, Held] = {}  # by order
        self._messages_were_usable = False

    @property
    def is_closed(self) -> bool:
        """Whether this rank has given it up."""
        return self._closed

    def is_broken(self) -> bool:
        """Whether no call can work any more."""
        return self.broken is not None

    # --- receives --------------------------------------------------------------------------

    def match(
        self,
        source: int,
        tag: int,
        peek: bool = False,
        place: int | None = None,
        fit: tuple[int, int] | None = None,
        for_message: bool = False,
    ) -> Match:
        """Wait for a message; `peek` leaves it in the queue.

        Args:
            for_message: it will be held: nobody waits in this place again if it is taken back.
            fit: code of the dtype, and bytes, of the array that shall be filled. What does not fit
                is refused at once (`is_refused`).
            place: the number of an earlier match whose message was withdrawn: this one waits where
                that one did, before receives that were posted after it.
        """
        number = -1 if place is None else place
        handle = self.core.post(source, tag, peek, number, *(fit or (-1, 0)), for_message)
        match = Match(self, handle, source, tag, peek)
        if self._returned and self._match_returned(match):
            return match
        if handle.state == RECEIVE_POSTED:
            self.matches[match.number] = match
            self.transport.own(handle, match)
        else:
            self.settle(match)
        return match

    def adopt(self, handle: Receive, source: int, tag: int) -> Match:
        """Return the match of a receive that holds its message already.

        Args:
            handle: the receive.
            source, tag: what it asks for; the world rank, or `ANY`.
        """
        match = Match(self, handle, source, tag, peek=False)
        self.settle(match)
        if not match.done:  # its message was taken back, and it waits again
            self.matches[match.number] = match
        return match

    def settle(self, match: Match) -> None:
        """Give a match what has become of it."""
        handle = match.handle
        state = handle.state  # it may change at any time
        if (
            state == RECEIVE_ENDED and handle.status == STATUS_TAKEN_BACK
        ):  # wait again, in the same place
            self.transport.disown(handle)  # that it has ended may still be told
            handle = self.core.post(match.source, match.tag, match.peek, match.number)
            match.handle = handle
            state = handle.state
        if state == RECEIVE_POSTED:
            self.transport.own(handle, match)
            return
        self.matches.pop(match.number, None)
        if state == RECEIVE_HELD:
            arrival = CoreArrival(self.transport, handle, self.withdrawn)
            self.transport.own(handle, arrival)
            match.message = self._incoming(arrival, handle)
            match.finish()
        elif state == RECEIVE_ENDED and handle.status in (
            0,
            STATUS_REFUSED,
        ):  # a probe, or it does not fit
            header = handle.header
            match.message = self._incoming(Found(handle.peer, header, handle.nbytes, None), handle)
            match.finish()
        else:
            match.finish(self._why(match, handle.status))

    def _incoming(self, arrival: Arrival, handle: Receive) -> Incoming:
        header = arrival.header
        _, _, tag, form = P2P.unpack_from(header)
        description = bytes(header[P2P.size :])
        return Incoming(arrival, handle.peer, tag, form, description, handle.order)

    def _why(self, match: Match, status: int) -> BaseException | None:
        return self.broken or self._no_sender(match.source) or self.transport.error_of(status)

    def put_back(self, message: Incoming) -> None:
        """Return a message to its place in the queue; another receive may take it from there.

        One that is held returns to its handle.
        """
        arrival = message.arrival
        held = self._held.get(message.order)
        if self.is_broken():
            self._drop(arrival)
        elif held is not None:
            held.message = message
            self._message_of[arrival] = message
        elif isinstance(arrival, CoreArrival) and arrival.handle.state in (
            RECEIVE_HELD,
            RECEIVE_READING,
        ):
            self.transport.disown(arrival.handle)
            arrival.handle.give_up()
        elif not isinstance(arrival, CoreArrival | Found):
            self._return(message)

    def park(self, message: Incoming, transfer: Transfer) -> None:
        """Put back a message whose receive was given up half-way: it goes on into memory of ours.

        Args:
            message: it.
            transfer: what it was accepted with.
        """
        if (
            isinstance(transfer, CoreReceive)
            and message.order not in self._held
            and not self.is_broken()
            and transfer.handle.give_up()
        ):
            self.transport.disown(transfer.handle)
            return
        # What has ended is still to be heard of.
        spare = new_bytes(message.arrival.nbytes)
        parked = ParkedArrival(message.arrival, transfer, spare)

        def done(operation: Operation) -> None:
            if operation.error is not None:  # its sender has given up, too
                self.withdrawn(parked)

        transfer.then(done)
        self.put_back(message._replace(arrival=parked))

    def hold(self, message: Incoming) -> Held:
        """Keep a matched message until `take` asks for it."""
        held = self._held[message.order] = Held(message)
        self._message_of[message.arrival] = message
        return held

    def take(self, held: Held) -> Incoming:
        """Return a held message to be received: then `let_go` it, or `put_back`.

        Raises:
            Error: it is not here: it was received, or is lost.
        """
        message, held.message = held.message, None
        if message is None:
            raise Error(f"this message {held.why}")
        held.why = "is being received"
        del self._message_of[message.arrival]
        return message

    def let_go(self, held: Held, order: int, why: str) -> None:
        """Forget the held message of this order, for it was received or is lost."""
        held.message, held.why = None, why
        self._held.pop(order, None)

    def _no_sender(self, source: int) -> PeerFailed | None:
        """Return why no message can come from `source` any more."""
        if source != ANY or not self.gone:
            return self.gone.get(source)
        others = [rank for rank in self.members if rank != self.me]
        if others and all(rank in self.gone for rank in others):
            return self.gone[others[0]]
        return None

    def take_turn(self, dest: int) -> Operation:
        """Come after all sends to `dest` that wait; those that start now come after this one."""
        if not self.turns:
            self._messages_were_usable = self.core.messages_usable
            self.core.messages_usable = False  # the core knows of no turns
        turn = self.turns[dest] = Operation()
        return turn

    def end_turn(self, dest: int, turn: Operation, before: Operation | None) -> None:
        """Let the next one send; if this one has given up, not before those before it have."""
        if before is not None and not before.done:
            before.then(lambda _: self.end_turn(dest, turn, None))
            return
        if self.turns.get(dest) is turn:
            del self.turns[dest]
        if not self.turns and self.broken is None:
            self.core.messages_usable = self._messages_were_usable
        turn.finish()

    # --- messages that are not in the core -------------------------------------------------

    def _match_returned(self, match: Match) -> bool:
        found = (each for each in self._returned if _fits(match, each))
        message = next(found, None)
        handle = match.handle
        if message is None or (handle.state == RECEIVE_HELD and handle.order < message.order):
            return False
        handle.give_up()
        if not match.peek:
            self._returned.remove(message)
            self._message_of.pop(message.arrival, None)
        match.message = message
        match.finish()
        return True

    def _return(self, message: Incoming) -> None:
        """Give a message to who waits for it; keep it if nobody does."""
        self.core.messages_usable = False  # the core does not know of it
        told = []
        waiting = sorted(self.matches.items())
        for match in [match for _, match in waiting if _fits(match, message)]:
            del self.matches[match.number]
            self.transport.disown(match.handle)
            match.handle.give_up()
            match.message = message
            told.append(match)
            if not match.peek:
                break
        else:
            insort(self._returned, message, key=lambda each: each.order)
            self._message_of[message.arrival] = message
        for match in told:
            match.finish()

    def withdrawn(self, arrival: Arrival) -> None:
        """Forget a message that its sender took back."""
        self._returned = [each for each in self._returned if each.arrival is not arrival]
        if arrival in self.being_read:
            self.being_read[arrival] = False
            return
        message = self._message_of.pop(arrival, None)
        if message is not None and message.order in self._held:
            why = "was taken back by its sender"
            self.let_go(self._held[message.order], message.order, why)

    def _drop_messages(self) -> None:
        arrivals = list(self._message_of)
        for held in self._held.values():
            held.message, held.why = None, "was dropped: its communicator is closed or broken"
        self._message_of.clear()
        self._held.clear()
        self._returned.clear()
        for arrival in arrivals:
            self._drop(arrival)

    def _drop(self, arrival: Arrival) -> None:
        """Drop a message that nobody will receive.

        Who waits until it is received goes on if this communicator was closed. If it is broken the
        sender will hear why, and must not believe until then that all went well.
        """
        if self._closed or not arrival.sender_waits:
            arrival.release()


def _fits(match: Match, message: Incoming) -> bool:
    return match.source in (ANY, message.source) and match.tag in (ANY, message.tag)
