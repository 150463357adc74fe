"""Arrays of one rank that others use as their own: `Communicator.share`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll._arrays import objects
from pycoll._calls import object_collectives
from pycoll._calls.call_plan import CallPlan
from pycoll._calls.group import Group
from pycoll._runtime import shared_arrays


def share(
    group: Group, x: Any, run: Callable[[CallPlan[Any]], Any]
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return every rank's `x` as an array of this process; see `Communicator.share`.

    Args:
        group: the communicator's ranks.
        x: this rank's.
        run: runs a call to its end.
    """
    if group.size > 1 and group.shm is None:
        raise ValueError(
            "share(): these ranks do not share memory; comm.split_by_host() gives those of one "
            "host, which do"
        )
    memory = group.engine.shared_memory
    host = memory.host if memory is not None else None
    own, said = shared_arrays.expose(x, group.rank, group.size, host)
    parts = objects.dump(said)
    all_said = run(
        CallPlan(
            group,
            "share()",
            lambda call: object_collectives.all_gather(group, call, parts, None),
            result=object_collectives.loaded,
        )
    )
    for rank, other in enumerate(all_said):
        if other.refused:
            shared_arrays.take_back(own)
            raise ValueError(f"rank {rank}: {other.refused}")
    assert own is not None
    found = []
    for rank, other in enumerate(all_said):
        if rank == group.rank or memory is None:
            found.append(own)
            continue
        local = memory.ranks.index(group.members[rank])
        found.append(shared_arrays.borrow(memory.host, local, other, group.rank, group.size))
    return tuple(found)
