"""Calls whose arguments were checked: what a communicator runs, starts, or starts again and again.

For each method of a communicator there is one here that finds everything a user can get wrong
alone, before anything is sent, and returns the call as a `CallPlan`. The blocking method runs it,
its non-blocking twin starts it, a persistent request prepares and starts it each time.
"""

from __future__ import annotations

from pycoll._calls.moves import Moves
from pycoll._calls.point_to_point import PointToPointCalls
from pycoll._calls.reductions import Reductions
from pycoll._calls.uneven_calls import UnevenCalls


class Calls(Moves, Reductions, UnevenCalls, PointToPointCalls):
    """Prepares the calls of one communicator; arguments as of the methods of `Communicator`.

    Args:
        group: the communicator's ranks.
        blocking: whether the caller waits in the call. Only then it may go through shared memory.
    """
