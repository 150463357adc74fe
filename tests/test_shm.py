"""Shared memory: what the transport contract does not say, and the short way of send and recv."""

from __future__ import annotations

import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from patience import PATIENCE
from tiers import exhaustive, few
from transport_world import Node, World

from pycoll import arrays
from pycoll.context import KIND_P2P, P2P
from pycoll.errors import PeerFailed
from pycoll.transports.base import CREDIT, EAGER_LIMIT, MESSAGE_COST, Withdrawn
from pycoll.transports.shm import ShmTransport, missing_core, open_host

if missing_core() is not None:
    pytest.skip("the compiled core is not built", allow_module_level=True)

from pycoll.transports._core import Host, PointToPoint

LARGE = 5 * 2**20 + 12345
IDENT = 7


@pytest.fixture
def world() -> Iterator[World]:
    made = World("shm", 3)
    yield made
    made.close()


def pattern(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


def transport_of(world: World, rank: int) -> ShmTransport:
    transport = world.nodes[rank].transport
    assert isinstance(transport, ShmTransport)
    return transport


# --- rings and heaps -------------------------------------------------------------------------


def test_payloads_that_look_like_items_of_a_ring_are_not_taken_for_some(world: World) -> None:
    # A ring of three ranks has 4095 lines of 64 bytes. Where a line of these payloads begins they
    # have the very word that says, in the next lap, that there is an item: a small message.
    lines, length = 4095, 31
    node = world.nodes[1]

    def exchange(payload: bytes) -> None:
        world.send(0, 1, b"", payload)
        world.run(lambda: bool(node.arrivals))
        (arrival,) = node.arrivals
        assert arrival.payload == payload
        arrival.release()
        node.arrivals.clear()

    for position in range(0, lines - length, length):
        items = [
            struct.pack("<QII48x", (lines + position + line + 1) << 16 | 1, 1 << 24, 0)
            for line in range(1, length)
        ]
        exchange(bytes(64 - 16) + b"".join(items))
    for number in range(2 * lines):
        exchange(b"%d" % number)


@pytest.mark.parametrize("size", [2, 40, 128])
def test_many_messages_of_all_sizes_go_round_rings_of_all_sizes(size: int) -> None:
    world = World("shm", size)
    random = np.random.default_rng(size)
    sent: list[tuple[bytes, bytes]] = []
    received: list[tuple[bytes, bytes]] = []
    for number in range(3000):
        nbytes = int(random.choice([0, 8, 60, 500, 2000, 5000, 30_000, EAGER_LIMIT, 70_000]))
        header = b"%d-" % number + bytes(int(random.choice([0, 30, 200, 3000])))
        payload = bytes(random.integers(0, 256, min(nbytes, 64), np.uint8)) * (nbytes // 64 + 1)
        world.send(0, size - 1, header, payload[:nbytes])
        sent.append((header, payload[:nbytes]))
        if random.random() < 0.1:
            for rank in (0, size - 1):
                world.nodes[rank].transport.progress()
        arrivals = world.nodes[size - 1].arrivals
        if random.random() < 0.2:
            while arrivals:
                arrival = arrivals.pop(0)
                received.append((bytes(arrival.header), receive(world, arrival, size)))
    node = world.nodes[size - 1]
    while len(received) < len(sent):
        world.run(lambda: bool(node.arrivals), ranks=[0, size - 1])
        arrival = node.arrivals.pop(0)
        received.append((bytes(arrival.header), receive(world, arrival, size)))
    assert received == sent
    world.close()


def receive(world: World, arrival: Any, size: int) -> bytes:
    into = bytearray(arrival.nbytes)
    transfer = arrival.accept(memoryview(into))
    world.run(lambda: transfer.done, ranks=[0, size - 1])
    assert transfer.error is None
    return bytes(into)


@pytest.mark.parametrize("nbytes", [3000, 100_000, 2**20 + 600])
def test_headers_that_are_longer_than_a_ring_arrive(world: World, nbytes: int) -> None:
    headers = [pattern(nbytes - i) for i in range(6)]
    for header in headers:
        world.send(0, 1, header, b"eager")
        world.send(0, 1, header, bytes(EAGER_LIMIT + 1))
    arrivals = world.arrivals(1, 2 * len(headers))
    assert [a.header for a in arrivals] == [header for header in headers for _ in range(2)]
    assert world.receive(arrivals[0]) == b"eager"


def test_a_header_that_fits_nowhere_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="too long"):
        world.send(0, 1, bytes(2**21), b"")


def test_a_heap_full_of_what_one_rank_does_not_take_does_not_stop_the_others() -> None:
    world = World("shm", 5)
    per_peer = CREDIT // EAGER_LIMIT
    for _ in range(per_peer):
        for peer in (1, 2, 3):
            world.send(0, peer, b"kept", bytes(EAGER_LIMIT))
    data = pattern(EAGER_LIMIT)
    world.send(0, 4, b"h" * 5000, data)
    (arrival,) = world.arrivals(4, 1)
    assert world.receive(arrival) == data
    for peer in (1, 2, 3):
        for arrival in world.arrivals(peer, per_peer):
            assert world.receive(arrival) == bytes(EAGER_LIMIT)
    world.close()


def test_close_waits_for_a_receiver_whose_ring_is_full(world: World) -> None:
    number = 5000
    for i in range(number):
        world.send(0, 1, b"%d" % i, bytes(EAGER_LIMIT + 1))
    closing = threading.Thread(target=world.nodes[0].transport.close, args=(20.0,))
    closing.start()
    world.run(lambda: world.nodes[1].ended == [0], ranks=[1])
    closing.join()
    assert [a.header for a in world.nodes[1].arrivals] == [b"%d" % i for i in range(number)]


def test_what_makes_no_sense_is_a_lost_link_and_no_crash() -> None:
    random = np.random.default_rng(3)
    lost = 0
    for _ in range(300):
        world = World("shm", 2)
        for nbytes in (8, 3000, 70_000):
            world.send(0, 1, b"header", bytes(nbytes))
        # Rank 0's ring to rank 1 lies behind the records and the page of rank 0 itself.
        ring = 8192 + 256 * 1024
        items = os.pread(world.descriptors[0], 512, ring + 64)
        broken = bytearray(items)
        # Not the word that publishes the item: without it there is none.
        place = int(random.integers(8, 24)) + 64 * int(random.integers(0, 5))
        broken[place] ^= int(random.integers(1, 256))
        os.pwrite(world.descriptors[0], broken, ring + 64)
        for _ in range(3):
            world.nodes[1].transport.progress()
        for arrival in world.nodes[1].arrivals:
            if arrival.nbytes <= 2**20:
                arrival.accept(memoryview(bytearray(arrival.nbytes)))
        lost += 0 in world.nodes[1].lost_peers
        world.close()
    assert lost > 20


# --- large messages --------------------------------------------------------------------------


def test_a_send_that_was_asked_whether_it_is_too_late_goes_no_further(world: World) -> None:
    transfer = world.send(0, 1, b"", bytes(LARGE))
    (arrival,) = world.arrivals(1, 1)
    assert not transfer.committed
    into = bytearray(LARGE)
    received = arrival.accept(memoryview(into))
    assert isinstance(received.error, Withdrawn)
    transfer.cancel()


def test_a_send_whose_receiver_has_it_all_is_committed(world: World) -> None:
    transfer = world.send(0, 1, b"", pattern(100_000))
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(100_000)
    received = arrival.accept(memoryview(into))
    world.run(lambda: received.done, ranks=[1])
    assert not transfer.done
    assert transfer.committed
    world.run(lambda: transfer.done)
    assert into == pattern(100_000)


def test_both_sides_copy(world: World) -> None:
    data = pattern(16 * 2**20)
    transfer = world.send(0, 1, b"", data)
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(len(data))
    received = arrival.accept(memoryview(into))  # up to its budget
    world.run(lambda: into[-1] == data[-1] and into[:-100] == data[:-100], ranks=[0])
    assert not received.done
    world.run(lambda: received.done and transfer.done)
    assert into == data


def test_memory_that_the_sender_cannot_write_is_filled_by_the_receiver(world: World) -> None:
    # A part of the receiver's memory is mapped where the kernel lets others not write: read-only
    # until the sender has tried.
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = 16 * 2**20
    data = pattern(nbytes)
    area = mmap.mmap(-1, nbytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    transfer = world.send(0, 1, b"", data)
    (arrival,) = world.arrivals(1, 1)
    received = arrival.accept(memoryview(area))
    tail = nbytes // 2
    assert libc.mprotect(ctypes.c_void_p(start + tail), tail, 1) == 0
    for _ in range(20):
        world.nodes[0].transport.progress()
    assert libc.mprotect(ctypes.c_void_p(start + tail), tail, 3) == 0
    world.run(lambda: received.done and transfer.done)
    assert received.error is None
    assert area[:] == data


def test_memory_that_cannot_be_read_comes_in_segments(world: World) -> None:
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = 8 * 2**20
    data = pattern(nbytes)
    area = mmap.mmap(-1, nbytes)
    area[:] = data
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    transfer = world.send(0, 1, b"", memoryview(area))
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(nbytes)
    assert libc.mprotect(ctypes.c_void_p(start), nbytes, 0) == 0
    received = arrival.accept(memoryview(into))
    assert libc.mprotect(ctypes.c_void_p(start), nbytes, 3) == 0
    world.run(lambda: received.done and transfer.done)
    assert into == data


CHILD = """
import os, select, sys
from pycoll.transports.shm import ShmTransport
from pycoll.transports._core import Host

memory, *doorbells = map(int, sys.argv[2:])
host = Host(memory, 1, doorbells, 2)
transport = ShmTransport(host, doorbells[1], 1, range(2), True)
into = bytearray(1 << 30)

class Peer:
    def __init__(self): self.echo = sys.argv[1] == "echo"
    def arrived(self, arrival):
        if self.echo:
            place = memoryview(bytearray(arrival.nbytes))
            header = bytes(arrival.header)
            back = lambda done: transport.send(0, header, [place])
            arrival.accept(place).then(back)
        else:
            self.receive = arrival.accept(memoryview(into))
            print("copying", flush=True)
    def withdrawn(self, arrival): pass
    def finished(self, peer): sys.exit(0)
    def lost(self, peer, reason): sys.exit(reason)

transport.start([{}, {}], Peer())
poller = select.poll()
poller.register(transport.fileno(), select.POLLIN)
while True:
    while transport.progress(): pass
    if transport.sleep(): poller.poll()
    transport.awake()
"""


class Pair:
    """This process as rank 0, and a child that is rank 1."""

    def __init__(self, what: str) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.descriptors = [os.memfd_create("pair"), os.eventfd(0, flags), os.eventfd(0, flags)]
        host = Host(self.descriptors[0], 0, self.descriptors[1:], 2)
        self.node = Node(ShmTransport(host, self.descriptors[1], 0, range(2), single_copy=True))
        self.node.transport.start([{}, {}], self.node)
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD, what, *map(str, self.descriptors)],
            pass_fds=self.descriptors,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, until: Callable[[], bool], timeout_s: float = 20.0) -> None:
        transport = self.node.transport
        poller = select.poll()
        poller.register(transport.fileno(), select.POLLIN)
        while True:
            worked = transport.progress()
            if until():
                return
            if worked:
                continue
            if transport.sleep():
                assert poller.poll(1000 * timeout_s), "nothing happened"
            transport.awake()

    def close(self) -> None:
        self.node.transport.close(5.0)
        self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def test_processes_wake_one_another() -> None:
    pair = Pair("echo")
    node = pair.node
    random = np.random.default_rng(5)
    for number in range(2000):
        data = pattern(
            int(random.choice([0, 8, 3000, 70_000, 600_000], p=[0.3, 0.3, 0.2, 0.1, 0.1]))
        )
        node.transport.send(1, b"%d" % number, [memoryview(data)])
        pair.run(lambda: len(node.arrivals) == 1)
        arrival = node.arrivals.pop()
        into = bytearray(arrival.nbytes)
        transfer = arrival.accept(memoryview(into))
        pair.run(lambda transfer=transfer: transfer.done)  # type: ignore[misc]
        assert (arrival.header, into) == (b"%d" % number, data)
    pair.close()


