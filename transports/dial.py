"""Connections between ranks: who connects to whom, and which connection becomes a link.

Two ranks have one link, for both directions. The one that first has something to send dials the
other. If both dial at once the connection of the lower rank counts: asked by a higher one while it
is dialing itself, the lower answers BUSY; the higher one always accepts. A link of several lanes
has that many connections, which the dialer of the first makes.

A stranger is never believed: see handshake.py. Of connections that have not proved who they are
only so many are kept; the oldest goes. Who of the job is cut so dials again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from pycoll._transports._core import timer_open, timer_set
from pycoll._transports.handshake import (
    BUSY,
    HELLO_NBYTES,
    LINKED,
    PROOF_NBYTES,
    REFUSED,
    REPLY_NBYTES,
    Hello,
    Secret,
    check_proof,
    check_reply,
    make_hello,
    make_proof,
    make_reply,
    may_be_hello,
    read_hello,
)

TRIES = 40
"""How often a rank dials another that closes the connection before it is a link: as a listener does
whom strangers flood."""

SILENT = 64
"""How many connections are kept that have not said yet which rank they are."""

PAUSE_NS, LONGEST_PAUSE_NS = 2_000_000, 128_000_000
"""How long a rank waits before it dials again: the first time; then twice as long, and so on."""

UNREACHED_S = 12.0
"""How long a rank is dialed whose host no packet reaches. A cable may be out; one that stays out is
a lost host, which pycoll-run names after 8 s."""

NOT_SENT = 512 * 1024
"""Bytes that the kernel takes beyond what is under way: more would delay what comes next."""

_ACCEPTED_AT_ONCE = 64
_UNREACHED = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)


class PeerLane(NamedTuple):
    """Which connection: the other rank, and the number of the lane."""

    peer: int
    lane: int


class _Dial:
    """A connection that this rank makes."""

    def __init__(self, link: PeerLane, connection: socket.socket, hello: bytes) -> None:
        self.link = link
        self.connection = connection
        self.hello = hello
        self.received = b""
        self.connected = False
        self.proved = False


class _Caller:
    """A connection that another one has made."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.hello = b""
        self.reply = b""
        self.says: Hello | None = None


