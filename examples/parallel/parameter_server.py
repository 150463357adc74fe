"""A parameter server: some ranks keep the parameters, the others compute gradients of them.

data_parallel.py trains with it: pycoll-run -n 4 examples/parallel/data_parallel.py

Every server keeps a shard of the parameters, a part as long as the others'. A worker pulls the
parameters before each step and pushes its gradient after it. The servers keep the workers' clocks,
the number of gradients that each has pushed, and decide by them which pulls must wait.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014),
section 3, for shards; Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server (NIPS 2013), section 2, for bounded staleness.
"""

from collections import Counter, deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np

import pycoll

PULL, LAST, PUSH, ANSWER = range(4)
"""Tags: a worker asks, asks for the last time, sends a gradient; a server sends parameters."""


class Served(NamedTuple):
    """What a server has done.

    Attributes:
        updates: how often it has updated its shard.
        ahead: of how many pulls the worker was 0, 1, 2, ... steps ahead of the slowest.
    """

    updates: int
    ahead: list


class ParameterServer:
    """The servers and workers of a communicator, seen from one rank; every rank makes one.

    Its last `num_servers` ranks are the servers, which call `serve`; the others are the workers,
    which call `pull` and `push` in turn, and `finish` at the end. Each step moves K bytes to every
    worker and as many back, if the parameters have K: with one server through that one rank. If a
    rank dies, all of these raise PeerFailed.

    Args:
        comm: of two ranks at least; it is copied, so no messages of others meet these.
        length: number of parameters.
        num_servers: the parameters are divided among so many; some have none if these are few.
        dtype: of the parameters and the gradients, a NumPy dtype.

    Attributes:
        comm: the copy; its `counters` are those of this traffic.
        is_server: what this rank is.
        num_workers: how many there are: ranks 0 to ``num_workers - 1``.
        shard: slice of the parameters that this server has; of a worker: empty.
    """

    def __init__(self, comm, length, num_servers=1, dtype=float):
        if not 0 < num_servers < comm.size:
            raise ValueError(
                f"num_servers is {num_servers}: of {comm.size} ranks one at least is a server, and "
                "one at least a worker"
            )
        if length < 0:
            raise ValueError(f"length is {length}: it is the number of parameters")
        self.length, self.dtype = length, np.dtype(dtype)
        self.num_workers = comm.size - num_servers
        self.is_server = comm.rank >= self.num_workers
        cuts = [length * each // num_servers for each in range(num_servers + 1)]
        self._shards = [slice(*ends) for ends in pairwise(cuts)]
        self.shard = self._shards[comm.rank - self.num_workers] if self.is_server else slice(0, 0)
        self.comm = comm.dup(name=f"parameter server of {comm.name}")

    def ipull(self, out, is_last=False):
        """Ask as `pull`, or as `finish`, does; return requests, to which `out` belongs."""
        self._check(out, "out", is_server=False)
        requests, nothing = [], np.empty(0, self.dtype)
        for server, shard in enumerate(self._shards, self.num_workers):
            requests.append(self.comm.isend(nothing, server, LAST if is_last else PULL))
            requests.append(self.comm.irecv(server, ANSWER, out=out[shard]))
        return requests

    def pull(self, out=None, is_last=False):
        """Return the parameters, of shape ``(length,)``, as soon as the servers' bound allows.

        They are in `out`, or in new memory if that is None.
        """
        out = np.empty(self.length, self.dtype) if out is None else out
        pycoll.wait_all(self.ipull(out, is_last))
        return out

    def push(self, gradient):
        """Send a gradient of shape ``(length,)``, which may be changed then: a step is over."""
        self._check(gradient, "gradient", is_server=False)
        shards = enumerate(self._shards, self.num_workers)
        pycoll.wait_all([self.comm.isend(gradient[each], to, PUSH) for to, each in shards])

    def finish(self, out=None):
        """Make no more steps; `pull` the parameters when all workers have said so."""
        return self.pull(out, is_last=True)

    def serve(self, parameters, update, staleness=None):
        """Keep a shard of the parameters until all workers have finished; return `Served`.

        Args:
            parameters: all of them, of shape ``(length,)``; this server changes its shard in place.
            update: ``update(shard, gradient)`` changes the shard; the gradient is its own.
            staleness: None: synchronous. The gradients of a step are added up in the order of
                workers, and there is one update a step. Else each gradient is an update of its own
                when it comes, and a worker that would be more than so many steps ahead of the
                slowest waits: pulling for step c, it sees all gradients of steps before
                ``c - staleness``; math.inf: nobody waits.
        """
        self._check(parameters, "parameters", is_server=True)
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness is {staleness}: it is a number of steps, or None")
        return _serve(self.comm, self.num_workers, parameters[self.shard], update, staleness)

    def _check(self, array, name, is_server):
        if is_server is not self.is_server:
            right = "server: it calls serve" if self.is_server else "worker: it calls pull and push"
            raise ValueError(f"this rank is a {right}")
        if array.shape != (self.length,) or array.dtype != self.dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}: it must be "
                f"{self.dtype}[{self.length}], as the parameters are"
            )


def _serve(comm, num_workers, shard, update, staleness):
    """Answer workers until all have asked for the last time."""
    working = set(range(num_workers))
    pulling = set()  # who wait for parameters
    clocks = [0] * num_workers
    gradients = [deque() for _ in clocks]  # that are in no update yet
    sends, ahead, updates = {}, Counter(), 0

    def steps_ahead(worker):
        return clocks[worker] - min(clocks[each] for each in working)

    def may_go_on(worker):
        if worker not in working:
            return not working
        if staleness is None:
            return not gradients[worker]
        return steps_ahead(worker) <= staleness

    status, buffer = pycoll.Status(), np.empty_like(shard)
    while working:
        comm.recv(out=buffer, status=status)
        if status.tag == PUSH:
            clocks[status.source] += 1
            gradients[status.source].append(buffer.copy())
        else:
            pulling.add(status.source)
        if status.tag == LAST:
            working.remove(status.source)
        waited_for = working if staleness is None else ()
        while any(gradients) and all(gradients[worker] for worker in waited_for):
            first, *others = [each.popleft() for each in gradients if each]
            for gradient in others:
                first += gradient
            update(shard, first)
            updates += 1
        for worker in sorted(filter(may_go_on, pulling)):
            pulling.remove(worker)
            if worker in working:
                ahead[steps_ahead(worker)] += 1
            sends[worker] = comm.isend(shard.copy(), worker, ANSWER)
    pycoll.wait_all(list(sends.values()))
    return Served(updates, [ahead[each] for each in range(max(ahead, default=0) + 1)])