@pytest.mark.parametrize("how", few([], [signal.SIGKILL, signal.SIGSTOP]))
def test_a_receiver_that_ends_or_stops_half_way_holds_nobody(how: signal.Signals) -> None:
    pair = Pair("copy")
    data = np.ones(1 << 30, np.uint8)
    transfer = pair.node.transport.send(1, b"", [memoryview(data)])
    assert pair.child.stdout is not None
    assert pair.child.stdout.readline() == "copying\n"
    pair.child.send_signal(how)
    if how == signal.SIGKILL:
        pair.child.wait()
    for _ in range(3):
        pair.node.transport.progress()
    assert not transfer.done
    pair.node.transport.forget(1, "killed")
    assert isinstance(transfer.error, PeerFailed)
    assert pair.node.transport.send(1, b"", [memoryview(b"x")]).error is not None
    pair.close()


# --- the short way ---------------------------------------------------------------------------


class Short:
    """send and recv of one rank, and what they leave to Python."""

    def __init__(self, world: World, rank: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.python: Callable[..., None] | None = None
        self.transport = transport_of(world, rank)
        self.core = PointToPoint(
            self.transport.channel, IDENT, range(3), self._send, self._recv, self._finish
        )
        self.core.usable = True

    def _send(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("send", args, kwargs))

    def _recv(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("recv", args, kwargs))
        if self.python is not None:
            self.python(*args, **kwargs)

    def _finish(self, dest: int, number: int) -> None:
        self.calls.append(("finish", self.transport.adopt(dest, number)))


@pytest.fixture
def short(world: World) -> list[Short]:
    for dtype in (np.float64, ml_dtypes.bfloat16):  # the core learns them at first sight
        arrays.wrap(np.zeros(1, dtype))
    return [Short(world, rank) for rank in range(3)]


def header_of(x: Any, tag: int, ident: int = IDENT) -> bytes:
    value = arrays.wrap(x)
    assert value is not None
    return P2P.pack(KIND_P2P, ident, tag, False) + arrays.describe(value)


DTYPES = list("?bhiqBHIQefdFD")


@pytest.mark.parametrize("dtype", [*map(np.dtype, DTYPES), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, 20_000])
def test_arrays_of_every_dtype_take_the_short_way(
    short: list[Short], dtype: np.dtype[Any], count: int
) -> None:
    x = (np.arange(count) % 5).astype(dtype)
    y = np.zeros(count, dtype)
    for tag in (0, 2**31 - 1):
        if count * dtype.itemsize > EAGER_LIMIT:
            continue
        assert short[0].core.send(x, 1, tag=tag) is None
        assert short[1].core.recv(0, tag, out=y) is y
        assert x.tobytes() == y.tobytes()
    assert short[0].calls == short[1].calls == []


def test_what_the_short_way_sends_is_what_the_long_way_sends(
    world: World, short: list[Short]
) -> None:
    for x in (np.arange(6, dtype=np.int16).reshape(2, 3), np.array(1.5), np.zeros((2, 0, 3))):
        short[0].core.send(x, 1, 3)
        arrival = world.arrivals(1, 1)[0]
        assert arrival.header == header_of(x, 3)
        assert arrival.payload == x.tobytes()
        world.nodes[1].arrivals.clear()
    x = np.arange(5.0)
    world.send(0, 1, header_of(x, 4), x.tobytes())
    y = np.zeros(7)
    assert short[1].core.recv(0, out=y) is y
    assert y.tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert short[0].calls == short[1].calls == []


def test_a_large_array_is_copied_once_and_both_ways_mix(world: World, short: list[Short]) -> None:
    x, y = np.arange(300_000.0), np.zeros(300_000)
    short[0].core.send(x, 1)
    ((_, transfer),) = short[0].calls  # nobody has received it for a while
    assert not transfer.done
    assert short[1].core.recv(0, out=y) is y
    world.run(lambda: transfer.done)
    assert (x == y).all()
    y[:] = 0
    transfer = world.send(0, 1, header_of(x, 1), memoryview(x))
    assert short[1].core.recv(0, 1, y) is y
    world.run(lambda: transfer.done)
    assert (x == y).all()
    assert short[1].calls == []


def test_an_offer_that_ends_before_python_hears_of_it_is_done(
    world: World, short: list[Short]
) -> None:
    x = np.arange(300_000.0)
    channel = transport_of(world, 0).channel
    ids: list[int] = []
    core = PointToPoint(
        channel, IDENT, range(3), None, None, lambda dest, number: ids.append(number)
    )
    core.usable = True
    core.send(x, 1)
    world.arrivals(1, 1)[0].release()
    world.run(lambda: not channel.holds(ids[0]))
    assert transport_of(world, 0).adopt(1, ids[0]).done
    core.send(x, 1)
    transport_of(world, 0).forget(1, "killed")
    assert isinstance(transport_of(world, 0).adopt(1, ids[1]).error, PeerFailed)


def test_a_large_array_goes_to_a_receiver_that_waits(world: World, short: list[Short]) -> None:
    node, transport = world.nodes[1], world.nodes[1].transport

    def receive_in_python(source: int, tag: int, out: Any) -> None:
        error: BaseException | None = Withdrawn()
        while error is not None:
            while len(node.arrivals) == len(node.taken_back):
                transport.progress()
            arrival = next(a for a in node.arrivals if a not in node.taken_back)
            node.arrivals.remove(arrival)
            transfer = arrival.accept(memoryview(out).cast("B"))
            while not transfer.done:
                transport.progress()
            error = transfer.error

    short[1].python = receive_in_python
    for count in 20 * (5_000, 8_000, 200_000, 3_000_000):
        x, y = np.arange(float(count)), np.zeros(count)
        waiting = threading.Thread(target=short[1].core.recv, args=(0, 0, y))
        waiting.start()
        short[0].core.send(x, 1)
        for call in short[0].calls:
            while not call[1].done:
                short[0].transport.progress()
        short[0].calls.clear()
        waiting.join()
        assert (x == y).all()


def test_a_message_is_buffered_after_all_if_its_receiver_waits_for_another(
    world: World, short: list[Short]
) -> None:
    x, y = np.arange(6_000.0), np.zeros(6_000)
    node = world.nodes[1]
    for _ in range(30):
        waiting = threading.Thread(target=short[1].core.recv, args=(0, 9, y))
        waiting.start()
        short[0].core.send(x, 1, 1)
        waiting.join()
        assert short[0].calls == []
        world.run(lambda: len(node.arrivals) > len(node.taken_back))
        (arrival,) = (a for a in node.arrivals if a not in node.taken_back)
        assert arrival.payload == x.tobytes()
        arrival.release()
        node.arrivals.clear()
        node.taken_back.clear()
    assert not y.any()


def test_a_receive_leaves_what_it_does_not_want_to_python(world: World, short: list[Short]) -> None:
    x = np.arange(4, dtype=np.float32)
    y = np.zeros(4, np.float32)
    for header, payload, args in (
        (header_of(x, 5), x.tobytes(), (0, 6, y)),  # another tag
        (header_of(x, 5, ident=8), x.tobytes(), (0, 5, y)),  # another communicator
        (header_of(x.astype(np.int32), 5), x.tobytes(), (0, 5, y)),  # another dtype
        (header_of(np.zeros(5, np.float32), 5), bytes(20), (0, 5, y)),  # longer
        (P2P.pack(KIND_P2P, IDENT, 5, True), b"pickle", (0, 5, y)),  # an object
        (header_of(x, 5)[:10], b"", (0, 5, y)),  # no message at all
    ):
        world.send(0, 1, header, payload)
        assert short[1].core.recv(*args) is None
        assert short[1].calls.pop() == ("recv", args, {})
        assert not y.any()
        (arrival,) = world.arrivals(1, 1)
        assert (arrival.header, bytes(arrival.payload or b"")) == (header, payload)
        world.nodes[1].arrivals.clear()


def test_what_is_not_the_common_case_goes_to_python_with_its_arguments(
    world: World, short: list[Short]
) -> None:
    x, y = np.arange(4.0), np.zeros(4)
    frozen = y[:]
    frozen.flags.writeable = False
    core = short[0].core
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("send", (x, 0), {}),  # to itself
        ("send", (x, 3), {}),
        ("send", (x, -2), {}),
        ("send", (x, 1.0), {}),
        ("send", (x, True), {}),
        ("send", (x,), {}),
        ("send", (), {"dest": 1}),
        ("send", (x, 1, -1), {}),
        ("send", (x, 1, 2**31), {}),
        ("send", (x, 1, 0, 0), {}),
        ("send", (x, 1), {"timeout": 1.0}),
        ("send", (x, 1), {"other": 1}),
        ("send", (x, 1), {"dest": 1}),
        ("send", (x[::2], 1), {}),
        ("send", ([1, 2], 1), {}),
        ("send", (x.astype(">f8"), 1), {}),
        ("recv", (), {}),
        ("recv", (1,), {}),
        ("recv", (-1, 0, y), {}),
        ("recv", (1, 0, frozen), {}),
        ("recv", (1, 0, y[::2]), {}),
        ("recv", (1, -2, y), {}),
        ("recv", (1, 0, y, object()), {}),
        ("recv", (1, 0, y), {"timeout": 1.0}),
        ("recv", (1,), {"out": y, "dest": 1}),
    ]
    for name, args, kwargs in cases:
        getattr(core, name)(*args, **kwargs)
        ((called, *rest),) = short[0].calls
        assert called == name
        assert rest == [args, kwargs] or rest[0] is not args
        short[0].calls.clear()
    assert transport_of(world, 0).links() == []


