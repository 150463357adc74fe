"""pycoll-run called on every node of a job, and agents that call their launcher."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from patience import PATIENCE

import pycoll
from pycoll._functions import engines, function
from pycoll._launcher import network_line
from pycoll._launcher.agent_socket import Ticket
from pycoll._launcher.nodes import find_node
from pycoll._launcher.spawn import UNENCRYPTED
from pycoll._tools import k8s
from pycoll.errors import BootstrapError, Error

LIMIT_S = 30 * PATIENCE
RUN = [sys.executable, "-P", "-m", "pycoll._launcher"]

WHERE = """
import os, sys, numpy as np, pycoll
comm = pycoll.init()
assert comm.all_reduce(np.full(50_000, comm.rank + 1.0))[-1] == comm.size * (comm.size + 1) / 2
say = [comm.rank, comm.size, comm.node, comm.local_rank, comm.local_size, os.environ["SITE"]]
print(*say, sys.stdin.read(), flush=True)
"""
WAIT = """
import numpy as np, pycoll, time
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
while True:
    comm.all_reduce(np.ones(10))
    time.sleep(0.01)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Nodes of one job: a pycoll-run each, with an environment of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.key, self.port = secrets.token_hex(32), free_port()
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, node: int, *words: str, **more: str) -> subprocess.Popen[str]:
        own = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
        variables = {
            "PYCOLL_NODE": str(node),
            "PYCOLL_NODES": str(self.count),
            "PYCOLL_RENDEZVOUS": f"tcp://127.0.0.1:{self.port}",
            "PYCOLL_KEY": self.key,
            "SITE": f"site{node}",
            **more,
        }
        process = self.processes[node] = subprocess.Popen(
            [*RUN, *words],
            env={**own, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process

    def end(self, node: int, said: str | None = None) -> tuple[int, str, str]:
        """Wait for a node: exit status, standard output and standard error."""
        process = self.processes.pop(node)
        out, err = process.communicate(said, timeout=LIMIT_S)
        return process.returncode, out, err

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def nodes() -> Iterator[Callable[[int], Nodes]]:
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Nodes:
            made = Nodes(count)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def until(line: str, process: subprocess.Popen[str], count: int = 1) -> None:
    """Wait until so many lines of standard output have this in them."""
    assert process.stdout is not None
    while count:
        said = process.stdout.readline()
        assert said, "it has ended"
        count -= line in said


@pytest.mark.parametrize("first", [0, 1])
def test_nodes_find_each_other_whoever_is_first(nodes: Any, script: Any, first: int) -> None:
    job, path = nodes(2), script(WHERE)
    job.start(first, "-n", "3", path)
    if first == 0:
        until_listening(job.port)
    job.start(1 - first, "-n", "3", path)
    status, out, err = job.end(0, "from the terminal")
    assert (status, err.removeprefix(f"pycoll-run: {UNENCRYPTED}\n")) == (0, "")
    assert sorted(line.split(maxsplit=6) for line in out.splitlines()) == [
        ["0", "3", "0", "0", "2", "site0", "from the terminal"],
        ["1", "3", "0", "1", "2", "site0"],
        ["2", "3", "1", "0", "1", "site1"],  # an environment of its own, and no standard input
    ]
    assert job.end(1) == (0, "", "")


def test_the_ranks_of_all_nodes_encrypt_if_node_0_says_so(nodes: Any, script: Any) -> None:
    text = """
import pycoll
comm = pycoll.init()
assert comm.all_reduce(1) == 3
peers = comm._group.engine.transport.outside.peers.values()
found = {(t.name, t._keys is not None) for t in peers}
assert found == {("zmq", True)}, found
"""
    job, path = nodes(2), script(text)
    job.start(0, "--encrypt", "-n", "3", path)
    job.start(1, "-n", "3", path)
    assert [job.end(0), job.end(1)] == [(0, "", "")] * 2


def until_listening(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)) as connection,
        ):
            if connection.getpeername() != connection.getsockname():  # else it has met itself
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until_it_catches(signum: int, pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> signum - 1 & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_fails_ends_all_nodes(nodes: Any, script: Any) -> None:
    job = nodes(3)
    path = script("import pycoll, sys\ncomm = pycoll.init()\nsys.exit(7 * (comm.rank == 2))\n")
    for node in range(3):
        job.start(node, path, "-n", "3")  # options behind the script are its own
    status, _, err = job.end(0)
    assert status == 7
    assert re.search(r"pycoll-run: rank \d+ failed after .* s: exit status 7", err) is not None
    assert [job.end(node)[0] for node in (1, 2)] == [0, 0]


def test_a_node_that_is_ended_is_named_at_once(nodes: Any, script: Any) -> None:
    job, path = nodes(2), script(WAIT)
    for node in range(2):
        job.start(node, "-n", "2", path)
    until("ready", job.processes[0], 2)
    job.processes[1].terminate()
    status, _, err = job.end(0)
    assert status == 1, err
    why = "lost with its host .*: its agent was ended by SIGTERM"
    assert re.search(rf"rank 1 failed after .* s: {why}", err), err
    job.end(1)


def test_a_node_that_is_killed_takes_only_its_own_ranks_along(nodes: Any, script: Any) -> None:
    job, path = nodes(2), script(WAIT)
    for node in range(2):
        job.start(node, "-n", "2", path)
    until("ready", job.processes[0], 2)
    job.processes[1].kill()  # its guardian sweeps, and both nodes are on this machine
    status, _, err = job.end(0)
    assert status == 1, err
    assert re.search("rank 1 failed after .* s: lost with its host .*: no sign of life", err), err
    job.end(1)


def test_the_end_of_node_0_ends_the_others(nodes: Any, script: Any) -> None:
    job, path = nodes(2), script(WAIT)
    for node in range(2):
        job.start(node, "-n", "2", path)
    until("ready", job.processes[0], 2)
    job.processes[0].kill()
    status, _, err = job.end(1)
    assert (status, err) == (2, "pycoll-run: node 1: node 0 is gone, or a signal has ended this\n")


def test_a_node_that_is_there_already_is_named(nodes: Any, script: Any) -> None:
    job, path = nodes(2), script(WAIT)
    for node in range(2):
        job.start(node, "-n", "2", path)
    until("ready", job.processes[0], 2)
    one = job.processes.pop(1)
    try:
        job.start(1, "-n", "2", path)
        status, _, err = job.end(1)
        assert status == 2
        assert "is node 1 already" in err
    finally:
        job.processes[1] = one
    job.start(5, "-n", "2", path, PYCOLL_NODES="7")
    assert job.end(5)[2] == "pycoll-run: the job has no node 5\n"


def test_a_node_with_another_key_is_not_let_in(nodes: Any, script: Any) -> None:
    job, path = nodes(2), script(WAIT)
    job.start(0, "-n", "2", path)
    until_listening(job.port)
    job.start(1, "-n", "2", path, PYCOLL_KEY="ab" * 32)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.end(1)[0] in (2, -signal.SIGTERM)  # it may not have been there yet


def test_a_port_that_is_taken_is_named(nodes: Any, script: Any) -> None:
    job = nodes(2)
    with socket.create_server(("", job.port)):
        job.start(0, "-n", "2", script(WAIT))
        status, _, err = job.end(0)
    assert status == 2
    assert f"node 0 cannot listen at port {job.port} (PYCOLL_RENDEZVOUS)" in err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"PYCOLL_NODE": ""}, "is set, but not PYCOLL_NODE"),
        ({"PYCOLL_KEY": "", "PYCOLL_NODE": ""}, "but not PYCOLL_NODE, PYCOLL_KEY"),
        ({"PYCOLL_NODE": "2"}, "PYCOLL_NODE is 2, of 2 nodes"),
        ({"PYCOLL_NODE": "x"}, "PYCOLL_NODE is x, of 2 nodes"),
        ({"PYCOLL_RENDEZVOUS": "node1"}, "not as tcp://HOST:PORT"),
        ({"PYCOLL_KEY": "secret"}, "not a hexadecimal key"),
    ],
)
def test_variables_without_sense_are_named(change: dict[str, str], told: str) -> None:
    variables = {
        "PYCOLL_NODE": "0",
        "PYCOLL_NODES": "2",
        "PYCOLL_RENDEZVOUS": "tcp://a:1",
        "PYCOLL_KEY": "ab" * 32,
    }
    with pytest.raises(Error, match=told):
        find_node({**variables, **change})