class Dialer:
    """Makes the links of one rank, and accepts those that others make.

    Args:
        rank: this rank.
        size: number of ranks in the job.
        lanes: connections that a link may have.
        listener: a listening socket that does not block; it belongs to this from now on.
        secret: of the job.
        keepalive: probes, one a second, that a peer silent for two seconds may leave unanswered
            before the connection counts as cut.
        linked: called with a link, its connection, which does not block and is the callee's, and
            whether this rank has made it.
        failed: called with a rank to which no link can be made, and why.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        lanes: int,
        listener: socket.socket,
        secret: Secret,
        keepalive: int,
        linked: Callable[[PeerLane, socket.socket, bool], None],
        failed: Callable[[int, str], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._lanes = lanes
        self._listener = listener
        self._secret = secret
        self._keepalive = keepalive
        self._on_link = linked
        self._on_failure = failed
        self._most_callers = 2 * size * lanes + SILENT
        self._poller = select.epoll()
        self._poller.register(listener.fileno(), select.EPOLLIN)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._listens = True
        self._timer = timer_open()
        self._poller.register(self._timer, select.EPOLLIN)
        self._again: list[PeerLane] = []  # to be dialed when the timer rings
        self._dials: dict[int, _Dial] = {}
        self._callers: dict[int, _Caller] = {}  # oldest first
        self._dialing: dict[PeerLane, tuple[str, int]] = {}  # where, and how often it was tried
        self._give_up_at: dict[PeerLane, float] = {}  # of those that were not reached
        self._linked: set[PeerLane] = set()
        self._waits: set[PeerLane] = set()  # the other rank's connection will come
        self._gone: set[int] = set()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `progress` has something to do."""
        return self._poller.fileno()

    def dial(self, link: PeerLane, endpoint: str) -> None:
        """Make a link to a rank that listens at ``tcp://host:port``, unless there is one."""
        if link in self._linked or link in self._dialing or link in self._waits:
            return
        self._dialing[link] = endpoint, 0
        self._connect(link)

    def _connect(self, link: PeerLane) -> None:
        endpoint, tries = self._dialing[link]
        self._dialing[link] = endpoint, tries + 1
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:
            self._without_connection(link, exc)
            return
        hello = make_hello(self._secret, Hello(self._rank, link.peer, link.lane))
        self._dials[connection.fileno()] = dial = _Dial(link, connection, hello)
        try:
            connection.setblocking(False)
            self._poller.register(connection.fileno(), select.EPOLLOUT)
            status = connection.connect_ex((host, int(port)))
        except OSError as exc:
            self._close(dial)
            self._without_connection(link, exc)
            return
        if status not in (0, errno.EINPROGRESS):
            self._dial_failed(dial, status)

    def _without_connection(self, link: PeerLane, exc: OSError) -> None:
        """Try again when a descriptor may be free, or give up."""
        if exc.errno in (errno.EMFILE, errno.ENFILE) and self._dialing[link][1] < TRIES:
            self._drop_a_caller()
            self._dial_later(link)
        else:
            self._fail(link, f"no connection to it can be made ({exc.strerror})")

    def _dial_later(self, link: PeerLane) -> None:
        _, tries = self._dialing[link]
        if not self._again:
            timer_set(self._timer, min(PAUSE_NS << min(tries, 16), LONGEST_PAUSE_NS))
        self._again.append(link)

    def _dial_again(self) -> None:
        timer_set(self._timer, 0)
        again, self._again = self._again, []
        for link in again:
            if link in self._linked:
                self._dialing.pop(link, None)
            elif link in self._dialing:
                self._connect(link)

    def progress(self) -> None:
        """Go on with what has come, without blocking."""
        listener = self._listener.fileno()
        # By the connection: while these are handled a descriptor may become another one's.
        found = [
            (descriptor, self._dials.get(descriptor) or self._callers.get(descriptor))
            for descriptor, _ in self._poller.poll(0)
        ]
        for descriptor, one in found:
            if descriptor == listener:
                self._accept()
            elif descriptor == self._timer:
                self._dial_again()
            elif isinstance(one, _Dial) and self._dials.get(descriptor) is one:
                self._go_on(one)
            elif isinstance(one, _Caller) and self._callers.get(descriptor) is one:
                self._listen_to(one)

    def forget(self, peer: int) -> None:
        """Make no link to a rank any more."""
        self._gone.add(peer)
        for dial in [dial for dial in self._dials.values() if dial.link.peer == peer]:
            self._close(dial)
        for link in [link for link in self._dialing if link.peer == peer]:
            del self._dialing[link]

    def close(self) -> None:
        """Close what is not a link yet, and listen no more."""
        unfinished: list[_Dial | _Caller] = [*self._dials.values(), *self._callers.values()]
        for one in unfinished:
            one.connection.close()
        self._dials.clear()
        self._callers.clear()
        self._poller.close()
        self._listener.close()
        for descriptor in (self._spare, self._timer):
            if descriptor >= 0:
                os.close(descriptor)
        self._spare = self._timer = -1

    def _close(self, one: _Dial | _Caller) -> None:
        descriptor = one.connection.fileno()
        if descriptor >= 0:
            self._dials.pop(descriptor, None)
            self._callers.pop(descriptor, None)
            one.connection.close()
            self._listen_again()

    def _is_up(self, link: PeerLane, one: _Dial | _Caller) -> None:
        descriptor = one.connection.fileno()
        self._dials.pop(descriptor, None)
        self._callers.pop(descriptor, None)
        self._poller.unregister(descriptor)
        self._linked.add(link)
        self._waits.discard(link)
        self._give_up_at.pop(link, None)
        self._set_up(one.connection)
        self._on_link(link, one.connection, isinstance(one, _Dial))

    def _set_up(self, connection: socket.socket) -> None:
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self._keepalive),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT),
        ]
        for level, option, value in options:
            with contextlib.suppress(OSError):  # a sandbox may not know one: it does without
                connection.setsockopt(level, option, value)

    # --- connections that this rank makes ----------------------------------------------------

    def _go_on(self, dial: _Dial) -> None:
        try:
            if not dial.connected:
                if status := dial.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._dial_failed(dial, status)
                    return
                self._poller.modify(dial.connection.fileno(), select.EPOLLIN)
                dial.connected = True
                self._say(dial.connection, dial.hello)
                return
            wanted = 1 if dial.proved else REPLY_NBYTES
            part = dial.connection.recv(wanted - len(dial.received))
        except BlockingIOError:
            return
        except OSError as exc:
            self._dial_failed(dial, exc.errno or 0)
            return
        if not part:
            self._dial_failed(dial, errno.ECONNRESET)
            return
        dial.received += part
        if len(dial.received) < wanted:
            return
        if dial.proved:
            self._answered(dial)
        elif not check_reply(self._secret, dial.hello, dial.received):
            self._close(dial)
            self._fail(dial.link, "who listens at its address does not know the key of the job")
        else:
            proof = make_proof(self._secret, dial.hello, dial.received)
            dial.proved, dial.received = True, b""
            try:
                self._say(dial.connection, proof)
            except OSError as exc:
                self._dial_failed(dial, exc.errno or 0)

    def _answered(self, dial: _Dial) -> None:
        link, answer = dial.link, dial.received
        self._dialing.pop(link, None)
        if answer == LINKED and link not in self._linked:
            self._is_up(link, dial)
            return
        self._close(dial)
        if answer == BUSY:
            if link not in self._linked:
                self._waits.add(link)
        elif answer != LINKED:
            self._fail(link, "it refused this rank")

    def _dial_failed(self, dial: _Dial, status: int) -> None:
        link = dial.link
        self._close(dial)
        if link in self._linked:  # the other rank's connection counts
            self._dialing.pop(link, None)
            return
        _, tries = self._dialing[link]
        cut = dial.connected and status in (errno.ECONNRESET, errno.EPIPE)
        may_come_back = status in _UNREACHED and self._may_come_back(link)
        if may_come_back or (cut and tries < TRIES):
            self._dial_later(link)
        elif cut:
            why = f"it closed the connection {tries} times before it was made"
            self._fail(link, f"{why} (is it of another job?)")
        elif status == errno.ECONNREFUSED:
            self._fail(link, "it does not answer (connection refused)")
        else:
            self._fail(link, f"it cannot be reached ({os.strerror(status)})")

    def _may_come_back(self, link: PeerLane) -> bool:
        now = time.monotonic()
        return now < self._give_up_at.setdefault(link, now + UNREACHED_S)

    def _fail(self, link: PeerLane, why: str) -> None:
        self._dialing.pop(link, None)
        if link.lane == 0 and link.peer not in self._gone:  # another lane can be done without
            self._gone.add(link.peer)
            self._on_failure(link.peer, why)

    # --- connections that others make --------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_one_away()
                return
            self._callers[connection.fileno()] = caller = _Caller(connection)
            try:
                connection.setblocking(False)
                self._poller.register(connection.fileno(), select.EPOLLIN)
            except OSError:
                self._close(caller)
                continue
            self._listen_to(caller)  # what it says first is mostly here
            silent = [one for one in self._callers.values() if not one.hello]
            if len(silent) > SILENT:
                self._close(silent[0])
            if len(self._callers) > self._most_callers:
                self._close(next(one for one in self._callers.values() if one.hello))

    def _drop_a_caller(self) -> bool:
        """Close the one who has waited longest, preferably one that has not said who it is."""
        silent = (one for one in self._callers.values() if not one.hello)
        first = next(silent, None) or next(iter(self._callers.values()), None)
        if first is not None:
            self._close(first)
        return first is not None

    def _turn_one_away(self) -> None:
        """Close one that waits, for want of descriptors: who is of the job comes again."""
        if self._drop_a_caller():
            return
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if self._spare < 0:  # others take every one: wait for one of ours
            self._poller.unregister(self._listener.fileno())
            self._listens = False

    def _listen_again(self) -> None:
        if not self._listens and self._listener.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                self._poller.register(self._listener.fileno(), select.EPOLLIN)
                self._listens = True

    def _listen_to(self, caller: _Caller) -> None:
        wanted = PROOF_NBYTES if caller.hello else HELLO_NBYTES
        try:
            part = caller.connection.recv(wanted - len(caller.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.received += part
        if not part or not (caller.hello or may_be_hello(caller.received)):
            self._close(caller)
        elif len(caller.received) == wanted:
            try:
                self._answer(caller)
            except OSError:
                self._close(caller)

    def _answer(self, caller: _Caller) -> None:
        if not caller.hello:
            says = read_hello(self._secret, caller.received)
            if says is None or not self._may_be(says):
                self._close(caller)
                return
            caller.says, caller.hello, caller.received = says, caller.received, b""
            caller.reply = make_reply(self._secret, caller.hello)
            self._say(caller.connection, caller.reply)
            return
        if not check_proof(self._secret, caller.hello, caller.reply, caller.received):
            self._close(caller)
            return
        assert caller.says is not None
        link = PeerLane(caller.says.source, caller.says.lane)
        if link.peer in self._gone:
            self._say(caller.connection, REFUSED)
            self._close(caller)
        elif link in self._linked or (link in self._dialing and self._rank < link.peer):
            self._say(caller.connection, BUSY)
            self._close(caller)
        else:
            self._say(caller.connection, LINKED)
            self._is_up(link, caller)

    def _may_be(self, says: Hello) -> bool:
        is_other = says.source < self._size and says.source != self._rank
        return is_other and says.dest == self._rank and says.lane < self._lanes

    @staticmethod
    def _say(connection: socket.socket, message: bytes) -> None:
        # It fits into what the kernel takes at once from any new connection.
        with contextlib.suppress(BlockingIOError):
            if connection.send(message) == len(message):
                return
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
