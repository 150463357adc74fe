"""Two levels without a message inside a host: the compiled core there, messages between hosts.

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

import math
import time
from collections.abc import Callable
from typing import Any

from pycoll._arrays.operators import Op
from pycoll._arrays.value import Value
from pycoll._calls import collectives, shared_memory_calls, shared_memory_rooted
from pycoll._calls.collectives import Reduction
from pycoll._calls.group import Group
from pycoll._calls.shared_memory import Native
from pycoll._calls.subgroups import child
from pycoll._dtypes import Array
from pycoll._runtime.task import Call, CallSteps
from pycoll._selection import agreed
from pycoll._selection.select import BY_LEVELS_NBYTES
from pycoll.errors import Error


def serve(group: Group, nbytes: int) -> bool:
    """Whether a blocking call on values of this length goes this way."""
    sharing = agreed.current().sharing
    crowded = {host for host in group.hosts if group.hosts.count(host) > 1}
    return nbytes <= BY_LEVELS_NBYTES and crowded <= sharing and len(set(group.hosts)) > 1


class TwoLevel:
    """The two levels of a communicator, as one of its ranks sees them.

    Args:
        group: the communicator's ranks; those of every host can use shared memory.

    Attributes:
        leads: whether this rank is its host's leader.
        alone: whether it has its host for itself.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._call: Call | None = None
        self._signature = b""
        self._deadline = math.inf
        first = {host: group.hosts.index(host) for host in sorted(set(group.hosts))}
        mine = group.hosts[group.rank]
        self.leads = first[mine] == group.rank
        with group.engine.locked():
            neighbors = [rank for rank, host in enumerate(group.hosts) if host == mine]
            self._host = child(group, "host", neighbors, group.name)
            leaders = list(first.values())
            self._leaders = child(group, "leaders", leaders, group.name) if self.leads else None
            group.context.on_fail = self._fail
            group.on_close.append(self.close)
        self.alone = self._host.size == 1

    def run(self, text: str, signature: bytes, timeout: float, steps: Callable[[], Any]) -> Any:
        """Run a call to its end: `steps` calls `inside` and `between`, the same on all ranks.

        Raises:
            Error: another thread is in a collective of this communicator.
        """
        group, context = self._group, self._group.context
        group.engine.look(context)
        with group.engine.locked():
            if self._call is not None:
                raise Error(
                    f"{text}: another thread is in a collective of this communicator; "
                    "collectives of one communicator come from one thread at a time"
                )
            self._call = Call(text, group.number, context)
            number = context.begin(signature)
        self._signature = signature
        self._deadline = time.monotonic() + timeout
        try:
            result = steps()
        except BaseException as exc:
            group.engine.give_up(context, exc)
            raise
        finally:
            self._call = None
        with group.engine.locked():
            context.end(number)
        return result

    def inside(self, steps: Callable[[Native], Any]) -> None:
        """Call the core with the other ranks of this host, if there are any."""
        native = self._host.native
        if native is not None:
            assert self._call is not None
            native.run(self._call, self._left(), lambda: steps(native))

    def between(self, steps: Callable[[Group, bytes], CallSteps]) -> None:
        """Run a call of the leaders, on the leaders."""
        leaders, call = self._leaders, self._call
        if leaders is not None:
            assert call is not None
            signature = self._signature
            engine = self._group.engine
            engine.run(call, lambda: steps(leaders, signature), self._left(), collective=True)

    def close(self) -> None:
        """Forget both; under the engine's lock."""
        self._host.close()
        if self._leaders is not None:
            self._leaders.close()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _fail(self) -> None:
        """The communicator is broken: whoever waits in one of the levels hears why."""
        error = self._group.context.broken
        assert error is not None
        for level in (self._host, self._leaders):
            if level is not None:
                level.context.fail(error)


def barrier(levels: TwoLevel) -> None:
    """Return when every rank has entered."""
    levels.inside(Native.barrier)
    levels.between(_leaders_barrier)
    levels.inside(Native.barrier)


def all_reduce(levels: TwoLevel, x: Value, memory: Array, op: Op) -> None:
    """Reduce into `memory` (C-contiguous, x's shape) on each rank.

    Args:
        levels: of the communicator.
        x: this rank's value, of at most `BY_LEVELS_NBYTES`.
        memory: gets the result.
        op: an operator of the core that gives the same bits in every order.
    """
    if levels.alone:
        memory[...] = x.array
    target = memory if levels.leads else None
    levels.inside(lambda core: shared_memory_calls.combine(core, "reduce", x, target, op))
    value = Value(memory, x.dtype, x.kind)

    def between(leaders: Group, signature: bytes) -> CallSteps:
        choice = leaders.choose("all_reduce", memory.nbytes, None, native=False)
        bound = collectives.all_reduce(leaders, value, Reduction(op, choice), memory)
        return collectives.run(leaders, signature, bound)

    levels.between(between)
    levels.inside(lambda core: shared_memory_rooted.spread(core, memory))


def _leaders_barrier(leaders: Group, signature: bytes) -> CallSteps:
    choice = leaders.choose("barrier", 0, None, native=False)
    return collectives.run(leaders, signature, collectives.barrier(leaders, choice))
