"""Ranks on the nodes of a Ray cluster: `pycoll.ray.run`. Needs Ray: ``pip install ray``.

On each node one Ray task starts a pycoll agent, which starts the ranks: so ranks of a node share
memory, and a node that is lost is noticed by pycoll's own heartbeats.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as exc:
    raise ImportError("pycoll.ray needs Ray: pip install ray") from exc

from pycoll._functions import engines, function
from pycoll._support.public_edge import edge
from pycoll.errors import Error

_PLACE_S = 60.0  # for the cluster to have room
_END_S = 5.0  # for tasks to end by themselves, when their ranks have ended


@edge
def run(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    per_node: int | None = None,
    resources: Mapping[str, float] | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> list[Any]:
    """Call ``fn(comm, *args)`` on n ranks, each a fresh interpreter on a node of a Ray cluster.

    As `pycoll.run`, but for where the ranks are. If `ray.init` has not been called, it is called
    without arguments. pycoll, and whatever modules `fn` needs, must be there on all nodes, as by a
    ``runtime_env`` of `ray.init`; ranks have the environment that Ray gives to its tasks, and
    ``PYCOLL_*`` of this process. They are no tasks: references of Ray are of no use there. The
    nodes must reach this process by TCP.

    Args:
        fn: called with the world communicator and `args`. ``sys.exit()`` in it returns None.
        n: number of ranks. Those of a node have consecutive numbers.
        args: passed on to `fn`.
        per_node: ranks on each node, of which the last may have fewer; None: as few nodes as
            possible.
        resources: all that Ray reserves for each rank; default: ``{"CPU": 1}``. With
            ``{"CPU": 1, "GPU": 1}`` the ranks of a node see all GPUs that it got: choose by
            `comm.local_rank`.
        timeout: seconds for everything, from when Ray has room; None: no limit.
        transport: as in `pycoll.init`; None: that of the environment.

    Returns:
        What `fn` has returned, by rank.

    Raises:
        Error: the nodes that are alive have no room for so many ranks, or others use it for 60 s;
            or a node does not come.
        PeerFailed: a rank died, or a node was lost, which is noticed within 10 s.
        Exception: as by `pycoll.run`.
    """
    options = function.checked_options(n, timeout, transport)
    write_task = function.task(fn, args)
    if not ray.is_initialized():
        ray.init()
    wanted = {name: each for name, each in (resources or {"CPU": 1.0}).items() if each}
    if not wanted or min(wanted.values()) < 0:
        raise ValueError(f"resources are what each rank needs, above 0, not {resources}")
    nodes = engines.spread(options.size, _rooms(wanted), per_node)
    with _placed(nodes, wanted) as engine:
        ended = engines.run_ranks_on(engine, nodes, options, write_task)
    return function.results("pycoll.ray.run", ended, options)


def _rooms(wanted: Mapping[str, float]) -> list[int]:
    """For how many ranks each node has room, the largest first."""
    rooms = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            # A rounded quotient: 1 / 0.1 is 10.
            room = [int(has.get(name, 0.0) / each + 1e-6) for name, each in wanted.items()]
            rooms.append(min(room))
    return sorted((room for room in rooms if room), reverse=True)


@contextlib.contextmanager
def _placed(nodes: Sequence[int], wanted: Mapping[str, float]) -> Iterator[_Nodes]:
    """Reserve what the ranks want, each node's on another node."""
    ranks = [nodes.count(node) for node in range(max(nodes) + 1)]
    bundles = [{name: _whole(count * each) for name, each in wanted.items()} for count in ranks]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    engine = _Nodes(group, bundles, ranks)
    try:
        if not ray.wait([group.ready()], timeout=_PLACE_S)[0]:
            raise Error(
                f"Ray has had no room for {bundles} on {len(bundles)} nodes for {_PLACE_S:g} s "
                "(ray status shows who has it)"
            )
        yield engine
    finally:
        engine.cancel()
        remove_placement_group(group)


def _whole(amount: float) -> float:
    """An amount as Ray takes it: above 1 a whole number."""
    return float(math.ceil(amount - 1e-6)) if amount > 1 else amount


class _Nodes:
    """An `engines.Cluster`: a task a bundle of a placement group."""

    def __init__(
        self, group: Any, bundles: Sequence[Mapping[str, float]], ranks: Sequence[int]
    ) -> None:
        self._group, self._bundles, self._ranks = group, bundles, ranks
        self._refs: list[Any] = []

    def start(self, works: Sequence[engines.NodeWork]) -> None:
        """See `engines.Cluster`."""
        remote = ray.remote(_serve)
        for node, (work, bundle) in enumerate(zip(works, self._bundles, strict=True)):
            own = ("CPU", "GPU", "memory")  # which have arguments of their own
            rest = {name: each for name, each in bundle.items() if name not in own}
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=node
            )
            task = remote.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                resources=rest,
                max_retries=0,
                scheduling_strategy=strategy,
                name=f"pycoll node {node}",
            )
            cores = int(bundle.get("CPU", 0))
            self._refs.append(task.remote(work, cores, max(1, cores // self._ranks[node])))

    def failure(self) -> str:
        """See `engines.Cluster`."""
        done, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)
        for ref in done:
            try:
                ray.get(ref)
            except Exception as exc:
                cause = getattr(exc, "cause", None) or exc
                return f"Ray, node {self._refs.index(ref)}: {type(cause).__name__}: {cause}"
        return ""

    def collect(self, node: int, timeout: float | None) -> Mapping[int, engines.Report]:
        """See `engines.Cluster`."""
        found: Mapping[int, engines.Report] = ray.get(self._refs[node], timeout=timeout)
        return found

    def cancel(self) -> None:
        """End what still runs, when it has had time to end by itself.

        To cancel a task in the moment in which it ends has ended the whole process, in Ray's core.
        """
        if not self._refs:
            return
        _, running = ray.wait(self._refs, num_returns=len(self._refs), timeout=_END_S)
        for ref in running:
            with contextlib.suppress(Exception):
                ray.cancel(ref, force=True)


def _serve(work: engines.NodeWork, cores: int, share: int) -> dict[int, engines.Report]:
    own = {}
    # Ray sets it to the cores of a task, unless it is set: each rank is to have its share of them.
    if os.environ.get("OMP_NUM_THREADS") == str(cores):
        own["OMP_NUM_THREADS"] = str(share)
    return engines.serve(work, own)