@pytest.mark.parametrize("state", ["unusable", "engaged", "queued"])
def test_the_short_way_is_closed_while_python_must_look(
    world: World, short: list[Short], state: str
) -> None:
    x, y = np.arange(4.0), np.zeros(4)
    short[0].core.send(x, 1)
    if state == "unusable":
        short[1].core.usable = False
    elif state == "engaged":
        world.hosts[1].engaged = True
    else:
        short[1].core.queued = 1
    short[1].core.recv(0, out=y)
    assert [call[0] for call in short[1].calls] == ["recv"]
    short[1].core.send(x, 0)
    sent_by_python = [call[0] for call in short[1].calls] == ["recv", "send"]
    assert sent_by_python == (state != "queued")


def test_a_rank_that_was_forgotten_or_has_closed_is_left_to_python(
    world: World, short: list[Short]
) -> None:
    x = np.arange(4.0)
    short[0].core.send(x, 1)
    transport_of(world, 0).forget(1, "killed")
    world.nodes[2].transport.close(1.0)
    for dest in (1, 2):
        short[0].core.send(x, dest)
    short[0].core.recv(1, 0, x)
    assert [call[0] for call in short[0].calls] == ["send", "send", "recv"]


def test_more_than_the_credit_is_offered(world: World, short: list[Short]) -> None:
    x = np.zeros(60_000, np.uint8)
    sent = 0
    while not short[0].calls:
        short[0].core.send(x, 1)
        sent += 1
    assert sent == CREDIT // (60_000 + MESSAGE_COST) + 1
    y = np.ones(60_000, np.uint8)
    for _ in range(sent):
        assert short[1].core.recv(0, out=y) is y
        assert not y.any()
    ((_, transfer),) = short[0].calls
    world.run(lambda: transfer.done)


