"""Functions on the nodes of an engine, and agents that call their launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from node_jobs import LIMIT_S, WAIT, until_listening
from patience import PATIENCE
from tiers import smoke

import pycoll
from pycoll._functions import engines, function
from pycoll._launcher import network_line
from pycoll._launcher.agent_socket import Ticket
from pycoll._support.environment import free_port
from pycoll.errors import BootstrapError, Error


def until_it_catches(signum: int, pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> signum - 1 & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Pool:
    """An `engines.Cluster`."""

    def __init__(self, serve: Callable[[engines.NodeWork], Any] = engines.serve) -> None:
        self._serve = serve
        self._pool = ThreadPoolExecutor(8)
        self._futures: list[Any] = []

    def start(self, works: Any) -> None:
        # As an engine does it: nothing is shared.
        copies = [cloudpickle.loads(cloudpickle.dumps(work)) for work in works]
        self._futures = [self._pool.submit(self._serve, work) for work in copies]

    def failure(self) -> str:
        ended = [future for future in self._futures if future.done() and future.exception()]
        return f"the pool: {ended[0].exception()}" if ended else ""

    def collect(self, node: int, timeout: float | None) -> Any:
        return self._futures[node].result(timeout)


def run_on(pool: Pool, fn: Any, nodes: list[int], *args: Any, timeout: float | None = None) -> Any:
    options = function.checked_options(len(nodes), timeout, None)
    task = function.task(fn, args)
    return function.results("run", engines.run_ranks_on(pool, nodes, options, task), options)


def test_functions_run_on_an_engine(capfd: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    def fn(comm: Any, x: Any, scale: float) -> Any:
        print("rank", comm.rank, flush=True)
        x *= scale  # its own, and writable
        return comm.all_reduce(x), comm.node, comm.local_rank

    found = run_on(Pool(), fn, [0, 0, 1], np.ones(1_000_000), 2.0)
    assert [place for _, *place in found] == [[0, 0], [0, 1], [1, 0]]
    for array, *_ in found:
        assert (array == 6.0).all()
        array += 1  # so are the results
    assert sorted(re.findall(r"rank \d", capfd.readouterr().out)) == ["rank 0", "rank 1", "rank 2"]


def test_exceptions_come_back_from_an_engine() -> None:
    def fn(comm: Any) -> None:
        if comm.rank == 1:
            raise LookupError("nothing there")
        comm.barrier()

    with pytest.raises(LookupError, match="nothing there") as caught:
        run_on(Pool(), fn, [0, 1])
    assert caught.value.__notes__[0] == "raised on rank 1 of 2"


@smoke
def test_a_death_on_an_engine_is_named() -> None:
    def fn(comm: Any) -> None:
        if comm.rank == 1:
            os._exit(9)
        comm.barrier()

    with pytest.raises(pycoll.PeerFailed, match="exit status 9") as caught:
        run_on(Pool(), fn, [0, 1])
    assert caught.value.rank == 1


def test_time_passes_on_an_engine_too() -> None:
    def fn(comm: Any) -> None:
        if comm.rank == 0:
            time.sleep(1000)
        comm.barrier()

    limit_s = 1.5 * PATIENCE  # rank 1 must be in its barrier before
    with pytest.raises(pycoll.OperationTimeout, match=f"took longer than {limit_s:g} s") as caught:
        run_on(Pool(), fn, [0, 1], timeout=limit_s)
    assert "rank 1: barrier" in str(caught.value)


def test_a_node_that_cannot_start_is_an_error_at_once() -> None:
    def serve(work: engines.NodeWork) -> Any:
        if work.node == 1:
            raise RuntimeError("no room in /tmp")
        return engines.serve(work)

    began = time.monotonic()
    with pytest.raises(Error, match="the pool: no room in /tmp"):
        run_on(Pool(serve), print, [0, 1])
    assert time.monotonic() - began < LIMIT_S


def test_a_node_whose_launcher_is_gone_says_so() -> None:
    work = engines.NodeWork(f"{'ab' * 32};{free_port()};127.0.0.1", 0, 1, {"path": sys.path}, [b""])
    with pytest.raises(BootstrapError, match="cannot reach the launcher"):
        engines.serve(work)


def test_a_rank_on_an_engine_has_no_input_and_no_path_of_ours() -> None:
    def fn(comm: Any) -> Any:
        return sys.stdin.read(), os.environ.get("PYTHONPATH")

    assert run_on(Pool(), fn, [0]) == [("", os.environ.get("PYTHONPATH"))]


def test_a_socket_that_has_met_itself_has_found_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # So it may be with a port that the system also gives to whoever connects to somewhere.
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        itself = socket.socket()
        itself.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        itself.bind(address)
        itself.connect(address)
        return itself

    monkeypatch.setattr(network_line.socket, "create_connection", connect)
    ticket = Ticket(bytes(32), free_port(), ["127.0.0.1"])
    with pytest.raises(BootstrapError, match=r"cannot reach node 0: .*: Connection refused"):
        network_line.reach(ticket, "node 0", 2, time.monotonic(), [], [])


def test_strangers_at_the_port_are_named_in_the_time_that_is_given() -> None:
    with socket.create_server(("0.0.0.0", 0)) as silent:
        port = silent.getsockname()[1]
        ticket = Ticket(bytes(32), port, ["127.0.0.1", "127.0.0.2"])
        began = time.monotonic()
        with pytest.raises(BootstrapError, match="cannot reach node 0") as caught:
            network_line.reach(ticket, "node 0", 2, began + 1.0, [], [])
        assert time.monotonic() - began < 1.0 + 2.0 * PATIENCE
    for address in ticket.addresses:
        assert f"{address} port {port} does not answer as a pycoll job" in str(caught.value)


def test_time_passes_before_all_nodes_have_come() -> None:
    def serve(work: engines.NodeWork) -> Any:
        return engines.serve(work) if work.node == 0 else time.sleep(4.0)

    # On a busy machine who waits for that node may be the first to lose patience.
    with pytest.raises(Error, match=r"took longer than 1 s|nothing has come from it for 1 s"):
        run_on(Pool(serve), print, [0, 1], timeout=1.0)


def test_node_0_may_be_ended_before_the_others_come(nodes: Any, script: Any) -> None:
    job = nodes(2)
    job.start(0, "-n", "2", script(WAIT))
    until_listening(job.port)
    until_it_catches(signal.SIGTERM, job.processes[0].pid)
    job.processes[0].terminate()
    status, _, err = job.end(0)
    assert (status, err[:32]) == (143, "pycoll-run: ended by SIGTERM aft")


@pytest.mark.parametrize(
    ("n", "rooms", "per_node", "nodes"),
    [
        (4, [8, 8], None, [0, 0, 0, 0]),
        (10, [8, 8], None, [0] * 5 + [1] * 5),
        (10, [8, 2, 2], None, [0] * 8 + [1] * 2),
        (4, [2, 2], 2, [0, 0, 1, 1]),
        (3, [4, 4], 2, [0, 0, 1]),
        (6, [4, 2], 4, [0, 0, 0, 0, 1, 1]),
        (2, [2], 4, [0, 0]),
        (3, [1, 1, 1], 1, [0, 1, 2]),
    ],
)
def test_ranks_are_spread(n: int, rooms: list[int], per_node: int, nodes: list[int]) -> None:
    assert engines.spread(n, rooms, per_node) == nodes


@pytest.mark.parametrize(
    ("n", "rooms", "per_node", "told"),
    [
        (5, [2, 2], None, "room for 4 ranks on 2 nodes, not for 5"),
        (1, [], None, "room for 0 ranks"),
        (4, [2, 1], 2, "4 ranks, 2 a node, need 2 nodes.* room for 2, 1"),
        (4, [], 2, "room for none"),
    ],
)
def test_too_many_ranks_are_refused(n: int, rooms: list[int], per_node: int, told: str) -> None:
    with pytest.raises(Error, match=told):
        engines.spread(n, rooms, per_node)


@pytest.mark.parametrize("per_node", [0, -1, 1.5, True])
def test_per_node_is_a_number_of_ranks(per_node: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="per_node is a number of ranks"):
        engines.spread(2, [4], per_node)


def test_engines_that_are_not_installed_are_named() -> None:
    for name, needs in (("ray", "Ray: pip install ray"), ("dask", "Dask: pip install distributed")):
        code = (
            "import sys; sys.modules['ray'] = sys.modules['distributed'] = None\n"
            f"import pycoll.{name}"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"pycoll.{name} needs {needs}" in done.stderr
