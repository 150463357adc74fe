"""Matching by the compiled core: a communicator's point-to-point messages are there."""

from __future__ import annotations

from bisect import insort
from typing import Any

from pycoll.context import ANY, P2P, Context, Incoming, Match, patterns
from pycoll.transports.base import Arrival, Transfer
from pycoll.transports.core import (
    HOLDING,
    OVER,
    POSTED,
    READING,
    REFUSED,
    TAKEN_BACK,
    CoreArrival,
    CoreReceive,
    CoreTransport,
)


class _Found(Arrival):
    """What a probe has found, or a receive has refused: its length."""

    __slots__ = ()

    def accept(self, into: memoryview) -> Transfer:
        raise AssertionError("it was only looked at")

    def release(self) -> None:
        raise AssertionError("it was only looked at")


class _Match(Match):
    """A receive or a probe that waits in the core."""

    __slots__ = ("face",)

    context: CoreContext

    def __init__(self, context: CoreContext, face: Any, source: int, tag: int, peek: bool) -> None:
        super().__init__(context, face.number, source, tag, peek)
        self.face = face

    @property
    def is_refused(self) -> bool:
        return bool(self.face.status == REFUSED)

    def held(self) -> None:
        """Hear that its message has come."""
        self.context.settle(self)

    def ended(self, status: int) -> None:
        """Hear that it has ended."""
        self.context.settle(self)

    def cancel(self) -> None:
        super().cancel()
        self.context.transport.disown(self.face)
        if not self.face.give_up():
            self.face.drop()


class CoreContext(Context):
    """What one communicator waits for, and what has come for it: see `Context`.

    Args:
        transport: the core's engine.
    """

    def __init__(
        self, ident: int, members: tuple[int, ...], me: int, transport: CoreTransport
    ) -> None:
        from pycoll.transports._core import Context as Core

        super().__init__(ident, members, me)
        self.transport = transport
        self.core = Core(transport.core, ident, members, me)
        # Messages that the core cannot take back: parts of them are elsewhere.
        self._returned: list[Incoming] = []

    # --- point to point --------------------------------------------------------------------

    def match(
        self,
        source: int,
        tag: int,
        peek: bool = False,
        place: int | None = None,
        fit: tuple[int, int] | None = None,
    ) -> Match:
        number = -1 if place is None else place
        face = self.core.post(source, tag, peek, number, *(fit or ()))
        match = _Match(self, face, source, tag, peek)
        if self._returned and self._match_returned(match):
            return match
        if face.state == POSTED:
            self.matches.add(match.number, match, (source, tag))
            self.transport.own(face, match)
        else:
            self.settle(match)
        return match

    def settle(self, match: _Match) -> None:
        """Give a match what has become of it."""
        face = match.face
        if face.state == OVER and face.status == TAKEN_BACK:  # wait again, in the same place
            match.face = face = self.core.post(match.source, match.tag, match.peek, match.number)
        if face.state == POSTED:
            self.transport.own(face, match)
            return
        self.matches.remove(match.number)
        if face.state == HOLDING:
            arrival = CoreArrival(self.transport, face, self.withdrawn)
            self.transport.own(face, arrival)
            match.message = self._incoming(arrival, face)
            match.finish()
        elif face.state == OVER and face.status in (0, REFUSED):  # a probe, or it does not fit
            header = face.header
            match.message = self._incoming(_Found(face.peer, header, face.nbytes, None), face)
            match.finish()
        else:
            match.finish(self._why(match, face.status))

    def _incoming(self, arrival: Arrival, face: Any) -> Incoming:
        header = arrival.header
        _, _, tag, form = P2P.unpack_from(header)
        description = bytes(header[P2P.size :])
        return Incoming(arrival, face.peer, tag, form, description, face.order)

    def _why(self, match: Match, status: int) -> BaseException | None:
        return self.broken or self._no_sender(match.source) or self.transport.error_of(status)

    def put_back(self, message: Incoming) -> None:
        arrival = message.arrival
        if self.is_broken() or message.order in self._held:
            super().put_back(message)
        elif isinstance(arrival, CoreArrival) and arrival.face.state in (HOLDING, READING):
            self.transport.disown(arrival.face)
            arrival.face.give_up()
        elif not isinstance(arrival, CoreArrival | _Found):
            self._return(message)

    def park(self, message: Incoming, transfer: Transfer) -> None:
        if (
            isinstance(transfer, CoreReceive)
            and message.order not in self._held
            and not self.is_broken()
            and transfer.face.give_up()
        ):
            self.transport.disown(transfer.face)
            return
        # What has ended is still to be heard of.
        super().park(message, transfer)

    # --- messages that are not in the core -------------------------------------------------

    def _match_returned(self, match: _Match) -> bool:
        found = (each for each in self._returned if _fits(match, each))
        message = next(found, None)
        face = match.face
        if message is None or (face.state == HOLDING and face.order < message.order):
            return False
        face.give_up()
        if not match.peek:
            self._returned.remove(message)
        match.message = message
        match.finish()
        return True

    def _return(self, message: Incoming) -> None:
        """Give a message to who waits for it; keep it if nobody does."""
        if self.short is not None:
            self.short.usable = False  # the core does not know of it
        fitting = patterns(message.source, message.tag)
        told = []
        while (match := self.matches.first(*fitting)) is not None:
            self.matches.remove(match.number)
            assert isinstance(match, _Match)
            self.transport.disown(match.face)
            match.face.give_up()
            match.message = message
            told.append(match)
            if not match.peek:
                break
        else:
            insort(self._returned, message, key=lambda each: each.order)
            self._message_of[message.arrival] = message
        for match in told:
            match.finish()

    def withdrawn(self, arrival: Arrival) -> bool:
        self._returned = [each for each in self._returned if each.arrival is not arrival]
        return super().withdrawn(arrival)

    # --- the end ---------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._returned.clear()
        if self._closed:
            self.core.close()  # who waits until its message is received goes on
        else:
            self.core.break_()

    def count(self) -> None:
        pass  # the core matches all alike


def _fits(match: Match, message: Incoming) -> bool:
    return match.source in (ANY, message.source) and match.tag in (ANY, message.tag)
