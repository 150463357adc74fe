"""How a value leaves a GPU, and comes to one, point to point: the best of what can be.

    offered     the receiver copies it within the GPU that both share         cuda_ipc
    direct      the network device reads it, or writes it, on the GPU         gpudirect
    segments    by way of host memory, one part of it after the other         segments
    staged      by way of host memory

The sender chooses among all of them. What is neither offered nor comes in segments the receiver
takes directly, if it can.
"""

from __future__ import annotations

from typing import Protocol

from pycoll._cuda.copies import GpuCopy
from pycoll._cuda.staging import Stage
from pycoll._gpu import cuda_ipc, gpudirect, segments
from pycoll._gpu.cuda_ipc import IpcRead, Offer
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import ARRAY, OFFERED, SEGMENTS, Incoming
from pycoll._runtime.messages import Envelope, accepted
from pycoll._runtime.task import CallSteps
from pycoll._transports.base import Arrival, Operation, Reach, Transfer
from pycoll.errors import OperationTimeout


class SendRoute(Protocol):
    """How a value leaves its GPU."""

    @property
    def copy(self) -> GpuCopy:
        """When it is done, the message may be sent."""

    def start(self) -> Operation:
        """Send it; return what is done when the array may be changed."""

    def cancel(self) -> None:
        """It will not be sent, or not to the end."""


def choose(envelope: Envelope, stage: Stage, is_detached: bool) -> SendRoute:
    """Return how a value leaves; `is_detached`: the array itself may change meanwhile."""
    if not is_detached:
        offer = cuda_ipc.offer(envelope.engine, envelope.context, stage, envelope.peer)
        if offer is not None:
            return _CudaIpc(envelope, stage, offer)
        reach = gpudirect.for_send(envelope.engine, stage, envelope.payload, envelope.peer)
        if reach is not None:
            return _Direct(envelope, stage, reach)
    return (
        segments.SegmentedSend(envelope, stage)
        if segments.fits(stage)
        else _Staged(envelope, stage)
    )


class _Staged:
    def __init__(self, envelope: Envelope, stage: Stage) -> None:
        self._envelope = envelope
        self.copy = stage.pull(envelope.engine)

    def start(self) -> Operation:
        envelope = self._envelope
        peer, header, parts = envelope.peer, envelope.header(ARRAY), (envelope.payload,)
        if envelope.is_synchronous:
            return envelope.engine.hold(peer, header, parts)
        return envelope.engine.send(peer, header, parts, envelope.may_be_withdrawn)

    def cancel(self) -> None:
        self.copy.watch()  # the array is let go in the end


class _CudaIpc:
    def __init__(self, envelope: Envelope, stage: Stage, offer: Offer) -> None:
        self._envelope = envelope
        self._offer = offer
        self.copy = stage.ready(envelope.engine)

    def start(self) -> Operation:
        envelope = self._envelope
        header = envelope.header(OFFERED, self._offer.pack())
        return envelope.engine.hold(envelope.peer, header, (envelope.payload,))

    def cancel(self) -> None:
        pass


class _Direct:
    def __init__(self, envelope: Envelope, stage: Stage, reach: Reach) -> None:
        self._envelope = envelope
        self._reach = reach
        self.copy = stage.ready(envelope.engine)

    def start(self) -> Operation:
        envelope = self._envelope
        header = envelope.header(ARRAY)
        transfer = envelope.engine.hold(envelope.peer, header, (envelope.payload,))
        return gpudirect.DirectSend(transfer, self._reach)

    def cancel(self) -> None:
        self._reach.close()


# --- what comes --------------------------------------------------------------------------------


def described(message: Incoming) -> bytes:
    """Return the array's description of a message that is offered, or comes in segments."""
    description = message.description
    if message.form == OFFERED:
        return cuda_ipc.split(description)[1]
    return segments.described(description) if message.form == SEGMENTS else description


def length(message: Incoming) -> int:
    """Return the bytes of a value that comes in segments."""
    return segments.nbytes_of(message.description)


