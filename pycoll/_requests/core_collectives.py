"""Collectives by messages that run in the compiled core, as requests of the public kind.

A call on NumPy arrays is started, run and ended by the core, which asks for a plan when it has
none: that is made here, of what `Calls` has prepared. Here is also what the core leaves: waits that
take long, and what is said when something goes wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion
from pycoll._calls import (
    arguments,
    blocks,
    collectives,
    core_runs,
    gathered_reductions,
    message_steps,
    object_collectives,
    rooted,
    rooted_plans,
    uneven,
    uneven_out,
)
from pycoll._calls.call_plan import ResultOf, Route, conclude
from pycoll._calls.calls import Calls
from pycoll._calls.group import SHARED_MEMORY, Group, Numbered
from pycoll._gpu import staged_run
from pycoll._requests import chunk_places
from pycoll._requests.core_started import CoreStarted, CoreTask, Owner
from pycoll._runtime.envelope import readable
from pycoll._runtime.task import Call, CallSteps, Started
from pycoll._support.lazy_import import LazyModule
from pycoll._support.public_edge import edge
from pycoll._transports._core import (
    METHODS,
    OPS,
    UNEVEN,
    Collective,
    Collectives,
    CompiledPlan,
    forget_plans,
)

if TYPE_CHECKING:
    from pycoll import schedules
    from pycoll._arrays.value import Value
    from pycoll._calls.group import Bound
    from pycoll._calls.rooted import Announcement
    from pycoll._runtime.context import Context
    from pycoll._transports._core import Memory
    from pycoll._transports.base import Parts
else:
    schedules = LazyModule("pycoll.schedules")

NONBLOCKING = tuple(f"i{name}" for name in METHODS)
"""Collectives that run there, and so do those of `METHODS`."""

_OBJECTS = "gather", "all_gather", "all_to_all"
"""Of a Python object, or of several, these have blocks, too."""

MOST_DIMS = 6
"""As of _core/python/collectives/collective.h."""
MOST_HEAD_NBYTES = 4096
"""Of an announcement, without a value or lengths."""


class CoreCollective(Collective, CoreStarted, shown_as="Request"):
    """A collective under way in the core."""

    _cancelled = False
    _why: BaseException | None = None

    @property
    def _call(self) -> Call:
        text, number, *_ = self._description
        context = self._group.context
        if context.shm is not None:
            number += context.shm.number
        return Call(text, number, context)

    @property
    def _has_failed(self) -> bool:
        return bool(self.done and self._description[2] != 0)

    def _waits_for(self) -> Collection[int]:
        by_python = self._by_python
        return by_python.awaited() if by_python is not None else set(self._awaited())

    def _ended(self) -> None:
        """Called when it is done, or was announced; ends are told in the order in which they came.

        Under the engine's lock.
        """
        if not self.done:
            came = self._take_held()
            if came is not None:
                self._goes_on(came)
            return
        error = self._error()
        if error is not None and error is not self._unfit:
            self._group.engine.break_for(self._call, error)
        if self._made is not None:
            self._tell(self._made)

    @property
    def _unfit(self) -> Exception | None:
        """Why the caller cannot have the result, though the call has not failed."""
        return self._by_python.unfit if self._by_python is not None else None

    def _tell(self, made: CoreTask) -> None:
        error, made.unfit = self._error(), self._unfit
        made.finish(error if error is not made.unfit else None)

    def _goes_on(self, came: bytes | list[Memory | None] | int) -> None:
        """Go on with what has come, which the core does not know."""
        call, engine = self._call, self._group.engine
        try:
            if isinstance(came, int):
                self._go_on(*core_runs.second_round(self._group, came))
                return
            steps, result = self._rest(call.text, came)
        except Exception as exc:  # `out` has changed meanwhile
            self._why = exc
            self._settle(None, True, False, False)
            return
        conclusion = partial(conclude, engine, result)
        self._by_python = engine.start(call, steps, conclusion, collective=False)
        if self._by_python.done:
            self._taken(self._by_python)
        else:
            self._by_python.watchers[self._taken] = None

    def _rest(self, text: str, came: bytes | list[Memory | None]) -> Taking:
        """Return what is to be done with what has come."""
        kind, root, given, is_left = self._made_by
        group, name = self._group, METHODS[kind]
        begun = Numbered(text.encode(), self._description[1])
        if isinstance(came, list):
            return _blocks(group, begun, name, given, came, is_left)
        if not came:
            return _long_objects(group, begun, name, root, given)
        announcement = rooted.Announcement.unpack(memoryview(came))
        plans: CompiledPlans | None = self._owner.plans if given is None else None
        how = name, begun.signature, root, announcement
        if plans is not None and (plan := plans.expected(*how)) is not None:
            self._expect(plan)
        take = _broadcast if name == "broadcast" else _scatter
        return take(group, begun, root, announcement, given)

    def _taken(self, task: Started) -> None:
        later = isinstance(task.result, partial)
        self._settle(task.result, task.error is not None, task.unfit is not None, later)

    def _fail(self) -> None:
        """Called when it has failed, before anybody else does."""
        self._locked(self._ended)

    def _error(self) -> BaseException | None:
        """Return why it has failed; None: it has not."""
        if self._why is None and self._description[2] != 0:
            engine: Any = self._group.engine
            self._why = engine.named(self._find_error(), self._call)
        return self._why

    def _find_error(self) -> BaseException:
        text, _, status, rank, came, expected = self._description
        by_python = self._by_python
        if by_python is not None and by_python.done:
            why = by_python.error or by_python.unfit
            assert why is not None
            return why
        ended = status, rank, came, expected
        error = core_runs.why_failed(self._group, readable(text.encode()), ended)
        assert error is not None
        return error


class CompiledPlans:
    """Makes what the core keeps for calls that are alike (`_core.CompiledPlan`); of a communicator.

    Args:
        group: its ranks.
        calls: what prepares its calls: those that do not block, then those that do.
    """

    def __init__(self, group: Group, calls: tuple[Calls, Calls]) -> None:
        self._group = group
        self._calls = calls

    @edge
    def __call__(
        self,
        kind: int,
        blocking: int,
        x: Any,
        op: Any,
        root: int,
        result: Any,
        algorithm: str | None,
        counts: list[int] | None,
    ) -> CompiledPlan | None:
        """Return the core's plan of a call and of all like it; None: Python must run them.

        Args:
            op: the number of an operator, or a function: then the values are gathered, and
                `algorithm` is its signature.
        """
        _follow_changes()
        group, calls, name = self._group, self._calls[blocking], METHODS[kind]
        gathers = not isinstance(op, int)
        arguments: dict[str, Any] = {}
        if name not in UNEVEN:
            arguments["algorithm"] = algorithm if not gathers else None
        if name in ("scatterv", "all_to_allv", "all_reduce_many"):
            arguments["xs"] = x
        elif name != "barrier":
            arguments["x"] = x
        if name in ("broadcast", "scatter", "reduce", "gather", "gatherv", "scatterv"):
            arguments["root"] = root
        if name not in ("barrier", "broadcast"):
            arguments["out"] = result
        reduces = name in schedules.REDUCING or name in ("reduce_scatterv", "all_reduce_many")
        if reduces:
            arguments["op"] = op if gathers else OPS[op]
        if counts is not None:
            arguments["counts"] = counts
        plan = getattr(calls, name)(**arguments)
        if name == "all_reduce_many" and plan.route is Route.SHARED_MEMORY and plan.is_one:
            text, nothing = plan.text.encode(), core_runs.NO_REDUCTION
            return CompiledPlan(group.size, 0, [], [], text, nothing, 1, 1, None, plan.salt)
        if plan.route is not Route.MESSAGES:
            return None
        if (gathers or not reduces) and core_runs.may_be_offered():
            return None
        if name in ("broadcast", "scatter"):
            if algorithm == SHARED_MEMORY:
                return None
            return self._announced(name, plan.text.encode(), x, root, result, algorithm)
        if name in UNEVEN or (name in _OBJECTS and conversion.wrap(x) is None):
            return self._of_blocks(name, plan.text.encode(), root)
        bound: Bound | None = plan.bind()
        if bound is None:
            return None
        binding = bound.binding
        if "pycoll._cuda.staging" in sys.modules and staged_run.is_staged(binding):
            return None
        if name == "exscan" and group.rank == 0:
            bound = bound._replace(binding=binding._replace(target=[None] * len(binding.target)))
        into = plan.rows if gathers else chunk_places.elements(result)
        places = bound.places or chunk_places.places_of(bound, chunk_places.elements(x), into)
        if places is None:
            return None
        collective, choice, *roots = bound.how
        steps = core_runs.steps_of(group.schedule(collective, choice.name, *roots))
        reduction = core_runs.reduction_of(binding)
        how = steps, places, plan.text.encode(), reduction, choice.segments, bound.granule
        return CompiledPlan(group.size, len(places), *how)

    def function(self, method: int, op: Any) -> gathered_reductions.Folding | None:
        """Return how a function combines what a method gathers; None: Python must do all."""
        return gathered_reductions.folding(self._group, METHODS[method], op)

    def _of_blocks(self, name: str, text: bytes, root: int) -> CompiledPlan:
        """Return the plan of a call on blocks of which only their senders know the length."""
        group, collective = self._group, name.removesuffix("v")
        is_exchange = collective == "all_to_all"
        choice = object_collectives.PAIRWISE if is_exchange else object_collectives.LINEAR
        schedule = group.schedule(collective, choice.name, root)
        places = [(-1, -1, -1)] * (group.size * (1 + is_exchange))
        how = core_runs.steps_of(schedule), places, text, core_runs.NO_REDUCTION
        return CompiledPlan(group.size, len(places), *how)

    def expected(
        self, name: str, text: bytes, root: int, came: Announcement
    ) -> CompiledPlan | None:
        """Return the plan of calls that pass no array, off root, if the same comes again.

        Args:
            name, text, root: of the call.
            came: what has come; None is returned if that is no NumPy array.
        """
        _follow_changes()
        if came.is_object:
            return None
        dtype, library, shape = conversion.from_description(came.description)
        if library != "numpy" or len(shape) > MOST_DIMS:
            return None
        value = conversion.fresh(dtype, library, shape)
        like = came._replace(inline=b"" if came.inline is not None else None)
        return self._by_announcement(name, text, root, like, None, value)

    def _announced(
        self, name: str, text: bytes, x: Any, root: int, result: Any, algorithm: str | None
    ) -> CompiledPlan | None:
        """Return the plan of a call whose root announces what comes; off root, what is expected."""
        group = self._group
        is_root = group.rank == root
        value = conversion.wrap(x if is_root else result)
        if is_root and value is None:
            return self._of_objects(name, text, root)
        if value is None:  # no array off root: anything may come
            steps = self._announcing(root), False, None, -1, self._most(b""), 0, None
            return CompiledPlan(group.size, 0, [], [], text, core_runs.NO_REDUCTION, 1, 1, steps)
        if name == "broadcast":
            came = rooted.of_broadcast(group, message_steps.Outgoing(x), algorithm)
        else:
            row = conversion.Value(value.array[0], value.dtype, value.kind) if is_root else value
            came = rooted.of_block(group, row, algorithm)
        source, target = value if is_root else None, conversion.wrap(result)
        return self._by_announcement(name, text, root, came, source, target)

    def _of_objects(self, name: str, text: bytes, root: int) -> CompiledPlan | None:
        """Return the root's plan of short objects, which stand in their announcement."""
        group = self._group
        if group.is_named(name):
            return None
        lengths = bytes(8 * group.size if name == "scatter" else 0)
        head = rooted.Announcement(True, 0, object_collectives.LINEAR, lengths, b"").pack()
        said = self._announcing(root), True, head, 0, self._most(head), 0, None
        return CompiledPlan(group.size, 0, [], [], text, core_runs.NO_REDUCTION, 1, 1, said)

    def _by_announcement(
        self,
        name: str,
        text: bytes,
        root: int,
        came: Announcement,
        source: Value | None,
        target: Value | None,
    ) -> CompiledPlan | None:
        """Return the plan of what has this announcement, from the root's value to the result."""
        group = self._group
        into = conversion.as_bytes(target.array) if target is not None else None
        views: list[Parts] | None = None
        if name == "broadcast":
            parts = (conversion.as_bytes(source.array),) if source is not None else None
            to = into if source is None else None
            bound = rooted.bind_broadcast(group, root, came, parts, to)
        else:
            if source is not None:
                views = [(row,) for row in collectives.rows(source.array)]
            assert into is not None
            lengths = [came.nbytes] * group.size
            bound = rooted.bind_scatter(group, root, came, lengths, views, into)
        ends = source.array if source is not None else None, target.array if target else None
        places = chunk_places.places_of(bound, *ends)
        if places is None:
            return None
        head, choice = came.pack(), came.choice
        shape = target.array.shape if target is not None else None
        dtype = target.dtype.code if target is not None else 0
        inline = came.nbytes if came.inline is not None else -1
        most, steps = self._most(head), core_runs.steps_of(group.schedule(name, choice.name, root))
        said = self._announcing(root), source is not None, head, inline, most, dtype, shape
        how = steps, places, text, core_runs.NO_REDUCTION, choice.segments, 1, said
        return CompiledPlan(group.size, len(places), *how)

    def _announcing(self, root: int) -> list[tuple[Any, ...]]:
        collective, choice = rooted.ANNOUNCING
        return core_runs.steps_of(self._group.schedule(collective, choice.name, root))

    def _most(self, head: bytes) -> int:
        """Return how long an announcement may be: that of objects to scatter has their lengths."""
        return rooted.INLINE_NBYTES + MOST_HEAD_NBYTES + 8 * self._group.size + len(head)


