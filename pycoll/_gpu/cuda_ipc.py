"""Messages between ranks that share a GPU: the receiver copies out of the sender's memory.

The host sees none of it. Instead of its value such a message brings what CUDA needs to reach it (an
IPC handle); the transport holds the sender until the receiver has let go of the message, and
carries no payload. What cannot be offered is staged: memory of pools and of expandable segments,
short messages, and those to ranks of which it is not known that they can reach this rank's memory.
That is asked once for each rank and GPU, with a small allocation that stays, while the message
itself is staged.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from pycoll._cuda import copies, cuda, staging
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import COLLECTIVE, CUDA_IPC, KIND_CUDA_IPC, OFFER
from pycoll._transports.base import Arrival, Operation, Withdrawn
from pycoll.errors import TransportError

if TYPE_CHECKING:
    from pycoll._cuda.staging import Stage

MIN_NBYTES: Final = 1 << 20
"""Shorter messages are staged: a handle must be opened for each. No transport buffers as much."""

VARIABLE: Final = "PYCOLL_CUDA_IPC"

_ASK, _CAN, _CANNOT, _NOT_YET = range(4)


class Offer(NamedTuple):
    """Memory of another process.

    Attributes:
        uuid: of the GPU.
        handle: of the allocation.
        offset: of the value in it, in bytes.
    """

    uuid: bytes
    handle: bytes
    offset: int

    def pack(self) -> bytes:
        """Return the bytes that `split` reads."""
        return OFFER.pack(*self)


def offered(arrival: Arrival) -> Offer:
    """Return what a collective's message says of its value, which is offered."""
    return Offer(*OFFER.unpack_from(arrival.header, COLLECTIVE.size))


def split(description: bytes) -> tuple[Offer, bytes]:
    """Return the offer at the front of a message's description, and the rest."""
    return Offer(*OFFER.unpack_from(description)), description[OFFER.size :]


def offer(engine: Engine, context: Context, stage: Stage, peer: int) -> Offer | None:
    """Return what the world rank `peer` needs to reach a value; None: it must be staged."""
    if (
        stage.nbytes < MIN_NBYTES
        or not stage.is_contiguous
        or peer == engine.rank
        or engine.hosts[peer] != engine.hosts[engine.rank]
        or os.environ.get(VARIABLE) == "0"
    ):
        return None
    device = stage.device
    answer = engine.ipc_peers.get((peer, device.uuid))
    if answer is False:
        return None
    handle = stage.ipc_handle
    if handle is None:
        return None
    found = Offer(device.uuid, handle.handle, handle.offset)
    if answer:
        return found
    trial = _trial(device)
    if trial is not None:
        engine.ipc_peers[peer, device.uuid] = False  # until it has answered
        _say(engine, context, peer, _ASK, trial.pack())
    return None


def _trial(device: cuda.Device) -> Offer | None:
    """Return what others try to open: it stays, whatever becomes of arrays."""
    if device.number not in _trials:
        with contextlib.suppress(TransportError):  # no memory is left
            handle = device.ipc_handle(device.allocate(1))
            if handle is not None:
                _trials[device.number] = Offer(device.uuid, handle.handle, handle.offset)
    return _trials.get(device.number)


_trials: dict[int, Offer] = {}


def is_for_all(
    engine: Engine, context: Context, x: Stage, nbytes: int, result: Stage | None
) -> bool:
    """Whether all other ranks can be offered a value; asks those of which it is not known.

    Args:
        engine, context: of the communicator.
        x: the value.
        nbytes: of one message.
        result: where this rank's part of the result goes; None: to the host.
    """
    if nbytes < MIN_NBYTES or os.environ.get(VARIABLE) == "0":
        return False
    if result is None or result.is_read_first or result.device is not x.device:
        return False
    if not (x.is_contiguous and result.is_contiguous):
        return False
    others = [peer for peer in context.members if peer != engine.rank]
    with engine.locked():
        return all([offer(engine, context, x, peer) is not None for peer in others])


