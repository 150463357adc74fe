"""Long values of GPUs, point to point: in segments, so that several ways are busy at once.

While one segment travels, the next one comes from the GPU of the sender, and the one before goes to
that of the receiver. The first segment is the message, and is matched like any. The others have
addresses, as collectives' messages have: their number is that of the value, counted by the sender.

How to send a value so is decided by its sender, who says it in the message.
"""

from __future__ import annotations

import struct
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from pycoll._cuda.copies import GpuCopy, Push, all_of
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import ARRAY, COLLECTIVE, KIND_COLLECTIVE, SEGMENTS, Key
from pycoll._transports.base import Arrival, Operation, Transfer
from pycoll.errors import TransportError

if TYPE_CHECKING:
    from pycoll._cuda.staging import Stage
    from pycoll._runtime.envelope import Incoming
    from pycoll._runtime.messages import Envelope

SEGMENT_NBYTES: Final = 4 << 20
"""As long as it takes to make starting a copy and a message cheap."""

_HEAD = struct.Struct("<IQQ")
"""Before the description: number of the value, its length, that of a segment, both in bytes."""

_FIRST_NUMBER: Final = 1 << 31
"""Numbers of collective calls are below."""


def fits(stage: Stage) -> bool:
    """Whether a value is worth several segments."""
    return stage.is_contiguous and stage.nbytes >= 2 * SEGMENT_NBYTES


def nbytes_of(description: bytes) -> int:
    """Return the length of a value that comes in segments, by the description of its message."""
    _, nbytes, _ = _HEAD.unpack_from(description)
    return int(nbytes)


def described(description: bytes) -> bytes:
    """Return what such a description says beyond that."""
    return description[_HEAD.size :]


def _spans(nbytes: int, step: int) -> list[slice]:
    """Return where segments begin and end; none is short, or it would be buffered."""
    count = nbytes // step
    return [
        slice(index * step, (index + 1) * step if index + 1 < count else nbytes)
        for index in range(count)
    ]


class SegmentedSend(Operation):
    """A value on its way.

    Args:
        envelope: the message.
        stage: of the value.

    Attributes:
        copy: when that is done, the message may start.
    """

    __slots__ = ("_copies", "_envelope", "_headers", "_left", "_spans", "_transfers", "copy")

    def __init__(self, envelope: Envelope, stage: Stage) -> None:
        super().__init__()
        self._envelope = envelope
        engine, context, nbytes = envelope.engine, envelope.context, len(envelope.payload)
        self._spans = _spans(nbytes, SEGMENT_NBYTES)
        self._copies = deque(
            all_of(stage.pull(engine, span.start, span.stop) for span in self._spans)
        )
        self.copy = self._copies[0]
        value = context.next_value
        context.next_value = (value + 1) % _FIRST_NUMBER
        self._headers = [envelope.header(SEGMENTS, _HEAD.pack(value, nbytes, SEGMENT_NBYTES))]
        self._headers += [
            COLLECTIVE.pack(KIND_COLLECTIVE, context.ident, _FIRST_NUMBER + value, 0, index)
            for index in range(1, len(self._spans))
        ]
        self._left = len(self._spans)
        self._transfers: list[Operation] = []

    def start(self) -> Operation:
        """Send the first segment, which is here, and the others as they come."""
        self._go_on()
        return self

    def _go_on(self) -> None:
        while self._copies and self._left > 0:
            copy = self._copies[0]
            copy.watch()
            if not copy.done:
                copy.then(lambda _: self._go_on())
                return
            self._copies.popleft()
            if copy.error is not None:
                self.abort(copy.error)
                return
            transfer = self._send(len(self._transfers))
            self._transfers.append(transfer)
            transfer.then(self._sent)

    @property
    def committed(self) -> bool:
        return len(self._transfers) == len(self._spans) and all(
            [transfer.done or transfer.committed for transfer in self._transfers]
        )

    def cancel(self) -> None:
        super().cancel()
        self._left = -1
        for transfer in self._transfers:
            if not transfer.done:
                transfer.cancel()
        if 0 < len(self._transfers) < len(self._spans):
            self._send(len(self._transfers)).cancel()  # so the receiver hears of it
        self._let_go()

    def _let_go(self) -> None:
        """See that the array is not kept longer than copies of it are under way."""
        while self._copies:
            self._copies.popleft().watch()

    def _send(self, index: int) -> Operation:
        envelope = self._envelope
        view = envelope.payload[self._spans[index]]
        return envelope.engine.hold(envelope.peer, self._headers[index], (view,))

    def _sent(self, transfer: Operation) -> None:
        if self._left < 0 or self.done:
            return
        if transfer.error is not None:
            self.abort(transfer.error)
            return
        self._left -= 1
        if not self._left:
            self.finish()