def test_ranks_and_single_nodes_are_no_nodes() -> None:
    assert find_node({}) is None
    assert find_node({"PYCOLL_NODES": "2", "PYCOLL_JOB": "x"}) is None
    alone = {"PYCOLL_NODES": "1", "PYCOLL_NODE": "0", "PYCOLL_KEY": "ab" * 32}
    assert find_node({**alone, "PYCOLL_RENDEZVOUS": "tcp://a:1"}) is None


def test_every_node_has_a_rank() -> None:
    node = find_node(
        {
            "PYCOLL_NODE": "0",
            "PYCOLL_NODES": "4",
            "PYCOLL_RENDEZVOUS": "tcp://a:1",
            "PYCOLL_KEY": "ab" * 32,
        }
    )
    assert node is not None
    hosts, by_rank = node.hosts(5)
    assert by_rank == [0, 0, 1, 2, 3]
    assert [host.calls for host in hosts] == [False, True, True, True]
    with pytest.raises(Error, match="-n 3 is too little"):
        node.hosts(3)


# Kubernetes.


def manifest(*words: str) -> str:
    parser = argparse.ArgumentParser()
    k8s.add_options(parser)
    return k8s.manifest(parser.parse_args(["manifest", "--image", "me/train", *words]))


def test_a_manifest_has_what_the_nodes_need() -> None:
    text = manifest("--name", "train", "--nodes", "3", "-n", "12", "--", "--bind", "core", "t.py")
    assert [line for line in text.splitlines() if line.startswith("kind")] == [
        'kind: "Secret"',
        'kind: "Service"',
        'kind: "Job"',
    ]
    key = re.search(r'key: "([0-9a-f]{64})"', text)
    assert key is not None
    assert key[1] not in manifest("--name", "train", "t.py")
    assert 'value: "tcp://train-0.train:29400"' in text
    words = re.findall(r'^            - "(.*)"$', text, re.MULTILINE)
    assert words == ["pycoll-run", "-n", "12", "--bind", "core", "t.py"]


