"""Last calls of a program, in which ranks differ beside requests that nobody waits for."""

from __future__ import annotations

from typing import Any

import numpy as np


def of_requests(comm: Any) -> list[Any]:
    """Two that nobody waits for, and that differ."""
    x = np.ones(9)
    return [comm.ibroadcast(x, root=1) if comm.rank else comm.ibarrier(), comm.irecv(0, tag=9)]


def beside_requests(comm: Any) -> list[Any]:
    """One call in shared memory or not, beside requests that nobody waits for.

    All ranks have begun the reduction before one can leave: who began it later would be told that
    a rank is missing there, and rightly.
    """
    requests = [comm.isend(np.ones(1_000_000), 1 - comm.rank), comm.iall_reduce(np.ones(9))]
    comm.barrier()
    comm.broadcast(1, root=comm.rank)
    return requests
