"""Schedules that the compiled core runs as parts of calls which Python has begun.

So runs what is no single schedule: blocks of different lengths, objects, lists of arrays, values
that are no arrays. What passes through a GPU, is reduced by a function of the user's, or has a
length that only its sender knows is run by `executor`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pycoll import ops
from pycoll.context import readable
from pycoll.errors import Error, MismatchError
from pycoll.late import Late
from pycoll.native import OPS
from pycoll.schedule import Copy, Recv, Reduce, Schedule, Send
from pycoll.transports._core import Run, Table
from pycoll.transports.base import Operation
from pycoll.transports.core import NO_VALUE, REFUSED

if TYPE_CHECKING:
    from pycoll import copies
    from pycoll.executor import Binding
    from pycoll.group import Group
else:
    copies = Late("pycoll.copies")

SEND, RECV, RECV_SCRATCH, REDUCE, COPY = range(5)
"""Kinds of steps, numbered as in _core/engine/run.h."""

NO_REDUCTION = -1, 0, 0
"""As the core takes a reduction: operator, dtype, and by what a result is divided."""

Status = tuple[int, int, int, int]
"""How a run has ended: its status, the rank or chunk at fault, bytes that came, and expected."""


class CoreRun(Operation):
    """A schedule under way in the core."""

    __slots__ = ("_call", "_core", "_group", "_is_given_up")

    def __init__(self, group: Group, call: bytes) -> None:
        super().__init__()
        self._group = group
        self._call = call
        self._core: Run | None = None
        self._is_given_up = False

    def bind(self, core: Run) -> None:
        """Say what runs."""
        self._core = core

    def awaited(self) -> Collection[int]:
        return set(self._core.awaited()) if self._core is not None else ()

    def start(self) -> None:
        """Start it; it may be done then."""
        assert self._core is not None
        if self._core.start() is not None:
            self._ended()

    def cancel(self) -> None:
        super().cancel()
        self._is_given_up = True
        if self._core is not None:
            self._core.give_up()

    def _ended(self) -> None:
        """Hear of its end, in the order of all that happens; under the engine's lock."""
        if not self._is_given_up:
            assert self._core is not None
            status = self._core.status
            self._core = None  # which has this
            self.finish(why_failed(self._group, readable(self._call), status))


def operation(
    group: Group,
    call: bytes,
    address: tuple[int, int],
    table: Table,
    binding: Binding,
    segments: int,
    granule: int,
) -> CoreRun | None:
    """Return what runs a schedule in the core; None: the core cannot.

    Args:
        group: its ranks.
        call: the call's signature.
        address: (number of the call, first lane).
        table: the schedule.
        binding: where the chunks are.
        segments, granule: as of `Group.operation`.
    """
    reduction = _reduction_of(binding)
    lengths: list[Any] = binding.nbytes
    if reduction is None or None in lengths:
        return None
    if reduction == NO_REDUCTION and may_be_lent_to():
        return None
    sources: list[memoryview | None] = []
    for parts in binding.source:
        if parts is not None and len(parts) != 1:
            return None
        sources.append(parts[0] if parts is not None else None)
    run = CoreRun(group, call)
    context: Any = group.context
    number, lane = address
    try:
        core = Run(
            run,
            context.core,
            table,
            lengths,
            sources,
            binding.target,
            reduction,
            number,
            lane,
            segments,
            granule,
        )
    except BufferError:
        return None
    run.bind(core)
    return run


def may_be_lent_to() -> bool:
    """Whether a peer may lend this rank memory of a GPU, which the core does not know.

    Peers lend to ranks that use a GPU themselves, and nothing that is reduced.
    """
    return "pycoll.copies" in sys.modules and copies.is_in_use()


def _reduction_of(binding: Binding) -> tuple[int, int, int] | None:
    """Return a reduction as the core takes it; None: it has no such one."""
    combine, finish = binding.combine, binding.finish
    if combine is None:
        return NO_REDUCTION if finish is None else None
    if not isinstance(combine, ops.Combiner) or not (
        finish is None or isinstance(finish, ops.Finisher)
    ):
        return None
    op, dtype = combine.op, combine.dtype
    if op.name not in OPS or ops.resolve(op.name) is not op or not dtype.code:
        return None
    return OPS.index(op.name), dtype.code, finish.count if finish is not None else 0


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
    if status == REFUSED:
        return MismatchError(
            f"rank {at} sent {came} bytes in {text}, where rank {context.me} expects {expected}"
        )
    if status == NO_VALUE:
        return Error(
            f"{text}: a step of the algorithm reads chunk {at} before it has a value. "
            "pycoll.prove finds such faults."
        )
    transport: Any = engine.transports[engine.rank]
    error: BaseException = context.gone.get(status - 1) or transport.error_of(status)
    return error


def table_of(schedule: Schedule, size: int, num_chunks: int) -> Table:
    """Compile a schedule for the core."""
    return Table(size, num_chunks, steps_of(schedule))


def steps_of(schedule: Schedule) -> list[tuple[Any, ...]]:
    """Return a schedule's steps as the core takes them."""
    steps: list[tuple[Any, ...]] = []
    for position, step in enumerate(schedule.steps):
        match step:
            case Send(peer):
                kind = SEND, False, peer
            case Recv(peer, _, scratch):
                kind = RECV_SCRATCH if scratch else RECV, False, peer
            case Reduce(_, incoming_first):
                kind = REDUCE, incoming_first, 0
            case Copy(source):
                kind = COPY, False, source
        chunks, successors = schedule.chunks[position], schedule.successors[position]
        number, waits = schedule.number[position], schedule.waits[position]
        steps.append((*kind, number, tuple(chunks), tuple(successors), waits))
    return steps
