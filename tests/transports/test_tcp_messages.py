"""Messages over TCP: lanes, what is pushed, what is under way when a transport closes."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
from tcp_world import KINDS, TcpWorld, pattern
from tiers import few
from transport_world import DEADLINE_S

from pycoll._transports.base import Arrival, Transfer
from pycoll._transports.core import AHEAD
from pycoll._transports.dial import PeerLane
from pycoll.errors import PeerFailed


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[TcpWorld]:
    made = TcpWorld(request.param)
    yield made
    made.close()


# --- lanes -----------------------------------------------------------------------------------


class Relay:
    """One between a dialer and a listener that lets little through at a time."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self.nbytes = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "tcp://{}:{}".format(*self._server.getsockname())
        self._target = host, int(port)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._server, self._server.accept()[0] as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
            with socket.create_connection(self._target) as other:
                ways = {one: other, other: one}
                while not self._over.wait(0.005):  # so much in 5 ms
                    for ready in select.select(list(ways), [], [], 0.1)[0]:
                        part = ready.recv(16384)
                        if not part:
                            return
                        self.nbytes += len(part)
                        ways[ready].sendall(part)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def test_a_slow_lane_takes_fewer_fragments_and_all_arrive() -> None:
    world = TcpWorld("tcp with lanes")
    relay = Relay(world.transport(1).address()["endpoint"])
    dialer = world.transport(0)._tcp.dialer
    dial = dialer.dial

    def led(link: PeerLane, endpoint: str) -> None:
        dial(link, relay.endpoint if link.lane == 2 else endpoint)

    dialer.dial = led  # type: ignore[method-assign]
    world.link()
    data = pattern(48 * 1024**2)
    sending = world.send(0, 1, b"h", data)
    assert world.receive(world.arrivals(1, 1)[0]) == data
    world.run(lambda: sending.done)
    assert 0 < relay.nbytes < len(data) / 6
    world.close()
    relay.close()


# --- pushed messages -------------------------------------------------------------------------

PUSHED = AHEAD - 1000


def push(world: TcpWorld, data: bytes) -> Transfer:
    return world.transport(0).push(1, b"pushed", [memoryview(data)])


def come_partly(world: TcpWorld, data: bytes) -> tuple[Arrival, Transfer]:
    """Push a message of which the front is there, in memory of the transport."""
    world.link()
    world.buffer(4096)
    transfer = push(world, data)
    (arrival,) = world.arrivals(1, 1)
    for _ in range(5):
        world.nodes[1].transport.progress()
    return arrival, transfer


def test_a_pushed_message_may_be_accepted_while_it_comes(world: TcpWorld) -> None:
    data, into = pattern(PUSHED), bytearray(PUSHED)
    arrival, _ = come_partly(world, data)
    receiving = arrival.accept(memoryview(into))
    assert not receiving.done
    world.run(lambda: receiving.done)
    assert into == data


@pytest.mark.parametrize("when", ["accepted", "lost", "forgotten"])
def test_a_pushed_message_of_which_the_sender_is_gone_fails(world: TcpWorld, when: str) -> None:
    arrival, _ = come_partly(world, pattern(PUSHED))
    into = memoryview(bytearray(PUSHED))
    receiving = arrival.accept(into) if when == "accepted" else None
    world.kill(0)
    world.run(lambda: 0 in world.nodes[1].lost_peers, ranks=[1])
    if when == "lost":
        receiving = arrival.accept(into)
    if receiving is not None:
        assert not receiving.done
    world.transport(1).forget(0, "killed")
    if when == "forgotten":
        receiving = arrival.accept(into)
    assert receiving is not None
    assert isinstance(receiving.error, PeerFailed)


# --- the end ---------------------------------------------------------------------------------


def test_close_delivers_everything_though_the_peer_reads_late(world: TcpWorld) -> None:
    world.link()
    world.buffer(4096)
    number = 500
    for index in range(number):
        assert world.send(0, 1, b"%d" % index, bytes([index % 256]) * 1000).done
    pushed = pattern(PUSHED)
    push(world, pushed)
    leaving = threading.Thread(target=world.transport(0).close, args=(DEADLINE_S,))
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()  # much of it has found no room yet
    node = world.nodes[1]
    world.run(lambda: bool(node.ended), ranks=[1])
    leaving.join()
    headers = [arrival.header for arrival in node.arrivals]
    assert headers == [*[b"%d" % index for index in range(number)], b"pushed"]
    for index, arrival in enumerate(node.arrivals[:-1]):
        assert arrival.payload == bytes([index % 256]) * 1000
    into = bytearray(PUSHED)
    assert node.arrivals[-1].accept(memoryview(into)).done
    assert into == pushed
    assert node.lost_peers == {}


@pytest.mark.parametrize("trial", few(range(3), range(3, 30)))
def test_close_delivers_what_was_sent_by_all_lanes(trial: int) -> None:
    world = TcpWorld("tcp with lanes")
    world.link()
    world.buffer(1024**2)
    data = pattern(300_000 + trial)  # more than a fragment, and less than the kernel takes
    into = bytearray(len(data))
    sending = world.send(0, 1, b"h", data)
    (arrival,) = world.arrivals(1, 1)
    receiving = arrival.accept(memoryview(into))
    world.run(lambda: sending.done, ranks=[0])  # with the kernel, and nobody has read it
    leaving = threading.Thread(target=world.transport(0).close, args=(DEADLINE_S,))
    leaving.start()
    world.run(lambda: bool(world.nodes[1].ended or world.nodes[1].lost_peers), ranks=[1])
    leaving.join()
    assert receiving.done
    assert into == data
    assert world.nodes[1].lost_peers == {}
    world.close()
