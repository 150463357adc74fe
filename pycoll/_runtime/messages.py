"""Point-to-point messages, one at a time: what is sent, and how one that comes is waited for."""

from __future__ import annotations

from typing import NamedTuple

from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import KIND_P2P, P2P, Incoming
from pycoll._runtime.task import CallSteps
from pycoll._transports.base import Transfer
from pycoll.errors import OperationTimeout


class Envelope(NamedTuple):
    """A message to be sent.

    Attributes:
        engine, context: of the sender.
        peer: world rank of the receiver.
        tag: its tag.
        payload: the elements of the value.
        description: of the array.
        is_synchronous: it is sent when it is received, not before.
        may_be_withdrawn: its send has a deadline.
    """

    engine: Engine
    context: Context
    peer: int
    tag: int
    payload: memoryview
    description: bytes
    is_synchronous: bool
    may_be_withdrawn: bool

    def header(self, form: int, before: bytes = b"") -> bytes:
        """Return the header of such a message, with `before` in front of the description."""
        return P2P.pack(KIND_P2P, self.context.ident, self.tag, form) + before + self.description


def accepted(context: Context, message: Incoming, transfer: Transfer) -> CallSteps:
    """Wait for a message on its way; given up, it is back in the queue."""
    try:
        yield transfer
    except (OperationTimeout, KeyboardInterrupt):
        context.park(message, transfer)
        raise
    except BaseException:
        transfer.cancel()
        raise
    return None
