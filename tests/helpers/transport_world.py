"""Ranks of one process, each with a transport of its own that is driven by hand."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from patience import PATIENCE
from simulated_device import Fabric

from pycoll._support.zmq_auth import Keys
from pycoll._transports import rdma_devices
from pycoll._transports.base import Arrival, Transfer, Transport
from pycoll._transports.core import CoreTransport, LinkMemory
from pycoll._transports.core_tcp import TcpNetwork
from pycoll._transports.rdma import RdmaTransport, completions_for, open_rdma, receives_for
from pycoll._transports.zeromq import ZmqTransport

OVER_PYTHON = "core over Python's "
"""Begin the kinds in which the core moves messages by a transport in Python."""

DEADLINE_S = 30.0 * PATIENCE


class Node:
    """One rank: a transport and what it was told; notes go to `nodes`, by rank."""

    def __init__(
        self, transport: Transport, nodes: list[Node] | None = None, rank: int = 0
    ) -> None:
        self.transport = transport
        self.nodes = [self] if nodes is None else nodes
        self.rank = rank
        self.arrivals: list[Arrival] = []
        self.taken_back: list[Arrival] = []
        self.ended: list[int] = []
        self.lost_peers: dict[int, str] = {}

    def arrived(self, arrival: Arrival) -> None:
        arrival.header = bytes(arrival.header)
        self.arrivals.append(arrival)

    def withdrawn(self, arrival: Arrival) -> None:
        self.taken_back.append(arrival)

    def finished(self, peer: int) -> None:
        self.ended.append(peer)

    def lost(self, peer: int, reason: str) -> None:
        self.lost_peers[peer] = reason

    def tell(self, peer: int, note: bytes) -> None:
        self.nodes[peer].transport.hear(self.rank, note)

    def listen(self, timeout_s: float) -> list[int]:
        return []  # notes come without


class World:
    """Some ranks in one process, each with a transport of its own, driven by hand."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.descriptors: list[int] = []
        self.hosts: list[Any] = []
        self.fabric: Any = None
        self.nodes: list[Node] = []
        self.outside: list[Node] = []  # the transports under those of the nodes
        for rank, transport in enumerate(self.make(kind, size)):
            self.nodes.append(Node(transport, self.nodes, rank))
        self.start()

    def start(self) -> None:
        """Tell each transport where the others are."""
        addresses = [node.transport.address() for node in self.nodes]
        for node in self.nodes:
            node.transport.start(addresses, node)
        outside = [node.transport.address() for node in self.outside]
        for node, under in zip(self.nodes, self.outside, strict=False):
            node.transport.outside.start(under.transport, outside, node)

    def make(self, kind: str, size: int) -> list[Transport]:
        if kind.startswith(OVER_PYTHON):
            under = self.make(kind.removeprefix(OVER_PYTHON), size)
            self.outside = [Node(transport) for transport in under]
            return [
                CoreTransport(
                    rank, size, outside={peer: one for peer in range(size) if peer != rank}
                )
                for rank, one in enumerate(under)
            ]
        if kind in ("tcp", "tcp with lanes"):
            return [over_tcp(rank, size, lanes=1 if kind == "tcp" else 3) for rank in range(size)]
        if kind == "zmq":
            return [ZmqTransport(rank) for rank in range(size)]
        if kind == "zmq with CURVE":
            keys = Keys.derive(bytes(32), b"pycoll zmq")
            return [ZmqTransport(rank, keys=keys) for rank in range(size)]
        if kind == "rdma, simulated":
            self.fabric = Fabric(seed=size)
            limits = receives_for(size - 1), completions_for(size - 1)
            return [
                RdmaTransport(rank, self.fabric.device(*limits), "simulated")
                for rank in range(size)
            ]
        if kind == "rdma":
            return [_on_device(rank, size) for rank in range(size)]
        # One memory, mapped once for each rank, as in processes of their own.
        from pycoll._transports._core import MappedHost

        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        memory = os.memfd_create("ranks", os.MFD_CLOEXEC)
        doorbells = [os.eventfd(0, flags) for _ in range(size)]
        self.descriptors = [memory, *doorbells]
        self.hosts = [MappedHost(memory, rank, doorbells, size) for rank in range(size)]
        return [
            CoreTransport(rank, size, LinkMemory(host, doorbells[rank], range(size), kind == "shm"))
            for rank, host in enumerate(self.hosts)
        ]

    def send(self, source: int, dest: int, header: bytes, *parts: bytes | memoryview) -> Transfer:
        views = [memoryview(part).cast("B") for part in parts]
        return self.nodes[source].transport.send(dest, header, views)

    def run(self, until: Callable[[], bool], ranks: list[int] | None = None) -> None:
        """Progress the given ranks (all of them) until the condition holds."""
        nodes = self.nodes if ranks is None else [self.nodes[rank] for rank in ranks]
        deadline = time.monotonic() + DEADLINE_S
        poller = select.poll()
        is_core = isinstance(nodes[0].transport, CoreTransport)  # which sleeps in ways of its own
        for node in () if is_core else nodes:
            poller.register(node.transport.fileno(), select.POLLIN)
        while True:
            # Not until nothing is left to do: that may be long after the condition held.
            worked = any([node.transport.progress() for node in nodes])
            if until():
                return
            assert time.monotonic() < deadline, "not in time"
            if worked:
                continue
            if all([node.transport.sleep() for node in nodes]):
                poller.poll(1 if is_core else 1000 * (deadline - time.monotonic()))
            for node in nodes:
                node.transport.awake()

    def arrivals(self, rank: int, number: int) -> list[Arrival]:
        """Wait until a rank has that many messages."""
        node = self.nodes[rank]
        self.run(lambda: len(node.arrivals) >= number)
        assert len(node.arrivals) == number
        return node.arrivals

    def quiet(self, rank: int, sender: int) -> None:
        """Wait until everything that `sender` has sent so far has been handled by `rank`."""
        node = self.nodes[rank]
        before = len(node.arrivals)
        self.send(sender, rank, b"last")
        self.run(lambda: len(node.arrivals) > before and node.arrivals[-1].header == b"last")
        node.arrivals.pop()

    def leave(self, rank: int) -> None:
        """Close the transport of a rank, while the others go on as processes do."""
        leaving = threading.Thread(target=self.nodes[rank].transport.close, args=(5.0,))
        leaving.start()
        others = [node for node in self.nodes if node is not self.nodes[rank]]
        while leaving.is_alive():
            if not any([node.transport.progress() for node in others]):
                leaving.join(0.001)

    def receive(self, arrival: Arrival) -> bytes:
        into = bytearray(arrival.nbytes)
        transfer = arrival.accept(memoryview(into))
        self.run(lambda: transfer.done)
        assert transfer.error is None
        return bytes(into)

    def close(self) -> None:
        for node in self.nodes:
            node.transport.close(5.0)
            if isinstance(node.transport, CoreTransport):
                node.transport.end()
        for descriptor in self.descriptors:
            os.close(descriptor)
        if self.fabric is not None:
            self.fabric.check()


def kill(transport: CoreTransport) -> None:
    """End a rank as the kernel ends a process: all that it has open is closed, without a word."""
    transport._closed = True  # it says nothing more
    if transport._tcp is not None:
        transport._tcp.close()
    transport.end()


def over_tcp(rank: int, size: int, key: bytes = bytes(32), lanes: int = 1) -> CoreTransport:
    """The core of a rank which the others reach by tcp."""
    return CoreTransport(rank, size, None, TcpNetwork(key, "127.0.0.1", lanes))


def _on_device(rank: int, size: int) -> RdmaTransport:
    """The transport of a rank on a real device, which it opens for itself."""
    choice = rdma_devices.find(os.environ)
    assert not isinstance(choice, str), choice
    opened = open_rdma(rank, size, choice)
    assert not isinstance(opened, str), opened
    return opened