def take(
    engine: Engine, context: Context, message: Incoming, target: memoryview, stage: Stage | None
) -> CallSteps:
    """Have a message written to `target`, or to the GPU if that is the staging buffer of `stage`.

    Given up, it is back in the queue.

    Raises:
        Withdrawn: its sender has given up.
    """
    if message.form == OFFERED:
        is_there = yield from _read_by_ipc(engine, context, message, target, stage)
    elif message.form == SEGMENTS:
        is_there = yield from _collect(engine, context, message, target, stage)
    else:
        is_there = yield from _accept(engine, context, message, target, stage)
    if stage is not None and not is_there:
        try:
            yield from _pushed(engine, stage, len(target))
        except (OperationTimeout, KeyboardInterrupt):
            kept = _Kept(message.arrival, target)
            context.put_back(whole(message)._replace(arrival=kept))
            raise
    return None


def whole(message: Incoming) -> Incoming:
    """Return a message as it would be if it had brought its value itself."""
    return message._replace(form=ARRAY, description=described(message))


def _read_by_ipc(
    engine: Engine, context: Context, message: Incoming, target: memoryview, stage: Stage | None
) -> CallSteps:
    """Copy a value from where its sender has it; returns whether it is on the GPU."""
    offer, _ = cuda_ipc.split(message.description)
    try:
        reading = IpcRead(engine, context, message.arrival, offer, target, stage)
    except BaseException:
        context.put_back(message)
        raise
    try:
        reading.start()
        if not reading.done:
            yield reading
        if reading.error is not None:
            raise reading.error
    except BaseException:
        reading.cancel()
        if reading.is_there:
            context.put_back(message)
        raise
    return reading.is_on_gpu


def _collect(
    engine: Engine, context: Context, message: Incoming, target: memoryview, stage: Stage | None
) -> CallSteps:
    """Receive a value in segments; returns whether it is on the GPU."""
    through = stage if stage is not None and stage.is_contiguous else None
    receiving = segments.Receiving(engine, context, message, target, through)
    yield from accepted(context, receiving.message, receiving)
    return through is not None


def _accept(
    engine: Engine, context: Context, message: Incoming, target: memoryview, stage: Stage | None
) -> CallSteps:
    """Have a message come into the staging buffer, or to the GPU; returns whether it is there."""
    assert stage is not None, "a message of the host for the host"
    reach = gpudirect.for_receive(message.arrival, stage, target)
    if reach is None:
        yield from accepted(context, message, message.arrival.accept(target))
        return False
    try:
        yield from _writable(engine, context, message, stage)
        yield from accepted(context, message, message.arrival.accept(target))
    finally:
        reach.close()
        stage.device.flush()  # nor shall what was given up be seen later
    if reach.is_in_buffer:
        return False
    stage.keep(0, stage.nbytes)
    return True


def _writable(engine: Engine, context: Context, message: Incoming, stage: Stage) -> CallSteps:
    """Wait until an array may be written; if that fails, the message is as it was before."""
    arrival = message.arrival
    context.being_read[arrival] = True
    try:
        for copy in stage.hindrances(engine):
            if not copy.done:
                yield copy
            if copy.error is not None:
                raise copy.error
    except BaseException:
        if context.being_read[arrival]:
            context.put_back(message)
        raise
    finally:
        del context.being_read[arrival]
    return None


def _pushed(engine: Engine, stage: Stage, nbytes: int) -> CallSteps:
    """Wait until the front of a staging buffer is on its GPU."""
    copy = stage.push(engine, 0, nbytes)
    try:
        if not copy.done:
            yield copy
    except BaseException:
        copy.settle()  # nothing of the caller's is written after the call
        raise
    if copy.error is not None:
        raise copy.error
    return None


class _Kept(Arrival):
    """A message that has come, but not to where its receiver wanted it."""

    __slots__ = ()

    def __init__(self, arrival: Arrival, payload: memoryview) -> None:
        mine = memoryview(bytearray(payload))
        super().__init__(arrival.peer, arrival.header, len(mine), mine)

    def accept(self, into: memoryview) -> Transfer:
        return self.copy(into)

    def release(self) -> None:
        pass
