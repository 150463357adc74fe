"""How frames come to the launcher's end of the rendezvous: from connections, and their carriers."""

from __future__ import annotations

import contextlib
import errno
import select
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pycoll._launcher.rendezvous_pairs import Pair, Pairs
from pycoll._rendezvous import wire as wire
from pycoll._support.ports import endpoint_of, listen
from pycoll.errors import BootstrapError

if TYPE_CHECKING:
    from pycoll._launcher.rendezvous_router import Router

# Who comes too late is told so in one piece, and not kept. So many at a time, that a flood does not
# hold the launcher's loop.
_LATE_BATCH = 100
_READ_NBYTES = 64 << 10


class Peer(Protocol):
    """A connection to one process."""

    def send(self, frame: bytes) -> None:
        """Send; never blocks. Nothing if the connection is gone."""


class Carries(Protocol):
    """A connection to another host, for all ranks there."""

    def send(self, kind: str, *fields: Any) -> None:
        """Send "link", number, frame; or "links", numbers, frame: the same for several ranks."""


class Relayed(NamedTuple):
    """A rank on another host: a `Peer`. What all ranks there are told goes there once.

    Attributes:
        line: the connection to that host.
        number: the rank's, there.
    """

    line: Carries
    number: int

    def send(self, frame: bytes) -> None:
        self.line.send("link", self.number, frame)


def send_all(peers: Iterable[Peer], frame: bytes) -> None:
    """Send the same to several processes: once to each other host, and to each process here."""
    together: dict[int, tuple[Carries, list[int]]] = {}
    for peer in peers:
        if isinstance(peer, Relayed):
            together.setdefault(id(peer.line), (peer.line, []))[1].append(peer.number)
        else:
            peer.send(frame)
    for line, numbers in together.values():
        line.send("links", numbers, frame)


class Carriers:
    """The carriers of one job, and the port at which processes come to one of them.

    Ranks on this host come by sockets that they inherit (`pairs`), others, and those that have lost
    theirs, by ZeroMQ, which serves the port from when the first of them comes (`open_router`).
    ZeroMQ is not imported before. Once the job has met, and unless a rank has come by ZeroMQ, who
    comes to the port is turned away.

    Args:
        key: the job's.
        host: the address to listen on; a free port is chosen.

    Attributes:
        endpoint: where the port is.
        pairs: the sockets that ranks inherit.

    Raises:
        BootstrapError: cannot listen on `host`.
    """

    def __init__(self, key: bytes, host: str) -> None:
        self._key = key
        try:
            self._listener = listen(host)
        except OSError as exc:
            raise BootstrapError(f"the launcher cannot listen on tcp://{host}: {exc}") from exc
        self.endpoint = endpoint_of(self._listener)
        self._has_router = self._is_port_closed = False
        self.pairs = Pairs(key)
        self._carriers: list[Pairs | Router] = [self.pairs]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self.pairs, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when somebody has come, or a frame."""
        return self._epoll.fileno()

    def receive(self) -> Iterator[tuple[Peer, bytes]]:
        """Give what has come, and from where."""
        for carrier in self._carriers:
            yield from carrier.receive()

    def is_somebody_at_port(self) -> bool:
        """Return whether somebody has come to the port whom ZeroMQ does not serve."""
        return not self._has_router and self._listener.fileno() in dict(self._epoll.poll(0))

    def open_router(self) -> None:
        """Let ZeroMQ serve the port: somebody has come to it.

        Raises:
            BootstrapError: that cannot be; the port is closed.
        """
        import zmq  # not sooner: it takes long

        from pycoll._launcher.rendezvous_router import Router

        self._epoll.unregister(self._listener)
        self._has_router = True
        try:
            router = Router(self._listener.fileno(), self._key)
        except (OSError, zmq.ZMQError, BootstrapError) as exc:
            self._listener.close()
            raise BootstrapError(f"the launcher cannot serve {self.endpoint}: {exc}") from exc
        self._carriers.append(router)
        self._epoll.register(router, select.EPOLLIN)

    def turn_away(self, pids: Sequence[int]) -> None:
        """Tell who comes after the job has met which processes are its ranks."""
        import hmac  # not sooner: hardly anybody comes

        late = wire.pack("late", {"pids": list(pids)})
        question = wire.late_question(self._key)
        for _ in range(_LATE_BATCH):
            try:
                stranger = self._listener.accept()[0]
            except BlockingIOError:  # nobody is left
                return
            except OSError as exc:
                # Without a descriptor nobody can be told, and who stays there keeps this awake.
                if exc.errno in (errno.EMFILE, errno.ENFILE):
                    self.close_port(())
                return
            with stranger, contextlib.suppress(OSError):
                stranger.setblocking(False)
                if hmac.compare_digest(stranger.recv(_READ_NBYTES), question):
                    stranger.send(late)

    def end_joining(self, peers: Iterable[Peer | None]) -> None:
        """Have no ZeroMQ any more, unless one of those who have joined came by it."""
        if self._has_router and not any(map(_came_by_port, peers)):
            self._close_router()
            self._epoll.register(self._listener, select.EPOLLIN)

    def close_port(self, peers: Iterable[Peer]) -> None:
        """Let nobody new in; those who have come stay. May be called again."""
        if not self._is_port_closed:
            self._is_port_closed = True
            if not self._has_router:
                self._epoll.unregister(self._listener)
            elif not any(map(_came_by_port, peers)):
                self._close_router()
            self._listener.close()

    def _close_router(self) -> None:
        """Have no ZeroMQ any more: no rank has come by it."""
        for router in self._carriers[1:]:
            self._epoll.unregister(router)
            router.close()
        del self._carriers[1:]
        self._has_router = False

    def close(self) -> None:
        """Stop listening, and disconnect all."""
        self._epoll.close()
        self._listener.close()
        for carrier in self._carriers:
            carrier.close()


def _came_by_port(peer: Peer | None) -> bool:
    return peer is not None and not isinstance(peer, Pair)
