"""`--encrypt`: what travels between ranks outside shared memory cannot be read on the way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiers import exhaustive, smoke
from transport_world import World

import pycoll
from pycoll._support.environment import UNENCRYPTED
from pycoll._transports.network import choose, why_not_encrypted
from pycoll.errors import BootstrapError

SECRET = b"nobody else may read this" * 400


class Tap:
    """Who sits between two ranks: passes on all that comes, and keeps a copy.

    Attributes:
        seen: what has passed, both ways.
    """

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self.seen = bytearray()
        self._there = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with self._listener:
            try:
                here, _ = self._listener.accept()
            except OSError:  # nobody has come
                return
        there = socket.create_connection(self._there)
        self._ends = [here, there]
        for one, other in ((here, there), (there, here)):
            self._threads.append(threading.Thread(target=self._pass_on, args=(one, other)))
            self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)
        for end in one, other:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # the first adds others
            thread.join()
        for end in self._ends:
            end.close()


class TappedWorld(World):
    """Two ranks; what rank 0 sends to rank 1 passes a tap."""

    def start(self) -> None:
        addresses = [node.transport.address() for node in self.nodes]
        self.tap = Tap(addresses[1]["endpoint"])
        addresses[1]["endpoint"] = self.tap.endpoint
        for node in self.nodes:
            node.transport.start(addresses, node)


@pytest.fixture
def tapped(request: pytest.FixtureRequest) -> Iterator[TappedWorld]:
    world = TappedWorld(request.param, 2)
    yield world
    world.close()
    world.tap.close()


@pytest.mark.parametrize(
    ("tapped", "readable"),
    [("zmq", True), ("zmq with CURVE", False)],
    indirect=["tapped"],
)
@pytest.mark.parametrize("nbytes", [len(SECRET), 300 * len(SECRET)])
def test_who_listens_reads_messages_without_curve_only(
    tapped: TappedWorld, readable: bool, nbytes: int
) -> None:
    data = SECRET * (nbytes // len(SECRET))
    transfer = tapped.send(0, 1, b"the header", data)
    (arrival,) = tapped.arrivals(1, 1)
    assert tapped.receive(arrival) == data
    tapped.run(lambda: transfer.done)
    assert len(tapped.tap.seen) > nbytes
    assert (SECRET in tapped.tap.seen) == readable
    assert (b"the header" in tapped.tap.seen) == readable


# --- jobs ------------------------------------------------------------------------------------

NETWORK = """
def network():
    "Of the transport to other ranks that is no shared memory: its name, and whether it encrypts."
    for transport in comm._group.engine.transport.outside.peers.values():
        return transport.name, transport._sockets.keys is not None
assert comm.all_reduce(rank) == sum(range(size))
big = comm.all_gather(np.full(200_000, rank))
assert (big == np.arange(size)[:, None]).all()
"""


@pytest.mark.parametrize(
    ("size", "options", "found"),
    [
        (2, ("--transport", "zmq"), ("zmq", False)),
        pytest.param(2, ("--transport", "zmq", "--encrypt"), ("zmq", True), marks=exhaustive),
        pytest.param(2, ("--encrypt",), None, marks=exhaustive),
        pytest.param(2, ("--encrypt", "--transport", "shm"), None, marks=exhaustive),
        (3, ("--encrypt", "--emulate-hosts", "2"), ("zmq", True)),
    ],
    ids=lambda value: " ".join(value) if "--" in str(value) else str(value),
)
@smoke
def test_an_encrypted_job_uses_curve_wherever_it_does_not_share_memory(
    job: Any, size: int, options: tuple[str, ...], found: tuple[str, bool] | None
) -> None:
    done = job(size, f"{NETWORK}assert network() == {found}, network()\nok()", *options)
    assert (done.status, done.content) == (0, [*range(size)]), done.stderr


def test_with_zmq_no_rank_uses_shared_memory(job: Any) -> None:
    text = """
