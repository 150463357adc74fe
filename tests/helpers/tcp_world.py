"""Two ranks of one process with links over TCP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np
from transport_world import World, kill

from pycoll._transports.core import CoreTransport
from pycoll._transports.dial import PeerLane

KINDS = ["tcp", "tcp with lanes"]
LANES = {"tcp": 1, "tcp with lanes": 3}


class TcpWorld(World):
    """Two ranks with links over TCP, of which the descriptors are known."""

    def __init__(self, kind: str = "tcp", size: int = 2) -> None:
        super().__init__(kind, size)
        self.lanes: dict[tuple[int, int, int], int] = {}
        self.losses: list[tuple[int, int]] = []
        for rank, node in enumerate(self.nodes):
            dialer = self.transport(rank)._tcp.dialer
            dialer._on_link = self._watch(rank, dialer._on_link)
            node.lost = self._count(rank, node.lost)  # type: ignore[method-assign]

    def transport(self, rank: int) -> CoreTransport:
        transport = self.nodes[rank].transport
        assert isinstance(transport, CoreTransport)
        return transport

    def _watch(
        self, rank: int, linked: Callable[[PeerLane, socket.socket, bool], None]
    ) -> Callable[[PeerLane, socket.socket, bool], None]:
        def watched(link: PeerLane, connection: socket.socket, dialed: bool) -> None:
            self.lanes[rank, link.peer, link.lane] = connection.fileno()
            linked(link, connection, dialed)

        return watched

    def _count(self, rank: int, lost: Callable[[int, str], None]) -> Callable[[int, str], None]:
        def counted(peer: int, reason: str) -> None:
            self.losses.append((rank, peer))
            lost(peer, reason)

        return counted

    def connection(self, rank: int, peer: int, lane: int) -> socket.socket:
        """Another descriptor of a connection."""
        return socket.socket(fileno=os.dup(self.lanes[rank, peer, lane]))

    def buffer(self, nbytes: int) -> None:
        """Have the kernel take about so much of what is written and not read yet."""
        for key in self.lanes:
            with self.connection(*key) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def is_linked(self) -> bool:
        """Whether all connections of ranks 0 and 1 are there."""
        return len(self.lanes) == 2 * LANES[self.kind]

    def kill(self, rank: int) -> None:
        kill(self.transport(rank))

    def link(self) -> None:
        """Make all connections of ranks 0 and 1."""
        self.send(0, 1, b"link")
        self.run(lambda: self.is_linked() and len(self.nodes[1].arrivals) == 1)
        self.nodes[1].arrivals.pop().release()
        self.quiet(1, 0)
        self.quiet(0, 1)


def pattern(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)
