"""Ranks that pycoll-run has not started: they are told by variables who they are, and meet."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from tiers import smoke

from pycoll._launcher import agent_socket, exchange, pmi
from pycoll._launcher.agent_socket import Ticket
from pycoll._support.environment import free_port
from pycoll.errors import BootstrapError

LIMIT_S = 30 * PATIENCE

SUM = """
import numpy as np, pycoll
comm = pycoll.init()
total = comm.all_reduce(np.full(100_000, comm.rank + 1.0))
assert (total == comm.size * (comm.size + 1) / 2).all()
local = comm.split_by_host()
assert local.size == comm.size and "shared_memory" in str(comm.explain("all_reduce", 8))
print(comm.rank, comm.node, comm.local_rank, comm.local_size, flush=True)
"""

# Waits in a collective until something goes wrong; says what, and when that was.
WAIT = """
import os, signal, sys, time
import pycoll
comm = pycoll.init()
comm.barrier()
print("ready", os.getpid(), flush=True)
try:
    if comm.rank == 1:
        BEFORE
    while True:
        comm.barrier()
        time.sleep(0.01)
except pycoll.PeerFailed as error:
    print(type(error).__name__, error.rank, str(error).splitlines()[0], flush=True)
    sys.exit(3)
"""


class Ranks:
    """Processes that have the variables of ranks."""

    def __init__(
        self, script: str, environments: list[Mapping[str, str]], stdin: int | None = None
    ) -> None:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOLL_", "SLURM_"))}
        self.environments = environments
        self.said: list[tuple[str, str]] = []
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                env={**own, **environment},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environment in environments
        ]

    def until_ready(self) -> None:
        """Wait for the first line of each."""
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready")

    def end(self) -> list[tuple[int, str, str]]:
        """Of each: exit status, standard output and standard error."""
        if not self.said:
            self.said = [process.communicate(timeout=LIMIT_S) for process in self.processes]
        return [(p.returncode, *both) for p, both in zip(self.processes, self.said, strict=True)]


def plain(size: int, **more: str) -> list[Mapping[str, str]]:
    """What somebody sets who has no launcher at all."""
    key, port = secrets.token_hex(32), free_port()
    shared = {"PYCOLL_KEY": key, "PYCOLL_RENDEZVOUS": f"tcp://127.0.0.1:{port}"}
    return [
        {"PYCOLL_RANK": str(r), "PYCOLL_SIZE": str(size), **shared, **more} for r in range(size)
    ]


def helper_pids(key: str) -> dict[int, str]:
    """The processes that carry on a job, by its key: number and command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environ = (folder / "environ").read_bytes()
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if key.encode() in environ and any(w.startswith("pycoll._launcher.") for w in words):
                found[int(folder.name)] = " ".join(words)
    return found


def helpers(key: str) -> list[str]:
    return list(helper_pids(key).values())


def until_no_helpers(key: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + PATIENCE * limit_s
    while left := helpers(key):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@smoke
def test_variables_alone_are_enough() -> None:
    environments = plain(4)
    ended = Ranks(SUM, environments).end()
    assert [status for status, *_ in ended] == [0] * 4, ended
    assert sorted(int(said.split()[1]) for _, said, _ in ended) == [0] * 4
    assert sorted(said.split()[2] for _, said, _ in ended) == ["0", "1", "2", "3"]
    assert {said.split()[3] for _, said, _ in ended} == {"4"}
    until_no_helpers(environments[0]["PYCOLL_KEY"])


@pytest.mark.parametrize(
    ("before", "status", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "its process ended without pycoll.finalize"),
        ("raise ValueError('mine')", 1, "raised ValueError"),
        ("sys.exit(0)", 0, "rank 1 is needed, but has left"),
    ],
)
def test_the_end_of_a_rank_is_told_to_the_others(before: str, status: int, told: str) -> None:
    environments = plain(3)
    ended = Ranks(WAIT.replace("BEFORE", before), environments).end()
    assert [s for s, *_ in ended] == [3, status, 3], ended
    for _, said, _ in (ended[0], ended[2]):
        assert said.splitlines()[-1].startswith("PeerFailed 1 ")
        assert told in said
    until_no_helpers(environments[0]["PYCOLL_KEY"])