def _later(result: ResultOf) -> ResultOf:
    """Have an object made when somebody asks for it: loading it may run anything."""
    return lambda got, late: partial(result, got, late)


Taking = tuple[CallSteps, ResultOf]
"""What is left of an announced call, and what its caller gets of the result."""


def _broadcast(
    group: Group, call: Numbered, root: int, announcement: Announcement, place: Any
) -> Taking:
    mine, gpu = arguments.fillable(place), conversion.here()
    steps = rooted.take_broadcast(group, call, root, announcement, mine, gpu)
    return steps, _later(rooted.broadcasted) if announcement.is_object else rooted.broadcasted


def _scatter(
    group: Group, call: Numbered, root: int, announcement: Announcement, place: Any
) -> Taking:
    out, gpu = arguments.fillable_out(place), conversion.here()
    steps = rooted.take_scatter(group, call, root, announcement, None, gpu, out)
    result = partial(rooted_plans.scattered, place, out)
    return steps, _later(result) if announcement.is_object and out is None else result


def _long_objects(group: Group, call: Numbered, name: str, root: int, given: Any) -> Taking:
    """Send pickled objects, on the root, of which not even the announcement was sent."""
    if name == "broadcast":
        parts, x = given
        return rooted.broadcast_object(group, call, root, parts), _later(lambda *_: x)
    result = _later(partial(rooted_plans.scattered, None, None))
    return rooted.scatter(group, call, given, None, root), result