# --- the protocol ----------------------------------------------------------------------------

HERE = Path(__file__).parent


@exhaustive
def test_two_ranks_over_one_memory_have_no_data_races(tmp_path: Path) -> None:
    program = tmp_path / "channel_tsan"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=thread", "-fno-strict-aliasing", "-pthread"]
    folders = [f"-I{HERE.parent / 'transports' / '_core'}"]
    source = HERE / "core" / "channel_tsan.c"
    built = subprocess.run(
        [compiler, *flags, *folders, "-D_GNU_SOURCE", source, "-o", program],
        capture_output=True,
        text=True,
    )
    if "tsan" in built.stderr and built.returncode != 0:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run(
        [program, "500", "1"], capture_output=True, text=True, timeout=60 * PATIENCE
    )
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer does not work with this kernel")
    assert ran.returncode == 0, ran.stderr


# --- coming by it ----------------------------------------------------------------------------


def test_the_memory_is_found_by_what_the_launcher_hands_on() -> None:
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    memory = os.memfd_create("memory", 0)
    doorbells = [os.eventfd(0, flags), os.eventfd(0, flags)]
    inode = os.fstat(memory).st_ino
    good = f"{memory}:{inode}:{doorbells[0]},{doorbells[1]}:2"
    opened = open_host({"PYCOLL_SHM": good}, 1, 2)
    assert not isinstance(opened, str)
    assert opened[1] == doorbells[1]
    assert not os.get_inheritable(memory)
    for variable, local, reason in (
        ("", 0, "PYCOLL_SHM is not set"),
        ("-:for a test", 0, "for a test"),
        ("nonsense", 0, "makes no sense"),
        ("1:2:3", 0, "makes no sense"),
        (good.replace(str(inode), str(inode + 1)), 0, "closed on the way"),
        (f"{memory}:{inode}:{doorbells[0]},9999:2", 0, "closed on the way"),
        (f"{memory}:{inode}:{doorbells[0]}:2", 0, "doorbells for 1 ranks"),
        (good, 2, "this is rank 2 of 2"),
    ):
        found = open_host({"PYCOLL_SHM": variable}, local, 2)
        assert isinstance(found, str)
        assert reason in found
    for descriptor in (memory, *doorbells):
        os.close(descriptor)
