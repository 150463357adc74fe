"""Two levels without a message inside a host: shared memory there, messages between hosts.

The algorithm `hierarchical` is a schedule, in which ranks of a host send each other messages. That
is best for large values, whose segments overlap. For small ones a message costs more than all
that the core does, so a blocking call takes three steps instead: the core brings everything to the
host's leader, the leaders run a schedule, the core spreads what they have. The leader is the first
rank of its host. Values are combined in another order than by the schedule, so this is for those
of which every order gives the same bits: integers and bools.

Both levels have communicators of their own, which are made when they are first needed. To everybody
else a call is one of the communicator itself: it has a number there, other calls are compared with
it, and if it fails, that communicator breaks and takes both levels along.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import collectives, shared_memory_calls, shared_memory_rooted
from pycoll._calls.call_plan import numbered
from pycoll._calls.group import Bound, Group
from pycoll._calls.shared_memory import ShmComm
from pycoll._calls.subgroups import child
from pycoll._runtime.task import Call, CallSteps, caller
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._calls.call_plan import CallPlan
    from pycoll._dtypes import Array


P = ParamSpec("P")


class TwoLevel:
    """The two levels of a communicator, as one of its ranks sees them.

    Args:
        group: the communicator's ranks; those of every host can use shared memory.

    Attributes:
        host: the ranks of this one's host.
        leaders: the leaders; None: this rank is none.
    """

    def __init__(self, group: Group) -> None:
        self._is_busy = False
        first = {host: group.hosts.index(host) for host in sorted(set(group.hosts))}
        mine = group.hosts[group.rank]
        leads = first[mine] == group.rank
        with group.engine.locked():
            neighbors = [rank for rank, host in enumerate(group.hosts) if host == mine]
            self.host = child(group, "host", neighbors, group.name)
            leaders = list(first.values())
            self.leaders = child(group, "leaders", leaders, group.name) if leads else None
            levels = [level for level in (self.host, self.leaders) if level is not None]
            group.context.levels = tuple([level.context for level in levels])

    def run(self, group: Group, plan: CallPlan[Any], timeout: float) -> None:
        """Run a call to its end.

        Raises:
            Error: another thread is in a collective of this communicator.
        """
        context = group.context
        group.engine.look(context)
        signature = f"{plan.text}\0{caller()}".encode()
        with group.engine.locked():
            if self._is_busy:
                raise Error(
                    f"{plan.text}: another thread is in a collective of this communicator; "
                    "collectives of one communicator come from one thread at a time"
                )
            self._is_busy = True
            call = Call(plan.text, group.number, context)
            number = context.begin(signature)
        try:
            plan.in_two_levels(TwoLevelCall(self, call, signature, time.monotonic() + timeout))
        except BaseException as exc:
            group.engine.give_up(call, exc)
            raise
        finally:
            self._is_busy = False
        with group.engine.locked():
            context.end(number)


class TwoLevelCall(NamedTuple):
    """A call under way in two levels: it calls `inside` and `between`, the same on all ranks.

    Attributes:
        levels: of its communicator.
        call: what it is to everybody else.
        signature: its text, and where it was made.
        deadline: of `time.monotonic`.
    """

    levels: TwoLevel
    call: Call
    signature: bytes
    deadline: float

    @property
    def leads(self) -> bool:
        """Whether this rank is its host's leader."""
        return self.levels.leaders is not None

    @property
    def is_alone(self) -> bool:
        """Whether this rank has its host for itself."""
        return self.levels.host.size == 1

    def inside(
        self, steps: Callable[Concatenate[ShmComm, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call the core with the other ranks of this host, if there are any."""
        if self.levels.host.shm is not None:
            self.levels.host.shm.run(self.call, self._left(), steps, *args, **kwargs)

    def between(
        self, bind: Callable[Concatenate[Group, P], Bound], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run a schedule of the leaders, on the leaders."""
        leaders = self.levels.leaders
        if leaders is not None:
            bound = partial(bind, leaders, *args, **kwargs)
            steps = partial(self._between, leaders, bound)
            leaders.engine.run(self.call, steps, self._left(), collective=True)

    def _between(self, leaders: Group, bind: Callable[[], Bound]) -> CallSteps:
        return numbered(leaders, self.signature, partial(bind().run, leaders))

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


def barrier(call: TwoLevelCall) -> None:
    """Return when every rank has entered."""
    call.inside(ShmComm.barrier)
    call.between(_leaders_barrier)
    call.inside(ShmComm.barrier)


def all_reduce(call: TwoLevelCall, x: Value, memory: Array, op: Op) -> None:
    """Reduce into `memory` (C-contiguous, x's shape) on each rank.

    Args:
        call: that does it.
        x: this rank's value, of at most `BY_LEVELS_NBYTES`.
        memory: gets the result.
        op: an operator of the core that gives the same bits in every order.
    """
    if call.is_alone:
        memory[...] = x.array
    target = memory if call.leads else None
    call.inside(shared_memory_calls.combine, "reduce", x, target, op)
    call.between(_leaders_all_reduce, Value(memory, x.dtype, x.kind), op)
    call.inside(shared_memory_rooted.spread, conversion.as_bytes(memory))


def _leaders_all_reduce(leaders: Group, x: Value, op: Op) -> Bound:
    """Bind what reduces into `x` itself."""
    choice = leaders.choose("all_reduce", x.array.nbytes, None, shm=False)
    return collectives.bind(leaders, "all_reduce", choice, x, x.array, op)


def _leaders_barrier(leaders: Group) -> Bound:
    return collectives.barrier(leaders, leaders.choose("barrier", 0, None, shm=False))
