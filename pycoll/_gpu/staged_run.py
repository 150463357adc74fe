"""A schedule on arrays of which some are on a GPU: copies become steps, with hazards of their own.

The steps that use a chunk wait until it is in the staging buffer; it leaves for the GPU as soon as
no step uses it any more. So copies in both directions and messages are under way at the same time,
as many as there are chunks, or segments of them.
"""

from __future__ import annotations

from functools import partial

from pycoll._cuda.copies import Begun
from pycoll._cuda.staging import stage_of
from pycoll._runtime.binding import Binding
from pycoll._runtime.external import Chunks, Draft, External, ExternalSchedule
from pycoll.schedule import Schedule, users_of


def is_staged(binding: Binding) -> bool:
    """Whether any chunk is in the staging buffer of an array on a GPU."""
    sources = [part for parts in binding.source if parts for part in parts]
    targets = [view for view in binding.target if view is not None]
    return any([stage_of(view) is not None for view in (*sources, *targets)])


def staged(schedule: Schedule, binding: Binding) -> ExternalSchedule:
    """Return a schedule with the copies of its chunks; it serves all segments of the binding."""
    draft = Draft(schedule)
    users = users_of(schedule, len(binding.nbytes))
    pulls = {
        chunk: [
            draft.add(External(partial(_pull, chunk, index)), before=steps)
            for index, part in enumerate(binding.source[chunk] or ())
            if (stage := stage_of(part)) is not None and not stage.is_target
        ]
        for chunk, steps in users.items()
    }
    for chunk, steps in users.items():
        target = binding.target[chunk]
        stage = stage_of(target) if target is not None else None
        if stage is not None and stage.is_contiguous:  # else it goes as a whole, in the end
            push = External(partial(_push, chunk), at_end=True)
            draft.add(push, after=steps or pulls[chunk])
    return draft.table()


def _pull(chunk: int, index: int, run: Chunks) -> Begun | None:
    """Copy a part of a chunk from the GPU."""
    part = (run.binding.source[chunk] or ())[index]
    stage = stage_of(part)
    if stage is None or not len(part):
        return None
    begin = stage.offset(part)
    copy = stage.pull(run.engine, begin, begin + len(part))
    return Begun(copy, copy.watch)  # the array is let go in the end


def _push(chunk: int, run: Chunks) -> Begun | None:
    """Copy the value of a chunk to the GPU."""
    run.settle(chunk)
    target = run.binding.target[chunk]
    stage = stage_of(target) if target is not None else None
    if stage is None or target is None or not len(target):
        return None
    begin = stage.offset(target)
    copy = stage.push(run.engine, begin, begin + len(target))
    return Begun(copy, copy.settle)