def _blocks(
    group: Group, call: Numbered, name: str, given: Any, came: list[Memory | None], is_left: bool
) -> Taking:
    items, out = given
    messages = [memoryview(data) if data is not None else None for data in came]
    values = [value for x in items if (value := conversion.wrap(x)) is not None]
    if name == "scatterv":
        target = uneven_out.BlockTarget(out, None, None, values)
        steps = uneven.taken(group, call, values, messages, target)
        return steps, lambda got, late: target.finish(got, late)[0]
    targets = uneven_out.BlockTargets(out, len(came), None, {}, values)
    return uneven.taken(group, call, values, messages, targets, is_left), targets.finish


def _unpack(memory: Memory) -> Any:
    """Return the array, in host memory, of a block that has come."""
    return conversion.unwrap(blocks.unpack(memoryview(memory)))


@cache
def _follow_changes() -> None:
    """From now on plans are forgotten when there are other algorithms."""
    schedules.on_change.append(forget_plans)


def finish(collective: CoreCollective, seconds: float) -> None:
    """Wait, for so long, for a blocking call that the core has begun and that takes long."""
    task = collective._task
    owner: Owner = collective._owner

    def steps() -> CallSteps:
        yield task

    try:
        owner.group.engine.run(task.call, steps, seconds, collective=True)
    except BaseException:
        with owner.group.engine.locked():
            task.cancel()  # also if the call did not even begin
        raise


def collectives_of(
    group: Group,
    context: Context,
    calls: tuple[Calls, Calls],
    slow: Callable[[str], Callable[..., Any]],
) -> Collectives:
    """Return the core's collectives of a communicator: `METHODS` and `NONBLOCKING` are its methods.

    Args:
        group: its ranks.
        context: what matches there.
        calls: what prepares its calls: those that do not block, then those that do.
        slow: returns the method of a name, to which goes what the core does not do.
    """
    plans = CompiledPlans(group, calls)
    owner = Owner(group, plans)
    of_group = context.core, group.size, group.rank, owner, CoreCollective
    shm = group.shm.core if group.shm is not None else None
    like = {"reduce_scatterv": "reduce_scatter", "all_reduce_many": "all_reduce"}
    twins = (like.get(name, name) for name in METHODS)
    allowed = [shm is not None and group.allows_shared_memory(name) for name in twins]
    bits = sum(is_allowed << method for method, is_allowed in enumerate(allowed))
    return Collectives(*of_group, plans, finish, _unpack, slow, shm, bits)
