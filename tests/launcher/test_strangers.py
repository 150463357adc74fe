"""Strangers at the ports of a job cost no descriptor, and a launcher without any ends its job."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from pycoll._launcher import guardian, rendezvous_router
from pycoll._launcher.job_spec import Options
from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._launcher.rendezvous_server import Server
from pycoll._launcher.spawn import Job
from pycoll._rendezvous.client import Client
from pycoll._rendezvous.wire import late_question, unpack
from pycoll._transports.zeromq import ZmqTransport
from pycoll._transports.zmq_sockets import Sockets
from pycoll.errors import TransportError

RUN = [sys.executable, "-m", "pycoll._launcher"]
LIMIT_S = 60
MANY = 1100  # more than a process may open under the usual limit, 1024
# What libzmq says first.
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"

FLOODED = f"""
import os, resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if os.environ["PYCOLL_RANK"] == "0":
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = os.environ["PYCOLL_RENDEZVOUS"].removeprefix("tcp://").split(":")
    address = host, int(port)

    def silent(count):
        return [socket.create_connection(address) for _ in range(count)]

    def descriptors():
        return len(os.listdir(f"/proc/{{os.getppid()}}/fd"))

    before = silent({MANY})
import pycoll
comm = pycoll.init()
if comm.rank == 0:
    after = silent({MANY})
    assert descriptors() < 200, descriptors()
    # Nobody can join any more: who says something is cut.
    after[0].sendall({SIGNATURE!r})
    try:
        assert after[0].recv(100) == b""
    except ConnectionResetError:
        pass
comm.barrier()
if comm.rank == 1:
    os._exit(3)
comm.recv(1)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_launcher_that_silent_connections_flood_names_the_cause(
    tmp_path: Path, transport: str
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * MANY + 100:
        pytest.skip("too few open files are allowed here (ulimit -Hn)")
    script = tmp_path / "script.py"
    script.write_text(FLOODED)
    limited = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh"]
    done = subprocess.run(
        [*limited, *RUN, "-n", "2", "--transport", transport, str(script)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "rank 1 failed" in done.stderr
    assert "exit status 3" in done.stderr
    assert "AssertionError" not in done.stderr, done.stderr


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_silent_connections_take_no_descriptor_of_a_rank() -> None:
    with ZmqTransportOpened() as transport:
        host, port = transport.address()["endpoint"].removeprefix("tcp://").split(":")
        before = num_descriptors()
        strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
        # One that speaks is heard after all that were silent before.
        strangers[0].sendall(SIGNATURE)
        assert strangers[0].recv(1) == SIGNATURE[:1]
        taken = num_descriptors() - before
        for stranger in strangers:
            stranger.close()
        assert taken <= 101


class ZmqTransportOpened:
    def __enter__(self) -> ZmqTransport:
        self.transport = ZmqTransport(0)
        return self.transport

    def __exit__(self, *exc_info: object) -> None:
        self.transport.close(0.0)


def test_who_begins_to_speak_and_stops_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_router, "_HANDSHAKE_MS", 50)
    over = threading.Event()
    with Server(2, bytes(32)) as server:

        def serve() -> None:
            while not over.is_set():
                select.select([server.fileno()], [], [], 0.05)
                server.progress()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            host, port = server.endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port)), LIMIT_S) as stranger:
                stranger.sendall(SIGNATURE)
                with suppress(ConnectionResetError):
                    while stranger.recv(100):  # the launcher's greeting, then the end
                        pass
        finally:
            over.set()
            thread.join()


@pytest.fixture
def met() -> Iterator[Server]:
    """The launcher's end of a job of one rank, which has met."""
    key = bytes(range(32))
    with Server(1, key) as server, ThreadPoolExecutor(1) as pool:
        variable = link_variable(server.open_link())
        client = Client(server.endpoint, key, 0, 1, link=variable)
        joined = pool.submit(client.join, {}, LIMIT_S)
        while not joined.done():
            server.progress()
        yield server
        client.close(0.0)


def answer(server: Server, question: bytes) -> bytes:
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as stranger:
        stranger.sendall(question)
        while not select.select([stranger], [], [], 0.01)[0]:
            server.progress()
        with suppress(ConnectionResetError):
            return stranger.recv(1 << 16)
        return b""


def test_only_who_has_the_key_is_told_which_processes_are_the_ranks(met: Server) -> None:
    question = late_question(bytes(range(32)))
    assert str(os.getpid()).encode() not in answer(met, b"?")
    assert answer(met, late_question(bytes(32))) == b""
    assert answer(met, question[:-1]) == b""
    assert unpack(answer(met, question), 16) == ("late", {"pids": [os.getpid()]})


def test_who_comes_where_no_descriptor_is_left_does_not_keep_the_launcher_awake(
    met: Server,
) -> None:
    host, port = met.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as stranger:
        stranger.sendall(b"?")
        assert select.select([met.fileno()], [], [], LIMIT_S)[0]
        with no_descriptors():
            met.progress()
        assert not select.select([met.fileno()], [], [], 0)[0]


def test_a_launcher_that_zeromq_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(rendezvous_router.Router, "_open", fail)
    before = num_descriptors()
    with Server(2, bytes(range(32))) as server:
        assert answer(server, b"hello") == b""
        assert "the launcher cannot serve" in str(server._over)
    assert num_descriptors() == before


def test_a_rank_that_zeromq_fails_says_so_and_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(Sockets, "_open", fail)
    before = num_descriptors()
    with pytest.raises(TransportError, match=r"rank 3 cannot listen on .*Too many open files"):
        ZmqTransport(3)
    assert num_descriptors() == before


@contextmanager
def no_descriptors() -> Iterator[list[int]]:
    """Take all that this process may have; gives those that were taken."""
    taken: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, num_descriptors() + 300), hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_sweep_that_cannot_look_at_processes_says_so_and_kills_the_sessions() -> None:
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as process:
        with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
            guardian.sweep({process.pid}, "no-job")
        assert process.wait() == -9


# A daemon in a session of its own, which only its environment gives away; it prints its number.
LEAVES_A_DAEMON = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.closerange(0, 3)
    while True:
        signal.pause()
sys.stdin.read()
sys.exit(3)
"""


@pytest.mark.parametrize("has_spare", [True, False])
def test_a_launcher_without_descriptors_ends_everything_and_gives_the_cause(
    tmp_path: Path, has_spare: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES_A_DAEMON)
    holding: list[Any] = []
    daemons: list[int] = []
    end, go = os.pipe()

    def take(rank: int, line: bytes) -> None:
        daemons.append(int(line))
        os.close(go)
        holding.append(no_descriptors())
        taken = holding[0].__enter__()
        if not has_spare:  # what was kept for the end is gone, too
            taken += job._hosts._here._spare
            job._hosts._here._spare.clear()

    job = Job(
        [sys.executable, str(script)], Options(1), stdin=end, stdout=take, stderr=lambda *_: None
    )
    try:
        outcome = job.run()
    finally:
        os.close(end)
        for held in holding:
            held.__exit__(None, None, None)
    assert (outcome.status, outcome.culprit) == (3, 0)
    assert "rank 0 failed" in outcome.report
    with suppress(FileNotFoundError):  # it may still be a zombie, of whoever adopts orphans here
        assert Path(f"/proc/{daemons[0]}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
