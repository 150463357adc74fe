"""The transport contract (transports/base.py), run on every transport."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from patience import PATIENCE
from tiers import exhaustive, few, rdma
from transport_world import DEADLINE_S, OVER_PYTHON, Node, World

from pycoll import _transports as transports
from pycoll._transports.base import CREDIT, EAGER_LIMIT, MESSAGE_COST, Arrival, Transfer, Withdrawn
from pycoll._transports.zeromq import AHEAD, WINDOW, ZmqTransport
from pycoll._transports.zmq_messages import FRAGMENT
from pycoll.errors import PeerFailed, TransportError

WORLDS = [
    *few(
        ["zmq", "shm", "shm in fragments", "tcp", "tcp with lanes", f"{OVER_PYTHON}zmq"],
        ["zmq with CURVE"],
    ),
    *(
        pytest.param(kind, marks=rdma)
        for kind in ("rdma, simulated", f"{OVER_PYTHON}rdma, simulated")
    ),
]
"""The kinds of transports, each in its tier."""

KINDS = [kind if isinstance(kind, str) else kind.values[0] for kind in WORLDS]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param, 3)
    yield made
    made.close()


def pattern(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def test_messages_arrive_in_sending_order_whatever_their_sizes(world: World) -> None:
    sizes = [0, 1, EAGER_LIMIT + 1, 100, 3 * FRAGMENT, 0, EAGER_LIMIT, 7]
    for number, nbytes in enumerate(sizes):
        world.send(0, 1, b"%d" % number, bytes(nbytes))
    arrivals = world.arrivals(1, len(sizes))
    assert [arrival.header for arrival in arrivals] == [b"%d" % n for n in range(len(sizes))]
    assert [arrival.nbytes for arrival in arrivals] == sizes
    assert {arrival.peer for arrival in arrivals} == {0}
    for arrival in arrivals:
        world.receive(arrival)


@pytest.mark.parametrize(
    "nbytes",
    [0, 1, EAGER_LIMIT, EAGER_LIMIT + 1, FRAGMENT - 1, FRAGMENT + 1, WINDOW * FRAGMENT + 12345],
)
def test_a_payload_arrives_unchanged(world: World, nbytes: int) -> None:
    data = pattern(nbytes)
    transfer = world.send(2, 0, b"h", data)
    (arrival,) = world.arrivals(0, 1)
    assert world.receive(arrival) == data
    world.run(lambda: transfer.done)
    assert transfer.error is None


def test_a_payload_of_many_parts_arrives_as_one(world: World) -> None:
    for number, unit in enumerate((10, 50_000, FRAGMENT)):
        parts = [pattern(unit + i) for i in range(4)] + [b""]
        world.send(0, 1, b"parts", *parts)
        arrival = world.arrivals(1, number + 1)[-1]
        assert world.receive(arrival) == b"".join(parts)


def test_a_small_message_is_done_when_send_returns_and_its_memory_is_free(world: World) -> None:
    data = bytearray(b"before")
    assert world.send(0, 1, b"h", data).done
    data[:] = b"after!"
    (arrival,) = world.arrivals(1, 1)
    assert arrival.payload is not None
    assert bytes(arrival.payload) == b"before"


def test_a_payload_that_came_with_its_header_stays_until_it_is_released(world: World) -> None:
    seen: list[memoryview] = []
    node = world.nodes[1]

    def arrived(arrival: Arrival) -> None:  # as one that uses it later
        assert arrival.payload is not None
        seen.append(arrival.payload)
        node.arrivals.append(arrival)

    node.arrived = arrived
    number = 60
    for i in range(number):
        world.send(0, 1, b"h", bytes([i]) * 5000)
        world.run(lambda i=i: len(seen) > i)  # type: ignore[misc]
    assert [bytes(view) for view in seen] == [bytes([i]) * 5000 for i in range(number)]
    for arrival in node.arrivals:
        arrival.release()


def test_a_large_message_is_done_only_after_it_was_accepted(world: World) -> None:
    transfer = world.send(0, 1, b"h", bytes(EAGER_LIMIT + 1))
    (arrival,) = world.arrivals(1, 1)
    world.quiet(1, 0)
    assert not transfer.done
    assert arrival.payload is None
    world.receive(arrival)
    world.run(lambda: transfer.done)


@pytest.mark.parametrize("nbytes", [0, 1, 5000, EAGER_LIMIT + 1])
def test_what_is_offered_is_done_only_after_it_was_accepted(world: World, nbytes: int) -> None:
    data = pattern(nbytes)
    transport = world.nodes[0].transport
    transfer = transport.offer(1, b"h", (memoryview(data),))
    (arrival,) = world.arrivals(1, 1)
    world.send(1, 0, b"h")
    world.arrivals(0, 1)
    assert (arrival.header, arrival.nbytes, arrival.payload) == (b"h", nbytes, None)
    assert not transfer.done
    assert world.receive(arrival) == data
    world.run(lambda: transfer.done)
    taken_back = transport.offer(1, b"h", (memoryview(data),))
    world.arrivals(1, 2)
    taken_back.cancel()
    world.run(lambda: bool(world.nodes[1].taken_back))


@pytest.mark.parametrize("nbytes", [0, 1000, EAGER_LIMIT])
def test_a_slow_receiver_bounds_what_is_buffered_for_it(world: World, nbytes: int) -> None:
    number = CREDIT // (nbytes + MESSAGE_COST) + 20
    transfers = [world.send(0, 1, b"%d" % i, bytes(nbytes)) for i in range(number)]
    buffered = sum(transfer.done for transfer in transfers)
    assert buffered == CREDIT // (nbytes + MESSAGE_COST)
    arrivals = world.arrivals(1, number)
    assert sum(arrival.payload is not None for arrival in arrivals) == buffered
    for arrival in arrivals:
        world.receive(arrival)
    world.run(lambda: all(transfer.done for transfer in transfers))


def test_consuming_gives_the_sender_its_credit_back(world: World) -> None:
    number = 3 * CREDIT // EAGER_LIMIT
    seen = 0
    for _ in range(number):
        transfer = world.send(0, 1, b"h", bytes(EAGER_LIMIT))
        world.run(lambda: bool(world.nodes[1].arrivals))
        arrival = world.nodes[1].arrivals.pop()
        seen += arrival.payload is not None
        world.receive(arrival)
        world.run(lambda transfer=transfer: transfer.done)  # type: ignore[misc]
        world.quiet(0, 1)  # what gives credit back has come, too
    assert seen == number


def test_messages_may_be_accepted_in_any_order(world: World) -> None:
    data = [pattern(EAGER_LIMIT + 1 + 100_000 * i) for i in range(12)]
    for payload in data:
        world.send(0, 1, b"h", payload)
    into = [bytearray(len(payload)) for payload in data]
    arrivals = world.arrivals(1, len(data))
    order = np.random.default_rng(1).permutation(len(data))
    transfers = [arrivals[i].accept(memoryview(into[i])) for i in order]
    world.run(lambda: all(transfer.done for transfer in transfers))
    assert into == data


def test_all_pairs_talk_at_once_both_ways(world: World) -> None:
    data = pattern(FRAGMENT + 17)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    for a, b in pairs:
        world.send(a, b, b"h", data)
    world.run(lambda: all(len(node.arrivals) == 2 for node in world.nodes))
    into = [bytearray(len(data)) for _ in pairs]
    arrivals = [arrival for node in world.nodes for arrival in node.arrivals]
    transfers = [arrival.accept(memoryview(b)) for arrival, b in zip(arrivals, into, strict=True)]
    world.run(lambda: all(transfer.done for transfer in transfers))
    assert all(b == data for b in into)


@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_three_gibibytes_travel_in_one_message(kind: str) -> None:
    world = World(kind, 2)
    nbytes = 3 * 1024**3 + 5
    data = np.zeros(nbytes, np.uint8)  # pages of zeros cost no memory
    marks = [0, 2**31 - 1, 2**31, 2**32 // 2 + 7, nbytes - 1]
    data[marks] = [1, 2, 3, 4, 5]
    transfer = world.send(0, 1, b"h", data.data)
    (arrival,) = world.arrivals(1, 1)
    assert arrival.nbytes == nbytes
    into = np.empty(nbytes, np.uint8)
    received = arrival.accept(into.data)
    world.run(lambda: received.done and transfer.done)
    assert into[marks].tolist() == [1, 2, 3, 4, 5]
    assert int(into[: 2**20].sum()) == 1
    world.close()


def test_a_message_taken_back_before_it_was_accepted_is_gone(world: World) -> None:
    transfer = world.send(0, 1, b"back", bytes(EAGER_LIMIT + 1))
    (arrival,) = world.arrivals(1, 1)
    transfer.cancel()
    world.run(lambda: world.nodes[1].taken_back == [arrival])
    assert isinstance(arrival.accept(memoryview(bytearray(arrival.nbytes))).error, Withdrawn)
    world.send(0, 1, b"next", b"next")
    assert world.receive(world.arrivals(1, 2)[-1]) == b"next"


def test_a_message_nobody_wants_does_not_hold_its_sender(world: World) -> None:
    transfer = world.send(0, 1, b"h", bytes(EAGER_LIMIT + 1))
    world.arrivals(1, 1)[0].release()
    world.run(lambda: transfer.done)


def large_transfer(world: World) -> tuple[Transfer, Transfer, bytearray]:
    """Start a transfer and stop in the middle of it."""
    nbytes = 6 * WINDOW * FRAGMENT
    sending = world.send(0, 1, b"h", b"\x01" * nbytes)
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(nbytes)
    receiving = arrival.accept(memoryview(into))
    world.run(lambda: into[0] == 1)
    assert not receiving.done
    return sending, receiving, into


@pytest.fixture(params=few(["zmq"], ["zmq with CURVE"]))
def network(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks with a transport that works between hosts."""
    made = World(request.param, 2)
    yield made
    made.close()


