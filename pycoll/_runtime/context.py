"""One communicator on one rank: its collective calls, and its messages (`Inbox`).

Ranks are world ranks here. Everything runs under the engine's lock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol

from pycoll._runtime.envelope import (
    COLLECTIVE,
    KIND_CUDA_IPC,
    Key,
    LastCall,
    Wanted,
    are_same,
    call_of,
    different_calls,
    different_last,
    readable,
)
from pycoll._runtime.inbox import Inbox
from pycoll._runtime.matching import Collecting
from pycoll._transports._core import RECEIVE_ENDED, RECEIVE_HELD, RECEIVE_POSTED, STATUS_TAKEN_BACK
from pycoll._transports.base import Arrival, Operation
from pycoll._transports.core import CoreArrival, CoreTransport
from pycoll.errors import Error, MismatchError, PeerFailed


class ShmCalls(Protocol):
    """The collectives of one communicator in shared memory.

    Attributes:
        number: collective calls made there.
        taken_nbytes: bytes of memory that they take, of all ranks together.
    """

    @property
    def number(self) -> int: ...

    @property
    def taken_nbytes(self) -> int: ...

    def refuse(self) -> None:
        """Make every later call look at the engine first."""

    def close(self) -> None:
        """Give the shared memory back."""

    def differing(self) -> MismatchError | None:
        """Return how a call of another rank differs from this one's, as far as can be seen now."""