class _Whole(Arrival):
    """A message with all its segments."""

    __slots__ = ()

    def accept(self, into: memoryview) -> Transfer:
        raise AssertionError("it is being received")

    def release(self) -> None:
        raise AssertionError("it is being received")


class Receiving(Transfer):
    """A value that comes.

    Args:
        engine, context: of the receiver.
        message: with the first segment; it is accepted.
        into: where the bytes shall be.
        stage: of an array on a GPU whose staging buffer that is, and where they shall go on to, or
            None.

    Attributes:
        message: the same, for one who gives up, and receives it again: without `stage`.
    """

    __slots__ = (
        "_context",
        "_engine",
        "_into",
        "_keys",
        "_left",
        "_pushes",
        "_spans",
        "_stage",
        "_transfers",
        "message",
    )

    def __init__(
        self,
        engine: Engine,
        context: Context,
        message: Incoming,
        into: memoryview,
        stage: Stage | None,
    ) -> None:
        super().__init__()
        value, nbytes, step = _HEAD.unpack_from(message.description)
        first = message.arrival
        self.message = message._replace(
            arrival=_Whole(first.peer, first.header, nbytes, None),
            form=ARRAY,
            description=described(message.description),
        )
        self._engine, self._context = engine, context
        self._into = into
        self._stage: Stage | None = stage
        self._spans = _spans(nbytes, step)
        self._left = len(self._spans)
        self._transfers: dict[int, Transfer] = {}
        self._pushes: list[GpuCopy | Push] = []
        self._keys: dict[int, Key] = {
            index: (_FIRST_NUMBER + value, 0, first.peer, index)
            for index in range(1, len(self._spans))
        }
        self._accept(0, first)
        for index, key in list(self._keys.items()):
            if not self.done:
                context.collect(key, partial(self._wanted, index))

    def cancel(self) -> None:
        super().cancel()
        self._left = -1
        for push in self._pushes:
            push.settle()
        for transfer in self._transfers.values():
            if not transfer.done:
                transfer.cancel()
        for key in self._keys.values():  # those that come later are dropped
            self._context.forget(key)
            self._context.collect(key, _drop)

    def redirect(self, into: memoryview) -> None:
        for push in self._pushes:
            push.settle()
        self._pushes, self._stage = [], None
        old, self._into = self._into, into
        for index, transfer in self._transfers.items():
            span = self._spans[index]
            if transfer.done:
                into[span] = old[span]
            else:
                transfer.redirect(into[span])
        self._left = len(self._spans) - sum([t.done for t in self._transfers.values()])
        if not self._left:
            self.finish()

    def _wanted(self, index: int, arrival: Arrival | None, error: BaseException | None) -> None:
        del self._keys[index]
        if arrival is None:
            assert error is not None
            self.abort(error)
        else:
            self._accept(index, arrival)

    def _accept(self, index: int, arrival: Arrival) -> None:
        transfer = self._transfers[index] = arrival.accept(self._into[self._spans[index]])
        transfer.then(partial(self._came, index))

    def _came(self, index: int, transfer: Operation) -> None:
        if self._left < 0 or self.done:
            return
        if transfer.error is not None:
            self.abort(transfer.error)
            return
        if self._stage is None:
            self._ended()
            return
        span = self._spans[index]
        try:
            push = self._stage.push(self._engine, span.start, span.stop)
        except TransportError as exc:
            self.abort(exc)
            return
        self._pushes.append(push)
        push.then(self._pushed)

    def _pushed(self, push: Operation) -> None:
        if self._left < 0 or self.done or push not in self._pushes:
            return
        if push.error is not None:
            self.abort(push.error)
        else:
            self._ended()

    def _ended(self) -> None:
        self._left -= 1
        if not self._left:
            self.finish()


def _drop(arrival: Arrival | None, error: BaseException | None) -> None:
    if arrival is not None:
        arrival.release()
