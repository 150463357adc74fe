"""Running one schedule over the transports: the only loop that does.

A `Run` posts every step as soon as what it waits for is done: hazards come with the schedule, and
receives that will be reduced are opened in the schedule's order, `window` at a time, which bounds
scratch memory. It never blocks; it is an operation that is done when its last step is.

Nothing is copied that need not be: chunks are sent from where their value lies (the caller's
array at first), received where they must end up, and reduced from the frame they came in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pycoll.context import COLLECTIVE, KIND_COLLECTIVE, Context, Key, readable
from pycoll.engine import Engine
from pycoll.errors import MismatchError
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send
from pycoll.transports.base import Arrival, Operation, Parts, Withdrawn

WINDOW = 4
"""Receives to be reduced that are open at a time (the proof covers 1, 2 and this)."""

Combine = Callable[[memoryview, memoryview, memoryview], None]
"""(left, right, out): byte views of equal length; out may be left or right."""


class Binding(NamedTuple):
    """Where the chunks of one run are; lists by chunk.

    Attributes:
        nbytes: length, or None if only the sender knows it.
        source: the value at the start, or None. Never written, unless it is also the target.
        target: where the value must be at the end, or None if it is not needed then.
        combine: the reduction, None if nothing is reduced.
    """

    nbytes: list[int | None]
    source: list[Parts | None]
    target: list[memoryview | None]
    combine: Combine | None = None


class Run(Operation):
    """One schedule under way.

    Args:
        engine: moves the messages.
        context: of the communicator; peers in the schedule are its ranks.
        address: (number of the call, lane), the same on all ranks.
        call: the call as text, compared by every receiver.
        schedule: this rank's steps.
        binding: where the chunks are; the memory belongs to the run until it is done.
    """

    __slots__ = (
        "_arrivals",
        "_binding",
        "_call",
        "_context",
        "_draining",
        "_engine",
        "_incoming",
        "_keys",
        "_lane",
        "_left",
        "_number",
        "_open",
        "_own",
        "_ready",
        "_schedule",
        "_scratch",
        "_transfers",
        "_unopened",
        "_waits",
        "location",
    )

    def __init__(
        self,
        engine: Engine,
        context: Context,
        address: tuple[int, int],
        call: bytes,
        schedule: Schedule,
        binding: Binding,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._context = context
        self._number, self._lane = address
        self._call = call
        self._schedule = schedule
        self._binding = binding
        self.location: list[Parts | None] = list(binding.source)
        self._waits = list(schedule.waits)
        self._left = len(schedule.steps)
        self._ready: deque[int] = deque()
        self._draining = False
        self._unopened: deque[int] = deque()
        self._open = 0
        self._incoming: dict[int, memoryview] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._own: dict[int, memoryview] = {}
        self._scratch: list[memoryview] = []
        self._keys: set[Key] = set()
        self._transfers: dict[int, Operation] = {}

    def start(self) -> None:
        """Post what can be posted."""
        for position, waits in enumerate(self._waits):
            if waits == 0:
                self._ready.append(position)
        self._drain()

    def cancel(self) -> None:
        super().cancel()
        self._left = -1
        self._unopened.clear()
        for transfer in self._transfers.values():
            transfer.cancel()
        self._transfers.clear()
        for key in self._keys:
            self._context.forget(key)
        self._keys.clear()
        for arrival in self._arrivals.values():
            arrival.release()
        self._arrivals.clear()

    # --- the loop --------------------------------------------------------------------------

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        try:
            while self._ready and self._left > 0:
                self._post(self._ready.popleft())
        except BaseException as exc:  # a user's operator, or a full memory
            self.abort(exc)
        finally:
            self._draining = False
        if self._left == 0 and not self.done:
            self._conclude()
            self.finish()

    def _post(self, position: int) -> None:
        match self._schedule.steps[position]:
            case Send(peer, chunk):
                self._send(position, peer, chunk)
            case Recv(_, _, scratch=True):
                self._unopened.append(position)
                self._open_receives()
            case Recv(peer, chunk):
                self._receive(position, peer, self._to_chunk(chunk))
            case Reduce(chunk, incoming_first):
                self._reduce(position, chunk, incoming_first)
            case Copy(source, chunk):
                destination = self._destination(chunk, self._binding.nbytes[chunk] or 0)
                fill_from(self._value(source), destination)
                self.location[chunk] = (destination,)
                self._complete(position)

    def _complete(self, position: int) -> None:
        if self._left < 0:
            return
        self._left -= 1
        for later in self._schedule.successors[position]:
            self._waits[later] -= 1
            if self._waits[later] == 0:
                self._ready.append(later)
        self._drain()

    def _conclude(self) -> None:
        """Copy to their targets the values that no step has put there."""
        for location, target in zip(self.location, self._binding.target, strict=True):
            if target is not None and location is not None and location[0] is not target:
                fill_from(location, target)

    # --- steps -----------------------------------------------------------------------------

    def _send(self, position: int, peer: int, chunk: int) -> None:
        header = COLLECTIVE.pack(
            KIND_COLLECTIVE,
            self._context.ident,
            self._number,
            self._lane,
            self._schedule.number[position],
        )
        world = self._context.members[peer]
        parts = self._value(chunk)
        self._follow(
            position,
            self._engine.send(self._context, world, header + self._call, parts),
        )

    def _receive(
        self, position: int, peer: int, place: Callable[[Arrival], memoryview | None]
    ) -> None:
        """Wait for a message; `place` says where it goes (None: it has been taken as it is)."""
        world = self._context.members[peer]
        key = (self._number, self._lane, world, self._schedule.number[position])

        def wanted(arrival: Arrival | None, error: BaseException | None) -> None:
            self._keys.discard(key)
            if arrival is None:
                assert error is not None
                self.abort(error)
                return
            try:
                into = place(arrival)
            except Exception as exc:
                arrival.release()
                self.abort(exc)
                return
            if into is None:
                self._complete(position)
            else:
                self._follow(position, arrival.accept(into))

        self._keys.add(key)
        self._context.collect(key, wanted)

    def _follow(self, position: int, transfer: Operation) -> None:
        def done(operation: Operation) -> None:
            self._transfers.pop(position, None)
            if operation.error is None:
                self._complete(position)
            elif not isinstance(operation.error, Withdrawn):
                self.abort(operation.error)
            # A sender that took its message back has broken the communicator: that will be heard.

        if not transfer.done:
            self._transfers[position] = transfer
        transfer.then(done)

    def _to_chunk(self, chunk: int) -> Callable[[Arrival], memoryview]:
        def place(arrival: Arrival) -> memoryview:
            self._check_length(arrival, chunk)
            destination = self._destination(chunk, arrival.nbytes)
            self.location[chunk] = (destination,)
            return destination

        return place

    def _open_receives(self) -> None:
        while self._unopened and self._open < WINDOW:
            position = self._unopened.popleft()
            step = self._schedule.steps[position]
            assert isinstance(step, Recv)
            self._open += 1
            self._receive(position, step.peer, self._to_scratch(position, step.chunk))

    def _to_scratch(self, position: int, chunk: int) -> Callable[[Arrival], memoryview | None]:
        def place(arrival: Arrival) -> memoryview | None:
            self._check_length(arrival, chunk)
            if arrival.payload is not None:
                self._arrivals[position] = arrival
                self._incoming[position] = arrival.payload
                return None
            scratch = self._take_scratch(arrival.nbytes)
            self._incoming[position] = scratch
            return scratch[: arrival.nbytes]

        return place

    def _reduce(self, position: int, chunk: int, incoming_first: bool) -> None:
        incoming = self._incoming.pop(position - 1)
        arrival = self._arrivals.pop(position - 1, None)
        nbytes = self._binding.nbytes[chunk]
        assert nbytes is not None
        if nbytes and self._binding.combine is not None:
            own = self._value(chunk)[0]
            operand = incoming[:nbytes]
            left, right = (operand, own) if incoming_first else (own, operand)
            destination = self._destination(chunk, nbytes)
            self._binding.combine(left, right, destination)
            self.location[chunk] = (destination,)
        if arrival is not None:
            arrival.release()
        else:
            self._scratch.append(incoming)
        self._open -= 1
        self._complete(position)
        self._open_receives()

    # --- memory ----------------------------------------------------------------------------

    def _value(self, chunk: int) -> Parts:
        value = self.location[chunk]
        assert value is not None, f"chunk {chunk} has no value"
        return value

    def _destination(self, chunk: int, nbytes: int) -> memoryview:
        target = self._binding.target[chunk]
        if target is not None:
            return target
        if chunk not in self._own:
            self._own[chunk] = new_bytes(nbytes)
        return self._own[chunk]

    def _take_scratch(self, nbytes: int) -> memoryview:
        for index, scratch in enumerate(self._scratch):
            if len(scratch) >= nbytes:
                return self._scratch.pop(index)
        return new_bytes(nbytes)

    def _check_length(self, arrival: Arrival, chunk: int) -> None:
        expected = self._binding.nbytes[chunk]
        if expected is not None and arrival.nbytes != expected:
            raise MismatchError(
                f"rank {arrival.peer} sent {arrival.nbytes} bytes in {readable(self._call)}, "
                f"where rank {self._context.me} expects {expected}"
            )


def new_bytes(nbytes: int) -> memoryview:
    """Return uninitialized writable memory."""
    if nbytes < 4096:
        return memoryview(bytearray(nbytes))
    import numpy as np  # late: a barrier does not need it

    return np.empty(nbytes, np.uint8).data


def fill_from(parts: Parts, into: memoryview) -> None:
    """Copy a payload to the front of `into`."""
    offset = 0
    for part in parts:
        into[offset : offset + len(part)] = part
        offset += len(part)
