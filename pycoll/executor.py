"""Running schedules over the transports: the only loop that does.

A `Run` posts every step as soon as what it waits for is done: hazards come with the schedule, and
receives that will be reduced are opened in the schedule's order, `window` at a time, which bounds
scratch memory. It never blocks; it is an operation that is done when its last step is.

Nothing is copied that need not be: chunks are sent from where their value lies (the caller's
array at first), received where they must end up, and reduced from the frame they came in.

A `Pipeline` runs the same schedule on one segment of every chunk after the other, several at a
time, each on a lane of its own: while a rank hands one segment on, the next comes in.

What else must happen around the messages, such as copies to and from a GPU, is put into the steps
beforehand (`external`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from pycoll.context import COLLECTIVE, KIND_COLLECTIVE, KIND_LENT, Context, Key, readable
from pycoll.engine import Engine
from pycoll.errors import Error, MismatchError
from pycoll.external import External, Table
from pycoll.late import Late
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send
from pycoll.scratch import new_bytes
from pycoll.transports.base import Arrival, Operation, Parts, Withdrawn

if TYPE_CHECKING:
    from pycoll import lending
else:  # for arrays on a GPU alone
    lending = Late("pycoll.lending")

WINDOW = 4
"""Receives to be reduced that are open at a time (the proof covers 1, 2 and this)."""

SEGMENTS_IN_FLIGHT = 16
"""Segments of one call that are under way at a time; as long as a chain through all ranks would
need to be full at 16 ranks."""

Combine = Callable[[memoryview, memoryview, memoryview], None]
"""(left, right, out): byte views of equal length; out may be left or right."""


class Binding(NamedTuple):
    """Where the chunks of one run are; lists by chunk.

    Attributes:
        nbytes: length, or None if only the sender knows it.
        source: the value at the start, or None. Never written, unless it is also the target.
        target: where the value must be at the end, or None if it is not needed then.
        combine: the reduction, None if nothing is reduced.
        blocks: all sources as one block of memory, and all targets, where the chunks lie one behind
            the other: what neighbors have there is sent, received and reduced in one piece.
            None: every chunk is by itself.
        finish: what is left to do in a target when its value is there, or None.
        on_gpu: what is lent goes to the arrays on a GPU, and not to their images, the targets.
    """

    nbytes: list[int | None]
    source: list[Parts | None]
    target: list[memoryview | None]
    combine: Combine | None = None
    blocks: tuple[memoryview | None, memoryview | None] | None = None
    finish: Callable[[memoryview], None] | None = None
    on_gpu: bool = False

    def cut(self, index: int, count: int, granule: int) -> Binding:
        """Return segment `index` of `count` of every chunk; `granule` bytes stay together.

        Every source must be in one part (see `joined`).
        """

        def segment(nbytes: int) -> slice:
            units = nbytes // granule
            return slice(units * index // count * granule, units * (index + 1) // count * granule)

        nbytes: list[int | None] = []
        source: list[Parts | None] = []
        target: list[memoryview | None] = []
        for length, parts, view in zip(self.nbytes, self.source, self.target, strict=True):
            assert length is not None
            piece = segment(length)
            nbytes.append(piece.stop - piece.start)
            source.append((parts[0][piece],) if parts is not None else None)
            target.append(view[piece] if view is not None else None)
        return Binding(nbytes, source, target, self.combine, finish=self.finish)

    def joined(self) -> Binding:
        """Return the same with every source in one part."""
        source: list[Parts | None] = [
            parts if parts is None or len(parts) == 1 else (memoryview(b"".join(parts)),)
            for parts in self.source
        ]
        return self._replace(source=source)


class Run(Operation):
    """One schedule under way.

    Args:
        engine: moves the messages.
        context: of the communicator; peers in the schedule are its ranks.
        address: (number of the call, lane), the same on all ranks.
        call: the call as text, compared by every receiver.
        schedule: this rank's steps.
        binding: where the chunks are; the memory belongs to the run until it is done.

    Attributes:
        engine, context, binding: as given.
        location: where the value of each chunk is now; None: it has none yet.
    """

    __slots__ = (
        "_begun",
        "_call",
        "_draining",
        "_ends",
        "_incoming",
        "_keys",
        "_lane",
        "_last",
        "_left",
        "_number",
        "_open",
        "_own",
        "_own_block",
        "_ready",
        "_scattered",
        "_schedule",
        "_settled",
        "_transfers",
        "_unopened",
        "_waits",
        "binding",
        "context",
        "engine",
        "location",
    )

    def __init__(
        self,
        engine: Engine,
        context: Context,
        address: tuple[int, int],
        call: bytes,
        schedule: Schedule | Table,
        binding: Binding,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.context = context
        self._number, self._lane = address
        self._call = call
        self._schedule = schedule
        self.binding = binding
        self.location: list[Parts | None] = list(binding.source)
        self._waits = list(schedule.waits)
        self._left = len(schedule.steps)
        self._ready: deque[int] = deque()
        self._begun: deque[tuple[int, Operation]] = deque()  # external, to be followed
        self._last: deque[tuple[int, Operation]] = deque()  # so, when all others are done
        self._draining = False
        self._unopened: deque[int] = deque()
        self._open = 0
        self._incoming: dict[int, tuple[memoryview, Arrival | None]] = {}  # to be combined
        self._own: dict[int, memoryview] = {}
        self._own_block: memoryview | None = None
        self._ends = list(accumulate([n or 0 for n in binding.nbytes], initial=0))
        self._scattered: dict[int, tuple[memoryview, list[memoryview]]] = {}  # scratch, and whither
        self._keys: set[Key] = set()
        self._transfers: dict[int, Operation] = {}
        self._settled: set[int] = set()

    def awaited(self) -> Collection[int]:
        """Return ranks that must all be in the call before this can be done."""
        sends = [peer for transfer in self._transfers.values() for peer in transfer.awaited()]
        return {*sends, *(sender for _, _, sender, _ in self._keys)}

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
        transfers, self._transfers = self._transfers, {}
        for transfer in transfers.values():  # others may be found to have ended by this
            transfer.cancel()
        for key in self._keys:
            self.context.forget(key)
        self._keys.clear()
        for _, arrival in self._incoming.values():
            if arrival is not None:
                arrival.release()
        self._incoming.clear()

    # --- the loop --------------------------------------------------------------------------

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        try:
            while self._left > 0:
                if self._ready:
                    self._post(self._ready.popleft())
                elif self._begun:
                    self._follow(*self._begun.popleft())
                elif self._left == len(self._last):
                    self._follow(*self._last.popleft())
                else:
                    break
            if self._left == 0 and not self.done:
                for chunk in range(len(self.location)):
                    self.settle(chunk)
        except BaseException as exc:  # a user's operator, or a full memory
            self.abort(exc)
        finally:
            self._draining = False
        if self._left == 0:
            self.finish()

    def _post(self, position: int) -> None:
        step, chunks = self._schedule.steps[position], self._schedule.chunks[position]
        match step:
            case Send(peer):
                message = self.header(self._schedule.number[position])
                world, parts = self.context.members[peer], self.values(chunks)
                self._follow(position, self.engine.send(self.context, world, message, parts))
            case Recv(_, _, scratch=True):
                self._unopened.append(position)
                self._open_receives()
            case Recv(peer):
                self._receive(position, peer, self._to_chunks)
            case Reduce(_, incoming_first):
                self._reduce(position, chunks, incoming_first)
            case Copy(source):
                destination = self.destination(chunks[0], self.binding.nbytes[chunks[0]] or 0)
                fill_from(self.values((source,)), destination)
                self._complete(position)
            case External(start, at_end):
                operation = start(self)
                if operation is None:
                    self._complete(position)
                else:
                    self._transfers[position] = operation
                    (self._last if at_end else self._begun).append((position, operation))

    def _complete(self, position: int) -> None:
        if self._left < 0:
            return
        self._left -= 1
        for later in self._schedule.successors[position]:
            self._waits[later] -= 1
            if self._waits[later] == 0:
                self._ready.append(later)
        self._drain()

    def settle(self, chunk: int) -> None:
        """Have the target of a chunk hold its value, once; no step uses the chunk any more."""
        location, target = self.location[chunk], self.binding.target[chunk]
        if target is None or chunk in self._settled:
            return
        self._settled.add(chunk)
        if location is not None and location[0] is not target:
            fill_from(location, target)
        if self.binding.finish is not None and len(target):
            self.binding.finish(target)

    # --- steps -----------------------------------------------------------------------------

    def header(self, number: int, kind: int = KIND_COLLECTIVE, more: bytes = b"") -> bytes:
        """Return the header of the message to a peer before which there were `number`."""
        header = COLLECTIVE.pack(kind, self.context.ident, self._number, self._lane, number)
        return header + more + self._call

    def _receive(
        self, position: int, peer: int, place: Callable[[int, Arrival], memoryview | None]
    ) -> None:
        """Wait for a message; `place` says where it goes (None: it has been taken as it is)."""
        world = self.context.members[peer]
        key = (self._number, self._lane, world, self._schedule.number[position])

        def wanted(arrival: Arrival | None, error: BaseException | None) -> None:
            self._keys.discard(key)
            if arrival is None:
                assert error is not None
                self.abort(error)
                return
            try:
                self._check_length(arrival, self._schedule.chunks[position])
                into = place(position, arrival)
                transfer = self._accept(arrival, into) if into is not None else None
            except Exception as exc:
                arrival.release()
                self.abort(exc)
                return
            if transfer is None:
                self._complete(position)
            else:
                self._follow(position, transfer)

        self._keys.add(key)
        self.context.collect(key, wanted)

    def _accept(self, arrival: Arrival, into: memoryview) -> Operation:
        """Have the value of a message written to `into`."""
        if arrival.header[0] != KIND_LENT:
            return arrival.accept(into)
        return lending.borrow(self.engine, self.context, arrival, into, self.binding.on_gpu)

    def _follow(self, position: int, transfer: Operation) -> None:
        def done(operation: Operation) -> None:
            self._transfers.pop(position, None)
            if self._left < 0:
                return
            if operation.error is None:
                if position in self._scattered:
                    scratch, views = self._scattered.pop(position)
                    fill_all(views, scratch)
                    self.engine.scratch.give_back(scratch)
                self._complete(position)
            elif not isinstance(operation.error, Withdrawn):
                self.abort(operation.error)
            # A sender that took its message back has broken the communicator: that will be heard.

        if not transfer.done:
            self._transfers[position] = transfer
        transfer.then(done)

    def _to_chunks(self, position: int, arrival: Arrival) -> memoryview | None:
        chunks = self._schedule.chunks[position]
        if len(chunks) == 1:
            return self.destination(chunks[0], arrival.nbytes)
        views = [self.destination(chunk, self._length(chunk)) for chunk in chunks]
        into = self._piece_of(chunks)
        if into is not None:
            return into
        if arrival.payload is not None:
            fill_all(views, arrival.payload)
            arrival.release()
            return None
        scratch = self.engine.scratch.take(arrival.nbytes)
        self._scattered[position] = scratch, views
        return scratch[: arrival.nbytes]

    def _open_receives(self) -> None:
        while self._unopened and self._open < WINDOW:
            position = self._unopened.popleft()
            step = self._schedule.steps[position]
            assert isinstance(step, Recv)
            self._open += 1
            self._receive(position, step.peer, self._to_scratch)

    def _to_scratch(self, position: int, arrival: Arrival) -> memoryview | None:
        if arrival.payload is not None:
            self._incoming[position] = arrival.payload, arrival
            return None
        scratch = self.engine.scratch.take(arrival.nbytes)
        self._incoming[position] = scratch, None
        return scratch[: arrival.nbytes]

    def _reduce(self, position: int, chunks: Sequence[int], incoming_first: bool) -> None:
        incoming, arrival = self._incoming.pop(position - 1)
        own, piece = [self._value(chunk)[0] for chunk in chunks], self._piece_of(chunks)
        out = [self.destination(chunk, self._length(chunk)) for chunk in chunks]
        into = self._piece_of(chunks)
        if piece is not None and into is not None:
            own, out = [piece], [into]
        begin = 0
        for mine, result in zip(own, out, strict=True):
            operand = incoming[begin : begin + len(result)]
            left, right = (operand, mine) if incoming_first else (mine, operand)
            if len(result) and self.binding.combine is not None:
                self.binding.combine(left, right, result)
            begin += len(result)
        if arrival is not None:
            arrival.release()
        else:
            self.engine.scratch.give_back(incoming)
        self._open -= 1
        self._complete(position)
        self._open_receives()

    # --- memory ----------------------------------------------------------------------------

    def _value(self, chunk: int) -> Parts:
        value = self.location[chunk]
        if value is None:
            raise Error(
                f"{readable(self._call)}: a step of the algorithm reads chunk {chunk} before it "
                "has a value. pycoll.prove finds such faults."
            )
        return value

    def value(self, chunk: int) -> memoryview:
        """Return the value of a chunk; of one in several parts the first."""
        return self._value(chunk)[0]

    def where(self, chunk: int) -> memoryview | None:
        """Return where a chunk has its value, which is in one part; None: it has none yet."""
        location = self.location[chunk]
        return location[0] if location is not None else None

    def place(self, chunk: int) -> None:
        """Have a chunk's value be at its target from now on: the caller puts it there."""
        target = self.binding.target[chunk]
        assert target is not None
        self.location[chunk] = (target,)

    def values(self, chunks: Sequence[int]) -> Parts:
        """Return the values of chunks, in one part if they lie one behind the other."""
        if len(chunks) == 1:
            return self._value(chunks[0])
        parts = [part for chunk in chunks for part in self._value(chunk)]
        piece = self._piece_of(chunks)
        return tuple(parts) if piece is None else (piece,)

    def _piece_of(self, chunks: Sequence[int]) -> memoryview | None:
        """Return the values of several chunks as one piece of a block; None: they are none."""
        if self.binding.blocks is None or len(chunks) == 1 or not are_neighbors(chunks):
            return None
        block = self._block_of(chunks[0])
        if block is None or any([self._block_of(chunk) is not block for chunk in chunks]):
            return None
        return block[self._ends[chunks[0]] : self._ends[chunks[-1] + 1]]

    def _block_of(self, chunk: int) -> memoryview | None:
        """Return the block of which the value of a chunk is a piece."""
        assert self.binding.blocks is not None
        source, target = self.binding.blocks
        value = self.location[chunk]
        if value is None or value is self.binding.source[chunk]:
            return source
        return target if value[0] is self.binding.target[chunk] else self._own_block

    def destination(self, chunk: int, nbytes: int) -> memoryview:
        """Return the memory in which `chunk` has its value from now on."""
        memory = self.binding.target[chunk]
        if memory is None:
            memory = self._own.get(chunk)
        if memory is None:
            if self.binding.blocks is None:
                memory = new_bytes(nbytes)
            else:
                if self._own_block is None:  # pages that are not touched cost nothing
                    self._own_block = new_bytes(self._ends[-1])
                memory = self._own_block[self._ends[chunk] : self._ends[chunk + 1]]
            self._own[chunk] = memory
        self.location[chunk] = (memory,)
        return memory

    def _length(self, chunk: int) -> int:
        nbytes = self.binding.nbytes[chunk]
        assert nbytes is not None, f"nobody said how long chunk {chunk} is"
        return nbytes

    def _check_length(self, arrival: Arrival, chunks: Sequence[int]) -> None:
        lengths = [self.binding.nbytes[chunk] for chunk in chunks]
        known = [length for length in lengths if length is not None]
        expected = sum(known)
        if len(known) == len(lengths) and arrival.nbytes != expected:
            raise MismatchError(
                f"rank {arrival.peer} sent {arrival.nbytes} bytes in {readable(self._call)}, "
                f"where rank {self.context.me} expects {expected}"
            )


