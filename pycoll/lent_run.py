"""A schedule that only moves, among ranks that share a GPU: the values stay there.

Each message is lent (`lending`): its receiver copies the value out of the sender's array into its
own. What a rank cannot lend it stages, and every run can receive either: so each rank may decide
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll import lending
from pycoll.context import KIND_LENT, Context
from pycoll.copies import Copy, Push
from pycoll.engine import Engine
from pycoll.errors import TransportError
from pycoll.executor import Binding, Run, are_neighbors
from pycoll.lending import MIN_NBYTES, Borrowing, Offer
from pycoll.schedule import Copy as CopyStep
from pycoll.schedule import Reduce, Schedule, Send
from pycoll.staging import Stage, stage_of
from pycoll.transports.base import Arrival, Operation

Place = tuple[Stage, int]
"""An array, and where in it some bytes are."""


def fits(engine: Engine, context: Context, schedule: Schedule, binding: Binding) -> bool:
    """Whether a run can leave all its chunks on the GPU, and lend all that it sends."""
    if binding.combine is not None or any([isinstance(step, Reduce) for step in schedule.steps]):
        return False
    if None in binding.nbytes:
        return False
    lent = set()
    for step, chunks in zip(schedule.steps, schedule.chunks, strict=True):
        if isinstance(step, Send):
            lent.add((tuple(chunks), context.members[step.peer]))
        if len(chunks) > 1 and not _is_piece_of_target(binding, chunks):
            return False
        if not isinstance(step, Send) and binding.target[chunks[0]] is None:
            return False  # it passes through this rank's host memory
    stages = _stages(binding)
    if None in stages or max([nbytes or 0 for nbytes in binding.nbytes]) < MIN_NBYTES:
        return False
    used = [stage for stage in stages if stage is not None]
    if len({stage.device for stage in used}) > 1 or any(
        [not stage.is_contiguous or stage.is_read_first for stage in used]
    ):
        return False
    for chunks, peer in lent:
        if sum([binding.nbytes[chunk] or 0 for chunk in chunks]) < MIN_NBYTES:
            return False
        for view in _views(binding, chunks[0]):
            stage = stage_of(view)
            if stage is None or lending.offer(engine, context, stage, peer) is None:
                return False
    return True


def _is_piece_of_target(binding: Binding, chunks: Sequence[int]) -> bool:
    """Whether several chunks of a message lie one behind the other when all are in their places."""
    return (
        binding.whole is not None
        and binding.whole.target is not None
        and are_neighbors(chunks)
        and all([binding.target[chunk] is not None for chunk in chunks])
    )


def _views(binding: Binding, chunk: int) -> list[memoryview]:
    """Return where a chunk is, at the start and at the end; what is empty is nowhere."""
    target = binding.target[chunk]
    views = [*(binding.source[chunk] or ()), *([target] if target is not None else [])]
    return [view for view in views if len(view)]


def _stages(binding: Binding) -> set[Stage | None]:
    return {
        stage_of(view) for chunk in range(len(binding.nbytes)) for view in _views(binding, chunk)
    }


class LentRun(Run):
    """A run whose chunks stay on a GPU."""

    __slots__ = ("_copies", "_from_host", "_is_in_place", "_unready")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._copies: list[Copy | Push] = []
        self._is_in_place = False
        self._from_host: dict[int, Place] = {}  # by position: what has come to an image
        self._unready = 0

    def start(self) -> None:
        self._await([stage.ready(self._engine) for stage in _stages(self._binding) if stage])

    def cancel(self) -> None:
        super().cancel()
        for copy in self._copies:  # nothing of the caller's is written after the call
            copy.settle()

    def _await(self, copies: Sequence[Copy | Push]) -> None:
        """Go on with the start when these are done."""
        self._unready = len(copies)
        for copy in copies:
            copy.then(self._was_ready)

    def _was_ready(self, copy: Operation) -> None:
        if self._left < 0 or self.done:
            return
        if copy.error is not None:
            self.abort(copy.error)
            return
        self._unready -= 1
        if self._unready:
            return
        if self._is_in_place or not any([len(chunks) > 1 for chunks in self._schedule.chunks]):
            super().start()
            return
        self._is_in_place = True  # messages of several chunks take them from there
        try:
            for chunk in range(len(self.location)):
                self._settle(chunk)
        except TransportError as exc:
            self.abort(exc)
            return
        copies = list(self._copies)
        if copies:
            self._await(copies)
        else:
            super().start()

    def _place(self, view: memoryview) -> Place:
        stage = stage_of(view)
        assert stage is not None, "this chunk is not on a GPU"
        return stage, stage.offset(view)

    # --- steps -----------------------------------------------------------------------------

    def _post(self, position: int) -> None:
        step, chunks = self._schedule.steps[position], self._schedule.chunks[position]
        if not isinstance(step, CopyStep):
            super()._post(position)
            return
        source = self._value(step.source)[0]
        copy = self._fill(self._destination(chunks[0], len(source)), source)
        copy.then(lambda copy: self._copied(position, copy))

    def _send(self, position: int, peer: int, chunks: Sequence[int]) -> None:
        world = self._context.members[peer]
        parts = self._value(chunks[0]) if len(chunks) == 1 else self._values(chunks)
        assert len(parts) == 1, "chunks of one message are not in one place"
        stage, begin = self._place(parts[0])
        found = lending.offer(self._engine, self._context, stage, world)
        if found is None:
            raise TransportError("an array on a GPU that could be lent cannot any more")
        header = self._header(position, KIND_LENT)
        header += Offer(found.uuid, found.handle, found.offset + begin).pack()
        self._follow(position, self._engine.hold(self._context, world, header + self._call, parts))

    def _accept(self, position: int, arrival: Arrival, into: memoryview) -> Operation:
        stage, begin = self._place(into)
        if arrival.header[0] != KIND_LENT:
            self._from_host[position] = stage, begin
            return arrival.accept(into)
        found = lending.offered(arrival)
        borrowing = Borrowing(self._engine, self._context, arrival, found, into, stage, begin)
        if not borrowing.is_on_gpu:
            self._from_host[position] = stage, begin
        borrowing.start()
        return borrowing

    def _complete(self, position: int) -> None:
        place = self._from_host.pop(position, None)
        if place is None or self._left < 0:
            super()._complete(position)
            return
        stage, begin = place
        nbytes = sum([self._length(chunk) for chunk in self._schedule.chunks[position]])
        try:
            copy = stage.push(self._engine, begin, begin + nbytes)
        except TransportError as exc:
            self.abort(exc)
            return
        self._copies.append(copy)
        copy.then(lambda copy: self._copied(position, copy))

    def _copied(self, position: int, copy: Operation) -> None:
        if self._left < 0 or self.done:
            return
        if copy.error is not None:
            self.abort(copy.error)
        else:
            super()._complete(position)

    # --- the end ---------------------------------------------------------------------------

    def _settle(self, chunk: int) -> None:
        location, target = self.location[chunk], self._binding.target[chunk]
        if target is not None and len(target) and location and location[0] is not target:
            self.location[chunk] = (target,)
            self._fill(target, location[0])

    def _fill(self, into: memoryview, source: memoryview) -> Copy:
        """Copy on the GPU."""
        if not len(into):
            return Copy(self._engine, None, None, None)
        stage, begin = self._place(into)
        other, offset = self._place(source)
        end, address = begin + len(into), other.pointer + offset
        if stage.pointer + begin == address:  # in place
            copy = stage.keep(begin, end)
        else:
            copy = stage.fill(self._engine, address, begin, end)
        self._copies.append(copy)
        return copy

    def _conclude(self) -> bool:
        try:
            super()._conclude()
        except TransportError as exc:
            self.abort(exc)
            return False
        for copy in self._copies:
            if not copy.done:
                copy.then(self._ended)
                if not copy.done:
                    return False
            if copy.error is not None:
                self.abort(copy.error)
        return not self.done

    def _ended(self, copy: Operation) -> None:
        if self._left >= 0 and not self.done:
            self._drain()
