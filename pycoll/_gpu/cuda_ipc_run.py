"""A schedule that only moves, among ranks that share a GPU: the values stay there.

Each message is offered (`cuda_ipc`): its receiver copies the value out of the sender's array into
its own. What a rank cannot offer it stages, and every run can receive either: so each rank may
decide alone. Sends and copies become external steps; what was received, but not offered, is pushed
by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pycoll._cuda.copies import Begun
from pycoll._cuda.staging import Stage, stage_of
from pycoll._gpu import cuda_ipc
from pycoll._gpu.cuda_ipc import MIN_NBYTES, Offer
from pycoll._runtime.binding import Binding, are_neighbors
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import KIND_OFFERED
from pycoll._runtime.external import Chunks, Draft, External, ExternalSchedule
from pycoll._transports.base import Operation
from pycoll.errors import TransportError
from pycoll.schedule import Copy, Reduce, Schedule, Send, users_of

Place = tuple[Stage, int]
"""An array, and where in it some bytes are."""


def fits(engine: Engine, context: Context, schedule: Schedule, binding: Binding) -> bool:
    """Whether a run can leave all its chunks on the GPU, and offer all that it sends."""
    if binding.combine is not None or any([isinstance(step, Reduce) for step in schedule.steps]):
        return False
    if None in binding.nbytes:
        return False
    offered = set()
    for step, chunks in zip(schedule.steps, schedule.chunks, strict=True):
        if isinstance(step, Send):
            offered.add((tuple(chunks), context.members[step.peer]))
        if len(chunks) > 1 and not _is_piece_of_target(binding, chunks):
            return False
        if not isinstance(step, Send) and any(
            [binding.target[chunk] is None or binding.source[chunk] for chunk in chunks]
        ):
            return False  # it passes through this rank's host memory, or replaces a value
    stages = _stages(binding)
    if None in stages or max([nbytes or 0 for nbytes in binding.nbytes]) < MIN_NBYTES:
        return False
    used = [stage for stage in stages if stage is not None]
    if len({stage.device for stage in used}) > 1 or any(
        [not stage.is_contiguous or stage.is_read_first for stage in used]
    ):
        return False
    for chunks, peer in offered:
        if sum([binding.nbytes[chunk] or 0 for chunk in chunks]) < MIN_NBYTES:
            return False
        for view in _views(binding, chunks[0]):
            stage = stage_of(view)
            if stage is None or cuda_ipc.offer(engine, context, stage, peer) is None:
                return False
    return True


def _is_piece_of_target(binding: Binding, chunks: Sequence[int]) -> bool:
    """Whether several chunks of a message lie one behind the other when all are in their places."""
    return (
        binding.blocks is not None
        and binding.blocks[1] is not None
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


def offered(schedule: Schedule, binding: Binding) -> tuple[ExternalSchedule, Binding]:
    """Return a schedule, and a binding, whose values stay on the GPU."""
    draft = Draft(schedule)
    everything = range(len(schedule.steps))
    ready = [
        draft.add(External(partial(_ready, stage)), before=everything) for stage in _stages(binding)
    ]
    together = {chunk for chunks in schedule.chunks if len(chunks) > 1 for chunk in chunks}
    for chunk, steps in users_of(schedule, len(binding.nbytes)).items():
        if not binding.source[chunk] or not binding.target[chunk]:
            continue
        if chunk in together:  # messages of several chunks take them from their places
            draft.add(External(partial(_put, chunk)), after=ready, before=steps)
        else:
            draft.add(External(partial(_put, chunk), at_end=True), after=[*ready, *steps])
    for position, step in enumerate(schedule.steps):
        chunks = schedule.chunks[position]
        if isinstance(step, Send):
            offer = partial(_offer, step.peer, chunks, schedule.number[position])
            draft.replace(position, External(offer))
        elif isinstance(step, Copy):
            draft.replace(position, External(partial(_copy, step.source, chunks[0])))
        else:
            push = External(partial(_push, chunks))
            draft.add(push, after=[position], before=schedule.successors[position])
    return draft.table(), binding._replace(on_gpu=True)


# --- the external steps ------------------------------------------------------------------------


def _ready(stage: Stage | None, run: Chunks) -> Operation | None:
    return stage.ready(run.engine) if stage is not None else None


def _put(chunk: int, run: Chunks) -> Begun | None:
    """Copy the value of a chunk to its place, if it is not there."""
    location, target = run.where(chunk), run.binding.target[chunk]
    if target is None or location is None or location is target:
        return None
    run.place(chunk)
    return _fill(run.engine, target, location)


def _copy(source: int, chunk: int, run: Chunks) -> Begun | None:
    (value,) = run.values((source,))
    return _fill(run.engine, run.destination(chunk), value)


def _fill(engine: Engine, into: memoryview, source: memoryview) -> Begun | None:
    """Copy on the GPU."""
    if not len(into):
        return None
    stage, begin = _place(into)
    other, offset = _place(source)
    end, address = begin + len(into), other.pointer + offset
    if stage.pointer + begin == address:  # in place
        stage.keep(begin, end)
        return None
    copy = stage.fill(engine, address, begin, end)
    return Begun(copy, copy.settle)


def _push(chunks: Sequence[int], run: Chunks) -> Begun | None:
    """Have what was received go on to the GPU, if it was not offered."""
    (value,) = run.values(chunks)
    if not len(value):
        return None
    stage, begin = _place(value)
    end = begin + len(value)
    if stage.has(begin, end):
        return None
    copy = stage.push(run.engine, begin, end)
    return Begun(copy, copy.settle)


def _offer(peer: int, chunks: Sequence[int], number: int, run: Chunks) -> Operation:
    world, parts = run.context.members[peer], run.values(chunks)
    assert len(parts) == 1, "chunks of one message are not in one place"
    stage, begin = _place(parts[0])
    found = cuda_ipc.offer(run.engine, run.context, stage, world)
    if found is None:
        raise TransportError("an array on a GPU that could be offered cannot any more")
    offer = Offer(found.uuid, found.handle, found.offset + begin)
    message = run.header(number, KIND_OFFERED, offer.pack())
    return run.engine.hold(world, message, parts)


def _place(view: memoryview) -> Place:
    stage = stage_of(view)
    assert stage is not None, "this chunk is not on a GPU"
    return stage, stage.offset(view)
