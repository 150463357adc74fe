"""What is around a message: its header, what becomes of that in Python, and calls as text.

Point-to-point messages match by source and tag, in the order in which they came. A message of a
collective has an address of its own: the number of the call, the subcall (which of the call's
schedules), the sender, and how many the sender has sent before in that subcall. It also carries the
call as text, so that ranks which made different calls find out at the first message they exchange.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pycoll._support import differing_calls
from pycoll._support.foreign_names import OF_STATUSES, Hinting
from pycoll._support.public_edge import passing_on, public
from pycoll._transports.base import Arrival
from pycoll.errors import MismatchError

ANY = -1
"""Matches every source, or every tag."""

ANY_SOURCE = ANY_TAG = ANY
PROC_NULL = -2
"""A peer that is nobody: sending to it and receiving from it does nothing."""

MAX_TAG = 2**31 - 1

P2P = struct.Struct("<BQqB")
"""Header of a point-to-point message: kind, context, tag, form; then the description."""

COLLECTIVE = struct.Struct("<BQIHI")
"""Header of a collective's message: kind, context, number, subcall, index; then the call."""

CUDA_IPC = struct.Struct("<BQB")
"""Header of what ranks ask each other about memory on a GPU: kind, context, what; then data."""

OFFER = struct.Struct("<16s64sQ")
"""Where a value that is offered lies, after the header of its message: see `cuda_ipc.Offer`."""

KIND_P2P, KIND_COLLECTIVE, KIND_CUDA_IPC, KIND_OFFERED = range(1, 5)
"""Kinds of messages; the last: a collective's without its value, which the receiver reads."""

ARRAY, OBJECT, OFFERED, SEGMENTS = range(4)
"""Forms of a point-to-point message.

OFFERED: the header only; the receiver reads the sender's memory on a GPU. SEGMENTS: the first
segment of a value on a GPU; the others follow as messages of their own.
"""


_ANOTHER = b"another collective"


class LastCall(NamedTuple):
    """What a rank that leaves tells of one communicator.

    Attributes:
        context: the communicator's number.
        num_calls: collective calls that it has made there.
        number: of the last of them that went by messages; -1: there is none.
        call: that call, as it is on the wire.
    """

    context: int
    num_calls: int
    number: int
    call: str


def readable(call: bytes) -> str:
    """Return a collective call as it came on the wire, for a message."""
    signature, _, where = call.partition(b"\0")
    return signature.decode() + (f" at {where.decode()}" if where else "")


def different_calls(
    name: str, number: int, me: int, mine: str, peer: int, theirs: str
) -> MismatchError:
    """Return the error for two ranks that have made different calls on the communicator `name`."""
    return MismatchError(differing_calls.different_calls(name, number, {me: mine, peer: theirs}))


def are_same(one: bytes, other: bytes) -> bool:
    """Whether two calls, as they are on the wire, are the same: where they were made may differ."""
    return one.partition(b"\0")[0] == other.partition(b"\0")[0]


def different_last(
    name: str,
    me: int,
    mine: LastCall,
    recent: Mapping[int, bytes],
    peer: int,
    theirs: LastCall,
    newest: str = "",
) -> MismatchError | None:
    """Return how what two ranks tell of their last calls on the communicator `name` differs.

    Of two that have made as many calls, and not as many by messages, one has made a call in shared
    memory in place of one of the other's.

    Args:
        recent: the latest calls by messages of `me`, by number.
        newest: the call in shared memory that it is in.
    """
    number, call = theirs.number, theirs.call.encode()
    own = recent.get(number)
    if mine.num_calls == theirs.num_calls and mine.number != number:
        if mine.number < number:
            own = newest.encode() or _ANOTHER
        else:
            own, call = mine.call.encode(), _ANOTHER
        number = mine.num_calls - 1
    if own is None or are_same(own, call):
        return None
    return different_calls(name, number, me, readable(own), peer, readable(call))


def call_of(arrival: Arrival) -> bytes:
    """Return the call to which a collective's message belongs, as it came on the wire."""
    header = arrival.header
    skipped = COLLECTIVE.size + (OFFER.size if header[0] == KIND_OFFERED else 0)
    return bytes(header[skipped:])


@public
class Status(Hinting, foreign=OF_STATUSES):
    """Who sent a message, with which tag, and how long it is.

    Attributes:
        source: rank of the sender (`PROC_NULL` if nothing was received).
        tag: its tag.
        nbytes: length of the value in bytes.
    """

    __slots__ = ("nbytes", "source", "tag")

    def __init__(self, source: int = PROC_NULL, tag: int = ANY_TAG, nbytes: int = 0) -> None:
        self.source = source
        self.tag = tag
        self.nbytes = nbytes

    @passing_on
    def count(self, dtype: Any) -> int:
        """Return how many elements of a dtype the message has.

        Args:
            dtype: of NumPy, or what makes one, or of PyTorch.

        Raises:
            ValueError: its length is no multiple of the dtype's.
        """
        itemsize = getattr(dtype, "itemsize", None)
        if not isinstance(itemsize, int):
            import numpy as np

            itemsize = np.dtype(dtype).itemsize
        count, rest = divmod(self.nbytes, itemsize) if itemsize else (0, self.nbytes)
        if rest:
            raise ValueError(f"{self.nbytes} bytes are no whole number of {dtype} elements")
        return count

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, nbytes={self.nbytes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]


class Incoming(NamedTuple):
    """A point-to-point message that has come; `order` counts those of its communicator."""

    arrival: Arrival
    source: int
    tag: int
    form: int
    description: bytes
    order: int


class Held:
    """A message that a matched probe has taken out of the queue, for the receive of its handle.

    Attributes:
        message: it; None: `why` says what has become of it.
        why: as a clause about "this message".
    """

    __slots__ = ("message", "why")

    def __init__(self, message: Incoming) -> None:
        self.message: Incoming | None = message
        self.why = ""


Key = tuple[int, int, int, int]
"""Address of a collective's message: (number, subcall, sender, index)."""

Wanted = Callable[[Arrival | None, BaseException | None], None]
"""Told the arrival, or the error that came instead."""