class Pipeline(Operation):
    """One schedule on every segment of its chunks.

    Args:
        make: the run of a segment.
        count: how many segments there are.
    """

    __slots__ = ("_count", "_filling", "_make", "_next", "_runs")

    def __init__(self, make: Callable[[int], Run], count: int) -> None:
        super().__init__()
        self._make = make
        self._count = count
        self._next = 0
        self._runs: set[Run] = set()
        self._filling = False

    def awaited(self) -> Collection[int]:
        """Return ranks that must all be in the call before this can be done."""
        return {peer for run in self._runs for peer in run.awaited()}

    def start(self) -> None:
        """Start as many segments as may be under way."""
        if self._filling:
            return
        self._filling = True
        while self._next < self._count and len(self._runs) < SEGMENTS_IN_FLIGHT and not self.done:
            run = self._make(self._next)
            self._next += 1
            self._runs.add(run)
            run.then(self._ended)
            run.start()
        self._filling = False
        if not self._runs and not self.done:
            self.finish()

    def cancel(self) -> None:
        super().cancel()
        runs, self._runs = self._runs, set()
        for run in runs:
            run.cancel()

    def _ended(self, run: Operation) -> None:
        assert isinstance(run, Run)
        self._runs.discard(run)
        if run.error is not None:
            self.abort(run.error)
        elif not self.done:
            self.start()


def are_neighbors(chunks: Sequence[int]) -> bool:
    """Whether chunks follow each other."""
    return all(after == before + 1 for before, after in pairwise(chunks))


def fill_all(views: Sequence[memoryview], data: memoryview) -> None:
    """Copy the front of `data` to several places, one after the other."""
    begin = 0
    for view in views:
        view[:] = data[begin : begin + len(view)]
        begin += len(view)


def fill_from(parts: Parts, into: memoryview) -> None:
    """Copy a payload to the front of `into`."""
    offset = 0
    for part in parts:
        into[offset : offset + len(part)] = part
        offset += len(part)
