"""Matching by the compiled core: a communicator's point-to-point messages are there."""

from __future__ import annotations

from bisect import insort
from typing import Any

from pycoll.context import (
    ANY,
    COLLECTIVE,
    KIND_LENDING,
    P2P,
    Context,
    Incoming,
    Key,
    Match,
    Wanted,
    call_of,
    patterns,
)
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


class _Collecting:
    """A collective's message that is waited for in the core."""

    __slots__ = ("context", "face", "key", "wanted")

    def __init__(self, context: CoreContext, key: Key, wanted: Wanted) -> None:
        self.context = context
        self.key = key
        self.wanted = wanted
        self.face = context.core.collect(*key)

    def held(self) -> None:
        """Hear that it has come."""
        self.context.collected(self)

    def ended(self, status: int) -> None:
        """Hear that it will not come."""
        self.context.collected(self)


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
        self._collecting: dict[Key, _Collecting] = {}

    # --- point to point --------------------------------------------------------------------

    def match(
        self,
        source: int,
        tag: int,
        peek: bool = False,
        place: int | None = None,
        fit: tuple[int, int] | None = None,
        for_handle: bool = False,
    ) -> Match:
        number = -1 if place is None else place
        face = self.core.post(source, tag, peek, number, *(fit or (-1, 0)), for_handle)
        match = _Match(self, face, source, tag, peek)
        if self._returned and self._match_returned(match):
            return match
        if face.state == POSTED:
            self.matches.add(match.number, match, (source, tag))
            self.transport.own(face, match)
        else:
            self.settle(match)
        return match

    def adopt(self, face: Any, source: int, tag: int) -> Match:
        """Return the match of a receive that holds its message already.

        Args:
            face: the receive.
            source, tag: what it asks for; the world rank, or `ANY`.
        """
        match = _Match(self, face, source, tag, peek=False)
        self.settle(match)
        if not match.done:  # its message was taken back, and it waits again
            self.matches.add(match.number, match, (source, tag))
        return match

    def settle(self, match: _Match) -> None:
        """Give a match what has become of it."""
        face = match.face
        state = face.state  # it may change at any time
        if state == OVER and face.status == TAKEN_BACK:  # wait again, in the same place
            match.face = face = self.core.post(match.source, match.tag, match.peek, match.number)
            state = face.state
        if state == POSTED:
            self.transport.own(face, match)
            return
        self.matches.remove(match.number)
        if state == HOLDING:
            arrival = CoreArrival(self.transport, face, self.withdrawn)
            self.transport.own(face, arrival)
            match.message = self._incoming(arrival, face)
            match.finish()
        elif state == OVER and face.status in (0, REFUSED):  # a probe, or it does not fit
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

    # --- collectives -----------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        return int(self.core.next_call)

    @next_number.setter
    def next_number(self, number: int) -> None:
        assert number == 0, "the core counts"

    def begin(self, call: bytes) -> int:
        number: int = self.core.begin(call)
        self.compare_left(number, call)
        return number

    def end(self, number: int) -> None:
        self.core.end(number)

    def collect(self, key: Key, wanted: Wanted) -> None:
        self.collected(_Collecting(self, key, wanted))

    def collected(self, collecting: _Collecting) -> None:
        """Say what has become of a collective's message, if that is known."""
        face = collecting.face
        state = face.state
        if state == OVER and face.status == TAKEN_BACK:
            collecting.face = face = self.core.collect(*collecting.key)
            state = face.state
        if state == POSTED:
            self._collecting[collecting.key] = collecting
            self.transport.own(face, collecting)
            return
        self._collecting.pop(collecting.key, None)
        if state == HOLDING:
            arrival = CoreArrival(self.transport, face, self.withdrawn)
            self.transport.own(face, arrival)
            collecting.wanted(arrival, None)
        else:
            gone = self.gone.get(collecting.key[2])
            error = self.broken or gone or self.transport.error_of(face.status)
            collecting.wanted(None, error)

    def forget(self, key: Key) -> None:
        collecting = self._collecting.pop(key, None)
        if collecting is not None:
            self.transport.disown(collecting.face)
            collecting.face.give_up()

    def arrived(self, arrival: Arrival) -> None:
        """A message has come for which Python is needed, or one of a call that differs."""
        if self.broken is not None:
            self._drop(arrival)
            return
        if arrival.header[0] == KIND_LENDING:
            self.on_lending(arrival)
            return
        _, _, number, _, _ = COLLECTIVE.unpack_from(arrival.header)
        theirs = call_of(arrival)
        peer = arrival.peer
        arrival.release()
        self.differs(number, peer, theirs)

    def recent_calls(self) -> dict[int, bytes]:
        calls: dict[int, bytes] = self.core.calls()
        return calls

    def newest_call(self) -> bytes:
        return next(iter(self.core.newest().values()), b"")

    # --- the end ---------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._returned.clear()
        for collecting in self._collecting.values():
            self.transport.disown(collecting.face)
        self._collecting.clear()
        if self._closed:
            self.core.close()  # who waits until its message is received goes on
        else:
            self.core.break_()

    def count(self) -> None:
        pass  # the core matches all alike


def _fits(match: Match, message: Incoming) -> bool:
    return match.source in (ANY, message.source) and match.tag in (ANY, message.tag)
