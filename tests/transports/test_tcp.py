"""Links over TCP; the contract of all transports is in test_transports.py."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from patience import PATIENCE
from tcp_world import KINDS, TcpWorld, pattern
from tiers import few
from transport_world import DEADLINE_S, over_tcp

from pycoll._transports.base import EAGER_LIMIT
from pycoll.errors import PeerFailed

HELPERS = Path(__file__).parents[1] / "helpers"


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def reset(connection: socket.socket) -> None:
    """End a connection as the kernel does when its keepalive finds nobody, with a reset."""
    nobody = struct.pack("H14x", socket.AF_UNSPEC)
    assert ctypes.CDLL(None).connect(connection.fileno(), nobody, len(nobody)) == 0


def shut(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("cut", [shut, reset])
@pytest.mark.parametrize(
    ("kind", "lane"), [("tcp", 0), ("tcp with lanes", 0), ("tcp with lanes", 2)]
)
def test_a_connection_cut_under_a_transfer_is_told_once_and_fails_all_after_the_verdict(
    kind: str, lane: int, cut: Callable[[socket.socket], None]
) -> None:
    world = TcpWorld(kind)
    world.link()
    nbytes = 64 * 1024**2
    sending = world.send(0, 1, b"h", bytes(nbytes))
    (arrival,) = world.arrivals(1, 1)
    receiving = arrival.accept(memoryview(bytearray(nbytes)))
    waiting = world.send(0, 1, b"h", bytes(nbytes))
    world.nodes[1].transport.progress()
    with world.connection(0, 1, lane) as connection:
        cut(connection)
    world.run(lambda: len(world.losses) == 2)
    later = world.send(0, 1, b"h", b"later")
    for _ in range(10):
        for node in world.nodes:
            node.transport.progress()
    assert sorted(world.losses) == [(0, 1), (1, 0)]
    assert not any(transfer.done for transfer in (sending, receiving, waiting, later))
    world.transport(0).forget(1, "killed")
    world.transport(1).forget(0, "killed")
    for transfer in (sending, receiving, waiting, later, world.send(0, 1, b"h", b"last")):
        assert isinstance(transfer.error, PeerFailed)
        assert transfer.error.reason == "killed"
    world.close()


PEER = """
import select, sys
sys.path[:0] = {path!r}
from transport_world import Node, over_tcp
class Echo(Node):
    def arrived(self, arrival):
        into = bytearray(arrival.nbytes)
        header = bytes(arrival.header)
        arrival.accept(memoryview(into)).then(
            lambda _: self.transport.send(0, header, [memoryview(into)]))
transport = over_tcp(1, 2)
print(transport.address()["endpoint"], flush=True)
node = Echo(transport)
transport.start([dict(endpoint=sys.stdin.readline().strip(), lanes=1), {{}}], node)
while not node.ended:
    if not transport.progress():
        select.select([], [], [], 0.001)