class IpcRead(Operation):
    """The value of a message, on its way from where its sender has it on a GPU.

    When it is done the sender may go on. Withdrawn: the sender has not waited.

    Args:
        engine, context: of the receiver.
        arrival: the message.
        offer: what it says of the value.
        into: host memory of its length.
        stage: of an array on a GPU that shall have it instead, without `into`; None: there is none.
        begin: where in that array, in bytes.

    Attributes:
        is_on_gpu: the value goes to that array.
        is_there: at the end, whether the sender still waits.

    Raises:
        TransportError: it cannot be reached from here.
    """

    __slots__ = (
        "_arrival",
        "_base",
        "_begin",
        "_context",
        "_copy",
        "_device",
        "_engine",
        "_hindrances",
        "_into",
        "_is_open",
        "_source",
        "_stage",
        "is_on_gpu",
        "is_there",
    )

    def __init__(
        self,
        engine: Engine,
        context: Context,
        arrival: Arrival,
        offer: Offer,
        into: memoryview,
        stage: Stage | None = None,
        begin: int = 0,
    ) -> None:
        super().__init__()
        device = find(offer.uuid)
        if device is None:
            raise TransportError("the GPU on which the sender's array is has gone from this rank")
        self._engine, self._context, self._arrival = engine, context, arrival
        self._device = device
        self._into, self._stage, self._begin = into, stage, begin
        self.is_on_gpu = stage is not None and stage.is_contiguous and stage.device is device
        self.is_there = True
        self._hindrances: deque[copies.GpuCopy] = deque()
        self._copy: copies.GpuCopy | None = None
        self._base = device.open_ipc(offer.handle)
        self._is_open = True
        self._source = self._base + offer.offset

    def start(self) -> None:
        """Begin to copy when the memory may be written."""
        self._context.being_read[self._arrival] = True
        if self.is_on_gpu and self._stage is not None:
            self._hindrances.extend(self._stage.hindrances(self._engine))
        self._go_on(None)

    def cancel(self) -> None:
        """Give it up: nothing is written any more when this returns."""
        super().cancel()
        if self._copy is not None:
            self._copy.settle()
        self._let_go()

    def _go_on(self, ended: Operation | None) -> None:
        if not self._is_open:
            return
        if ended is not None and ended.error is not None:
            self._end(ended.error)
            return
        if self._hindrances:
            self._hindrances.popleft().then(self._go_on)
            return
        nbytes = self._arrival.nbytes
        try:
            if self.is_on_gpu and self._stage is not None:
                begin, end = self._begin, self._begin + nbytes
                self._copy = self._stage.fill(self._engine, self._source, begin, end)
            else:
                into = self._into[:nbytes]
                self._copy = staging.fetch(self._engine, self._device, self._source, into)
        except TransportError as exc:
            self._end(exc)
            return
        self._copy.then(lambda copy: self._end(copy.error))

    def _end(self, error: BaseException | None) -> None:
        if not self._is_open:
            return
        if error is not None and self._copy is not None:
            self._copy.settle()
        error = self._let_go() or error
        if error is None and not self.is_there:
            error = Withdrawn()
        if error is None:
            self._arrival.read_there()
        self.finish(error)

    def _let_go(self) -> TransportError | None:
        """Return why the memory could not be let go, or None."""
        if self._is_open:
            self._is_open = False
            self.is_there = self._context.being_read.pop(self._arrival)
            try:
                self._device.close_ipc(self._base)
            except TransportError as exc:
                return exc
        return None


def read(
    engine: Engine, context: Context, arrival: Arrival, into: memoryview, on_gpu: bool
) -> IpcRead:
    """Begin to copy the value of a collective's message.

    Args:
        engine, context, arrival: see `IpcRead`.
        into: host memory of its length.
        on_gpu: the array on a GPU whose staging buffer that is shall have it, if that is the same
            GPU.
    """
    stage = staging.stage_of(into) if on_gpu else None
    begin = stage.offset(into) if stage is not None else 0
    reading = IpcRead(engine, context, arrival, offered(arrival), into, stage, begin)
    reading.start()
    return reading


def heard(engine: Engine, context: Context, arrival: Arrival) -> None:
    """Take a question, or an answer."""
    _, _, what = CUDA_IPC.unpack_from(arrival.header)
    data = bytes(arrival.header[CUDA_IPC.size :])
    arrival.release()
    if what == _ASK:
        asked, _ = split(data)
        _say(engine, context, arrival.peer, _try(asked), asked.uuid)
    elif what == _CAN:
        engine.ipc_peers[arrival.peer, data] = True
    elif what == _NOT_YET:  # ask again
        engine.ipc_peers.pop((arrival.peer, data), None)


def _try(asked: Offer) -> int:
    if not copies.is_in_use():
        return _NOT_YET  # it may never use a GPU, and shall not begin with this
    try:
        device = find(asked.uuid)
        if device is None:
            return _CANNOT
        device.close_ipc(device.open_ipc(asked.handle))
    except TransportError:
        return _CANNOT
    return _CAN


def _say(engine: Engine, context: Context, peer: int, what: int, data: bytes) -> None:
    header = CUDA_IPC.pack(KIND_CUDA_IPC, context.ident, what)
    engine.send(peer, header + data, ())


def find(uuid: bytes) -> cuda.Device | None:
    """Return this process's GPU of that identity, if it has it."""
    devices = map(cuda.device, range(cuda.count()))
    return next((device for device in devices if device.uuid == uuid), None)