@pytest.fixture(params=WORLDS)
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks with a transport in which a large message takes its time."""
    made = World(request.param, 2)
    yield made
    made.close()


def test_a_send_given_up_half_way_ends_the_receive_as_withdrawn(pair: World) -> None:
    sending, receiving, _ = large_transfer(pair)
    sending.cancel()
    pair.run(lambda: receiving.done)
    assert isinstance(receiving.error, Withdrawn)


def test_after_cancel_of_a_receive_nothing_more_is_written(pair: World) -> None:
    sending, receiving, into = large_transfer(pair)
    receiving.cancel()
    before = bytes(into)
    pair.run(lambda: sending.done)
    pair.quiet(1, 0)
    assert into == before


def test_a_redirected_receive_ends_complete_in_its_new_place(pair: World) -> None:
    sending, receiving, into = large_transfer(pair)
    elsewhere = bytearray(len(into))
    receiving.redirect(memoryview(elsewhere))
    before = bytes(into)
    pair.run(lambda: receiving.done and sending.done)
    assert into == before
    assert elsewhere == b"\x01" * len(into)


def test_close_delivers_what_was_buffered_and_then_says_goodbye(world: World) -> None:
    number = 1000
    for i in range(number):  # more than a ring of shared memory has room for
        world.send(0, 1, b"%d" % i, b"x" * 100)
    world.leave(0)
    world.nodes[0].transport.close(5.0)  # a second time does nothing
    world.run(lambda: world.nodes[1].ended == [0], ranks=[1])
    assert [a.header for a in world.nodes[1].arrivals] == [b"%d" % i for i in range(number)]


def test_what_is_sent_over_a_lost_link_waits_for_the_verdict(network: World) -> None:
    network.send(0, 1, b"h", b"link")
    network.arrivals(1, 1)
    network.nodes[1].transport.close(0.0)
    network.run(lambda: 1 in network.nodes[0].lost_peers, ranks=[0])
    transfers = [network.send(0, 1, b"h", bytes(nbytes)) for nbytes in (1, EAGER_LIMIT + 1)]
    assert not any(transfer.done for transfer in transfers)
    network.nodes[0].transport.forget(1, "killed")
    assert [str(transfer.error) for transfer in transfers] == ["rank 1 failed: killed"] * 2


@pytest.mark.parametrize("network", ["zmq", "zmq with CURVE"], indirect=True)
def test_what_is_pushed_is_buffered_within_a_credit_of_its_own(network: World) -> None:
    transport = network.nodes[0].transport
    assert isinstance(transport, ZmqTransport)
    first, second = pattern(AHEAD - 2), pattern(EAGER_LIMIT + 1)
    data = bytearray(first)
    assert transport.push(1, b"first", [memoryview(data)[:10], memoryview(data)[10:]]).done
    data[:] = bytes(len(data))  # it is the caller's again
    waiting = transport.push(1, b"second", [memoryview(second)])
    assert not waiting.done
    assert network.send(0, 1, b"small", b"small").done
    arrivals = network.arrivals(1, 3)
    assert [arrival.header for arrival in arrivals] == [b"first", b"second", b"small"]
    assert [network.receive(arrival) for arrival in arrivals] == [first, second, b"small"]
    network.run(lambda: waiting.done)
    network.quiet(0, 1)
    again = transport.push(1, b"again", [memoryview(first)])
    assert again.done
    network.arrivals(1, 4)[-1].release()
    network.quiet(0, 1)
    assert transport.push(1, b"h", [memoryview(first)]).done


def test_transfers_with_a_peer_that_has_ended_fail(world: World) -> None:
    nbytes = EAGER_LIMIT + 1
    outgoing = world.send(0, 1, b"h", bytes(nbytes))
    world.send(1, 0, b"h", bytes(nbytes))
    (arrival,) = world.arrivals(0, 1)
    world.arrivals(1, 1)
    world.nodes[0].transport.forget(1, "killed")
    later = world.send(0, 1, b"h", b"x")
    for transfer in (outgoing, later):
        assert isinstance(transfer.error, PeerFailed)
        assert transfer.error.reason == "killed"
    assert isinstance(arrival.accept(memoryview(bytearray(nbytes))).error, PeerFailed)


def test_a_receive_half_way_fails_when_its_sender_has_ended(pair: World) -> None:
    _, receiving, _ = large_transfer(pair)
    pair.nodes[1].transport.forget(0, "killed")
    assert isinstance(receiving.error, PeerFailed)


def test_links_are_made_when_first_needed(world: World) -> None:
    assert world.nodes[0].transport.links() == []
    world.send(0, 2, b"h", b"x")
    world.arrivals(2, 1)
    assert world.nodes[0].transport.links() == [2]


def test_a_close_leaves_no_descriptor_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for kind in KINDS:
        World(kind, 2).close()  # ZeroMQ's own, made once
        before = descriptors()
        for _ in range(3):
            world = World(kind, 3)
            world.send(0, 1, b"h", b"x")
            world.send(1, 0, b"h", b"x")
            world.arrivals(0, 1)
            world.close()
        assert descriptors() == before


VICTIM = """
import json, sys
from pycoll._transports.zeromq import ZmqTransport
import select
class Deaf:
    def arrived(self, arrival): print("got", arrival.nbytes, flush=True)
    def withdrawn(self, arrival): pass
    def finished(self, peer): pass
    def lost(self, peer, reason): pass
