"""Shared memory: what the contract of transports does not say."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from tiers import few
from transport_world import Node, World

from pycoll._transports._core import MappedHost, Parker
from pycoll._transports.base import CREDIT, EAGER_LIMIT, Withdrawn
from pycoll._transports.core import CoreTransport, LinkMemory
from pycoll._transports.shm import NOTES_NBYTES, open_host
from pycoll.errors import PeerFailed, TransportError

LARGE = 5 * 2**20 + 12345
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def world() -> Iterator[World]:
    made = World("shm", 3)
    yield made
    made.close()


def pattern(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


# --- rings and heaps -------------------------------------------------------------------------


def test_payloads_that_look_like_items_of_a_ring_are_not_taken_for_some(world: World) -> None:
    # A ring of three ranks has 4095 lines of 64 bytes. Where a line of these payloads begins they
    # have the very word that says, in the next lap, that there is an item: a small message.
    lines, length = 4095, 31
    node = world.nodes[1]

    def exchange(payload: bytes) -> None:
        world.send(0, 1, b"h", payload)
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
    refused = world.send(0, 1, bytes(2**21), b"")
    assert isinstance(refused.error, TransportError)


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


def test_what_makes_no_sense_is_a_lost_link_and_no_crash() -> None:
    random = np.random.default_rng(3)
    lost = 0
    for _ in range(300):
        world = World("shm", 2)
        for nbytes in (8, 3000, 70_000):
            world.send(0, 1, b"header", bytes(nbytes))
        # Rank 0's ring to rank 1 lies behind the records, the notes of both and its own ring.
        ring = 8192 + 2 * NOTES_NBYTES + 256 * 1024
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
    transfer = world.send(0, 1, b"h", bytes(LARGE))
    (arrival,) = world.arrivals(1, 1)
    assert not transfer.committed
    into = bytearray(LARGE)
    received = arrival.accept(memoryview(into))
    assert isinstance(received.error, Withdrawn)
    transfer.cancel()


def test_a_send_whose_receiver_has_it_all_is_committed(world: World) -> None:
    transfer = world.send(0, 1, b"h", pattern(100_000))
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
    transfer = world.send(0, 1, b"h", data)
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
    transfer = world.send(0, 1, b"h", data)
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


def test_memory_that_cannot_be_read_comes_in_fragments(world: World) -> None:
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = 8 * 2**20
    data = pattern(nbytes)
    area = mmap.mmap(-1, nbytes)
    area[:] = data
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    transfer = world.send(0, 1, b"h", memoryview(area))
    (arrival,) = world.arrivals(1, 1)
    into = bytearray(nbytes)
    assert libc.mprotect(ctypes.c_void_p(start), nbytes, 0) == 0
    received = arrival.accept(memoryview(into))
    assert libc.mprotect(ctypes.c_void_p(start), nbytes, 3) == 0
    world.run(lambda: received.done and transfer.done)
    assert into == data


CHILD = """
import os, sys
from pycoll._transports.core import CoreTransport, LinkMemory
from pycoll._transports._core import MappedHost, Parker

memory, *doorbells = map(int, sys.argv[2:])
host = MappedHost(memory, 1, doorbells, 2)
transport = CoreTransport(1, 2, LinkMemory(host, doorbells[1], range(2), True))
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
while True:
    while transport.progress(): pass
    parker = Parker(transport.core)
    if parker.begin(None): parker.wait(60.0)
"""


class Pair:
    """This process as rank 0, and a child that is rank 1."""

    def __init__(self, what: str) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.descriptors = [os.memfd_create("pair"), os.eventfd(0, flags), os.eventfd(0, flags)]
        host = MappedHost(self.descriptors[0], 0, self.descriptors[1:], 2)
        self.node = Node(
            CoreTransport(0, 2, LinkMemory(host, self.descriptors[1], range(2), single_copy=True))
        )
        self.node.transport.start([{}, {}], self.node)
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD, what, *map(str, self.descriptors)],
            pass_fds=self.descriptors,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, until: Callable[[], bool], timeout_s: float = 20.0) -> None:
        transport, deadline = self.node.transport, time.monotonic() + timeout_s
        while True:
            worked = transport.progress()
            if until():
                return
            assert time.monotonic() < deadline, "nothing happened"
            parker = Parker(transport.core)
            if not worked and parker.begin(None):
                parker.wait(deadline - time.monotonic())

    def close(self) -> None:
        self.node.transport.close(5.0)
        self.node.transport.end()
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
    transfer = pair.node.transport.send(1, b"h", [memoryview(data)])
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
    assert pair.node.transport.send(1, b"h", [memoryview(b"x")]).error is not None
    pair.close()


def test_two_ranks_over_one_memory_have_no_data_races(tmp_path: Path) -> None:
    program = tmp_path / "channel_tsan"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=thread", "-fno-strict-aliasing", "-pthread"]
    folders = [f"-I{TESTS.parent / 'transports' / '_core'}"]
    source = TESTS / "core" / "channel_tsan.c"
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