EARLY = """
import sys, time
import pycoll
comm = pycoll.init()
others = comm.split(int(comm.rank > 0))
if comm.rank:
    for _ in range(20):
        others.barrier()
        time.sleep(0.05)
print(time.monotonic(), flush=True)
"""


def test_rank_0_ends_after_all_others() -> None:
    ranks = Ranks(EARLY, plain(3))
    first, *others = (os.pidfd_open(process.pid) for process in ranks.processes)
    try:
        waiting = {first, *others}
        order = []
        while waiting:
            ready = select.select(waiting, [], [], LIMIT_S)[0]
            assert ready
            order += sorted(ready, key=lambda pidfd: pidfd == first)
            waiting -= set(ready)
        assert order[-1] == first
    finally:
        for pidfd in (first, *others):
            os.close(pidfd)
    ended = ranks.end()
    assert [status for status, *_ in ended] == [0] * 3, ended
    said = [float(text) for _, text, _ in ended]
    assert said[0] + 0.5 < min(said[1:])  # it was ready long before


def test_rank_0_does_not_wait_for_others_if_it_fails() -> None:
    script = """
import sys, time
import pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 0:
    raise ValueError("mine")
sys.stdin.read()  # in something that is not pycoll
"""
    ranks = Ranks(script, plain(2), stdin=subprocess.PIPE)
    assert ranks.processes[0].wait(LIMIT_S) == 1
    assert ranks.processes[1].poll() is None
    for process in reversed(ranks.processes):  # who has rank 0's standard error ends with the last
        process.communicate(timeout=LIMIT_S)
    assert [process.returncode for process in ranks.processes] == [1, 0]


def test_a_job_may_have_one_rank() -> None:
    script = "import pycoll; comm = pycoll.init(); print(comm.rank, comm.size, comm.all_reduce(5))"
    ((status, said, text),) = Ranks(script, plain(1)).end()
    assert (status, said) == (0, "0 1 5\n"), text


def test_signals_to_everything_of_a_job_end_only_its_ranks() -> None:
    environments = plain(2)
    ranks = Ranks(WAIT.replace("BEFORE", "pass"), environments)
    ranks.until_ready()
    for pid in helper_pids(environments[0]["PYCOLL_KEY"]):
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGTERM)
    ranks.processes[1].kill()
    (status, said, _), _ = ranks.end()
    assert status == 3
    assert "PeerFailed 1 rank 1 failed: its process ended" in said


def test_abort_ends_the_others_and_gives_its_own_status() -> None:
    ended = Ranks(WAIT.replace("BEFORE", "comm.abort(7)"), plain(3)).end()
    assert [status for status, *_ in ended] == [-signal.SIGTERM, 7, -signal.SIGTERM]


@pytest.mark.parametrize("which", ["meeting", "adopting"])
def test_the_end_of_what_serves_the_job_is_told(which: str) -> None:
    environments = plain(2)
    key = environments[0]["PYCOLL_KEY"]
    ranks = Ranks(WAIT.replace("BEFORE", "pass"), environments)
    ranks.until_ready()
    for pid, line in helper_pids(key).items():
        if f"pycoll._launcher.{which}" in line:
            os.kill(pid, signal.SIGKILL)
    for status, said, _ in ranks.end():
        assert status == 3
        assert "PeerFailed 0 rank 0 failed: its meeting process" in said
    until_no_helpers(key, 20.0)


@pytest.fixture(autouse=True, scope="module")
def incomplete() -> Iterator[dict[int, Ranks]]:
    """Ranks by the one that never comes; they wait for it while other tests run."""
    script = f"import pycoll\npycoll.init(timeout={4 * PATIENCE})"
    two, four = plain(2), plain(4)
    jobs = {0: Ranks(script, two[1:]), 2: Ranks(script, [*four[:2], four[3]])}
    yield jobs
    for ranks in jobs.values():
        for process in ranks.processes:
            process.kill()
        ranks.end()