assert links() == {"zmq"}, links()
ok()
"""
    done = job(2, text, init="comm = pycoll.init(transport='zmq')\nrank, size = comm.rank, 2")
    assert (done.status, done.content) == (0, [0, 1]), done.stderr


def test_a_script_of_an_encrypted_job_cannot_choose_what_does_not_encrypt(job: Any) -> None:
    init = """
rank = int(os.environ["PYCOLL_RANK"])
for name in ("tcp", "rdma"):
    why = f"{name}: it does not encrypt.*use --transport auto or zmq"
    error_like(pycoll.TransportError, why, pycoll.init, transport=name)
"""
    done = job(2, "ok()", "--encrypt", init=init)
    assert (done.status, done.content) == (0, [0, 1]), done.stderr


def test_ranks_that_do_not_agree_on_encryption_do_not_meet(job: Any) -> None:
    init = """
rank = int(os.environ["PYCOLL_RANK"])
os.environ["PYCOLL_ENCRYPT"] = str(rank % 2)
error_like(pycoll.BootstrapError, "is set for rank 1, but not for ranks 0, 2;", pycoll.init)
"""
    done = job(3, "ok()", init=init)
    assert (done.status, done.content) == (0, [0, 1, 2]), done.stderr


def encryption(comm: Any) -> tuple[str | None, set[bool]]:
    transports = comm._group.engine.transport.outside.peers.values()
    keys = {t._sockets.keys is not None for t in transports if t.name == "zmq"}
    return os.environ.get("PYCOLL_ENCRYPT"), keys


def test_a_function_runs_encrypted_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYCOLL_ENCRYPT", "1")
    assert pycoll.run(encryption, 2, transport="zmq") == [("1", {True})] * 2
    monkeypatch.setenv("PYCOLL_ENCRYPT", "maybe")
    with pytest.raises(BootstrapError, match="PYCOLL_ENCRYPT is 'maybe'"):
        pycoll.run(encryption, 2)


# --- which network ---------------------------------------------------------------------------


def test_the_network_is_tcp_unless_a_rank_wants_zmq_or_the_job_is_encrypted() -> None:
    tcp, zmq = {"network": "tcp"}, {"network": "zmq"}
    assert choose([{}, {}], encrypt=False) == "tcp"
    assert choose([{}, tcp], encrypt=False) == "tcp"
    assert choose([zmq, {}], encrypt=False) == "zmq"
    assert choose([{}, {}], encrypt=True) == "zmq"
    with pytest.raises(BootstrapError, match=r"rank 2 uses .* tcp, but rank 1 uses zmq"):
        choose([{}, zmq, tcp], encrypt=False)


@smoke
def test_only_tcp_and_rdma_do_not_encrypt() -> None:
    names = [name for name in ("auto", "shm", "tcp", "zmq", "rdma") if why_not_encrypted(name)]
    assert names == ["tcp", "rdma"]


# Hosts that have addresses, though all are this machine.
ADDRESSES = """
if {addresses}:
    os.environ["PYCOLL_ADDRESSES"] = "0=127.0.0.1,1=127.0.0.1"
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""


@pytest.mark.parametrize(
    ("size", "addresses", "options", "times"),
    [
        (4, True, ("--emulate-hosts", "2"), 1),
        (2, True, ("--emulate-hosts", "2", "--encrypt"), 0),
        (2, True, ("--emulate-hosts", "2", "--transport", "zmq"), 0),
        pytest.param(2, True, ("--transport", "tcp"), 0, marks=exhaustive),
        pytest.param(2, False, ("--emulate-hosts", "2"), 0, marks=exhaustive),
    ],
    ids=["hosts", "encrypted", "zmq", "one host", "emulated hosts"],
)
def test_that_connections_between_hosts_are_not_encrypted_is_said_once_a_job(
    job: Any, size: int, addresses: bool, options: tuple[str, ...], times: int
) -> None:
    text = "comm.barrier()\nok()"
    done = job(size, text, *options, init=ADDRESSES.format(addresses=addresses))
    assert (done.status, done.content) == (0, [*range(size)]), done.stderr
    assert done.stderr.count(f"pycoll-run: {UNENCRYPTED}\n") == times, done.stderr
    assert done.stderr.count("\n") == times, done.stderr
