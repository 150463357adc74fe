"""The meeting of ranks: a real server, and real clients in threads and processes, on loopback.

What does not depend on the way to the server is tested over both: ZeroMQ, and inherited sockets.
"""

from __future__ import annotations

import math
import os
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE

from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._launcher.rendezvous_server import Notice, Relayed, Server
from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.client import Client, Event
from pycoll._rendezvous.wire import WIRE_VERSION
from pycoll._rendezvous.zmq_keys import derive_keys
from pycoll.errors import BootstrapError

KEY = bytes(range(32))
DEADLINE_S = 30.0 * PATIENCE  # for what must happen; none of the tests waits for it to pass


class Launcher:
    """A server in the loop it is made for: a thread that sleeps on its descriptor, for ever."""

    def __init__(self, size: int) -> None:
        self.server = Server(size, KEY)
        self.endpoint = self.server.endpoint
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self.server.fileno(), select.POLLIN)
        poll.register(self._fd, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._fd in ready:
                os.eventfd_read(self._fd)
                while not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return
                    command()
            if self.server.fileno() in ready:
                for notice in self.server.progress():
                    self._notices.put(notice)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` in the loop, and return its result."""
        future: Future[Any] = Future()

        def command() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as exc:
                future.set_exception(exc)

        self._commands.put(command)
        os.eventfd_write(self._fd, 1)
        return future.result(DEADLINE_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Hold the loop, as if the launcher had got SIGSTOP."""
        go, holding = threading.Event(), threading.Event()

        def hold() -> None:
            holding.set()
            go.wait(DEADLINE_S)

        self._commands.put(hold)
        os.eventfd_write(self._fd, 1)
        assert holding.wait(DEADLINE_S)
        yield
        go.set()

    def rank_ended(self, rank: int, reason: str, clean: bool) -> None:
        self.call(self.server.rank_ended, rank, reason, clean)

    def notice(self, kind: str) -> Notice:
        """Wait for the next notice of this kind; those before it are dropped."""
        while True:
            notice = self._notices.get(timeout=DEADLINE_S)
            if notice.kind == kind:
                return notice

    def has_notice(self) -> bool:
        return not self._notices.empty()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._commands.put(None)
        os.eventfd_write(self._fd, 1)
        self._thread.join()
        os.close(self._fd)
        self.server.close()


class Job:
    """What a test starts, ended after it. Its clients go the way that is named to the server."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._launchers: dict[str, Launcher] = {}
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(64))

    def launcher(self, size: int) -> Launcher:
        launcher = Launcher(size)
        self._stack.callback(launcher.close)
        self._launchers[launcher.endpoint] = launcher
        return launcher

    def client(self, endpoint: str, rank: int, size: int, **options: Any) -> Client:
        if self._way == "local" and endpoint in self._launchers:
            launcher = self._launchers[endpoint]
            options["link"] = link_variable(launcher.call(launcher.server.open_link))
        client = Client(endpoint, options.pop("key", KEY), rank, size, **options)
        self._stack.enter_context(client)
        return client

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pool.submit(function, *args)

    def joining(
        self, launcher: Launcher, rank: int, size: int, timeout_s: float = DEADLINE_S
    ) -> Future[Any]:
        """Join in a thread, and return once the server knows of it."""
        client = self.client(launcher.endpoint, rank, size)
        future = self.start(client.join, {}, timeout_s)
        while launcher.notice("joined").rank != rank:
            pass
        return future

    def meet(self, size: int) -> tuple[Launcher, list[Client]]:
        """Start a server and all ranks of a job; return when they have met."""
        launcher = self.launcher(size)
        clients = [self.client(launcher.endpoint, rank, size) for rank in range(size)]
        for future in [self.start(client.join, {}, DEADLINE_S) for client in clients]:
            future.result()
        for _ in clients:
            launcher.notice("joined")
        return launcher, clients

    def stranger(self, endpoint: str) -> Stranger:
        stranger = Stranger(endpoint)
        self._stack.callback(stranger.close)
        return stranger

    def close(self) -> None:
        self._stack.close()


class Stranger:
    """A peer that has the job's key, but not our manners."""

    def __init__(self, endpoint: str) -> None:
        keys = derive_keys(KEY)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_publickey = keys.client_public
        self.socket.curve_secretkey = keys.client_secret
        self.socket.curve_serverkey = keys.server_public
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def ask(self, kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Send a message and return the first answer there is."""
        self.send(wire.pack(kind, fields))
        assert self.socket.poll(int(DEADLINE_S * 1000))
        return wire.unpack(self.socket.recv(), 64)

    def join(self, launcher: Launcher, rank: int, size: int) -> None:
        """Join, and do not wait for the others."""
        self.send(wire.pack("join", join_fields(rank=rank, size=size)))
        while launcher.notice("joined").rank != rank:
            pass

    def answers_until_heard(self) -> list[tuple[str, dict[str, Any]]]:
        """Wait until the server has handled all that was sent; return what it has sent."""
        answers = [self.ask("bye")]
        while answers[-1][0] != "bye":
            assert self.socket.poll(int(DEADLINE_S * 1000))
            answers.append(wire.unpack(self.socket.recv(), 64))
        return answers[:-1]

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def join_fields(**fields: Any) -> dict[str, Any]:
    return {"version": WIRE_VERSION, "rank": 0, "size": 2, "pid": 5, "info": b"\x80", **fields}


@pytest.fixture(params=["zmq", "local"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    one = Job(request.param)
    yield one
    one.close()


by_zmq = pytest.mark.parametrize("job", ["zmq"], indirect=True)


def is_readable(fd: int, timeout_s: float = DEADLINE_S) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def events(client: Client, count: int = 1) -> list[Event]:
    """Sleep on the descriptor, as the owner does, until so many events have come."""
    got: list[Event] = []
    while len(got) < count:
        assert is_readable(client.fileno()), f"no more than {got}"
        got += client.progress()
    return got


def settled(client: Client) -> list[Event]:
    """Return all events that the server pushed before this moment."""
    assert client.ask_table(DEADLINE_S)
    return client.progress()


def pythonpath() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(wire.__file__).parents[2])}


# Meeting.


def test_every_rank_gets_what_each_has_said_by_rank(job: Job) -> None:
    launcher = job.launcher(5)
    infos = [{"rank": rank, "blob": bytes([rank]), "name": f"host {rank}"} for rank in range(5)]
    clients = [job.client(launcher.endpoint, rank, 5) for rank in range(5)]
    futures = [job.start(client.join, infos[r], DEADLINE_S) for r, client in enumerate(clients)]
    assert [future.result() for future in futures] == [infos] * 5


def test_one_rank_meets_itself_even_with_no_end_of_patience(job: Job) -> None:
    assert job.client(job.launcher(1).endpoint, 0, 1).join({"a": 1}, math.inf) == [{"a": 1}]


def test_the_launcher_hears_of_each_process_that_joined(job: Job) -> None:
    launcher = job.launcher(2)
    assert launcher.call(launcher.server.missing) == [0, 1]
    job.joining(launcher, 1, 2)
    assert launcher.call(launcher.server.missing) == [0]
    job.client(launcher.endpoint, 0, 2).join({}, DEADLINE_S)
    assert launcher.notice("joined") == Notice("joined", 0, {"pid": os.getpid()})
    assert launcher.call(launcher.server.missing) == []


@by_zmq
def test_clients_may_share_a_context(job: Job) -> None:
    launcher = job.launcher(2)
    with zmq.Context() as context:
        clients = [job.client(launcher.endpoint, r, 2, context=context) for r in range(2)]
        for future in [job.start(client.join, {}, DEADLINE_S) for client in clients]:
            future.result()
        for client in clients:
            client.close(DEADLINE_S)
        assert not context.closed


def test_who_is_missing_is_named_at_the_deadline(job: Job) -> None:
    launcher = job.launcher(4)
    client = job.client(launcher.endpoint, 1, 4)
    with pytest.raises(BootstrapError, match=r"rank 1 waited 0\.\d s .*ranks 0, 2, 3 of 4 have"):
        client.join({}, 0.3)


def test_one_missing_rank_is_named_in_the_singular(job: Job) -> None:
    launcher = job.launcher(2)
    with pytest.raises(BootstrapError, match="rank 0 of 2 has not joined"):
        job.client(launcher.endpoint, 1, 2).join({}, 0.3)


def test_only_the_lowest_rank_present_prints_who_is_missing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = job.launcher(4)
    clients = [job.client(launcher.endpoint, rank, 4, notice_s=0.1) for rank in (1, 2)]
    for future in [job.start(client.join, {}, 0.75) for client in clients]:
        assert isinstance(future.exception(), BootstrapError)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith("pycoll: rank 1 has waited 0.")
        assert line.endswith("s for ranks 0, 3 of 4 to join the job")


def test_a_rank_that_gave_up_may_join_again(job: Job) -> None:
    launcher = job.launcher(2)
    impatient = job.client(launcher.endpoint, 0, 2)
    with pytest.raises(BootstrapError):
        impatient.join({}, 0.2)
    with pytest.raises(RuntimeError, match="joins once"):
        impatient.join({}, 0.2)
    impatient.close(DEADLINE_S)
    assert launcher.call(launcher.server.missing) == [0, 1]
    again = job.client(launcher.endpoint, 0, 2)
    both = [again, job.client(launcher.endpoint, 1, 2)]
    assert [len(f.result()) for f in [job.start(c.join, {}, DEADLINE_S) for c in both]] == [2, 2]


def test_a_rank_that_gave_up_and_ended_has_ended(job: Job) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    stranger.join(launcher, 1, 2)
    launcher.rank_ended(1, "exit status 1", False)
    stranger.send(wire.pack("withdraw", {}))
    stranger.answers_until_heard()
    assert launcher.call(launcher.server.table)[1] == "rank 1: ended (exit status 1)"


def test_a_rank_that_gave_up_when_all_had_joined_has_failed(job: Job) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    stranger.join(launcher, 1, 2)
    client = job.client(launcher.endpoint, 0, 2)
    client.join({}, DEADLINE_S)
    stranger.send(wire.pack("withdraw", {}))
    assert events(client)[0].fields["reason"] == "gave up waiting for the job to meet"


@pytest.mark.parametrize("clean", [True, False])
def test_a_rank_that_ended_before_it_joined_ends_the_meeting_for_all(job: Job, clean: bool) -> None:
    launcher = job.launcher(3)
    waiting = job.joining(launcher, 0, 3)
    launcher.rank_ended(2, "exit status 3", clean)
    with pytest.raises(BootstrapError, match=r"rank 2 ended before it joined.*: exit status 3"):
        waiting.result(DEADLINE_S)
    with pytest.raises(BootstrapError, match=r"rank 2 ended before it joined.*: exit status 3"):
        job.client(launcher.endpoint, 1, 3).join({}, DEADLINE_S)
    with pytest.raises(BootstrapError, match="rank 2 has already ended: exit status 3"):
        job.client(launcher.endpoint, 2, 3).join({}, DEADLINE_S)


def test_a_rank_that_joined_and_died_ends_the_meeting(job: Job) -> None:
    launcher = job.launcher(3)
    waiting = job.joining(launcher, 0, 3)
    job.stranger(launcher.endpoint).join(launcher, 1, 3)
    launcher.rank_ended(1, "killed by signal 9 (SIGKILL)", False)
    with pytest.raises(BootstrapError, match=r"rank 1 ended before all ranks had joined.*SIGKILL"):
        waiting.result(DEADLINE_S)


@by_zmq
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "raised",
            {"error": "ValueError", "text": "Traceback: bad", "peer_failed": False},
            "rank 1 failed before all .*: raised ValueError\nTraceback: bad",
        ),
        ("abort", {"code": 3}, r"rank 1 failed before all .*: called abort\(3\)"),
        ("left", {"links": []}, "rank 1 left before all"),
    ],
)
def test_a_rank_that_goes_before_all_have_joined_ends_the_meeting(
    job: Job, kind: str, fields: dict[str, Any], message: str
) -> None:
    launcher = job.launcher(3)
    waiting = job.joining(launcher, 0, 3)
    stranger = job.stranger(launcher.endpoint)
    stranger.join(launcher, 1, 3)
    stranger.send(wire.pack(kind, fields))
    with pytest.raises(BootstrapError, match=message):
        waiting.result(DEADLINE_S)
    assert launcher.notice(kind).rank == 1


def test_a_rank_number_twice_names_both_processes_and_leaves_the_first_alone(job: Job) -> None:
    launcher = job.launcher(2)
    waiting = job.joining(launcher, 1, 2)
    script = (
        "import sys, os; from pycoll._rendezvous.client import Client\n"
        "c = Client(sys.argv[1], bytes.fromhex(sys.argv[2]), 1, 2)\n"
        "try: c.join({}, 30)\n"
        "except Exception as e: print(os.getpid(), e)\n"
        "c.close(5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, launcher.endpoint, KEY.hex()],
        env=pythonpath(), capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    pid, message = done.stdout.split(maxsplit=1)
    assert f"rank 1 is already process {os.getpid()}; this is process {pid}" in message
    assert "must not call init()" in message
    job.client(launcher.endpoint, 0, 2).join({}, DEADLINE_S)
    assert len(waiting.result(DEADLINE_S)) == 2


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("version", WIRE_VERSION + 1, f"version {WIRE_VERSION + 1} .* version {WIRE_VERSION}:"),
        ("version", None, "speaks version None"),
        ("size", 3, "is rank 0 of 3, but this job has 2 ranks"),
        ("rank", 2, "not understood"),
        ("rank", -1, "not understood"),
        ("rank", "1", "not understood"),
        ("pid", 0, "not understood"),
        ("info", {}, "not understood"),
        ("info", bytes(wire.MAX_INFO_NBYTES + 1), "not understood"),
    ],
)
def test_a_join_that_does_not_fit_is_refused_with_the_reason(
    job: Job, field: str, value: object, answer: str
) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    kind, fields = stranger.ask("join", **join_fields(**{field: value}))
    assert kind == "refused"
    assert re.search(answer, fields["message"])
    assert launcher.call(launcher.server.missing) == [0, 1]


@by_zmq
def test_info_that_is_too_large_is_an_error_before_anything_is_sent(job: Job) -> None:
    client = job.client("tcp://127.0.0.1:1", 0, 2)
    with pytest.raises(ValueError, match="65536 bytes"):
        client.join({"blob": bytes(wire.MAX_INFO_NBYTES)}, DEADLINE_S)


@by_zmq
def test_64_clients_join_in_less_than_a_second_of_the_servers_processor_time(job: Job) -> None:
    script = """if True:
        import select, sys, time
        from pycoll._launcher.rendezvous_server import Server
        server = Server(64, bytes.fromhex(sys.argv[1]))
        print(server.endpoint, flush=True)
        start, poll = time.process_time(), select.poll()
        poll.register(server.fileno(), select.POLLIN)
        poll.register(0, select.POLLIN)
        while 0 not in dict(poll.poll()):
            server.progress()
        print(time.process_time() - start)
        server.close()
    """
    with subprocess.Popen(
        [sys.executable, "-c", script, KEY.hex()],
        env=pythonpath(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        clients = [job.client(endpoint, rank, 64) for rank in range(64)]
        for future in [job.start(client.join, {}, DEADLINE_S) for client in clients]:
            assert len(future.result(DEADLINE_S)) == 64
        output, _ = server.communicate("", DEADLINE_S)
    assert float(output) < 1.0


# Reaching the launcher, and trust.


@by_zmq
def test_a_wrong_key_is_said_quickly(job: Job) -> None:
    launcher = job.launcher(2)
    start = time.monotonic()
    with pytest.raises(BootstrapError, match=f"rank 1: {launcher.endpoint} refuses .* key"):
        job.client(launcher.endpoint, 1, 2, key=bytes(32)).join({}, DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S / 6


@by_zmq
def test_another_kind_of_server_is_said_quickly(job: Job) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(BootstrapError, match="refuses this process"):
            job.client(f"tcp://127.0.0.1:{port}", 1, 2).join({}, DEADLINE_S)


@by_zmq
def test_a_launcher_that_cannot_be_reached_is_named_at_the_deadline(job: Job) -> None:
    with socket.socket() as taken:  # bound, and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BootstrapError, match=rf"rank 1 waited 0\.\d s .*{endpoint} cannot be"):
            job.client(endpoint, 1, 2).join({}, 0.3)


@by_zmq
def test_a_launcher_that_is_silent_is_named_at_the_deadline(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BootstrapError, match=f"{endpoint} does not answer"):
            job.client(endpoint, 1, 2).join({}, 0.3)


@by_zmq
def test_a_launcher_that_is_stopped_is_named_at_the_deadline(job: Job) -> None:
    launcher = job.launcher(2)
    with launcher.stopped(), pytest.raises(BootstrapError, match="does not answer"):
        job.client(launcher.endpoint, 1, 2).join({}, 0.3)


@by_zmq
def test_a_host_that_has_no_address_is_named_at_the_deadline(job: Job) -> None:
    with pytest.raises(BootstrapError, match=r"no-such-host\.invalid:1 cannot be reached"):
        job.client("tcp://no-such-host.invalid:1", 1, 2).join({}, 0.3)


@by_zmq
@pytest.mark.parametrize("endpoint", ["", "localhost:1", "tcp://", "tcp://127.0.0.1", "no://x:1"])
def test_an_endpoint_that_is_none_is_said_at_once(job: Job, endpoint: str) -> None:
    with pytest.raises(BootstrapError, match="is no address of a launcher"):
        job.client(endpoint, 1, 2).join({}, DEADLINE_S)


@by_zmq
def test_a_client_tries_again_until_the_launcher_is_there(job: Job) -> None:
    launcher = job.launcher(1)
    client = socket.socket()
    port = int(launcher.endpoint.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as front, client:

        def forward(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            for _ in range(2):  # a launcher that ends, or a front that has nothing behind it yet
                front.accept()[0].close()
            there = front.accept()[0]
            with there, socket.create_connection(("127.0.0.1", port)) as server:
                back = job.start(forward, server, there)
                forward(there, server)
                back.result(DEADLINE_S)

        serving = job.start(serve)
        late = job.client(f"tcp://127.0.0.1:{front.getsockname()[1]}", 0, 1)
        assert late.join({"a": 1}, DEADLINE_S) == [{"a": 1}]
        late.close(0.0)
        serving.result(DEADLINE_S)


def test_a_launcher_that_goes_while_ranks_wait_ends_the_meeting(job: Job) -> None:
    launcher = job.launcher(2)
    waiting = job.joining(launcher, 0, 2)
    launcher.close()
    with pytest.raises(BootstrapError, match=r"the connection to the launcher .* was lost"):
        waiting.result(DEADLINE_S)


def test_a_key_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Server(1, b"secret")
    with pytest.raises(ValueError, match="at least 16"):
        Client("tcp://127.0.0.1:1", b"", 0, 1)


def test_a_server_that_cannot_listen_says_where() -> None:
    with pytest.raises(BootstrapError, match=r"cannot listen on tcp://192\.0\.2\.1"):
        Server(1, KEY, "192.0.2.1")


def test_a_server_of_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Server(0, KEY)


@by_zmq
def test_strangers_without_the_key_get_nowhere(job: Job) -> None:
    launcher = job.launcher(1)
    port = int(launcher.endpoint.rpartition(":")[2])
    keys = derive_keys(KEY)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # cut before it could read why
    with zmq.Context() as context:
        no_security, other_key = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        # It knows even the server's public key, which is derived from the job's key.
        other_key.curve_serverkey = keys.server_public
        other_key.curve_publickey, other_key.curve_secretkey = zmq.curve_keypair()
        for stranger in (no_security, other_key):
            stranger.linger = 0
            with stranger, stranger.get_monitor_socket(failed) as monitor:
                stranger.connect(launcher.endpoint)
                stranger.send(wire.pack("join", join_fields(size=1)))
                assert monitor.poll(int(DEADLINE_S * 1000))
                stranger.disable_monitor()
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        raw.settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert not launcher.has_notice()
    assert len(job.client(launcher.endpoint, 0, 1).join({}, DEADLINE_S)) == 1


NONSENSE = [
    b"",
    b"\xc1",
    bytes(100_000),
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    b"\xc7\xff\x01" + bytes(255),
    msgpack.packb(None),
    msgpack.packb(["join"]),
    msgpack.packb(["join", {}]),
    msgpack.packb(["join", {b"rank": 1}]),
    msgpack.packb([["join"], {}]),
    msgpack.packb(["join", {str(i): i for i in range(1000)}]),
    msgpack.packb([b"\xff", {}]),
    wire.pack("join", join_fields(rank=1.5)),
    wire.pack("join", join_fields(rank=2**63)),
    wire.pack("met", {"infos": []}),
    wire.pack("raised", {}),
    wire.pack("table", {"id": "x"}),
    wire.pack("table", {}),
    wire.pack("exchange", {"round": "x", "info": b""}),
    wire.pack("exchange", {"round": 0, "info": {}}),
    wire.pack("exchange", {}),
    wire.pack("left", {"links": [7]}),
    wire.pack("left", {"links": 7}),
    wire.pack("left", {"links": [], "calls": 7}),
    wire.pack("left", {"links": [], "calls": [[1, 2, 3]]}),
    wire.pack("left", {"links": [], "calls": [[1, 2, 3, 4]]}),
    wire.pack("abort", {"code": None}),
    wire.pack("broken", {"context": [], "error": "MismatchError"}),
    wire.pack("waiting", {"context": {}, "number": "x", "call": 1, "where": 2, "members": 3}),
    wire.pack("running", {"more": 1}),
]


@by_zmq
@pytest.mark.parametrize("has_joined", [False, True])
def test_nonsense_from_a_peer_with_the_key_has_no_effect(job: Job, has_joined: bool) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    if has_joined:
        stranger.join(launcher, 0, 2)
    for frame in NONSENSE:
        stranger.send(frame)
        stranger.send(frame, frame)
    assert {kind for kind, _ in stranger.answers_until_heard()} <= {"refused"}
    assert not launcher.has_notice()
    assert launcher.call(launcher.server.missing) == ([1] if has_joined else [0, 1])


@by_zmq
def test_nothing_is_believed_before_a_join(job: Job) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    everything = {"error": "E", "text": "T", "peer_failed": False}
    stranger.send(wire.pack("raised", everything))
    stranger.send(wire.pack("abort", {"code": 1}))
    stranger.send(wire.pack("left", {"links": []}))
    stranger.send(wire.pack("who", {}))
    stranger.send(wire.pack("table", {"id": 1}))
    stranger.send(wire.pack("withdraw", {}))
    assert stranger.answers_until_heard() == []
    assert not launcher.has_notice()


@by_zmq
def test_an_oversized_message_costs_its_sender_the_connection_and_nobody_else(job: Job) -> None:
    launcher = job.launcher(2)
    waiting = job.joining(launcher, 0, 2)
    stranger = job.stranger(launcher.endpoint)
    with stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        stranger.send(bytes(wire.MAX_FRAME_NBYTES + 1))
        assert monitor.poll(int(DEADLINE_S * 1000))
        stranger.socket.disable_monitor()
    job.client(launcher.endpoint, 1, 2).join({}, DEADLINE_S)
    waiting.result(DEADLINE_S)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: b"\x92\xa3abc" + b))
def test_any_bytes_decode_or_are_malformed(frame: bytes) -> None:
    try:
        kind, fields = wire.unpack(frame, 64)
    except wire.MalformedError:
        return
    assert isinstance(kind, str)
    assert isinstance(fields, dict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(wire._POSTS)), st.data())
def test_any_fields_of_a_post_parse_or_are_malformed(kind: str, data: st.DataObject) -> None:
    names = list(wire._POSTS[kind])
    fields = {name: data.draw(VALUES) for name in names}
    try:
        parsed = wire.parse_post(kind, fields, 4)
    except wire.MalformedError:
        return
    assert wire.unpack(wire.pack(kind, parsed), 64) == (kind, parsed)


# Meeting again.


def exchange_all(job: Job, clients: list[Client], info: dict[str, Any]) -> list[Any]:
    futures = [
        job.start(client.exchange, {**info, "rank": rank}, DEADLINE_S)
        for rank, client in enumerate(clients)
    ]
    return [future.result(DEADLINE_S) for future in futures]


def test_ranks_that_have_met_exchange_infos_round_by_round(job: Job) -> None:
    _, clients = job.meet(3)
    for number in range(3):
        expected = [{"round": number, "rank": rank} for rank in range(3)]
        assert exchange_all(job, clients, {"round": number}) == [expected] * 3


def test_who_is_missing_from_an_exchange_is_named_and_may_still_come(job: Job) -> None:
    launcher, clients = job.meet(3)
    message = r"rank 1 waited 0\.\d s .*ranks 0, 2 of 3 have not exchanged addresses"
    with pytest.raises(BootstrapError, match=message):
        clients[1].exchange({}, 0.3)

    def given() -> bytes | None:
        return launcher.server._ranks[1].round_info

    first = launcher.call(given)  # it counts, until there is another
    again = job.start(clients[1].exchange, {"again": True, "rank": 1}, DEADLINE_S)
    while launcher.call(given) == first:
        pass
    others = [job.start(clients[rank].exchange, {}, DEADLINE_S) for rank in (0, 2)]
    for future in (again, *others):
        assert future.result(DEADLINE_S) == [{}, {"again": True, "rank": 1}, {}]
    assert exchange_all(job, clients, {"third": True})[2][1] == {"third": True, "rank": 1}


def test_an_exchange_that_completed_after_one_had_given_up_counts_for_its_next_try(
    job: Job,
) -> None:
    _, clients = job.meet(2)
    with pytest.raises(BootstrapError, match="rank 1 of 2 has not exchanged addresses"):
        clients[0].exchange({"rank": 0}, 0.2)
    both = [{"rank": 0}, {"rank": 1}]
    assert clients[1].exchange({"rank": 1}, DEADLINE_S) == both
    assert clients[0].exchange({"too": "late"}, DEADLINE_S) == both
    assert exchange_all(job, clients, {"next": 1})[0] == [
        {"next": 1, "rank": 0},
        {"next": 1, "rank": 1},
    ]


@pytest.mark.parametrize("kind", ["ended", "failed", "left"])
def test_an_exchange_fails_when_a_rank_goes_and_the_event_is_kept(job: Job, kind: str) -> None:
    launcher, clients = job.meet(3)
    waiting = job.start(clients[0].exchange, {}, DEADLINE_S)
    while launcher.call(lambda: launcher.server._ranks[0].round_info) is None:
        pass
    if kind == "left":
        clients[2].post("left", links=[])
        expected = "rank 2 has left the job"
    else:
        launcher.rank_ended(2, "exit status 7", kind == "ended")
        expected = "rank 2 (has ended|failed): exit status 7"
    with pytest.raises(BootstrapError, match=f"rank 0 cannot exchange addresses: {expected}"):
        waiting.result(DEADLINE_S)
    assert is_readable(clients[0].fileno(), 0)
    assert [event.kind for event in clients[0].progress()] == [kind]
    with pytest.raises(BootstrapError, match=f"rank 1 cannot exchange addresses: {expected}"):
        clients[1].exchange({}, DEADLINE_S)


def test_an_exchange_fails_when_the_launcher_goes(job: Job) -> None:
    launcher, clients = job.meet(2)
    waiting = job.start(clients[0].exchange, {}, DEADLINE_S)
    while launcher.call(lambda: launcher.server._ranks[0].round_info) is None:
        pass
    launcher.close()
    with pytest.raises(BootstrapError, match="was lost before all ranks had exchanged addresses"):
        waiting.result(DEADLINE_S)
    assert [event.kind for event in clients[0].progress()] == ["lost"]


def test_an_exchange_comes_after_joining_and_before_closing(job: Job) -> None:
    client = job.client(job.launcher(1).endpoint, 0, 1)
    with pytest.raises(RuntimeError, match="has joined"):
        client.exchange({}, DEADLINE_S)
    client.join({}, DEADLINE_S)
    assert client.exchange({"a": 1}, DEADLINE_S) == [{"a": 1}]
    client.close(DEADLINE_S)
    with pytest.raises(RuntimeError, match="has joined"):
        client.exchange({}, DEADLINE_S)


# What becomes of ranks.


def test_a_rank_that_raised_is_told_to_the_others_and_the_launcher(job: Job) -> None:
    launcher, clients = job.meet(3)
    clients[1].post("raised", error="ValueError", text="Traceback...", peer_failed=False)
    failed = Event("failed", {"rank": 1, "reason": "raised ValueError", "detail": "Traceback..."})
    assert events(clients[0]) == events(clients[2]) == [failed]
    assert settled(clients[1]) == []
    notice = launcher.notice("raised")
    assert notice.rank == 1
    assert notice.fields == {"error": "ValueError", "text": "Traceback...", "peer_failed": False}


def test_a_rank_that_raised_peer_failed_is_told_to_the_launcher_alone(job: Job) -> None:
    launcher, clients = job.meet(2)
    clients[1].post("raised", error="PeerFailed", text="...", peer_failed=True)
    assert launcher.notice("raised").fields["peer_failed"] is True
    assert settled(clients[0]) == []
    launcher.rank_ended(1, "exit status 1", False)
    failed = {"rank": 1, "reason": "exit status 1", "detail": ""}
    assert events(clients[0]) == [Event("failed", failed)]


def test_abort_is_a_failure_with_its_code(job: Job) -> None:
    launcher, clients = job.meet(2)
    clients[0].post("abort", code=7)
    failed = {"rank": 0, "reason": "called abort(7)", "detail": ""}
    assert events(clients[1]) == [Event("failed", failed)]
    assert launcher.notice("abort") == Notice("abort", 0, {"code": 7})


def test_a_rank_that_left_is_told_with_its_links_its_last_calls_and_its_error(job: Job) -> None:
    launcher, clients = job.meet(3)
    calls = [[1, 3, 2, "barrier()\0x.py:1"], [1 << 61, 1, -1, ""]]
    clients[2].post("left", links={1, 0}, calls=calls, error="Error: first")
    fields = {"links": [0, 1], "calls": calls, "error": "Error: first"}
    left = Event("left", {"rank": 2, **fields})
    assert events(clients[0]) == events(clients[1]) == [left]
    assert launcher.notice("left") == Notice("left", 2, fields)


def test_who_leaves_later_has_heard_of_who_has_left_before(job: Job) -> None:
    _, clients = job.meet(2)
    clients[0].post("left", links=[])
    assert clients[0].settle(5.0) == []
    clients[1].post("left", links=[])
    assert [event.fields["rank"] for event in clients[1].settle(5.0)] == [0]
    assert clients[1].settle(5.0) == []  # nothing was posted since


@pytest.mark.parametrize("clean", [True, False])
def test_a_rank_that_ended_is_told_once(job: Job, clean: bool) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(0, "exit status X", clean)
    launcher.rank_ended(0, "again", not clean)
    ended = Event("ended", {"rank": 0, "reason": "exit status X"})
    failed = Event("failed", {"rank": 0, "reason": "exit status X", "detail": ""})
    assert settled(clients[1]) == [ended if clean else failed]


def test_a_letter_reaches_one_rank_in_the_order_of_sending(job: Job) -> None:
    _, clients = job.meet(3)
    notes = [bytes([number]) * number for number in range(5)]
    for note in notes:
        clients[0].post("tell", rank=2, note=note)
    told = [Event("told", {"rank": 0, "note": note}) for note in notes]
    assert events(clients[2], len(notes)) == told
    assert settled(clients[1]) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 3, "note": b""},
        {"rank": -1, "note": b""},
        {"rank": 0, "note": b"x" * 1025},
        {"rank": 0, "note": "text"},
    ],
    ids=["no such rank", "a negative rank", "too long", "no bytes"],
)
def test_a_letter_that_makes_no_sense_is_refused(job: Job, fields: dict[str, Any]) -> None:
    _, clients = job.meet(3)
    with pytest.raises(ValueError, match="'tell'"):
        clients[1].post("tell", **fields)


def test_a_letter_to_a_rank_that_has_ended_is_dropped(job: Job) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(1, "exit status 0", True)
    clients[0].post("tell", rank=1, note=b"too late")
    assert [event.kind for event in settled(clients[0])] == ["ended"]


def test_a_rank_that_raised_and_then_ended_has_failed_once(job: Job) -> None:
    launcher, clients = job.meet(2)
    clients[0].post("raised", error="KeyError", text="", peer_failed=False)
    launcher.notice("raised")
    launcher.rank_ended(0, "exit status 1", False)
    assert [event.fields["reason"] for event in settled(clients[1])] == ["raised KeyError"]


def test_the_end_of_the_launcher_is_an_event_after_all_others_and_comes_once(job: Job) -> None:
    launcher = job.launcher(2)
    clients = [job.client(launcher.endpoint, rank, 2) for rank in range(2)]
    for future in [job.start(client.join, {}, DEADLINE_S) for client in clients]:
        future.result()
    launcher.rank_ended(1, "exit status 0", True)
    launcher.close()
    assert [event.kind for event in events(clients[0], 2)] == ["ended", "lost"]
    assert not is_readable(clients[0].fileno(), 0)
    clients[0].post("running")
    assert clients[0].ask_table(DEADLINE_S) == []
    assert clients[0].progress() == []
    clients[0].close(DEADLINE_S)


def test_text_that_is_no_unicode_or_too_long_arrives_all_the_same(job: Job) -> None:
    launcher, clients = job.meet(2)
    text = "begin \udcff " + "x" * (wire.MAX_FRAME_NBYTES + 1) + " end"
    clients[0].post("raised", error="E", text=text, peer_failed=False)
    clients[0].close(DEADLINE_S)
    (event,) = events(clients[1])
    assert event.fields["detail"].startswith("begin \\udcff xxx")
    assert event.fields["detail"].endswith("xxx end")
    assert "characters left out" in launcher.notice("raised").fields["text"]


# Broken communicators.


def broken(context: object, error: str = "OperationTimeout", **fields: Any) -> dict[str, Any]:
    cause = {"rank": 0, "reason": "late", "message": "too late", "members": [0, 2], **fields}
    return {"context": context, "error": error, **cause}


def test_the_members_of_a_broken_communicator_are_told_and_nobody_else(job: Job) -> None:
    _, clients = job.meet(3)
    fields = broken(b"seven")
    clients[0].post("broken", **fields)
    members = fields.pop("members")
    assert members == [0, 2]
    assert events(clients[0]) == events(clients[2]) == [Event("broken", fields)]
    assert settled(clients[1]) == []


def test_the_first_cause_that_breaks_a_communicator_is_the_one_that_counts(job: Job) -> None:
    _, clients = job.meet(3)
    clients[0].post("broken", **broken(7))
    events(clients[2])
    clients[2].post("broken", **broken(7, "KeyboardInterrupt", rank=2))
    clients[2].post("broken", **broken(8, "KeyboardInterrupt", rank=2))
    assert [e.fields["context"] for e in events(clients[0], 2)] == [7, 8]
    assert settled(clients[0]) == []


def wait_in(client: Client, call: str, where: str = "", **fields: Any) -> None:
    told = {"context": 7, "number": 5, "members": [0, 1], **fields}
    client.post("waiting", call=call, where=where, **told)


def test_two_calls_with_one_number_break_the_communicator_side_by_side(job: Job) -> None:
    _, clients = job.meet(3)
    wait_in(clients[1], "barrier()", "b.py:2")
    assert settled(clients[1]) == []
    wait_in(clients[0], "all_reduce(float32[4], op=sum)", "a.py:1")
    both = [events(clients[0]), events(clients[1])]
    assert both[0] == both[1]
    (event,) = both[0]
    assert event.kind == "broken"
    assert event.fields == {
        "context": 7,
        "error": "MismatchError",
        "rank": 0,
        "reason": "made another call than rank 1",
        "message": "ranks made different calls on world:\n"
        "  rank 0: all_reduce(float32[4], op=sum) #5 at a.py:1\n"
        "  rank 1: barrier() #5 at b.py:2\n"
        "Make the same calls in the same order on all ranks.",
    }
    assert settled(clients[2]) == []


@pytest.mark.parametrize(
    "other",
    [
        {"call": "barrier", "where": "elsewhere.py:9"},
        {"call": "broadcast", "number": 6},
        {"call": "broadcast", "context": 8},
    ],
)
def test_the_same_call_another_number_or_another_communicator_is_no_mismatch(
    job: Job, other: dict[str, Any]
) -> None:
    _, clients = job.meet(2)
    wait_in(clients[0], "barrier")
    assert settled(clients[0]) == []
    wait_in(clients[1], **other)
    assert settled(clients[1]) == settled(clients[0]) == []


def test_point_to_point_calls_are_not_compared(job: Job) -> None:
    _, clients = job.meet(2)
    for client, call in zip(clients, ("recv from 1", "recv from 0"), strict=True):
        client.post("waiting", context=7, number=-1, call=call, where="")
        assert settled(client) == []


def test_a_rank_that_runs_again_is_not_compared(job: Job) -> None:
    _, clients = job.meet(2)
    wait_in(clients[0], "barrier")
    clients[0].post("running")
    assert settled(clients[0]) == []
    wait_in(clients[1], "broadcast")
    assert settled(clients[1]) == []


@by_zmq
def test_a_post_that_is_none_is_an_error_in_the_rank(job: Job) -> None:
    client = job.client("tcp://127.0.0.1:1", 0, 2)
    with pytest.raises(ValueError, match="there is no post 'sleeping'"):
        client.post("sleeping")
    with pytest.raises(ValueError, match="post 'abort' has the fields code"):
        client.post("abort")
    with pytest.raises(ValueError, match="field 'links' of post 'left'"):
        client.post("left", links=[2])


# The table.


def test_the_table_says_what_each_rank_does(job: Job) -> None:
    launcher = job.launcher(2)
    job.joining(launcher, 0, 2, 1.0)
    table = launcher.call(launcher.server.table)
    assert re.fullmatch(r"rank 0: in init\(\), waiting .*, for 0\.\d s", table[0])
    assert table[1] == "rank 1: has not joined"

    launcher, clients = job.meet(6)
    wait_in(clients[1], "recv from 0", number=-1)
    wait_in(clients[2], "barrier()", "train.py:40")
    wait_in(clients[0], "recv from 2", "train.py:41", number=-1)
    clients[0].post("running")
    clients[3].post("raised", error="ValueError", text="", peer_failed=False)
    clients[4].post("left", links=[])
    for client in clients:
        settled(client)
    launcher.rank_ended(5, "exit status 0", True)
    table = clients[0].ask_table(DEADLINE_S)
    assert table == launcher.call(launcher.server.table)
    before = r"recv from 2 at train\.py:41"
    doing = rf"not waiting in pycoll \(or only just\); until 0\.\d s ago in {before}"
    assert re.fullmatch(f"rank 0: {doing}", table[0])
    assert re.fullmatch(r"rank 1: recv from 0, for 0\.\d s", table[1])
    assert re.fullmatch(r"rank 2: barrier\(\) #5 at train\.py:40, for 0\.\d s", table[2])
    assert table[3:] == [
        "rank 3: raised ValueError",
        "rank 4: has finalized",
        "rank 5: ended (exit status 0)",
    ]


def test_somebody_waits_in_init_in_a_call_or_natively(job: Job) -> None:
    launcher = job.launcher(2)
    is_anyone_waiting = launcher.server.is_anyone_waiting
    assert not launcher.call(is_anyone_waiting)
    waiting = job.joining(launcher, 1, 2)
    assert launcher.call(is_anyone_waiting)
    client = job.client(launcher.endpoint, 0, 2)
    client.join({}, DEADLINE_S)
    waiting.result(DEADLINE_S)
    assert not launcher.call(is_anyone_waiting)
    wait_in(client, "barrier")
    settled(client)
    assert launcher.call(is_anyone_waiting)
    launcher.rank_ended(0, "exit status 0", True)
    assert not launcher.call(is_anyone_waiting)
    launcher.server._waits_natively = lambda rank: "barrier()" if rank == 1 else ""
    assert launcher.call(is_anyone_waiting)


def test_events_that_come_while_the_table_is_asked_for_are_kept(job: Job) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(1, "exit status 0", True)
    assert len(clients[0].ask_table(DEADLINE_S)) == 2
    assert is_readable(clients[0].fileno(), 0)
    assert [event.kind for event in clients[0].progress()] == ["ended"]
    assert not is_readable(clients[0].fileno(), 0)


def test_a_table_that_comes_too_late_is_not_taken_for_the_next(job: Job) -> None:
    launcher, clients = job.meet(2)
    with launcher.stopped():
        assert clients[0].ask_table(0.05) == []
    wait_in(clients[0], "barrier")
    assert clients[0].ask_table(DEADLINE_S)[0].startswith("rank 0: barrier")


# The descriptor, and a launcher or rank that does not read.


def test_posting_does_not_take_the_news_from_the_descriptor(job: Job) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(1, "exit status 0", True)
    assert is_readable(clients[0].fileno())
    for _ in range(100):
        clients[0].post("running")
    assert is_readable(clients[0].fileno(), 0)
    assert [event.kind for event in clients[0].progress()] == ["ended"]


def test_telling_ranks_does_not_take_the_news_from_the_servers_descriptor(job: Job) -> None:
    with Server(2, KEY) as server:
        clients = [job.client(server.endpoint, rank, 2) for rank in range(2)]
        futures = [job.start(client.join, {}, DEADLINE_S) for client in clients]
        while not all(future.done() for future in futures):
            server.progress()
        server.progress()
        assert not is_readable(server.fileno(), 0)
        clients[0].post("left", links=[])
        assert is_readable(server.fileno())
        time.sleep(0.005)  # when it sends, libzmq looks for news only once in a millisecond
        server.rank_ended(1, "exit status 0", True)
        assert is_readable(server.fileno(), 0)
        assert [notice.kind for notice in server.progress()] == ["left"]
        for client in clients:
            client.close(0.0)


def test_no_event_is_missed_by_ranks_that_post_and_ask_meanwhile(job: Job) -> None:
    count = 200
    _, clients = job.meet(4)

    def busy(client: Client) -> list[Event]:
        got: list[Event] = []
        while len(got) < count:
            client.post("running")
            assert is_readable(client.fileno())
            got += client.progress()
            assert client.ask_table(DEADLINE_S)
        return got

    futures = [job.start(busy, client) for client in clients[1:]]
    for number in range(count):
        clients[0].post("broken", **broken(number, members=[1, 2, 3]))
    for future in futures:
        assert [event.fields["context"] for event in future.result(DEADLINE_S)] == [*range(count)]


def test_a_stopped_launcher_neither_blocks_posts_nor_costs_memory_for_old_states(job: Job) -> None:
    launcher, clients = job.meet(1)
    with launcher.stopped():
        for number in range(20_000):
            wait_in(clients[0], f"barrier #{number} {'x' * 2000}", number=number, members=[0])
        clients[0].post("left", links=[])
        assert len(clients[0]._link._backlog) <= 2
    assert clients[0].ask_table(DEADLINE_S) == ["rank 0: has finalized"]
    assert launcher.notice("left").rank == 0


def test_close_returns_once_the_server_has_handled_what_was_posted(job: Job) -> None:
    launcher = job.launcher(1)
    script = """if True:
        import os, sys
        from pycoll._rendezvous.client import Client
        client = Client(sys.argv[1], bytes.fromhex(sys.argv[2]), 0, 1)
        client.join({}, 30)
        client.post("raised", error="ValueError", text="x" * 1000000, peer_failed=False)
        client.close(30)
        os._exit(1)
    """
    arguments = [sys.executable, "-c", script, launcher.endpoint, KEY.hex()]
    assert subprocess.run(arguments, env=pythonpath(), timeout=DEADLINE_S).returncode == 1
    launcher.notice("joined")
    assert launcher.has_notice()
    assert launcher.notice("raised").fields["error"] == "ValueError"


def test_close_does_not_wait_longer_than_it_may(job: Job) -> None:
    launcher, clients = job.meet(1)
    with launcher.stopped():
        clients[0].post("left", links=[])
        start = time.monotonic()
        clients[0].close(0.2)
        assert 0.2 <= time.monotonic() - start < DEADLINE_S / 6
        clients[0].close(DEADLINE_S)
    assert clients[0].progress() == []


def test_close_of_a_rank_that_was_refused_does_not_wait(job: Job) -> None:
    launcher = job.launcher(1)
    refused = job.client(launcher.endpoint, 0, 2)
    with pytest.raises(BootstrapError, match="this job has 1 ranks"):
        refused.join({}, DEADLINE_S)
    refused.post("raised", error="BootstrapError", text="", peer_failed=False)
    start = time.monotonic()
    refused.close(DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S / 6
    assert not launcher.has_notice()


@pytest.mark.parametrize("way", ["zmq", "local"])
def test_nothing_stays_open_after_close(way: str) -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    job = Job(way)
    launcher, clients = job.meet(2)
    clients[0].close(DEADLINE_S)
    launcher.server.fileno()
    job.close()
    launcher.server.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


@pytest.mark.parametrize("link", ["", "link_variable(server.open_link())"])
def test_a_forked_child_that_closes_its_copy_leaves_the_parents_connection_alone(
    link: str,
) -> None:
    script = """if True:
        import os, sys, threading
        from pycoll._rendezvous.client import Client
        from pycoll._launcher.rendezvous_pairs import link_variable
        from pycoll._launcher.rendezvous_server import Server
        server = Server(1, bytes(32))
        client = Client(server.endpoint, bytes(32), 0, 1, link=%s)
        def serve():
            while True:
                if any(n.kind == "left" for n in server.progress()):
                    break
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client.join({}, 30)
        if (pid := os.fork()) == 0:
            client.close(30)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        client.post("left", links=[])
        thread.join(30)
        client.close(0)
        server.close()
        print("well")
    """
    command = [sys.executable, "-W", "ignore", "-c", script % (link or "''")]
    done = subprocess.run(
        command, env=pythonpath(), timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("well\n", "")


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([3], "rank 3"),
        ([2, 1], "ranks 1, 2"),
        ([0, 1, 2, 3], "ranks 0, 1, 2, 3"),
        ([0, *range(4, 64)], "ranks 0, 4-63"),
        (range(5), "ranks 0-4"),
    ],
)
def test_ranks_are_named_for_people(ranks: list[int], name: str) -> None:
    assert wire.name_ranks(ranks) == name


class Host:
    """The connection to another host, as the server has it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, kind: str, *fields: Any) -> None:
        self.sent.append((kind, *fields))


def test_what_all_ranks_are_told_goes_to_another_host_once() -> None:
    hosts = [Host(), Host()]
    peers = [Relayed(hosts[rank // 3], 10 + rank % 3) for rank in range(6)]
    with Server(6, KEY) as server:

        def say(who: int, kind: str, **fields: Any) -> None:
            server.hear(peers[who], wire.pack(kind, fields))

        def told() -> list[list[tuple[str, Any, str]]]:
            found = []
            for host in hosts:
                frames = [(k, to, wire.unpack(frame, 10)[0]) for k, to, frame in host.sent]
                found.append(frames)
                host.sent.clear()
            return found

        version = wire.WIRE_VERSION
        for rank in range(6):
            say(rank, "join", version=version, rank=rank, size=6, pid=100 + rank, info=b"\x80")
        assert told() == [[("links", [10, 11, 12], "met")]] * 2
        for number in range(2):
            for rank in range(6):
                say(rank, "exchange", round=number, info=b"\x80")
            assert told() == [[("links", [10, 11, 12], "exchanged")]] * 2
        say(4, "who")
        assert told() == [[], [("link", 11, "who")]]
        say(0, "exchange", round=2, info=b"\x80")
        say(0, "exchange", round=2, info=b"\x80")  # it had given up, and asks again
        server.rank_ended(1, "killed", clean=False)
        assert told() == [
            [("links", [10, 12], "failed"), ("links", [10], "refused")],
            [("links", [10, 11, 12], "failed")],
        ]