transport = ZmqTransport(1)
print(json.dumps(transport.address()), flush=True)
transport.start([json.loads(sys.stdin.readline()), {}], Deaf())
poller = select.poll()
poller.register(transport.fileno(), select.POLLIN)
while True:
    while transport.progress():
        pass
    poller.poll()
"""


def test_the_death_of_a_process_is_reported_once() -> None:
    node = Node(ZmqTransport(0))
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        theirs = json.loads(victim.stdout.readline())
        print(json.dumps(node.transport.address()), file=victim.stdin, flush=True)
        node.transport.start([{}, theirs], node)
        transfer = node.transport.send(1, b"h", [memoryview(bytes(EAGER_LIMIT + 1))])
        assert victim.stdout.readline() == f"got {EAGER_LIMIT + 1}\n"
        victim.send_signal(signal.SIGKILL)
    poller = select.poll()
    poller.register(node.transport.fileno(), select.POLLIN)
    deadline = time.monotonic() + 5.0 * PATIENCE
    while not node.lost_peers and time.monotonic() < deadline:
        node.transport.progress()
        poller.poll(100)
    assert list(node.lost_peers) == [1]
    assert not transfer.done
    node.transport.forget(1, "killed")
    assert isinstance(transfer.error, PeerFailed)
    assert transfer.error.rank == 1
    node.transport.close(5.0)


def test_a_wrong_token_gets_nowhere() -> None:
    here, there = Node(ZmqTransport(0)), Node(ZmqTransport(1))
    address = {**there.transport.address(), "token": "guess"}
    here.transport.start([{}, address], here)
    there.transport.start([{}, {}], there)
    here.transport.send(1, b"h", [memoryview(b"hello")])
    poller = select.poll()
    poller.register(here.transport.fileno(), select.POLLIN)
    deadline = time.monotonic() + DEADLINE_S
    while not here.lost_peers and time.monotonic() < deadline:
        here.transport.progress()
        poller.poll(100)
    assert "token" in here.lost_peers[1]
    there.transport.progress()
    assert there.arrivals == []
    here.transport.close(0.0)
    there.transport.close(0.0)


def test_the_table_names_its_transports_and_says_why_one_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYCOLL_SHM", "-:for a test")
    monkeypatch.setenv("PYCOLL_RDMA_DEVICE", "none:such")
    assert transports.check("auto") == "tcp"
    reasons = transports.reasons()
    assert list(reasons) == ["shm", "rdma", "tcp", "zmq"]
    assert reasons["tcp"] is None
    assert reasons["zmq"] is None
    for name, reason in (("shm", "for a test|core is missing"), ("rdma", "no (RDMA )?device")):
        with pytest.raises(TransportError, match=rf"{name}: .*({reason}).*; use --transport auto"):
            transports.check(name)
    with pytest.raises(TransportError, match="no such transport"):
        transports.check("pigeon")