def test_what_looks_like_something_else_in_yaml_stays_text() -> None:
    text = manifest("--", "t.py", "no", "1e3", "a: b", "#", 'say "hi"')
    for word in ('"no"', '"1e3"', '"a: b"', '"#"', r'"say \"hi\""'):
        assert f"            - {word}\n" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--name", "Train", "t.py"], "lower-case"),
        (["--name", "t" * 60, "t.py"], "at most 52"),
        (["-n", "1", "t.py"], "each needs a rank"),
        (["--nodes", "0", "t.py"], "each needs a rank"),
        (["--gpus", "-1", "t.py"], "less than none"),
        ([], "which program"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        manifest(*words)


# Engines: a pool of threads stands for the nodes, all of which are here.


class Pool:
    """An `engines.Cluster`."""

    def __init__(self, serve: Callable[[engines.Work], Any] = engines.serve) -> None:
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
    options = function.checked_options(fn, len(nodes), timeout, None)
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

    limit_s = 3.0 * PATIENCE  # rank 1 must be in its barrier before
    with pytest.raises(pycoll.OperationTimeout, match=f"took longer than {limit_s:g} s") as caught:
        run_on(Pool(), fn, [0, 1], timeout=limit_s)
    assert "rank 1: barrier" in str(caught.value)


def test_a_node_that_cannot_start_is_an_error_at_once() -> None:
    def serve(work: engines.Work) -> Any:
        if work.node == 1:
            raise RuntimeError("no room in /tmp")
        return engines.serve(work)

    began = time.monotonic()
    with pytest.raises(Error, match="the pool: no room in /tmp"):
        run_on(Pool(serve), print, [0, 1])
    assert time.monotonic() - began < LIMIT_S


def test_a_node_whose_launcher_is_gone_says_so() -> None:
    work = engines.Work(f"{'ab' * 32};{free_port()};127.0.0.1", 0, 1, {"path": sys.path}, [b""])
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


def test_time_passes_before_all_nodes_have_come() -> None:
    def serve(work: engines.Work) -> Any:
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
