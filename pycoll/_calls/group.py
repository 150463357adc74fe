"""What the calls of one communicator share: its ranks, its engine, its schedules."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pycoll._calls import core_runs
from pycoll._gpu import cuda_ipc, cuda_ipc_run, staged_run
from pycoll._runtime.context import Context
from pycoll._runtime.engine import Engine
from pycoll._runtime.task import place_of_call
from pycoll._selection import select
from pycoll._selection.agreed import SHARED_MEMORY as SHARED_MEMORY
from pycoll._selection.select import Choice
from pycoll._support.lazy_import import LazyModule
from pycoll._transports._core import forget_plans, with_default_floats

if TYPE_CHECKING:
    from pycoll import schedules
    from pycoll._calls.core_runs import CoreRun
    from pycoll._calls.shared_memory import ShmComm
    from pycoll._runtime.binding import Binding, ChunkPlace
    from pycoll._runtime.external import ExternalSchedule
    from pycoll._runtime.task import CallSteps
    from pycoll._selection.agreed import Agreed
    from pycoll._selection.select import Query, Selector
    from pycoll._transports._core import CompiledPlan
    from pycoll.schedule import Schedule
    from pycoll.schedules import reordered
else:
    schedules = LazyModule("pycoll.schedules")
    reordered = LazyModule("pycoll.schedules.reordered")

How = tuple[str, Choice] | tuple[str, Choice, int]
"""(collective, choice), and the root if the collective has one."""


class Numbered(NamedTuple):
    """A collective call under way, as its messages name it.

    Attributes:
        signature: its text, and where it was made.
        number: its number on the communicator.
    """

    signature: bytes
    number: int


class Bound(NamedTuple):
    """A collective with its memory, as one schedule runs it.

    Attributes:
        how: which schedule.
        binding: where its chunks are.
        granule: bytes that stay together in a segment: an element.
        places: of the chunks; None: they follow from the memory.
    """

    how: How
    binding: Binding
    granule: int = 1
    places: list[ChunkPlace] | None = None

    def run(self, group: Group, call: Numbered, subcall: int = 0) -> CallSteps:
        """Run it as a part of a call, from a subcall on."""
        yield from group.run(call, subcall, self.how, self.binding, self.granule)


IN_SHARED_MEMORY = Choice(SHARED_MEMORY)

CACHED_SCHEDULES = 64
"""Schedules kept by a communicator: one for each (collective, algorithm, root) it uses."""

MOST_ON_GPUS = 16
"""Ranks that reduce on GPUs: a kernel has an element of each in registers at once."""

KNOWN_CALLS = 1024
"""Choices kept by a communicator: one for each call that differs in what matters to it."""


class Group:
    """The ranks of one communicator, seen from one of them.

    All by which the communicator can be used keeps this object; what the engine keeps does not.
    So when it is freed the communicator is closed, some time after.

    Attributes:
        members: their world ranks, in order.
        rank: this process's rank among them.
        size: their number.
        context: what matches their messages.
        hosts: by rank the number of its host.
        shm: their collectives in shared memory; None: not all are on this host, or cannot.
    """

    def __init__(
        self, engine: Engine, ident: int, members: Sequence[int], name: str = "world"
    ) -> None:
        self.engine = engine
        self.members = tuple(members)
        self.rank = self.members.index(engine.rank)
        self.size = len(self.members)
        self.hosts = tuple([engine.hosts[world] for world in self.members])
        self._order = self.engine.agreed.order(self.hosts)
        self.context: Context = engine.open_context(ident, self.members)
        self.context.name = name
        engine.transport.core.note_name(ident, name)
        self.context.made_at = place_of_call()
        self.context.on_cuda_ipc = lambda context, arrival: cuda_ipc.heard(engine, context, arrival)
        self._from_world = {world: rank for rank, world in enumerate(self.members)}
        self._schedules: OrderedDict[tuple[str, str, int], Schedule] = OrderedDict()
        self._tables: dict[tuple[object, ...], tuple[Schedule, CompiledPlan]] = {}
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._selector: Selector | None = None
        self._generation = 0
        self.shm = self._open_shm()
        self.op_timeout = engine.op_timeout
        engine.close_when_dropped(self.context, self)

    def _open_shm(self) -> ShmComm | None:
        shared = self.engine.shared_memory
        if self.size == 1 or shared is None or not set(self.members) <= set(shared.ranks):
            return None
        from pycoll._calls.shared_memory import ShmComm

        self.context.shm = shm = ShmComm(self.engine, self.context, shared)
        shm.core.may_use_gpus = self.may_be_on_gpus
        return shm

    @property
    def may_be_on_gpus(self) -> bool:
        """Whether ranks ask each other if large reductions are for GPUs; the same on all."""
        hosts = set(self.hosts)
        fits = 1 < self.size <= MOST_ON_GPUS and len(hosts) == 1
        return fits and hosts <= self.engine.agreed.gpus

    def close(self) -> None:
        """Forget this communicator; under the engine's lock."""
        self.engine.close_context(self.context)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.context.name

    @property
    def op_timeout(self) -> float:
        """Default deadline of an operation, seconds; math.inf: none."""
        return self._op_timeout

    @op_timeout.setter
    def op_timeout(self, seconds: float) -> None:
        self._op_timeout = seconds
        self.context.core.op_timeout = seconds
        if self.shm is not None:
            self.shm.core.op_timeout = seconds

    @property
    def number(self) -> int:
        """Number of the next collective call."""
        return self.context.num_calls

    def rank_of(self, world: int) -> int:
        """Return the rank here of a world rank."""
        return self._from_world[world]

    def choose(
        self,
        collective: str,
        nbytes: int,
        forced: str | None,
        rank_order: bool = False,
        whole: bool = False,
        shm: bool = True,
    ) -> Choice:
        """Return how a call runs; the same on all ranks.

        Args:
            collective: for example ``"all_reduce"``.
            nbytes: of one rank's value, or of one block (see `select.Query`).
            forced: the algorithm that the caller wants, or None.
            rank_order: the operator is not commutative.
            whole: the operator takes whole values only.
            shm: it may go through shared memory, where there is some.

        Raises:
            ValueError: `forced` does not exist, or cannot serve this operator.
        """
        if (
            forced is None
            and shm
            and self.shm is not None
            and self.allows_shared_memory(collective)
        ):
            return IN_SHARED_MEMORY  # whatever the times: the core's fast path asks nobody
        self._forget_stale()
        key = collective, nbytes, forced, rank_order, whole, shm
        choice = self._choices.get(key)
        if choice is None:
            request = select.Query(collective, nbytes, rank_order, whole, shm)
            # Times are floats: all ranks must find the same one the least.
            choice = with_default_floats(self._choose, forced, request)
            if len(self._choices) >= KNOWN_CALLS:
                self._choices.clear()
            self._choices[key] = choice
        return choice

    def _choose(self, forced: str | None, request: Query) -> Choice:
        return self.selector.choose(request) if forced is None else self._force(forced, request)

    def _force(self, name: str, request: Query) -> Choice:
        collective = request.collective
        if name == SHARED_MEMORY:
            if self.shm is not None:
                return IN_SHARED_MEMORY
            if self.size == 1:
                return self.selector.choose(request)
            raise ValueError(self._no_shared_memory(collective))
        known = schedules.names(collective)
        if name not in known:
            listed = ", ".join((SHARED_MEMORY, *known))
            raise ValueError(f"{collective} has no algorithm {name!r}; it has {listed}")
        reason = select.usable(collective, name, rank_order=request.rank_order, whole=request.whole)
        if reason is not None:
            raise ValueError(reason)
        self.schedule(collective, name)  # a user's may make no sense: say so before it is used
        return Choice(name, self.selector.segments(name, request))

    @property
    def selector(self) -> Selector:
        """What chooses algorithms; made when it is first needed."""
        if self._selector is None:
            self.go_by(self.engine.agreed)
        assert self._selector is not None
        return self._selector

    def go_by(self, settings: Agreed) -> None:
        """Choose by other settings than the job's; on all ranks, before or between calls."""
        self._selector = select.Selector(settings, self.hosts, self.shm is not None)
        self._choices.clear()
        forget_plans()

    def is_named(self, collective: str) -> bool:
        """Whether PYCOLL_ALGORITHM says what a collective must run."""
        rule = self.engine.agreed.rules.get(collective)
        return rule is not None and not rule.excluded

    def allows_shared_memory(self, collective: str) -> bool:
        """Whether calls of a collective may go through shared memory without asking `choose`."""
        rule = self.engine.agreed.rules.get(collective)
        return rule is None or rule.allows(SHARED_MEMORY)

    def _no_shared_memory(self, collective: str) -> str:
        others = " or ".join(schedules.names(collective))
        if self.engine.shared_memory is None:
            why = f"cannot be used: {self.engine.no_shared_memory}"
        else:
            why = "needs all ranks of the communicator on one host"
        return f"{collective} {SHARED_MEMORY} {why}; use {others}"

    def schedule(self, collective: str, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's schedule, compiled once."""
        self._forget_stale()
        key = (collective, algorithm, root)
        schedule = self._schedules.get(key)
        if schedule is None:
            placed = schedules.find(collective, algorithm)
            if self._order:
                placed = reordered.reordered(placed, self._order)
            schedule = schedules.compiled(placed, self.rank, self.size, root, self.hosts)
            self._schedules[key] = schedule
            if len(self._schedules) > CACHED_SCHEDULES:
                self._schedules.popitem(last=False)
        else:
            self._schedules.move_to_end(key)
        return schedule

    def _forget_stale(self) -> None:
        """Forget what was found before the user registered an algorithm, perhaps once more."""
        if self._generation != schedules.generation():
            self._generation = schedules.generation()
            self._schedules.clear()
            self._choices.clear()
            if self._selector is not None:
                self.go_by(self._selector.agreed)

    def operation(
        self,
        call: Numbered,
        subcall: int,
        how: How,
        binding: Binding,
        granule: int = 1,
    ) -> CoreRun:
        """Make what runs a schedule, as a part of a call; it must be started.

        Args:
            call: that it is a part of.
            subcall: its first; it takes one for each segment.
            how: which schedule, and in how many segments.
            binding: where the chunks are.
            granule: bytes that must stay together in a segment: an element.
        """
        collective, choice, *root = how
        schedule = self.schedule(collective, choice.name, *root)
        if choice.segments > 1:
            binding = binding.joined()
        steps: Schedule | ExternalSchedule = schedule
        if "pycoll._cuda.staging" in sys.modules and staged_run.is_staged(binding):
            fits = cuda_ipc_run.fits(self.engine, self.context, schedule, binding)
            if fits and choice.segments == 1:
                steps, binding = cuda_ipc_run.offered(schedule, binding)
            else:
                steps = staged_run.staged(schedule, binding)
        if steps is schedule:
            table = self._table(how, schedule, len(binding.nbytes))
        else:
            table = core_runs.table_of(steps, self.size, len(binding.nbytes))
        address = call.number, subcall
        return core_runs.CoreRun(
            self, call.signature, address, table, steps, binding, choice.segments, granule
        )

    def _table(self, how: How, schedule: Schedule, num_chunks: int) -> CompiledPlan:
        """Return a schedule as the core runs it, compiled once."""
        collective, choice, *root = how
        key = collective, choice.name, *root
        kept = self._tables.get(key)
        if kept is None or kept[0] is not schedule:
            kept = schedule, core_runs.table_of(schedule, self.size, num_chunks)
            if len(self._tables) >= CACHED_SCHEDULES:
                self._tables.clear()
            self._tables[key] = kept
        return kept[1]

    def run(
        self,
        call: Numbered,
        subcall: int,
        how: How,
        binding: Binding,
        granule: int = 1,
    ) -> CallSteps:
        """Run what `operation` makes to its end, and return it."""
        operation = self.operation(call, subcall, how, binding, granule)
        operation.start()
        try:
            yield operation
        except BaseException:
            operation.cancel()
            raise
        return operation