transport.close(5.0)
transport.end()
"""


@pytest.mark.parametrize("stopped_s", few([0.5], [8.0]))  # the second: longer than its keepalive
def test_a_stopped_peer_is_not_lost_and_goes_on(stopped_s: float) -> None:
    # Its nodes are one transport here, and another in a process of its own.
    world = TcpWorld("tcp", 1)
    transport = over_tcp(0, 2)
    node = world.nodes[0]
    node.transport.close(0.0)
    node.transport.end()
    node.transport = transport
    with subprocess.Popen(
        [sys.executable, "-c", PEER.format(path=[str(HELPERS)])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as peer:  # fmt: skip
        assert peer.stdin is not None
        assert peer.stdout is not None
        theirs = {"endpoint": peer.stdout.readline().strip(), "lanes": 1}
        print(transport.address()["endpoint"], file=peer.stdin, flush=True)
        transport.start([{}, theirs], node)
        small, large = pattern(10), pattern(3 * EAGER_LIMIT)
        world.send(0, 1, b"before", small)
        assert world.receive(world.arrivals(0, 1)[-1]) == small
        peer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.pid, os.WSTOPPED)
        world.send(0, 1, b"while", large)
        until = time.monotonic() + stopped_s
        while time.monotonic() < until:
            if not transport.progress():
                select.select([], [], [], 0.01)
        assert world.losses == []
        assert len(node.arrivals) == 1
        peer.send_signal(signal.SIGCONT)
        assert world.receive(world.arrivals(0, 2)[-1]) == large
        transport.close(5.0)
        transport.end()
        assert peer.wait(DEADLINE_S) == 0


def test_a_wrong_key_makes_no_link_and_both_sides_say_why() -> None:
    world = TcpWorld("tcp")
    world.nodes[1].transport.close(0.0)
    world.nodes[1].transport.end()
    other = over_tcp(1, 2, b"another key of thirty-two bytes!")
    world.nodes[1].transport = other
    addresses = [node.transport.address() for node in world.nodes]
    for node in world.nodes:
        node.transport.start(addresses, node)
    transfers = [world.send(rank, 1 - rank, b"h", bytes(2 * EAGER_LIMIT)) for rank in (0, 1)]
    world.run(lambda: all(node.lost_peers for node in world.nodes))
    for rank, node in enumerate(world.nodes):
        assert "another job" in node.lost_peers[1 - rank]
        assert node.arrivals == []
    assert not any(transfer.done for transfer in transfers)
    world.close()


def test_a_connection_that_is_refused_is_a_lost_link() -> None:
    world = TcpWorld("tcp")
    world.nodes[1].transport.close(0.0)
    transfer = world.send(0, 1, b"h", b"x")
    world.run(lambda: bool(world.nodes[0].lost_peers), ranks=[0])
    assert world.nodes[0].lost_peers == {1: "it does not answer (connection refused)"}
    large = world.send(0, 1, b"h", bytes(2 * EAGER_LIMIT))
    assert transfer.done  # it was buffered
    assert not large.done
    world.transport(0).forget(1, "killed")
    assert isinstance(large.error, PeerFailed)
    world.close()


def test_a_listener_without_descriptors_turns_callers_away_and_does_not_spin() -> None:
    world = TcpWorld("tcp")
    host, port = world.transport(0).address()["endpoint"].removeprefix("tcp://").split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # now nothing can be opened
    try:
        for stranger in strangers:
            stranger.sendall(b"p")
        for turn in range(1000):
            if not world.nodes[0].transport.progress() and turn > 100:
                break
        else:
            pytest.fail("it spins")
        for stranger in strangers:
            with suppress(ConnectionError):  # what it has said was never read
                assert stranger.recv(1) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stranger in strangers:
            stranger.close()
    world.send(1, 0, b"h", b"still there")
    assert world.receive(world.arrivals(0, 1)[0]) == b"still there"
    world.close()


FORKED = """
import os, sys
sys.path[:0] = {path!r}
from transport_world import World, kill
world = World({kind!r}, 2)
world.send(0, 1, b"h", b"x")
world.arrivals(1, 1)
world.quiet(0, 1)
reading, writing = os.pipe()
told, tell = os.pipe()
child = os.fork()
if child == 0:
    left = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{{fd}}")]
    os.close(writing)
    bad = [name for name in left if name.startswith("socket:") or "eventpoll" in name]
    os.write(tell, b"1" if bad else b"0")
    os.read(reading, 1)  # until the parent has seen the end
    os._exit(0)
assert os.read(told, 1) == b"0", "the child holds connections"
# The end of one is seen by the other, though the child goes on.
kill(world.nodes[0].transport)
world.run(lambda: 0 in world.nodes[1].lost_peers, ranks=[1])
world.nodes.pop(0)
os.write(writing, b"x")
assert os.waitpid(child, 0)[1] == 0
world.close()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_holds_no_connection_open(kind: str) -> None:
    script = FORKED.format(path=[str(HELPERS)], kind=kind)
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_links_that_fail_leave_no_descriptor_behind() -> None:
    before = num_descriptors()
    test_a_wrong_key_makes_no_link_and_both_sides_say_why()
    for _ in range(3):
        test_a_connection_that_is_refused_is_a_lost_link()
        test_a_connection_cut_under_a_transfer_is_told_once_and_fails_all_after_the_verdict(
            "tcp with lanes", 1, reset
        )
    assert num_descriptors() == before


CUT = """
import os, re, subprocess, sys
import numpy as np
import pycoll
comm = pycoll.init()
x = np.ones(100_000)
assert comm.all_reduce(x)[0] == 2
if comm.rank == 0:
    listed = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True).stdout
    cut = ""  # a connection that does not count, as both have dialed, may be there still
    for port in re.findall(rf":(\\d+) .*pid={os.getpid()},", listed):
        cut += subprocess.check_output(["ss", "-K", "-tnH", "sport", "=", port], text=True)
    print("cut" if cut else "this kernel cuts nothing", flush=True)
try:
    while True:
        comm.all_reduce(x)
except pycoll.PeerFailed as error:
    print(f"rank {comm.rank}: {error}", flush=True)
"""


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ss") is None, reason="needs root and ss (iproute2)"
)
def test_a_link_that_the_system_cuts_is_a_failed_peer_on_both_sides(tmp_path: Path) -> None:
    program = tmp_path / "cut.py"
    program.write_text(CUT)
    done = subprocess.run(
        [sys.executable, "-m", "pycoll._launcher", "-n", "2", "--transport", "tcp",
         "--timeout", str(30 * PATIENCE), str(program)],
        capture_output=True, text=True, timeout=40 * PATIENCE,
    )  # fmt: skip
    if "cuts nothing" in done.stdout:
        pytest.skip("ss -K does nothing: a kernel without INET_DIAG_DESTROY")
    # Whoever hears of it first may have ended before the other one looks.
    for rank in range(2):
        assert f"rank {rank}: rank {1 - rank} " in done.stdout, done.stdout + done.stderr
    assert "failed: its link was closed" in done.stdout
