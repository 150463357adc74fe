"""A line of frames through the network: ZeroMQ, encrypted by CURVE with the job's key.

For agents that no launcher has started, and who so have to find it: the agent has a `LinkLine`, the
other end is a `CallerLine` on a `Router`.
"""

from __future__ import annotations

import errno
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pycoll._launcher.agent_socket import Ticket
from pycoll._launcher.line import Hear, Line
from pycoll._launcher.rendezvous_router import Caller
from pycoll._rendezvous.connection import Connection
from pycoll._rendezvous.wire import MAX_FRAME_NBYTES, MAX_INFO_NBYTES
from pycoll._support.ready import ready
from pycoll.errors import BootstrapError

_LINGER_S = 1.0  # for the last frames
_REACH_S = 10.0  # for an address to answer, at most
_LEAST_S, _SHORT_S = 0.05, 1.0
_PAUSE_S = 0.2  # between trials to reach it
_LOOPBACK = "127.0.0.1"


class LinkLine(Line):
    """The agent's end.

    Args:
        link: connected; it becomes its own.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        hear, lost: see `Line`.
    """

    def __init__(
        self,
        link: Connection,
        selector: selectors.BaseSelector,
        hear: Hear,
        lost: Callable[[str], None],
    ) -> None:
        super().__init__(hear, lost)
        self._link, self._selector = link, selector
        self._is_closed = False
        selector.register(link.fileno(), selectors.EVENT_READ, self._pump)

    def close(self) -> None:
        """Disconnect, when what was sent has gone out; may be called again."""
        super().close()
        if not self._is_closed:
            self._is_closed = True
            self._selector.unregister(self._link.fileno())
            self._link.close(_LINGER_S)

    def flush(self, deadline: float) -> None:
        """See `Line`: `close` does it."""

    def _put(self, frame: bytes) -> None:
        self._link.send(frame)

    def _pump(self) -> None:
        for frame in self._link.pump():
            if self.is_open and not self._came(frame):
                return self._give_up("it sends what makes no sense")
        if self.is_open and not self._link.is_open:
            self._give_up("")

    def _give_up(self, why: str) -> None:
        """Say so first: to close the link may take long, and ranks wait to hear it."""
        self.is_open = False
        self._lost(why)


class CallerLine(Line):
    """The other end; it cannot know that the agent's process has ended, but for its silence.

    Args:
        caller: where the agent's frames come from, which the owner gives to `came`.
        hear, lost: see `Line`.
    """

    def __init__(self, caller: Caller, hear: Hear, lost: Callable[[str], None]) -> None:
        super().__init__(hear, lost)
        self._caller = caller

    def came(self, frame: bytes) -> None:
        """Handle a frame that has come from there."""
        if self.is_open and not self._came(frame):
            self._end("it sends what makes no sense")

    def _put(self, frame: bytes) -> None:
        self._caller.send(frame)


def reach(
    ticket: Ticket,
    whom: str,
    size: int,
    deadline: float,
    watched: Sequence[int],
    signals: Sequence[int],
) -> Connection:
    """Connect to the other end, at whichever of its addresses works; it may not be there yet.

    Args:
        ticket: where it is.
        whom: its name, for errors.
        size: number of ranks, at most.
        deadline: how long to try, of time.monotonic().
        watched: descriptors; when one can be read, nobody wants it any more.
        signals: when one has come, neither.

    Raises:
        BootstrapError: no address works; what each says.
    """
    failures: list[str] = []
    while True:
        is_short = deadline - time.monotonic() < _SHORT_S  # too short to find out why
        found = _reach_once(ticket, size, deadline)
        if isinstance(found, Connection):
            return found
        if not (is_short and failures):
            failures = found
        pause = min(_PAUSE_S, deadline - time.monotonic())
        if pause <= 0 or signals or ready(watched, pause):
            why = "; ".join(failures)
            raise BootstrapError(f"{socket.gethostname()} cannot reach {whom}: {why}")


def _reach_once(ticket: Ticket, size: int, deadline: float) -> Connection | list[str]:
    """Try all addresses at once, and take the first that answers; else say why not."""
    answers: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
    addresses = list(dict.fromkeys([*ticket.addresses, _LOOPBACK]))
    limit_s = _left_s(deadline)
    for address in addresses:  # none of these threads is joined
        words = [address, ticket.port, limit_s, answers]
        threading.Thread(target=_try, args=words, daemon=True).start()
    failures = []
    last = []  # what listens at this host's own loopback address may be something else
    untried = dict.fromkeys(addresses)
    while untried:
        try:
            answer = answers.get(timeout=_left_s(deadline))
        except queue.Empty:  # a name that is looked up for long
            failures += [_late(address, ticket.port, limit_s) for address in untried]
            break
        if answer[0] == _LOOPBACK and _LOOPBACK not in ticket.addresses:
            last.append(answer)
            del untried[_LOOPBACK]
            continue
        link = _link(ticket, size, answer, deadline, len(untried) + len(last))
        if isinstance(link, Connection):
            return link
        del untried[answer[0]]
        failures.append(link)
    for answer in last:
        link = _link(ticket, size, answer, deadline, 1)
        if isinstance(link, Connection):
            return link
        failures.append(link)
    return failures


def _left_s(deadline: float) -> float:
    """How long to wait for an address: what is left, but not too long, and not too short to try."""
    return min(_REACH_S, max(_LEAST_S, deadline - time.monotonic()))


def _late(address: str, port: int, limit_s: float) -> str:
    return f"{address} port {port}: no answer in {limit_s:.1f} s (a firewall?)"


def _link(
    ticket: Ticket, size: int, answer: tuple[str, str, str], deadline: float, addresses: int
) -> Connection | str:
    """Connect to an address that answers; else say why not.

    Args:
        ticket, size: see `reach`.
        answer: from `_try`.
        deadline: of time.monotonic(), for this and the others that have not been tried.
        addresses: how many these are.
    """
    address, found, why = answer
    if why:
        return why
    host = f"[{found}]" if ":" in found else found
    max_nbytes = 2 * (MAX_FRAME_NBYTES + size * MAX_INFO_NBYTES)
    endpoint = f"tcp://{host}:{ticket.port}"
    link = Connection(endpoint, ticket.key, max_nbytes, -1, size)
    try:
        why = link.why_not_connected(_left_s(deadline) / addresses)
    except BaseException:
        link.close(0.0)
        raise
    if why:
        link.close(0.0)
        return f"{address} port {ticket.port} {why}"
    return link


def _try(
    address: str, port: int, limit_s: float, answers: queue.SimpleQueue[tuple[str, str, str]]
) -> None:
    """Put the address there, what it stands for if it is a name, and why it does not answer."""
    found, why = "", ""
    try:
        with socket.create_connection((address, port), limit_s) as connection:
            if connection.getpeername() == connection.getsockname():
                # Nobody listens on this host, and the port was free: the socket got it, and so
                # connected to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            found = connection.getpeername()[0]
    except TimeoutError:
        why = _late(address, port, limit_s)
    except OSError as exc:
        why = f"{address} port {port}: {exc.strerror or exc}"
    answers.put((address, found, why))
