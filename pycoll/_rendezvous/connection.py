"""One authenticated connection to the launcher, that breaks at most once."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
import time

import zmq

from pycoll._rendezvous.wire import (
    Backlog,
    MalformedError,
    already_joined,
    late_question,
    seconds_since,
    unpack,
)
from pycoll._rendezvous.zmq_keys import Wakeup, derive_keys
from pycoll._support.ports import why_unreachable
from pycoll._support.zmq_auth import open_context
from pycoll.errors import BootstrapError

_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FOREIGN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_CUT = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_DOWN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
_CONNECTED = zmq.EVENT_CONNECTED | _CUT | zmq.EVENT_DISCONNECTED
_STARTED = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECTED

# A server that cannot read our greeting (another key) cuts the connection without a word, and so
# does one that ends at that moment: believe in the wrong key after this many times in a row.
_MAX_CUTS = 3
# The launcher says at once that the job has met, or not at all; what answers more is none.
_ASK_S, _ANSWER_NBYTES = 1.0, 1 << 20

# Between two attempts to connect; the pause doubles.
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 0.5

# libzmq says nothing about a host name that cannot be resolved: look again after this long.
_MAX_SILENCE_S = 2.0

# Not ZMQ_RECONNECT_IVL -1: then libzmq (4.3.5) closes the pipe of a lost connection itself, and
# what had been received but not read yet is lost with it, such as why the launcher ended.
_NEVER_MS = (1 << 31) - 1


class Connection:
    """A DEALER with a CURVE handshake that passed, and a monitor that tells when it is lost.

    It does not reconnect: ZeroMQ would lose what was under way without a word. The owner sleeps
    on `fileno()` and calls `pump()`. Not thread-safe.

    Args:
        endpoint: the server's, ``tcp://host:port``.
        key: the job's secret, at least 16 bytes.
        max_nbytes: longest frame that is received.
        rank, size: who connects, and to how large a job; rank -1: an agent.

    Raises:
        ValueError: the key is too short.
        BootstrapError: libzmq was built without CURVE, or has too few threads or descriptors.
    """

    def __init__(
        self,
        endpoint: str,
        key: bytes,
        max_nbytes: int,
        rank: int,
        size: int,
    ) -> None:
        self._endpoint, self._key, self._keys = endpoint, key, derive_keys(key)
        self._rank, self._size = rank, size
        self._who = f"rank {rank}" if rank >= 0 else "pycoll's launcher on this host"
        try:
            self._context = open_context()
        except OSError as exc:
            raise BootstrapError(f"{self._who} cannot use ZeroMQ: {exc.strerror}") from exc
        self._max_nbytes = max_nbytes
        self._wakeup = Wakeup()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._backlog = Backlog()
        self._has_connected = False  # something listens there

    @property
    def is_open(self) -> bool:
        """Whether there is a connection; it changes in `pump` (lost) and `close`."""
        return self._socket is not None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `pump()` may have work, or after `wake`."""
        return self._wakeup.fileno()

    def wake(self) -> None:
        """Make `fileno()` readable until the next `pump()`."""
        self._wakeup.set()

    def wait(self, timeout_s: float) -> None:
        """Sleep until `fileno()` is readable, at most `timeout_s` (and at most a minute)."""
        self._wakeup.wait(timeout_s)

    def connect(self, timeout_s: float) -> None:
        """Try until the handshake passes; once.

        Raises:
            BootstrapError: the server does not accept the key, or the time is over.
        """
        if why := self.why_not_connected(timeout_s):
            raise BootstrapError(f"{self._who}: {self._endpoint} {why}")

    def why_not_connected(self, timeout_s: float) -> str:
        """Try until the handshake passes; once. Returns "", or what the server's address does.

        Raises:
            BootstrapError: the job has met without this process.
        """
        start, pause, num_cuts = time.monotonic(), _FIRST_PAUSE_S, 0
        deadline = start + timeout_s
        host = self._endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if why := why_unreachable(host):
            return f"cannot be reached: {why}"
        while True:
            try:
                happened = self._attempt(deadline)
            except zmq.ZMQError as exc:
                self._disconnect(0.0)
                return f"is no address of a launcher (tcp://host:port): {exc}"
            if happened == _UP:
                return ""
            self._disconnect(0.0)
            num_cuts = num_cuts + 1 if happened == _CUT else 0
            if happened in (_REFUSED, _FOREIGN) or num_cuts >= _MAX_CUTS:
                self.raise_if_late(deadline)
                return (
                    "refuses this process: it does not answer as a pycoll job with this job's key. "
                    "Address and key must come from the same job, and no other program listen there"
                )
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                known = "does not answer as a pycoll job"
                if not (happened & _STARTED or self._has_connected):
                    known = "cannot be reached"
                return f"{known} within {seconds_since(start)}"
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LAST_PAUSE_S)

    def raise_if_late(self, deadline: float) -> None:
        """Ask the launcher, which has cut this connection, whether the job has met already.

        Args:
            deadline: until when, of time.monotonic(); a second at most.

        Raises:
            BootstrapError: it has; which process is this rank.
        """
        if self._rank < 0:
            return
        host, _, port = self._endpoint.removeprefix("tcp://").rpartition(":")
        answer = b""
        deadline = min(deadline, time.monotonic() + _ASK_S)
        with contextlib.suppress(OSError, ValueError):
            address = (host.strip("[]"), int(port))
            left = max(1e-3, deadline - time.monotonic())
            with sockets.create_connection(address, left) as asking:
                asking.sendall(late_question(self._key))
                while len(answer) < _ANSWER_NBYTES and (data := asking.recv(1 << 16)):
                    answer += data
                    asking.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            kind, fields = unpack(answer, max(self._size, 16))
            pid = fields["pids"][self._rank]
        except (MalformedError, LookupError, TypeError):
            return  # it is no launcher, or its job has not met
        if kind == "late":
            text = already_joined(self._rank, pid, os.getpid())
            raise BootstrapError(f"{self._who} cannot join the job: {text}")

    def send(self, frame: bytes, is_state: bool = False) -> None:
        """Send, now or when the server reads again; never blocks. Without a connection: nothing.

        Args:
            frame: what to send.
            is_state: it replaces the last such frame, if that has not been sent yet.
        """
        if self._socket is None:
            return
        self._backlog.add(frame, is_state)
        self._flush(self._socket)
        # Sending took the edge of whatever came meanwhile.
        self._wakeup.restore(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog else 0))

    def pump(self) -> list[bytes]:
        """Send what waits to be sent and return the frames that came; the flag is cleared."""
        self._wakeup.clear()
        if self._socket is None:
            return []
        # The monitor first: what came before the connection went is already in the socket.
        is_lost = False
        while (happened := self._monitor_event()) is not None:
            is_lost = is_lost or bool(happened & _DOWN)
        self._flush(self._socket)
        # Receiving last, until there is nothing: only that leaves the next frame its edge.
        received: list[bytes] = []
        while True:
            try:
                received += self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
        if is_lost:
            # At once, or what libzmq still has to say would keep the descriptor readable.
            self._disconnect(0.0)
        return received

    def close(self, linger_s: float) -> None:
        """Disconnect and give the descriptors back; may be called again."""
        self._disconnect(linger_s)
        self._wakeup.close()
        self._context.term()

    def _attempt(self, deadline: float) -> int:
        """Connect once; return what decided it, or the last there was to see: a monitor event."""
        socket = self._context.socket(zmq.DEALER)
        self._socket = socket
        socket.linger = 0
        socket.curve_publickey = self._keys.client_public
        socket.curve_secretkey = self._keys.client_secret
        socket.curve_serverkey = self._keys.server_public
        socket.reconnect_ivl = _NEVER_MS
        socket.handshake_ivl = 0  # a launcher that is stopped is slow, not lost
        socket.ipv6 = "[" in self._endpoint
        socket.maxmsgsize = self._max_nbytes
        socket.rcvhwm = 0  # what the server pushes is bounded, and must not pile up there
        self._monitor = socket.get_monitor_socket(
            _UP | _REFUSED | _FOREIGN | _CUT | _DOWN | _STARTED
        )
        self._wakeup.add(socket)
        self._wakeup.add(self._monitor)
        socket.connect(self._endpoint)
        last, silent_at = 0, time.monotonic() + _MAX_SILENCE_S
        while True:
            self._wakeup.clear()
            # Looking at its events quiets the socket's descriptor, on which we sleep too.
            socket.get(zmq.EVENTS)
            while (happened := self._monitor_event()) is not None:
                last = happened
                self._has_connected |= bool(happened & _CONNECTED)
                if not happened & _STARTED:
                    return happened
            remaining = (deadline if last else min(deadline, silent_at)) - time.monotonic()
            if remaining <= 0:
                return last
            self._wakeup.wait(remaining)

    def _monitor_event(self) -> int | None:
        assert self._monitor is not None
        try:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        event: int = struct.unpack_from("=H", frames[0])[0]
        return event

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        def send(frame: bytes) -> bool:
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return False
            return True

        self._backlog.flush(send)

    def _disconnect(self, linger_s: float) -> None:
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        self._backlog.clear()
        for each in (socket, monitor):
            if each is not None:
                self._wakeup.remove(each)
        if socket is not None:
            socket.disable_monitor()
            socket.close(int(linger_s * 1000))
        if monitor is not None:
            monitor.close(0)
