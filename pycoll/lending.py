"""Messages between ranks that share a GPU: the receiver copies out of the sender's memory.

The host sees none of it. Instead of its value such a message brings what CUDA needs to reach it
(an IPC handle); the transport holds the sender until the receiver has let go of the message, and
carries no payload. What cannot be lent is staged: memory of pools and of expandable segments, short
messages, and those to ranks of which it is not known that they can reach this rank's memory. That
is asked once for each rank and GPU, with a real allocation, while the message itself is staged.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from pycoll import copies, cuda
from pycoll.context import KIND_LENDING, LENDING, Context
from pycoll.engine import Engine
from pycoll.errors import TransportError
from pycoll.transports.base import Arrival

if TYPE_CHECKING:
    from pycoll.staging import Stage

MIN_NBYTES: Final = 1 << 20
"""Shorter messages are staged: a handle must be opened for each. No transport buffers as much."""

VARIABLE: Final = "PYCOLL_CUDA_IPC"

_OFFER = struct.Struct("<16s64sQ")
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
        return _OFFER.pack(*self)


def split(description: bytes) -> tuple[Offer, bytes]:
    """Return the offer at the front of a message's description, and the rest."""
    return Offer(*_OFFER.unpack_from(description)), description[_OFFER.size :]


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
    answer = engine.borrowers.get((peer, device.uuid))
    if answer is False:
        return None
    lent = device.lend(stage.pointer)
    if lent is None:
        return None
    found = Offer(device.uuid, lent.handle, lent.offset)
    if answer:
        return found
    engine.borrowers[peer, device.uuid] = False  # until it has answered
    _say(engine, context, peer, _ASK, found.pack())
    return None


def heard(engine: Engine, context: Context, arrival: Arrival) -> None:
    """Take a question, or an answer."""
    _, _, what = LENDING.unpack_from(arrival.header)
    data = bytes(arrival.header[LENDING.size :])
    arrival.release()
    if what == _ASK:
        asked, _ = split(data)
        _say(engine, context, arrival.peer, _try(asked), asked.uuid)
    elif what == _CAN:
        engine.borrowers[arrival.peer, data] = True
    elif what == _NOT_YET:  # ask again
        engine.borrowers.pop((arrival.peer, data), None)


def _try(asked: Offer) -> int:
    if not copies.is_in_use():
        return _NOT_YET  # it may never use a GPU, and shall not begin with this
    try:
        device = find(asked.uuid)
        if device is None:
            return _CANNOT
        device.give_back(device.borrow(asked.handle))
    except TransportError:
        return _CANNOT
    return _CAN


def _say(engine: Engine, context: Context, peer: int, what: int, data: bytes) -> None:
    header = LENDING.pack(KIND_LENDING, context.ident, what)
    engine.send(context, peer, header + data, ())


def find(uuid: bytes) -> cuda.Device | None:
    """Return this process's GPU of that identity, if it has it."""
    devices = map(cuda.device, range(cuda.count()))
    return next((device for device in devices if device.uuid == uuid), None)