class Context(Inbox):
    """What one communicator waits for, and how its calls are compared; attributes also of `Inbox`.

    Args:
        transport: the core's engine.

    Attributes:
        name: what messages call it.
        made_at: path and line where the program made it.
        users: knows when nobody can use this any more (`Communicators.close_when_dropped`).
        shm: those that do not go by messages; or None.
        unheard: it broke because of a call that this rank has left, which nobody here was told yet.
        pending: calls under way.
        next_value: number of the next value that is sent in segments.
        num_agreements: calls of agree and shrink that this rank has made.
        stays_off_gpus: a rank could not reach the memory of another's GPU: all are staged.
    """

    def __init__(
        self, ident: int, members: tuple[int, ...], me: int, transport: CoreTransport
    ) -> None:
        super().__init__(ident, members, me, transport)
        self.name = "a communicator"
        self.made_at = ("?", 0)
        self.next_value = 0
        self.num_agreements = 0
        self.stays_off_gpus = False
        self.pending: set[Operation] = set()
        self.shm: ShmCalls | None = None
        self.unheard = False
        self._left: dict[int, LastCall] = {}
        self._collecting: dict[Key, Collecting] = {}
        self.users: object = None
        self.on_mismatch: Callable[[Context, MismatchError], None] = lambda context, error: None
        self.on_cuda_ipc: Callable[[Context, Arrival], None] = lambda _, arrival: arrival.release()

    # --- collectives -----------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """Number of the next collective call by messages."""
        return int(self.core.next_call)

    def begin(self, call: bytes) -> int:
        """Start a collective call; returns its number. Messages that came early are compared."""
        number: int = self.core.begin(call)
        self.compare_left(number, call)
        return number

    def compare_left(self, number: int, call: bytes) -> None:
        """Compare a call that has begun with the last ones of ranks that have left."""
        for rank, last in self._left.items():
            if last.number == number:
                self._check_same(number, call, rank, last.call.encode())

    def end(self, number: int) -> None:
        """Finish a collective call: every message for it must have been used."""
        self.core.end(number)

    def collect(self, key: Key, wanted: Wanted) -> None:
        """Have `wanted` called with the message of that address, now or when it comes."""
        self.collected(Collecting(self, key, wanted))

    def collected(self, collecting: Collecting) -> None:
        """Say what has become of a collective's message, if that is known."""
        handle = collecting.handle
        state = handle.state
        if state == RECEIVE_ENDED and handle.status == STATUS_TAKEN_BACK:
            self.transport.disown(handle)  # that it has ended may still be told
            collecting.handle = handle = self.core.collect(*collecting.key)
            state = handle.state
        if state == RECEIVE_POSTED:
            self._collecting[collecting.key] = collecting
            self.transport.own(handle, collecting)
            return
        self._collecting.pop(collecting.key, None)
        if state == RECEIVE_HELD:
            arrival = CoreArrival(self.transport, handle, self.withdrawn)
            self.transport.own(handle, arrival)
            collecting.wanted(arrival, None)
        else:
            gone = self.gone.get(collecting.key[2])
            error = self.broken or gone or self.transport.error_of(handle.status)
            collecting.wanted(None, error)

    def forget(self, key: Key) -> None:
        """Stop waiting for the message of that address."""
        collecting = self._collecting.pop(key, None)
        if collecting is not None:
            self.transport.disown(collecting.handle)
            collecting.handle.give_up()

    # --- what the engine tells -------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """A message has come for which Python is needed, or one of a call that differs."""
        if self.broken is not None:
            self._drop(arrival)
            return
        if arrival.header[0] == KIND_CUDA_IPC:
            self.on_cuda_ipc(self, arrival)
            return
        _, _, number, _, _ = COLLECTIVE.unpack_from(arrival.header)
        theirs = call_of(arrival)
        peer = arrival.peer
        arrival.release()
        self.differs(number, peer, theirs)

    def peer_gone(self, rank: int, error: PeerFailed) -> None:
        """No more messages will come from `rank`: what waits for one fails."""
        if rank not in self.members or rank in self.gone:
            return
        self.gone[rank] = error
        for match in list(self.matches.values()):
            reason = self._no_sender(match.source)
            if reason is not None:
                match.abort(reason)

    def fail(self, error: BaseException) -> None:
        """Break: everything pending ends with `error`, and so will every later call."""
        if self.broken is not None:
            return
        self.broken = copy.copy(error)  # the traceback of what is raised keeps the call's arrays
        if self.shm is not None:
            self.shm.refuse()
        self.core.messages_usable = self.core.collectives_usable = False
        for operation in list(self.pending):
            operation.abort(error)
        for match in list(self.matches.values()):
            match.abort(error)
        self._drop_messages()
        for collecting in self._collecting.values():
            self.transport.disown(collecting.handle)
        self._collecting.clear()
        if self._closed:
            self.core.close()  # who waits until its message is received goes on
        else:
            self.core.break_()

    def close(self) -> None:
        """Drop what has come and was never asked for; what other threads wait for ends."""
        self._closed = True
        self.fail(Error("this communicator is closed"))

    # --- sameness --------------------------------------------------------------------------

    # A call is its signature, a zero byte, and where it was made, which may differ.

    @property
    def num_calls(self) -> int:
        """Number of collective calls that this rank has made."""
        return self.next_number + (self.shm.number if self.shm is not None else 0)

    def recent_calls(self) -> dict[int, bytes]:
        """Return the latest calls by messages, by number."""
        calls: dict[int, bytes] = self.core.calls()
        return calls

    def place_of(self, text: str, number: int) -> str:
        """Return where a latest call by messages was made; "": there is none with this text."""
        if number < 0:
            return ""
        call, _, place = self.recent_calls().get(number, b"").partition(b"\0")
        return place.decode() if call == text.encode() else ""

    def newest_call(self) -> bytes:
        """Return the call by messages that has begun last; empty: there was none."""
        calls = self.recent_calls()
        return calls[max(calls)] if calls else b""

    def last_call(self) -> LastCall:
        """Return what to tell of the last call."""
        newest = self.newest_call().decode()
        return LastCall(self.ident, self.num_calls, self.next_number - 1, newest)

    def peer_left(self, rank: int, last: LastCall) -> None:
        """Hear from a rank that leaves what it has called last."""
        self._left[rank] = last
        self.core.collectives_usable = False  # each call must be compared with that one
        self.compare_all_left()

    def compare_all_left(self, num_calls: int = 0, newest: str = "") -> None:
        """Compare what this rank has called with the last calls of ranks that have left.

        Args:
            num_calls: how many it has made with one in shared memory that has only begun.
            newest: that call.
        """
        mine, calls = self.last_call(), self.recent_calls()
        mine = mine._replace(num_calls=max(mine.num_calls, num_calls))
        for rank, last in self._left.items():
            error = different_last(self.name, self.me, mine, calls, rank, last, newest)
            if error is not None:
                self.on_mismatch(self, error)

    @property
    def has_left(self) -> bool:
        """Whether a rank has told that it makes no more calls here."""
        return bool(self._left)

    def left_before(self, rank: int, number: int) -> bool:
        """Whether a rank is known to have left without making the collective call `number`."""
        return rank in self._left and self._left[rank].num_calls <= number

    def _check_same(self, number: int, mine: bytes, peer: int, theirs: bytes) -> None:
        if not are_same(mine, theirs):
            self.mismatch(number, readable(mine), peer, readable(theirs))

    def differs(self, number: int, peer: int, theirs: bytes) -> None:
        """Break because a rank has made a call that this rank has not made with that number."""
        mine = self.recent_calls().get(number, b"another collective")
        self.mismatch(number, readable(mine), peer, readable(theirs))

    def mismatch(self, number: int, mine: str, peer: int, theirs: str) -> None:
        """Break because two ranks made different calls."""
        self.on_mismatch(self, different_calls(self.name, number, self.me, mine, peer, theirs))
