"""What a communicator has sent and received, by rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pycoll._runtime.context import Context
from pycoll._support.public_edge import public

Array = np.ndarray[Any, Any]


@public
class Counters(NamedTuple):
    """Messages of one communicator and the bytes in them, since it was made; see its `counters`.

    Each is an int64 array of shape ``(size,)``, by rank of the communicator.

    Attributes:
        sent_bytes: of payloads sent to each rank.
        sent_messages: their number.
        received_bytes: of payloads received from each rank.
        received_messages: their number.
    """

    sent_bytes: Array
    sent_messages: Array
    received_bytes: Array
    received_messages: Array


def of_context(context: Context) -> Counters:
    """Return what a communicator has exchanged."""
    counts = np.frombuffer(context.core.counts(), np.int64)
    by_world = counts.reshape(-1, len(Counters._fields))
    return Counters(*np.ascontiguousarray(by_world[list(context.members)].T))
