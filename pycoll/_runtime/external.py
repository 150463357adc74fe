"""Steps outside of the messages: a fifth kind, which no author of an algorithm sees.

Such a step is put into a compiled schedule: a copy between a GPU and host memory, for example. It
waits for steps of the schedule, or they wait for it. The core runs the result as it runs any
schedule, and asks for such steps (`core_runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from pycoll._runtime.binding import Binding
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.envelope import KIND_COLLECTIVE
from pycoll._transports.base import Operation, Parts
from pycoll.schedule import Schedule, Step


class Chunks(Protocol):
    """The chunks of a run, or of one segment of it, as an external step sees them.

    Attributes:
        binding: where they are at the start, and must be at the end.
        engine, context: of the ranks.
    """

    binding: Binding
    engine: Engine
    context: Context

    def where(self, chunk: int) -> memoryview | None:
        """Return where a chunk has its value, which is in one part; None: it has none yet."""

    def values(self, chunks: Sequence[int]) -> Parts:
        """Return the values of chunks, in one part if they lie one behind the other."""

    def destination(self, chunk: int) -> memoryview:
        """Return the memory in which a chunk has its value from now on."""

    def place(self, chunk: int) -> None:
        """Have a chunk's value be at its target from now on: the caller puts it there."""

    def settle(self, chunk: int) -> None:
        """Have the target of a chunk hold its value, once; no step uses the chunk any more."""

    def header(self, number: int, kind: int = KIND_COLLECTIVE, more: bytes = b"") -> bytes:
        """Return the header of the message to a peer before which there were `number`."""


class External(NamedTuple):
    """Something that is done outside of the messages.

    Attributes:
        start: begins it for the chunks of a run. The step is done when the operation is that it
            returns; None: at once. The operation is cancelled with the run.
        at_end: the run asks for its end (`Operation.then`) when all other steps are done; else when
            no other step can begin. For operations of which it takes time to ask.
    """

    start: Callable[[Chunks], Operation | None]
    at_end: bool = False


class ExternalSchedule(NamedTuple):
    """The steps of one run: a `Schedule` with external steps, and the same attributes.

    Attributes:
        steps: the external ones that were added, then those of the schedule.
        chunks, number, waits, successors: see `Schedule`.
    """

    steps: tuple[Step | External, ...]
    chunks: tuple[tuple[int, ...], ...]
    number: tuple[int, ...]
    waits: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]


class Draft:
    """A schedule that is being rewritten.

    Its steps keep their numbers until `table`; what is added is numbered on from there.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._steps: list[Step | External] = list(schedule.steps)
        self._successors = [set(later) for later in schedule.successors]

    def add(self, step: External, after: Iterable[int] = (), before: Iterable[int] = ()) -> int:
        """Add a step that waits for some, and for which others wait."""
        position = len(self._steps)
        self._steps.append(step)
        self._successors.append(set(before))
        for earlier in after:
            self._successors[earlier].add(position)
        return position

    def replace(self, position: int, step: External) -> None:
        """Put another step in the place of one, with the same hazards."""
        self._steps[position] = step

    def table(self) -> ExternalSchedule:
        """Return all steps; of those that are ready at once, the added ones begin first."""
        count, total = len(self._schedule.steps), len(self._steps)
        added = total - count
        waits = [0] * total
        successors: list[tuple[int, ...]] = []
        for later in self._successors[count:] + self._successors[:count]:
            moved = sorted([(position + added) % total for position in later])
            successors.append(tuple(moved))
            for position in moved:
                waits[position] += 1
        return ExternalSchedule(
            steps=tuple(self._steps[count:] + self._steps[:count]),
            chunks=((),) * added + self._schedule.chunks,
            number=(0,) * added + self._schedule.number,
            waits=tuple(waits),
            successors=tuple(successors),
        )