def test_who_is_missing_is_named(incomplete: dict[int, Ranks]) -> None:
    for status, _, text in incomplete[2].end():
        assert status == 1
        assert re.search(r"BootstrapError.*rank 2 of 4 (has|had) ", text, re.DOTALL)
    until_no_helpers(incomplete[2].environments[0]["PYCOLL_KEY"])


def test_without_rank_0_the_others_say_where_they_have_looked(incomplete: Any) -> None:
    (ended,) = incomplete[0].end()
    port = incomplete[0].environments[0]["PYCOLL_RENDEZVOUS"].rpartition(":")[2]
    assert f"cannot reach rank 0: 127.0.0.1 port {port}: Connection refused" in ended[2]


def test_a_port_that_is_taken_is_named() -> None:
    environments = plain(2)
    with socket.create_server(("", int(environments[0]["PYCOLL_RENDEZVOUS"].rpartition(":")[2]))):
        (ended,) = Ranks("import pycoll\npycoll.init(timeout=20)", environments[:1]).end()
    assert re.search(r"cannot listen at port \d+: Address already in use", ended[2])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"PYCOLL_RANK": "0"}, "another process, on .*, is rank 0 already"),
        ({"PYCOLL_SIZE": "3"}, "it says that the job has 3 ranks, rank 0 says 2"),
    ],
)
def test_who_does_not_belong_is_turned_away(change: dict[str, str], told: str) -> None:
    first, second = plain(2)
    ranks = Ranks("import pycoll\npycoll.init(timeout=60)", [first])
    agent_is_there(first)
    late = Ranks(COME, [{**second, **change}]).end()
    ranks.processes[0].terminate()
    # Of two that say they are rank 0, the first to come is.
    texts = [text for _, _, text in (*late, *ranks.end())]
    assert re.search(told, "".join(texts)), texts
    until_no_helpers(first["PYCOLL_KEY"])


# Comes to the agent that is there, and opens no meeting of its own.
COME = """
import os
from pycoll._launcher import entering
from pycoll._launcher.agent_socket import Ticket
rank, size = int(os.environ["PYCOLL_RANK"]), int(os.environ["PYCOLL_SIZE"])
entering.enter(Ticket(bytes.fromhex(os.environ["PYCOLL_KEY"]), 0, []), rank, size, 20)
"""


def agent_is_there(environment: Mapping[str, str]) -> None:
    """Wait until the agent of this host is there."""
    deadline = time.monotonic() + LIMIT_S
    while not any("adopting" in line for line in helpers(environment["PYCOLL_KEY"])):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_process_of_a_rank_is_none() -> None:
    script = """
import os, subprocess, sys, pycoll
comm = pycoll.init()
child = "import pycoll; pycoll.init(timeout=60)"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
assert f"rank {comm.rank} is already process {os.getpid()}; this is process" in done.stderr
"""
    assert [status for status, *_ in Ranks(script, plain(2)).end()] == [0, 0]


def test_srun_and_a_key_are_enough() -> None:
    key = secrets.token_hex(32)
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "PYCOLL_KEY": key}
    environments = [{**shared, "SLURM_PROCID": str(rank)} for rank in range(2)]
    script = "import pycoll\nassert pycoll.init().all_reduce(1) == 2"
    assert [status for status, *_ in Ranks(script, environments).end()] == [0, 0]


def test_the_key_stands_on_no_command_line() -> None:
    environments = plain(2)
    key = environments[0]["PYCOLL_KEY"]
    ranks = Ranks(WAIT.replace("BEFORE", "pass"), environments)
    ranks.until_ready()
    lines = helpers(key)
    assert len(lines) == 2
    assert not any(key[:16] in line for line in lines)
    names = Path("/proc/net/unix").read_text()
    assert "pycoll-" in names
    assert key[:16] not in names
    for process in ranks.processes:
        process.kill()
    ranks.end()
    until_no_helpers(key)


