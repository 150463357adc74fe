"""The core's links over TCP: who connects is decided here, and the core gets connected sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll._support.ports import endpoint_of, listen, why_unreachable
from pycoll._support.weak import weakly
from pycoll._transports.dial import Dialer, PeerLane
from pycoll._transports.handshake import Secret
from pycoll.errors import TransportError

if TYPE_CHECKING:
    from pycoll._transports._core import MessageEngine

_KEEPALIVE, _KEEPALIVE_BETWEEN_HOSTS = 3, 6


class TcpNetwork(NamedTuple):
    """How the ranks that share no memory with this one reach it.

    Attributes:
        key: the job's.
        host: the address to listen on.
        lanes: connections that a link has, if the other rank has as many.
    """

    key: bytes
    host: str
    lanes: int


class TcpLinks:
    """The links of one rank over TCP.

    Args:
        rank, size: of the job.
        network: how others reach this rank.

    Attributes:
        dialer: makes the connections; its descriptor is readable when `progress` has work to do.
        lanes: as given.
        is_closing: no link gets further lanes.

    Raises:
        TransportError: it cannot listen there.
    """

    def __init__(self, rank: int, size: int, network: TcpNetwork) -> None:
        self.lanes = network.lanes
        self.is_closing = False
        self._addresses: Sequence[dict[str, Any]] = ()
        if why := why_unreachable(network.host):
            raise TransportError(f"tcp: rank {rank} cannot be reached at {network.host}: {why}")
        is_local = network.host in ("127.0.0.1", "::1")
        try:
            with contextlib.ExitStack() as undo:
                listener = undo.enter_context(listen(network.host))
                self._endpoint = endpoint_of(listener)
                self.dialer = Dialer(
                    rank,
                    size,
                    network.lanes,
                    listener,
                    Secret.derive(network.key),
                    _KEEPALIVE if is_local else _KEEPALIVE_BETWEEN_HOSTS,
                    weakly(self._linked),
                    weakly(self._unreachable),
                )
                undo.pop_all()
        except OSError as exc:
            text = f"tcp: rank {rank} cannot listen on {network.host}: {exc.strerror}"
            raise TransportError(text) from exc

    def open(self, core: MessageEngine) -> None:
        """Be the links of an engine."""
        self._core = core

    def address(self) -> dict[str, Any]:
        """Return what other ranks need to reach this one."""
        return {"endpoint": self._endpoint, "lanes": self.lanes}

    def start(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Begin: `addresses` by rank."""
        self._addresses = addresses

    def dial(self, peer: int) -> None:
        """Make the link to a rank; its further lanes follow when the first is there."""
        self._dial(PeerLane(peer, 0))

    def _dial(self, link: PeerLane) -> None:
        self.dialer.dial(link, self._addresses[link.peer]["endpoint"])

    def _linked(self, link: PeerLane, connection: socket.socket, dialed: bool) -> None:
        descriptor = connection.detach()
        try:
            self._core.attach(link.peer, link.lane, descriptor)
        except OSError as exc:
            os.close(descriptor)
            if exc.errno != errno.ENOTCONN and link.lane == 0:  # else it has ended meanwhile
                self._core.lose(link.peer, f"its link cannot be used ({exc.strerror})")
            return
        if dialed and link.lane == 0 and not self.is_closing:
            address = self._addresses[link.peer]
            for lane in range(1, min(self.lanes, address.get("lanes", 1))):
                self._dial(link._replace(lane=lane))

    def _unreachable(self, peer: int, why: str) -> None:
        self._core.lose(peer, why)

    def progress(self) -> None:
        """Go on with connections that are no links yet, without blocking."""
        self.dialer.progress()

    def forget(self, peer: int) -> None:
        """Make no link to a rank any more."""
        self.dialer.forget(peer)

    def close(self) -> None:
        """Close what is not a link yet, and listen no more."""
        self.dialer.close()
