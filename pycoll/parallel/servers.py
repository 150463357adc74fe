"""A parameter server: some ranks keep the parameters, the others compute gradients of them.

Every server keeps a shard of the parameters, a part as long as the others'. A worker pulls the
parameters before each step and pushes its gradient after it. The servers keep the workers' clocks,
the number of gradients that each has pushed, and decide by them which pulls must wait.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014),
section 3, for shards; Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server (NIPS 2013), section 3, for bounded staleness.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import pycoll
from pycoll._support.public_edge import edge, edges

Array = np.ndarray[Any, Any]

PULL, PUSH, DONE, ANSWER = range(4)
"""Tags: a worker asks, a worker's gradient, a worker has ended; a server's parameters."""


class Served(NamedTuple):
    """What a server has done.

    Attributes:
        updates: how often it has updated its shard.
        ahead: how many pulls it has answered, by how many steps the worker was ahead of the slowest
            at that moment; int64, as long as the most that occurred, and one.
    """

    updates: int
    ahead: Array


@edges
class ParameterServer:
    """The servers and workers of a communicator, seen from one rank; every rank makes one.

    Its last `num_servers` ranks are the servers, which call `serve`; the others are the workers,
    which call `pull` and `push` in turn, and `finish` at the end. Each step moves K bytes to every
    worker and as many back, if the parameters have K: with one server through that one rank.

    Args:
        comm: of two ranks at least; it is copied, so no messages of others meet these.
        length: number of parameters.
        num_servers: the parameters are divided among so many.
        dtype: of the parameters and the gradients, a NumPy dtype.

    Attributes:
        comm: the copy; its `counters` are those of this traffic.
        is_server: what this rank is.
        num_workers: how many there are: ranks 0 to ``num_workers - 1``.
        shard: slice of the parameters that this server has; of a worker: empty.

    Raises:
        ValueError: there would be no worker or no server, or `length` is negative.
        TypeError: a number is no integer.
    """

    @edge
    def __init__(
        self, comm: pycoll.Communicator, length: int, num_servers: int = 1, dtype: Any = float
    ) -> None:
        length, num_servers = operator.index(length), operator.index(num_servers)
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
        self._shards = [slice(*ends) for ends in itertools.pairwise(cuts)]
        self.shard = self._shards[comm.rank - self.num_workers] if self.is_server else slice(0, 0)
        self._nothing = np.empty(0, self.dtype)
        self.comm = comm.dup(name=f"parameter server of {comm.name}")

    # --- workers ---------------------------------------------------------------------------

    def ipull(self, out: Array) -> list[pycoll.Request[Any]]:
        """Ask for the parameters; returns requests, of which `out` is theirs until all are done.

        It can be called before the last `push` is received: the parameters of the next step come
        while the worker does something else.
        """
        out = self._check(out, "out")
        requests = []
        for server, shard in enumerate(self._shards, self.num_workers):
            requests.append(self.comm.isend(self._nothing, server, PULL))
            requests.append(self.comm.irecv(server, ANSWER, out=out[shard]))
        return requests

    def pull(self, out: Array | None = None) -> Array:
        """Return the parameters, as soon as the servers' bound allows.

        Args:
            out: array of shape ``(length,)`` that gets them; None: a new one.

        Raises:
            PeerFailed: a server or another worker has ended.
        """
        out = np.empty(self.length, self.dtype) if out is None else out
        pycoll.wait_all(self.ipull(out))
        return out

    def push(self, gradient: Array) -> None:
        """Send a gradient of shape ``(length,)``, which may be changed afterwards: a step is over.

        Raises:
            PeerFailed: a server or another worker has ended.
        """
        gradient = self._check(gradient, "gradient")
        shards = enumerate(self._shards, self.num_workers)
        pycoll.wait_all([self.comm.isend(gradient[each], to, PUSH) for to, each in shards])

    def finish(self, out: Array | None = None) -> Array:
        """Say that this worker makes no more steps; return the parameters when all have said so."""
        for server in range(self.num_workers, self.comm.size):
            self.comm.send(self._nothing, server, DONE)
        return self.pull(out)

    def _check(self, array: Array, name: str) -> Array:
        if self.is_server:
            raise ValueError("this rank is a server: it calls serve()")
        if array.shape != (self.length,) or array.dtype != self.dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}: it must be "
                f"{self.dtype}[{self.length}], as the parameters are"
            )
        return array

    # --- servers ---------------------------------------------------------------------------

    def serve(
        self,
        parameters: Array,
        update: Callable[[Array, Array], object],
        staleness: int | None = None,
    ) -> Served:
        """Keep a shard of the parameters until all workers have finished.

        Args:
            parameters: all of them, of shape ``(length,)``; this server changes its shard in place.
            update: ``update(shard, gradient)`` changes a shard, of which it gets the parameters and
                the gradient; the latter is its own to change.
            staleness: None: synchronous. The gradients of a step are added up in the order of
                workers, and there is one update a step. Else each gradient is an update of its own
                when it comes, and a worker that would be more than so many steps ahead of the
                slowest waits: pulling for step c, it sees all gradients of steps before
                ``c - staleness``.

        Raises:
            ValueError: this rank is a worker, or an argument does not fit.
            PeerFailed: a worker or another server has ended.
        """
        if not self.is_server:
            raise ValueError("this rank is a worker: it calls pull(), push() and finish()")
        if staleness is not None and operator.index(staleness) < 0:
            raise ValueError(f"staleness is {staleness}: it is a number of steps, or None")
        if parameters.shape != (self.length,) or parameters.dtype != self.dtype:
            raise ValueError(f"parameters must be {self.dtype}[{self.length}]")
        return _Serving(
            self.comm, self.num_workers, parameters[self.shard], update, staleness
        ).run()


class _Serving:
    """The loop of one server."""

    def __init__(
        self,
        comm: pycoll.Communicator,
        num_workers: int,
        shard: Array,
        update: Callable[[Array, Array], object],
        staleness: int | None,
    ) -> None:
        self._comm, self._shard, self._update, self._staleness = comm, shard, update, staleness
        self._clocks = [0] * num_workers
        self._working = set(range(num_workers))
        self._pulling: set[int] = set()  # whose pulls wait
        self._num_ended = 0  # that have got the last parameters
        self._gradients: list[deque[Array]] = [deque() for _ in range(num_workers)]  # synchronous
        # What a worker is being sent must stay as it is while the shard goes on.
        self._copies = [np.empty_like(shard) for _ in range(num_workers)]
        self._sends: dict[int, pycoll.Request[Any]] = {}
        self._updates = 0
        self._ahead = [0]

    def run(self) -> Served:
        status, buffer = pycoll.Status(), np.empty_like(self._shard)
        while self._num_ended < len(self._clocks):
            self._comm.recv(out=buffer, status=status)
            if status.tag == PULL:
                self._pulling.add(status.source)
            elif status.tag == DONE:
                self._working.discard(status.source)
            else:
                self._clocks[status.source] += 1
                if self._staleness is None:
                    self._gradients[status.source].append(buffer.copy())
                else:
                    self._apply(buffer)
            while self._working and all(self._gradients[each] for each in self._working):
                first, *others = [each.popleft() for each in self._gradients if each]
                for gradient in others:
                    first += gradient
                self._apply(first)
            for worker in sorted(self._pulling):
                if self._may_go_on(worker):
                    self._answer(worker)
        pycoll.wait_all(list(self._sends.values()))
        return Served(self._updates, np.array(self._ahead, np.int64))

    def _apply(self, gradient: Array) -> None:
        self._update(self._shard, gradient)
        self._updates += 1

    def _steps_ahead(self, worker: int) -> int:
        return self._clocks[worker] - min(self._clocks[each] for each in self._working)

    def _may_go_on(self, worker: int) -> bool:
        if worker not in self._working:
            return not self._working
        if self._staleness is None:
            return not self._gradients[worker]
        return self._steps_ahead(worker) <= self._staleness

    def _answer(self, worker: int) -> None:
        if worker in self._working:
            ahead = self._steps_ahead(worker)
            self._ahead += [0] * (ahead + 1 - len(self._ahead))
            self._ahead[ahead] += 1
        else:
            self._num_ended += 1
        self._pulling.discard(worker)
        if worker in self._sends:
            self._sends[worker].wait()  # it has come: its worker has asked again
        self._copies[worker][...] = self._shard
        self._sends[worker] = self._comm.isend(self._copies[worker], worker, ANSWER)
