"""A real server of a meeting, and real clients, on loopback."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from patience import PATIENCE

from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._launcher.rendezvous_server import Notice, Server
from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.client import Client, Event
from pycoll._rendezvous.wire import WIRE_VERSION
from pycoll._rendezvous.zmq_keys import derive_keys

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


def broken(context: object, error: str = "OperationTimeout", **fields: Any) -> dict[str, Any]:
    cause = {"rank": 0, "reason": "late", "message": "too late", "members": [0, 2], **fields}
    return {"context": context, "error": error, **cause}
