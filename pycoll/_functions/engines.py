"""Functions on ranks that an engine has room for, such as Ray or Dask: `pycoll.run` elsewhere.

The engine runs `serve` once on each node. That starts an agent there, which calls this process
(`agent_caller`, `agent_listener`); the ranks are the agent's. The task and the results go the
engine's way, which is made for large ones.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, NamedTuple, Protocol

from pycoll._functions import call
from pycoll._functions.function import OF_RANKS, Ended, WriteTask, memfd, raise_ended
from pycoll._launcher.agent_listener import AgentCalls
from pycoll._launcher.agent_socket import Ticket
from pycoll._launcher.host import NamedHost
from pycoll._launcher.job_spec import Options
from pycoll._launcher.reach import listen_everywhere, own_addresses
from pycoll._launcher.spawn import Job
from pycoll._support.wording import a_kind
from pycoll.errors import BootstrapError, Error

_WAIT_S = 60.0  # for all nodes to be there
_COLLECT_S = 10.0  # for what the ranks of a node that failed have said

Report = tuple[call.Head, list[bytearray]]


class NodeWork(NamedTuple):
    """What a node is to do.

    Attributes:
        ticket: where the launcher is, and the key to it.
        node: the node's number.
        size: number of ranks of the job.
        head, pieces: of the task, a parcel (`call`).
    """

    ticket: str
    node: int
    size: int
    head: call.Head
    pieces: list[bytearray]


class Cluster(Protocol):
    """What runs a function once on each node."""

    def start(self, works: Sequence[NodeWork]) -> None:
        """Have `serve` called with these, one on each node."""

    def failure(self) -> str:
        """Return why a node will not call, "" if it may; asked four times a second."""

    def collect(self, node: int, timeout: float | None) -> Mapping[int, Report]:
        """Return what `serve` has returned on a node.

        Raises:
            Exception: it did not, or the node is lost, or the seconds have passed.
        """


def run_ranks_on(
    engine: Cluster, nodes: Sequence[int], options: Options, write_task: WriteTask
) -> Ended:
    """Run a job on the nodes of an engine whose ranks do a task and report.

    Args:
        engine: has room for the ranks already.
        nodes: by rank the number of its node.
        options, write_task: see `function.run_ranks`.

    Raises:
        Error: the ranks could not be started.
    """
    with listen_everywhere() as listener, memfd() as file:
        key = os.urandom(32)
        write_task(file.fileno(), call.InheritedDescriptors(0, []))
        task = call.read_parcel(file.fileno())
        assert task is not None
        port = listener.getsockname()[1]
        ticket = Ticket(key, port, [one.address for one in own_addresses()]).text()
        count = max(nodes) + 1
        engine.start([NodeWork(ticket, node, len(nodes), *task) for node in range(count)])
        options = options._replace(
            hosts=[NamedHost(f"node {node}", calls=True) for node in range(count)],
            nodes=nodes,
            calls=AgentCalls(
                listener, key, min(options.timeout_s or _WAIT_S, _WAIT_S), engine.failure
            ),
        )
        outcome = Job(["python"], options, stdin=subprocess.DEVNULL).run()
    if outcome.culprit is None and outcome.status not in OF_RANKS:
        raise_ended(outcome)
    reports: list[call.Parcel | None] = [None] * len(nodes)
    if outcome.culprit is not None and not outcome.is_lost:
        with contextlib.suppress(Exception):  # it may be lost by now
            _sort(engine.collect(nodes[outcome.culprit], _COLLECT_S), reports)
    elif outcome.status == 0:
        for node in range(count):
            _sort(engine.collect(node, None), reports)
    return Ended(outcome, reports)


def _sort(found: Mapping[int, Report], reports: list[call.Parcel | None]) -> None:
    for rank, (head, pieces) in found.items():
        # What an engine hands over may be read-only, and arrays in it would be, too.
        reports[rank] = call.Parcel(head, [bytearray(piece) for piece in pieces])


# Not by PYTHONPATH, which would be that of the ranks, and of other interpreters that they start.
_AGENT = """
import runpy, sys
sys.path[:] = sys.argv.pop(1).split("\\n")
runpy.run_module("pycoll._launcher.agent_caller", run_name="__main__", alter_sys=True)
"""


def serve(
    work: NodeWork, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[int, Report]:
    """Be a node, until the job is over; an engine calls it, in a worker of its own.

    Args:
        work: what to do.
        environment: variables that the ranks have beside this process's.

    Returns:
        By rank what the ranks of this node have reported.

    Raises:
        BootstrapError: this node has not come into the job; why.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(memfd()) for _ in range(work.size + 1)]
        said = stack.enter_context(memfd())
        numbers = [file.fileno() for file in files]
        # What can be imported here comes first: the engine may have put modules in folders of its
        # own. A worker need not have the launcher's folders.
        path = list(dict.fromkeys([*map(str, sys.path), *work.head["path"]]))
        call.write_parcel(numbers[0], {**work.head, "path": path}, _writer(work.pieces))
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        ticket = call.InheritedDescriptors(numbers[0], numbers[1:])
        rank = [sys.executable, *flags, call.__file__, str(ticket)]
        agent = [sys.executable, "-c", _AGENT, "\n".join(path), str(work.node)]
        process = subprocess.Popen(
            [*agent, ",".join(map(str, numbers)), *rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=numbers,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as pipe:  # however this is left, the agent ends
            with contextlib.suppress(BrokenPipeError):
                pipe.write(work.ticket.encode() + b"\n")
                pipe.flush()
            status = process.wait()
        reports = {rank: call.read_parcel(number) for rank, number in enumerate(numbers[1:])}
        found = {rank: (one.head, one.pieces) for rank, one in reports.items() if one is not None}
        if status and not found:
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            text = text or f"pycoll's launcher on this node ended with status {status}"
            raise BootstrapError(text)
        return found


def _writer(pieces: Sequence[bytes | bytearray]) -> call.Write:
    def write(file: IO[bytes], hand_on: Callable[[pickle.PickleBuffer], object]) -> None:
        file.write(pieces[0])
        for piece in pieces[1:]:
            hand_on(pickle.PickleBuffer(piece))

    return write


def spread(n: int, rooms: Sequence[int], per_node: int | None) -> list[int]:
    """The node of each rank, in blocks as equal as can be.

    Args:
        n: number of ranks.
        rooms: how many ranks each node has room for, the largest first.
        per_node: on each node, of which the last may have fewer; None: as few nodes as possible.

    Raises:
        TypeError, ValueError: `per_node` is no number of ranks.
        Error: there is no room.
    """
    if per_node is not None:
        if isinstance(per_node, bool) or not isinstance(per_node, int):
            raise TypeError(f"per_node is a number of ranks, not {a_kind(per_node)}")
        if per_node < 1:
            raise ValueError(f"per_node is a number of ranks, at least 1, not {per_node}")
        count = -(-n // per_node)
        wanted = [per_node] * (count - 1) + [n - (count - 1) * per_node]
        if count > len(rooms) or any(rooms[k] < wanted[k] for k in range(count)):
            raise Error(
                f"{n} ranks, {per_node} a node, need {count} nodes with room for so many; there is "
                f"room for {', '.join(map(str, rooms)) or 'none'}"
            )
        return [rank // per_node for rank in range(n)]
    if n > sum(rooms):
        raise Error(f"there is room for {sum(rooms)} ranks on {len(rooms)} nodes, not for {n}")
    count = next(k for k in range(1, len(rooms) + 1) if sum(rooms[:k]) >= n)
    shares = [0] * count
    for _ in range(n):  # each to the node with the fewest that has room
        node = min((k for k in range(count) if shares[k] < rooms[k]), key=lambda k: shares[k])
        shares[node] += 1
    return [node for node, share in enumerate(shares) for _ in range(share)]