# PMI-1.


class ProcessManager:
    """As much of PMI-1 as processes need, for so many of them."""

    def __init__(self, size: int) -> None:
        self.values: dict[str, str] = {}
        self._all_here = threading.Barrier(size)
        self.said: list[str] = []
        self._threads: list[threading.Thread] = []

    def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(ours,))
        thread.start()
        self._threads.append(thread)
        return theirs

    def _serve(self, end: socket.socket) -> None:
        with end, end.makefile("rwb", buffering=0) as lines:
            for line in lines:
                words = dict(w.partition("=")[::2] for w in line.decode().split())
                self.said.append(words["cmd"])
                lines.write(f"{self._answer(words)}\n".encode())

    def _answer(self, words: dict[str, str]) -> str:
        if words["cmd"] == "get_my_kvsname":
            return "cmd=my_kvsname kvsname=job"
        if words["cmd"] == "put":
            self.values[words["key"]] = words["value"]
            return "cmd=put_result rc=0 msg=success"
        if words["cmd"] == "barrier_in":
            self._all_here.wait(LIMIT_S)
            return "cmd=barrier_out rc=0"
        if words["cmd"] == "get":
            return f"cmd=get_result rc=0 value={self.values[words['key']]}"
        return f"cmd={words['cmd']}_response rc=0"

    def close(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def manager() -> Iterator[ProcessManager]:
    manager = ProcessManager(2)
    yield manager
    manager.close()


def test_pmi_gives_all_what_rank_0_has_given(manager: ProcessManager) -> None:
    found: dict[int, str] = {}

    def share(rank: int, text: str) -> None:
        with manager.open() as end:
            found[rank] = pmi.Pmi(end.fileno()).share(text, 10 * PATIENCE)

    threads = [
        threading.Thread(target=share, args=(0, "a text; of=words")),
        threading.Thread(target=share, args=(1, "")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "a text; of=words", 1: "a text; of=words"}
    assert manager.said.count("finalize") == 2


def test_a_launcher_that_ends_is_no_answer() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        with pytest.raises(OSError, match=r"Broken pipe|has ended at PMI's init"):
            pmi.Pmi(theirs.fileno()).share("", 1.0)


# What launchers say.


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"WORLD_SIZE": "4", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}, ("torchrun", 3, 4)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, ("torchrun (or what sets its variables)", 3, 4)),
        (
            {"WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"},
            ("srun", 1, 3),  # a variable of a batch script
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, ("Open MPI's mpirun", 2, 4)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("an MPI launcher (PMI)", 1, 2)),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}, ("srun", 1, 3)),
    ],
)
@smoke
def test_launchers_are_known_by_their_variables(
    environ: dict[str, str], found: tuple[str, int, int] | None
) -> None:
    assert exchange.find(environ) == found


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "two", "RANK": "1"},
        {"WORLD_SIZE": "2", "RANK": "2"},
        {"SLURM_STEP_NUM_TASKS": "3"},
        {"PMI_SIZE": "0", "PMI_RANK": "0"},
    ],
)
def test_variables_without_sense_are_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(BootstrapError, match="which makes no sense"):
        exchange.find(environ)


def test_a_ticket_is_read_as_it_was_written() -> None:
    ticket = Ticket(b"k" * 32, 4000, ["10.0.0.1", "fd77::1"])
    assert Ticket.read(ticket.text()) == ticket
    with pytest.raises(BootstrapError, match="is not of pycoll"):
        Ticket.read("something else")


def test_descriptors_come_with_a_message_however_many() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = os.pipe()
        agent_socket.send(ours, {"count": 300}, [pipe[0]] * 300)
        deadline = time.monotonic() + 10 * PATIENCE
        message = agent_socket.receive(theirs, deadline)
        found = agent_socket.receive_descriptors(theirs, message["count"], deadline)
        assert len(found) == 300
        assert not any(os.get_inheritable(descriptor) for descriptor in found)
        for descriptor in (*found, *pipe):
            os.close(descriptor)
