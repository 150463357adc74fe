"""Point-to-point messages, one at a time: what is sent, and how one that comes is waited for."""

from __future__ import annotations

from typing import NamedTuple

from pycoll.context import KIND_P2P, P2P, Context, Incoming, ParkedArrival
from pycoll.engine import Engine
from pycoll.errors import OperationTimeout
from pycoll.scratch import new_bytes
from pycoll.task import CallSteps
from pycoll.transports.base import Operation, Transfer


class Letter(NamedTuple):
    """A message to be sent.

    Attributes:
        engine, context: of the sender.
        peer: world rank of the receiver.
        tag: its tag.
        image: of the value.
        description: of the array.
        is_synchronous: it is sent when it is received, not before.
    """

    engine: Engine
    context: Context
    peer: int
    tag: int
    image: memoryview
    description: bytes
    is_synchronous: bool

    def header(self, form: int, before: bytes = b"") -> bytes:
        """Return the header of such a message, with `before` in front of the description."""
        return P2P.pack(KIND_P2P, self.context.ident, self.tag, form) + before + self.description


def accepted(context: Context, message: Incoming, transfer: Transfer) -> CallSteps:
    """Wait for a message on its way; given up, it is back in the queue."""
    try:
        yield transfer
    except (OperationTimeout, KeyboardInterrupt):
        _park(context, message, transfer)
        raise
    except BaseException:
        transfer.cancel()
        raise
    return None


def _park(context: Context, message: Incoming, transfer: Transfer) -> None:
    """Put back a message whose receive was given up half-way: it goes on into memory of ours."""
    spare = new_bytes(message.arrival.nbytes)
    parked = ParkedArrival(message.arrival, transfer, spare)

    def done(operation: Operation) -> None:
        if operation.error is not None:  # its sender has given up, too
            context.withdrawn(parked)

    transfer.then(done)
    context.put_back(message._replace(arrival=parked))
