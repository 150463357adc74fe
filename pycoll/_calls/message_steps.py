"""Point-to-point calls, as generators that the engine runs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion, objects
from pycoll._arrays.value import Value
from pycoll._calls.group import Group
from pycoll._gpu import routes
from pycoll._runtime.communicators import raise_error
from pycoll._runtime.envelope import (
    ANY,
    ARRAY,
    KIND_P2P,
    OBJECT,
    OFFERED,
    P2P,
    SEGMENTS,
    Held,
    Incoming,
    Status,
)
from pycoll._runtime.matching import Match
from pycoll._runtime.messages import Envelope, accepted
from pycoll._runtime.scratch import new_bytes
from pycoll._runtime.task import Call, CallSteps, Task
from pycoll._transports.base import Operation, Parts, Withdrawn, nbytes_of
from pycoll.errors import Error, MismatchError, TruncationError

if TYPE_CHECKING:
    from pycoll._dtypes import DType


@functools.lru_cache(256)  # programs send the same shapes over and over
def _understood(description: bytes) -> tuple[DType, str, tuple[int, ...]]:
    return conversion.from_description(description)


class Outgoing:
    """A value ready to be sent: its description and its bytes, which stay the caller's.

    Args:
        x: the value.
        is_synchronous: its send is done when it is received, not before.

    Attributes:
        may_be_withdrawn: its send has a deadline; set before it starts.
    """

    def __init__(self, x: object, is_synchronous: bool = False) -> None:
        self.is_detached = False
        self.is_synchronous = is_synchronous
        self.may_be_withdrawn = False
        self.value = value = conversion.wrap(x)
        self.is_object = value is None
        self.parts: Parts
        if value is None:
            self.parts = objects.dump(x)
            self.description = b""
            self.text = type(x).__name__
            self.nbytes = nbytes_of(self.parts)
        else:
            self.parts = (conversion.as_bytes(conversion.contiguous(value.array)),)
            self.description = conversion.describe(value)
            self.text = f"{value.dtype}{list(value.array.shape)}"
            self.nbytes = value.array.nbytes

    def detach(self) -> None:
        """Take a copy of the value, so that what it came from may be overwritten."""
        self.is_detached = True
        if self.value is not None and self.value.stage is not None:
            return  # that is what its staging buffer is
        self.parts = tuple(memoryview(bytearray(part)) for part in self.parts)


def send(group: Group, outgoing: Outgoing, dest: int, tag: int) -> CallSteps:
    """Send to rank `dest`; done when the value may be changed."""
    transfer = yield from _start_in_turn(group, outgoing, dest, tag)
    if not transfer.done or transfer.error is not None:
        yield from finish_send(transfer)


def buffered_send(group: Group, outgoing: Outgoing, dest: int, tag: int, text: str) -> CallSteps:
    """Send a value that was detached; done when it has been copied, whoever receives it.

    A value on a GPU is copied here, before what is sent after it.
    """
    context, engine = group.context, group.engine
    if outgoing.value is None or outgoing.value.stage is None:
        transfer = yield from _in_turn(group, outgoing, None, dest, tag)
    else:
        before, turn = context.turns.get(dest), context.take_turn(dest)
        try:
            yield from pulled(group, outgoing.value)
            outgoing.parts = tuple(memoryview(bytearray(part)) for part in outgoing.parts)
            if before is not None and not before.done:
                yield before
            transfer = start_send(group, outgoing, dest, tag)
        finally:
            context.end_turn(dest, turn, before)
    if transfer.error is not None:
        raise transfer.error
    if not transfer.done:
        engine.go_on(Call(text, -1, context), finish_send(transfer))
    return None


def finish_send(transfer: Operation) -> CallSteps:
    """Wait for a send that is under way."""
    try:
        yield transfer
    except BaseException:
        transfer.cancel()
        raise
    return None


def finish_both(received: Operation, sent: Operation) -> CallSteps:
    """Wait for a receive and a send that are under way."""
    try:
        yield received
        yield sent
    except BaseException:
        received.cancel()
        sent.cancel()
        raise
    return None


def _start_in_turn(group: Group, outgoing: Outgoing, dest: int, tag: int) -> CallSteps:
    """Start to send when the value is here: messages to one rank leave in the order of the calls.

    Returns the transfer.
    """
    stage = outgoing.value.stage if outgoing.value is not None else None
    way: routes.SendRoute | None = None
    if stage is not None:
        envelope = Envelope(
            group.engine,
            group.context,
            group.members[dest],
            tag,
            outgoing.parts[0],
            outgoing.description,
            outgoing.is_synchronous,
            outgoing.may_be_withdrawn,
        )
        way = routes.choose(envelope, stage, outgoing.is_detached)
    try:
        return (yield from _in_turn(group, outgoing, way, dest, tag))
    except BaseException:
        if way is not None:
            way.cancel()
        raise


def _in_turn(
    group: Group, outgoing: Outgoing, way: routes.SendRoute | None, dest: int, tag: int
) -> CallSteps:
    context = group.context
    copy = way.copy if way is not None else None
    if copy is not None:
        copy.look()
    before = context.turns.get(dest)
    if before is None and (copy is None or copy.done):
        return _start(group, outgoing, way, dest, tag)
    turn = context.take_turn(dest)
    try:
        for wanted in (copy, before):
            if wanted is not None and not wanted.done:
                yield wanted
        if context.broken is not None:  # so the one before this was not sent
            raise_error(context.broken)
        return _start(group, outgoing, way, dest, tag)
    finally:
        context.end_turn(dest, turn, before)


def _start(
    group: Group, outgoing: Outgoing, way: routes.SendRoute | None, dest: int, tag: int
) -> Operation:
    if way is None:
        return start_send(group, outgoing, dest, tag)
    if way.copy.error is not None:
        raise way.copy.error
    return way.start()


def pulled(group: Group, *values: Value | None) -> CallSteps:
    """Wait until the values that are on a GPU are in host memory."""
    stages = [value.stage for value in values if value is not None]
    if not any(stages):
        return None
    from pycoll._cuda.copies import all_of

    copies = all_of(stage.pull(group.engine) for stage in stages if stage is not None)
    for copy in copies:
        copy.watch()  # whatever becomes of the call, its array is let go in the end
    for copy in copies:
        if not copy.done:
            yield copy
        if copy.error is not None:
            raise copy.error
    return None


def start_send(group: Group, outgoing: Outgoing, dest: int, tag: int) -> Operation:
    """Hand a message to the transport."""
    form = OBJECT if outgoing.is_object else ARRAY
    header = P2P.pack(KIND_P2P, group.context.ident, tag, form)
    peer, header = group.members[dest], header + outgoing.description
    if outgoing.is_synchronous:
        return group.engine.hold(peer, header, outgoing.parts)
    return group.engine.send(peer, header, outgoing.parts, outgoing.may_be_withdrawn)


def receive(
    group: Group,
    source: int,
    tag: int,
    out: Value | None,
    status: Status | None,
    gpu: int | None = None,
    place: int | None = None,
    match: Match | None = None,
) -> CallSteps:
    """Receive a message into `out` or new memory, on that GPU if on one; returns the value.

    Args:
        group: the communicator's ranks.
        source, tag: of the message.
        out: the array to fill; None: a new one.
        status: filled in.
        gpu: where a new array goes that was on one; None: the current one.
        place: of an earlier receive, where this one waits; None: after all others.
        match: what has a message already; None: nothing has.
    """
    world = source if source == ANY else group.members[source]
    fit = (out.dtype.code, out.array.nbytes) if out is not None and place is None else None
    while True:
        if match is None:
            match = group.context.match(world, tag, place=place, fit=fit)
        place = match.number
        message = yield from _matched(match)
        is_refused, match = match.is_refused, None
        if is_refused and message.form in (OFFERED, SEGMENTS):
            fit = None  # such a message says elsewhere what it brings
            continue
        try:
            result = yield from _take(group, message, out, gpu)
        except Withdrawn:
            continue  # its sender gave up: wait for another
        fill_status(group, status, message)
        return result


def probe(group: Group, source: int, tag: int) -> CallSteps:
    """Wait for a message, and leave it where it is; returns its Status."""
    world = source if source == ANY else group.members[source]
    message = yield from _matched(group.context.match(world, tag, peek=True))
    status = Status()
    fill_status(group, status, message)
    return status


def probe_now(group: Group, source: int, tag: int) -> CallSteps:
    """Return the Status of a message that is here, or None; fails if none can come any more."""
    world = source if source == ANY else group.members[source]
    match = group.context.match(world, tag, peek=True)
    if not match.done:
        match.cancel()
        return None
    message = yield from _matched(match)
    status = Status()
    fill_status(group, status, message)
    return status


def matched_probe(group: Group, source: int, tag: int) -> CallSteps:
    """Wait for a message, and take it out of the queue; returns (its Status, it)."""
    world = source if source == ANY else group.members[source]
    message = yield from _matched(group.context.match(world, tag, for_message=True))
    return _held(group, message)


def matched_probe_now(group: Group, source: int, tag: int) -> CallSteps:
    """The same with a message that is here; None if there is none."""
    world = source if source == ANY else group.members[source]
    match = group.context.match(world, tag, for_message=True)
    if not match.done:
        match.cancel()
        return None
    message = yield from _matched(match)
    return _held(group, message)


PROBES = {
    "probe": probe,
    "iprobe": probe_now,
    "mprobe": matched_probe,
    "improbe": matched_probe_now,
}
"""By the name of the method."""


def _held(group: Group, message: Incoming) -> tuple[Status, Held]:
    status = Status()
    fill_status(group, status, message)
    return status, group.context.hold(message)


def receive_held(
    group: Group, held: Held, out: Value | None, status: Status | None, gpu: int | None = None
) -> CallSteps:
    """Receive a message that a matched probe has taken, as `receive` does."""
    context = group.context
    message = context.take(held)
    try:
        result = yield from _take(group, message, out, gpu)
    except Withdrawn:
        context.let_go(held, message.order, "was taken back by its sender")
        raise Error(f"this message {held.why}") from None
    except BaseException:
        if held.message is None:  # nobody has put it back
            context.let_go(held, message.order, "was lost when its receive failed")
        raise
    context.let_go(held, message.order, "was received already")
    fill_status(group, status, message)
    return result


def send_receive(
    group: Group,
    outgoing: Outgoing | None,
    dest: tuple[int, int],
    receiving: CallSteps | None,
) -> CallSteps:
    """Send to `dest` (rank, tag) while receiving; returns the value received."""
    if outgoing is not None and receiving is not None and _waits(group, outgoing, dest[0]):
        return (yield from _send_later_receive(group, outgoing, dest, receiving))
    transfer = None
    if outgoing is not None:
        transfer = yield from _start_in_turn(group, outgoing, *dest)
    try:
        result = (yield from receiving) if receiving is not None else None
        if transfer is not None:
            yield transfer
    except BaseException:
        if transfer is not None:
            transfer.cancel()
        raise
    return result


def _waits(group: Group, outgoing: Outgoing, dest: int) -> bool:
    """Whether a send may have to wait before it starts."""
    staged = outgoing.value is not None and outgoing.value.stage is not None
    return staged or dest in group.context.turns


def _send_later_receive(
    group: Group, outgoing: Outgoing, dest: tuple[int, int], receiving: CallSteps
) -> CallSteps:
    """The same, where the receive shall not wait for the send to start."""
    received = Task(receiving)
    received.start()
    transfer: Operation | None = None
    try:
        transfer = yield from _start_in_turn(group, outgoing, *dest)
        assert transfer is not None
        for wanted in (received, transfer):
            if not wanted.done:
                yield wanted
            if wanted.error is not None:
                raise wanted.error
    except BaseException as exc:
        received.abort(exc)
        if transfer is not None:
            transfer.cancel()
        raise
    return received.result


def _matched(match: Match) -> CallSteps:
    try:
        yield match
    except BaseException:
        match.cancel()
        if match.message is not None and not match.peek:
            match.context.put_back(match.message)
        raise
    return match.message


def _take(group: Group, message: Incoming, out: Value | None, gpu: int | None) -> CallSteps:
    """Receive a matched message into the memory that the caller wants it in."""
    engine, context = group.engine, group.context
    try:
        target, array, finish = _prepare(group, message, out, gpu)
        stage = array.stage if isinstance(array, Value) else None
    except BaseException:
        context.put_back(message)
        raise
    if stage is not None or message.form in (OFFERED, SEGMENTS):
        yield from routes.take(engine, context, message, target, stage)
    else:
        yield from accepted(context, message, message.arrival.accept(target))
    return finish(array)


def _described(message: Incoming) -> Any:
    is_plain = message.form == ARRAY
    return _understood(message.description if is_plain else routes.described(message))


def check_fits(group: Group, message: Incoming, out: Value) -> None:
    """Raise why a message cannot fill `out`, if it cannot.

    Raises:
        MismatchError: it is a Python object, or of another dtype.
        TruncationError: it is too long.
    """
    if message.form == OBJECT:
        raise MismatchError(
            f"rank {group.rank_of(message.source)} sent a Python object "
            f"(tag {message.tag}), which cannot fill the array out. Receive without out."
        )
    dtype, _, shape = _described(message)
    if out.dtype != dtype:
        raise MismatchError(
            f"rank {group.rank_of(message.source)} sent {dtype}{list(shape)} "
            f"(tag {message.tag}), but out is {out.dtype}{list(out.array.shape)}. "
            "Pass an array of the dtype that was sent."
        )
    nbytes = _length(message)
    if nbytes > out.array.nbytes:
        raise TruncationError(
            f"the message of rank {group.rank_of(message.source)} (tag {message.tag}) has "
            f"{nbytes} bytes ({dtype}{list(shape)}), but out has {out.array.nbytes} bytes "
            f"({out.dtype}{list(out.array.shape)}). It is still here: receive it with more room."
        )


def _prepare(
    group: Group, message: Incoming, out: Value | None, gpu: int | None
) -> tuple[memoryview, Any, Any]:
    """Return (bytes to fill, what was allocated, how to make the result of that)."""
    if out is not None:
        check_fits(group, message, out)
    nbytes = _length(message)
    if message.form == OBJECT:
        buffer = new_bytes(nbytes)
        return buffer, buffer, objects.load
    dtype, kind, shape = _described(message)
    if out is None:
        value = conversion.fresh(dtype, kind, shape, gpu)
        return conversion.as_bytes(value.array), value, conversion.unwrap
    if out.array.flags.c_contiguous:
        return conversion.as_bytes(out.array)[:nbytes], out, conversion.filled
    buffer = new_bytes(nbytes)

    def spread(filled: memoryview) -> object:
        import numpy as np

        elements = np.frombuffer(filled, dtype.storage) if nbytes else np.empty(0, dtype.storage)
        out.array.flat[: len(elements)] = elements
        return conversion.filled(out)

    return buffer, buffer, spread


def fill_status(group: Group, status: Status | None, message: Incoming) -> None:
    if status is not None:
        status.source = group.rank_of(message.source)
        status.tag = message.tag
        status.nbytes = _length(message)


def _length(message: Incoming) -> int:
    return routes.length(message) if message.form == SEGMENTS else message.arrival.nbytes
