"""Ranks on the hosts of a Dask cluster: `pycoll.dask.run`. Needs ``pip install distributed``.

On each host one Dask task starts a pycoll agent, which starts the ranks: so ranks of a host share
memory, and a host that is lost is noticed by pycoll's own heartbeats.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

try:
    from distributed import Client
except ImportError as exc:
    raise ImportError("pycoll.dask needs Dask: pip install distributed") from exc

from pycoll._functions import engines, function
from pycoll._support.public_edge import edge
from pycoll.errors import Error

_LOOK_S = 1.0  # between looks at whether a worker is still there


@edge
def run(
    client: Client,
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    per_node: int | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> list[Any]:
    """Call ``fn(comm, *args)`` on n ranks, each a fresh interpreter on a host of a Dask cluster.

    As `pycoll.run`, but for where the ranks are. pycoll, and whatever modules `fn` needs, must be
    there on all hosts; ranks have the environment of the workers, and ``PYCOLL_*`` of this process.
    They are no tasks: collections of Dask are of no use there. The workers must reach this process
    by TCP. A thread of one worker on each host is taken while the ranks run; nothing else is
    reserved: other tasks may use the same cores.

    Args:
        client: of the cluster.
        fn: called with the world communicator and `args`. ``sys.exit()`` in it returns None.
        n: number of ranks. Those of a host have consecutive numbers.
        args: passed on to `fn`.
        per_node: ranks on each host, of which the last may have fewer; None: as few hosts as
            possible. A host has room for as many ranks as its workers have threads.
        timeout: seconds for everything; None: no limit.
        transport: as in `pycoll.init`; None: that of the environment.

    Returns:
        What `fn` has returned, by rank.

    Raises:
        Error: the cluster has no room for so many ranks, or a host does not come within 60 s.
        PeerFailed: a rank died, or a host was lost, which is noticed within 10 s.
        Exception: as by `pycoll.run`.
    """
    options = function.checked_options(n, timeout, transport)
    write_task = function.task(fn, args)
    hosts = _hosts(client)
    nodes = engines.spread(options.size, [room for room, _ in hosts], per_node)
    engine = _Workers(client, [worker for _, worker in hosts])
    try:
        ended = engines.run_ranks_on(engine, nodes, options, write_task)
    finally:
        engine.cancel()
    return function.results("pycoll.dask.run", ended, options)


def _hosts(client: Client) -> list[tuple[int, str]]:
    """Of each host how many threads its workers have, and one of these; the most threads first."""
    hosts: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for address, threads in client.nthreads().items():
        hosts[urlsplit(address).hostname or address].append((threads, address))
    found = [(sum(threads for threads, _ in each), min(each)[1]) for each in hosts.values()]
    return sorted(found, key=lambda each: (-each[0], each[1]))


class _Workers:
    """An `engines.Cluster`: a task on a worker of each host."""

    def __init__(self, client: Client, workers: Sequence[str]) -> None:
        self._client, self._workers = client, workers
        self._futures: list[Any] = []

    def start(self, works: Sequence[engines.NodeWork]) -> None:
        """See `engines.Cluster`."""
        for work, worker in zip(works, self._workers, strict=False):
            future = self._client.submit(
                engines.serve,
                work,
                workers=[worker],
                allow_other_workers=False,
                pure=False,
                retries=0,
                key=f"pycoll-{work.node}-{time.time_ns()}",
            )
            self._futures.append(future)

    def failure(self) -> str:
        """See `engines.Cluster`."""
        return next(filter(None, map(self._failure, range(len(self._futures)))), "")

    def _failure(self, node: int) -> str:
        """Why nothing can come of a node, as far as this client has heard."""
        future, status = self._futures[node], self._futures[node].status
        if status not in ("error", "cancelled", "lost"):
            return ""
        why = status
        if status == "error":
            exc = future.exception()
            why = f"{type(exc).__name__}: {exc}"
        return f"Dask, worker {self._workers[node]}: {why}"

    def collect(self, node: int, timeout: float | None) -> Mapping[int, engines.Report]:
        """See `engines.Cluster`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                found: Mapping[int, engines.Report] = self._futures[node].result(_LOOK_S)
            except TimeoutError:
                # Dask waits for ever for a worker that has gone.
                if self._workers[node] not in self._client.nthreads():
                    raise Error(f"Dask, worker {self._workers[node]}: it has gone") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            else:
                return found

    def cancel(self) -> None:
        """Forget what still runs: it ends by itself, as its launcher has gone."""
        for future in self._futures:
            with contextlib.suppress(Exception):
                future.cancel()
