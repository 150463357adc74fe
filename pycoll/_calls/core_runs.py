"""Schedules that the compiled core runs as parts of calls which Python has begun.

So runs what is no single schedule: blocks of different lengths, objects, lists of arrays, values
that are no arrays. The messages are the core's. It asks Python for the steps that it cannot do: a
reduction by a function of the user's, a copy to or from a GPU (`external`), the receive of a value
that its sender offers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pycoll._cuda import copies
from pycoll._gpu import cuda_ipc
from pycoll._runtime.binding import Binding, CoreReduction, are_neighbors, fill_all
from pycoll._runtime.envelope import COLLECTIVE, KIND_COLLECTIVE, readable
from pycoll._runtime.external import External, ExternalSchedule
from pycoll._runtime.scratch import new_bytes
from pycoll._transports._core import (
    STATUS_NO_VALUE,
    STATUS_REFUSED,
    STEP_COPY,
    STEP_EXTERNAL,
    STEP_RECV,
    STEP_RECV_SCRATCH,
    STEP_REDUCE,
    STEP_SEND,
    VALUE_AT_SOURCE,
    VALUE_AT_TARGET,
    VALUE_NOWHERE,
    CompiledPlan,
    Run,
    float_control,
    with_floats,
)
from pycoll._transports.base import Operation, Parts, Withdrawn
from pycoll.errors import Error, MismatchError
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send

if TYPE_CHECKING:
    from pycoll._calls.group import Group

NO_REDUCTION: CoreReduction = (-1, 0, 0)

Status = tuple[int, int, int, int]
"""How a run has ended: its status, the rank or chunk at fault, bytes that came, and expected."""


def _nothing() -> None:
    pass


class CoreRun(Operation):
    """A schedule under way in the core.

    Args:
        group: its ranks.
        call: the call's signature.
        address: (number of the call, first subcall).
        table: the schedule, as the core has it.
        schedule: the same.
        binding: where the chunks are; the memory belongs to the run until it is done.
        segments, granule: as of `Group.operation`.
    """

    def __init__(
        self,
        group: Group,
        call: bytes,
        address: tuple[int, int],
        table: CompiledPlan,
        schedule: Schedule | ExternalSchedule,
        binding: Binding,
        segments: int,
        granule: int,
    ) -> None:
        super().__init__()
        self._group = group
        self._call = call
        self._address = address
        self._schedule = schedule
        self.binding = binding
        self._cut = segments, granule
        self._floats = float_control()  # in which its operator computes, whoever drives
        self._is_given_up = False
        self._segments: dict[int, Segment] = {}
        self._transfers: dict[tuple[int, int], Operation] = {}
        # By segment, with its steps: of these the end is asked for last.
        self._last: dict[int, deque[tuple[int, Operation]]] = {}
        if None in binding.nbytes:  # of what this rank has it knows the length
            nbytes = [
                sum(map(len, parts)) if length is None and parts is not None else length
                for length, parts in zip(binding.nbytes, binding.source, strict=True)
            ]
            self.binding = binding = binding._replace(nbytes=nbytes)
        sources = [
            None if parts is None else parts[0] if len(parts) == 1 else tuple(parts)
            for parts in binding.source
        ]
        memory = table, list(binding.nbytes), sources, list(binding.target)
        where = (*address, segments, granule)
        self._core = Run(group.context.core, *memory, reduction_of(binding), *where)

    def awaited(self) -> Collection[int]:
        others = [rank for transfer in self._transfers.values() for rank in transfer.awaited()]
        return {*self._core.awaited(), *others}

    def start(self) -> None:
        """Start it; it may be done then."""
        if self._core.start(self) is not None:
            self._ended()

    def cancel(self) -> None:
        super().cancel()
        self._is_given_up = True
        transfers, self._transfers = self._transfers, {}
        for transfer in transfers.values():  # others may be found to have ended by this
            transfer.cancel()
        self._core.give_up()
        self._segments.clear()

    def value(self, chunk: int) -> memoryview:
        """Return the value of a chunk, when it has ended; of one in several parts the first."""
        parts = self.binding.source[chunk]
        if parts is not None:
            return parts[0]
        grown = self._core.grown(chunk)
        assert grown is not None, f"nobody has sent chunk {chunk}"
        return memoryview(grown)

    def _ended(self) -> None:
        """Hear of its end, in the order in which ends came; under the engine's lock."""
        if self._is_given_up:
            return
        error = why_failed(self._group, readable(self._call), self._core.status)
        self._segments.clear()
        self.finish(error)

    # --- steps that the core asks for ------------------------------------------------------

    def _asked(self) -> None:
        """Do the steps that the core has asked Python for; under the engine's lock."""
        begun: deque[tuple[int, int, Operation]] = deque()
        try:
            while not self._is_given_up:
                asked = self._core.next_asked()
                if asked is not None:
                    self._do(*asked, begun)
                elif begun:
                    self._follow(*begun.popleft())
                else:
                    return
        except BaseException as exc:  # a user's operator, or a full memory
            if self._is_given_up:
                raise
            self.abort(exc)

    def _do(self, number: int, position: int, begun: deque[tuple[int, int, Operation]]) -> None:
        if position < 0:
            self._ask_last(number)
            return
        segment = self._segment(number)
        step, chunks = self._schedule.steps[position], self._schedule.chunks[position]
        match step:
            case External(start, at_end):
                operation = start(segment)
                if operation is None:
                    self._core.step_done(number, position)
                    return
                self._transfers[number, position] = operation
                if at_end:
                    self._last.setdefault(number, deque()).append((position, operation))
                else:
                    begun.append((number, position, operation))
            case Reduce(_, incoming_first):
                with_floats(self._floats, segment.reduce, position, chunks, incoming_first)
                self._core.step_done(number, position)
            case _:
                self._read_by_ipc(segment, position, chunks)

    def _ask_last(self, number: int) -> None:
        """Ask for the ends of what may end last, for one after the other."""
        last = self._last.get(number)
        while last and not self._is_given_up:
            position, operation = last.popleft()
            if not operation.done:
                self._follow(number, position, operation, after=lambda: self._ask_last(number))
                return
            self._follow(number, position, operation)

    def _read_by_ipc(self, segment: Segment, position: int, chunks: Sequence[int]) -> None:
        """Receive a message that is offered."""
        handle = self._core.take(segment.number, position)
        if handle is None:
            return
        group = self._group
        arrival = group.engine.transport.arrival_of(handle)
        try:
            segment.check_length(arrival.peer, arrival.nbytes, chunks)
            views = [segment.destination(chunk) for chunk in chunks]
            into = views[0] if len(views) == 1 else segment.piece_of(chunks)
            scratch = new_bytes(arrival.nbytes) if into is None else None
            into = scratch if scratch is not None else into
            assert into is not None
            on_gpu = segment.binding.on_gpu
            reading = cuda_ipc.read(group.engine, group.context, arrival, into, on_gpu)
        except BaseException:
            arrival.release()
            raise
        self._transfers[segment.number, position] = reading
        fill = partial(fill_all, views, scratch) if scratch is not None else _nothing
        self._follow(segment.number, position, reading, before=fill)

    def _follow(
        self,
        number: int,
        position: int,
        operation: Operation,
        before: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:
        """Have a step done when an operation is, and something else before and after that."""

        def done(operation: Operation) -> None:
            self._transfers.pop((number, position), None)
            if self._is_given_up:
                return
            if operation.error is None:
                before()
                self._core.step_done(number, position)
                after()
            elif isinstance(operation.error, Withdrawn):
                self._core.wait_again(number, position)
            else:
                self.abort(operation.error)

        operation.then(done)

    def _segment(self, number: int) -> Segment:
        if number not in self._segments:
            count, granule = self._cut
            binding = self.binding if count == 1 else self.binding.cut(number, count, granule)
            self._segments[number] = Segment(self, self._group, self._core, number, binding)
        return self._segments[number]

    def header(self, number: int, segment: int, kind: int, more: bytes) -> bytes:
        """Return the header of a segment's message to a peer before which there were `number`."""
        call, subcall = self._address
        ident = self._group.context.ident
        return COLLECTIVE.pack(kind, ident, call, subcall + segment, number) + more + self._call

    def text(self) -> str:
        return readable(self._call)


class Segment:
    """One segment of a run, for the steps that Python does: its chunks, and where they are.

    Attributes:
        number: which one.
        binding: its chunks.
        engine, context: of the ranks.
    """

    __slots__ = ("_core", "_ends", "_own", "_run", "binding", "context", "engine", "number")

    def __init__(
        self, run: CoreRun, group: Group, core: Run, number: int, binding: Binding
    ) -> None:
        self._run = run
        self._core = core
        self.number = number
        self.binding = binding
        self.engine = group.engine
        self.context = group.context
        self._own: memoryview | None = None
        self._ends = list(accumulate([n or 0 for n in binding.nbytes], initial=0))

    def header(self, number: int, kind: int = KIND_COLLECTIVE, more: bytes = b"") -> bytes:
        """Return the header of the message to a peer before which there were `number`."""
        return self._run.header(number, self.number, kind, more)

    def where(self, chunk: int) -> memoryview | None:
        """Return where a chunk has its value, which is in one part; None: it has none yet."""
        return self._view(chunk, self._core.where(self.number, chunk))

    def destination(self, chunk: int) -> memoryview:
        """Return the memory in which `chunk` has its value from now on."""
        view = self._view(chunk, self._core.place(self.number, chunk))
        assert view is not None
        return view

    def place(self, chunk: int) -> None:
        """Have a chunk's value be at its target from now on: the caller puts it there."""
        self._core.place(self.number, chunk)

    def _view(self, chunk: int, place: int) -> memoryview | None:
        if place == VALUE_AT_SOURCE:
            parts = self.binding.source[chunk]
            assert parts is not None
            return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        if place == VALUE_AT_TARGET:
            return self.binding.target[chunk]
        if place == VALUE_NOWHERE:
            return None
        if self._own is None:
            own = self._core.own(self.number, 0)
            assert own is not None
            self._own = memoryview(own)
        return self._own[self._ends[chunk] : self._ends[chunk + 1]]

    def values(self, chunks: Sequence[int]) -> Parts:
        """Return the values of chunks, in one part if they lie one behind the other."""
        parts = [self._value(chunk) for chunk in chunks]
        if len(parts) == 1:
            return (parts[0],)
        piece = self.piece_of(chunks)
        return tuple(parts) if piece is None else (piece,)

    def _value(self, chunk: int) -> memoryview:
        view = self.where(chunk)
        if view is None:
            raise Error(no_value(self._run.text(), chunk))
        return view

    def piece_of(self, chunks: Sequence[int]) -> memoryview | None:
        """Return the values of several chunks as one piece of a block; None: they are none."""
        if self.binding.blocks is None or not are_neighbors(chunks):
            return None
        places = {self._core.where(self.number, chunk) for chunk in chunks}
        if places not in ({VALUE_AT_SOURCE}, {VALUE_AT_TARGET}):
            return None
        block = self.binding.blocks[places == {VALUE_AT_TARGET}]
        if block is None:
            return None
        return block[self._ends[chunks[0]] : self._ends[chunks[-1] + 1]]

    def check_length(self, peer: int, nbytes: int, chunks: Sequence[int]) -> None:
        """Raise MismatchError unless a message is as long as its chunks."""
        expected = sum([self.binding.nbytes[chunk] or 0 for chunk in chunks])
        if nbytes != expected:
            raise MismatchError(
                wrong_length(peer, nbytes, self._run.text(), self.context, expected)
            )

    def reduce(self, position: int, chunks: Sequence[int], incoming_first: bool) -> None:
        """Combine chunks with what has come for them."""
        incoming = memoryview(self._core.incoming(self.number, position))
        combine, begin = self.binding.combine, 0
        for chunk in chunks:
            mine = self._value(chunk)
            result = self.destination(chunk)
            operand = incoming[begin : begin + len(result)]
            left, right = (operand, mine) if incoming_first else (mine, operand)
            if len(result) and callable(combine):
                combine(left, right, result)
            begin += len(result)

    def settle(self, chunk: int) -> None:
        """Have the target of a chunk hold its value, once; no step uses the chunk any more."""
        self._core.settle(self.number, chunk)


def may_be_offered() -> bool:
    """Whether a peer may offer this rank memory of a GPU, which only a `CoreRun` can receive.

    Peers offer to ranks that use a GPU themselves, and nothing that a schedule reduces.
    """
    return "pycoll._cuda.copies" in sys.modules and copies.is_in_use()


def reduction_of(binding: Binding) -> CoreReduction:
    """Return a reduction as the core takes it; NO_REDUCTION: Python does it, if there is one."""
    return binding.combine if isinstance(binding.combine, tuple) else NO_REDUCTION


def wrong_length(peer: int, nbytes: int, text: str, context: Any, expected: int) -> str:
    """Return what a MismatchError says of a message of another length."""
    return f"rank {peer} sent {nbytes} bytes in {text}, where rank {context.me} expects {expected}"


def no_value(text: str, chunk: int) -> str:
    """Return what the error for a wrong algorithm says."""
    return (
        f"{text}: a step of the algorithm reads chunk {chunk} before it has a value. "
        "pycoll.prove finds such faults."
    )


def why_failed(group: Group, text: str, ended: Status) -> BaseException | None:
    """Return why a run of the core has failed; None: it has not.

    Args:
        group: whose run it was.
        text: the call.
        ended: how it has ended.
    """
    status, at, came, expected = ended
    context, engine = group.context, group.engine
    if status == 0:
        return None
    if context.broken is not None:
        return context.broken
    if status == STATUS_REFUSED:
        return MismatchError(wrong_length(at, came, text, context, expected))
    if status == STATUS_NO_VALUE:
        return Error(no_value(text, at))
    return context.gone.get(status - 1) or engine.transport.error_of(status)


def table_of(schedule: Schedule | ExternalSchedule, size: int, num_chunks: int) -> CompiledPlan:
    return CompiledPlan(size, num_chunks, steps_of(schedule))


def second_round(group: Group, nbytes: int) -> tuple[CompiledPlan, bool]:
    """Return how what is too long for the first round of an all_gather is gathered.

    Args:
        group: the ranks.
        nbytes: of the longest block.

    Returns the plan, and whether all lengths that are rounded to the same go by it.
    """
    choice = group.choose("all_gather", nbytes, None, shm=False)
    steps = steps_of(group.schedule("all_gather", choice.name))
    places = [(-1, -1, -1)] * group.size
    how = steps, places, b"", NO_REDUCTION, choice.segments, 1
    return CompiledPlan(group.size, group.size, *how), not group.selector.agreed.segment_nbytes


def steps_of(schedule: Schedule | ExternalSchedule) -> list[tuple[Any, ...]]:
    """Return a schedule's steps as the core takes them."""
    steps: list[tuple[Any, ...]] = []
    for position, step in enumerate(schedule.steps):
        match step:
            case Send(peer):
                kind = STEP_SEND, False, peer
            case Recv(peer, _, scratch):
                kind = STEP_RECV_SCRATCH if scratch else STEP_RECV, False, peer
            case Reduce(_, incoming_first):
                kind = STEP_REDUCE, incoming_first, 0
            case Copy(source):
                kind = STEP_COPY, False, source
            case External(_, at_end):
                kind = STEP_EXTERNAL, at_end, 0
        chunks, successors = schedule.chunks[position], schedule.successors[position]
        number, waits = schedule.number[position], schedule.waits[position]
        steps.append((*kind, number, tuple(chunks), tuple(successors), waits))
    return steps
