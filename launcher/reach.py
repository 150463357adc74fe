"""At which address one host reaches another: tried, because names and interfaces do not tell.

The same address may be that of every host (docker0), a name may stand for a loopback address, a
firewall may drop what it likes. So each host listens, tells its addresses, and tries those of the
others; who answers has to show that it is the host that was meant, and of this job. What is said
here is no secret: the job's key only signs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pycoll._support.ports import BACKLOG, leave_silent

_TRY_S = 5.0  # for a connection and its answer
_MAX_AT_ONCE = 64  # strangers that are listened to; when there are more, the oldest is cut
_SIOCGIFADDR = 0x8915
_NONCE_NBYTES = 32
_QUESTION = struct.Struct(f"<I{_NONCE_NBYTES}s32s")  # the host that is meant, nonce, signature
_ANSWER = struct.Struct("<I32s")  # the host that answers, signature
_PINGS = 50
_BULK_NBYTES = 32 << 20
_CHUNK_NBYTES = 1 << 20
_PING, _BULK = b"p", b"b"


class Address(NamedTuple):
    """An address of a host, and its interface."""

    interface: str
    address: str


class HostAddresses(NamedTuple):
    """A host to be reached: its number, the port it listens at, addresses, the best first."""

    node: int
    port: int
    addresses: Sequence[str]


class Reachability(NamedTuple):
    """How a host is reached.

    Attributes:
        node: its number.
        address: the first address that works; "": none.
        failures: of those before it, why not: "10.0.0.2: no answer in 5 s".
        latency_s: half of a round trip; 0: not measured.
        nbytes_per_s: of one connection; 0: not measured.
    """

    node: int
    address: str
    failures: Sequence[str]
    latency_s: float = 0.0
    nbytes_per_s: float = 0.0


def own_addresses() -> list[Address]:
    """The addresses of this host that others may reach: not those of loopback or of one link."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
                found.append(Address(name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            found.append(Address(name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return [one for one in found if _is_of_use(one.address)]


def _is_of_use(address: str) -> bool:
    read = ipaddress.ip_address(address)
    return not (read.is_loopback or read.is_link_local)


def _signature(key: bytes, what: bytes, node: int, nonce: bytes) -> bytes:
    text = what + struct.pack("<I", node) + nonce
    return hmac.new(key, text, hashlib.sha256).digest()


class Doorman:
    """Answers who tries to reach this host, in threads of its own.

    Args:
        key: the job's.
        node: this host's number.

    Attributes:
        port: where it listens, on all addresses.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, key: bytes, node: int) -> None:
        self._key, self._node = key, node
        self._listener = listen_everywhere()
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []  # who has not shown yet that it has the key
        threading.Thread(target=self._serve, name="pycoll-doorman", daemon=True).start()

    def close(self) -> None:
        """Stop listening; may be called again."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes who is in accept
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                stranger = self._listener.accept()[0]
            except OSError:
                return
            with self._lock:
                self._strangers.append(stranger)
                oldest = self._strangers.pop(0) if len(self._strangers) > _MAX_AT_ONCE else None
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
            threading.Thread(target=self._answer, args=(stranger,), daemon=True).start()

    def _forget(self, stranger: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._strangers.remove(stranger)

    def _answer(self, stranger: socket.socket) -> None:
        try:
            with stranger, contextlib.suppress(OSError, EOFError):
                until = time.monotonic() + _TRY_S
                _, nonce, signature = _QUESTION.unpack(_receive(stranger, _QUESTION.size, until))
                if not hmac.compare_digest(signature, _signature(self._key, b"ask", 0, nonce)):
                    return
                self._forget(stranger)
                stranger.settimeout(_TRY_S)
                proof = _signature(self._key, b"answer", self._node, nonce)
                stranger.sendall(_ANSWER.pack(self._node, proof))
                while kind := stranger.recv(1):
                    if kind == _BULK:
                        _receive(stranger, _BULK_NBYTES, keep=False)
                    stranger.sendall(kind)
        finally:
            self._forget(stranger)


def listen_everywhere(port: int = 0) -> socket.socket:
    """Return a TCP socket that listens at a port of all addresses; 0: at a free one.

    A connection over which nothing has been said waits in the kernel: see `leave_silent`.

    Raises:
        OSError: it cannot.
    """
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    else:
        listener = socket.create_server(("0.0.0.0", port), backlog=BACKLOG)
    leave_silent(listener)
    return listener


def _receive(
    connection: socket.socket, nbytes: int, until: float | None = None, *, keep: bool = True
) -> bytes:
    """Receive so many bytes; all of them before `until`, of time.monotonic(), if that is given."""
    data = b""
    left = nbytes
    while left:
        if until is not None:  # or who sends a byte now and then would hold us up for ever
            connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(min(left, _CHUNK_NBYTES))
        if not part:
            raise EOFError
        left -= len(part)
        if keep:
            data += part
    return data


def reach_all(
    targets: Sequence[HostAddresses], key: bytes, *, measures: bool = False
) -> list[Reachability]:
    """Find out how hosts are reached, all at once; takes 10 s at most.

    Args:
        targets: the hosts.
        key: the job's.
        measures: measure latency and bandwidth, too, of one host after the other.
    """
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), _MAX_AT_ONCE)) as pool:
        found = list(pool.map(lambda target: _reach(target, key), targets))
    if measures:
        ports = {target.node: target.port for target in targets}
        found = [_measured(one, ports[one.node], key) for one in found]
    return found


def _reach(target: HostAddresses, key: bytes) -> Reachability:
    """Try the first address of a host, then all others at once: the first that works counts."""
    if not target.addresses:
        return Reachability(target.node, "", ["it has told no address"])
    first, *others = target.addresses
    tried = [_try(first, target, key)]
    if tried[0] is not None and others:
        with ThreadPoolExecutor(len(others)) as pool:
            tried += pool.map(lambda address: _try(address, target, key), others)
    failures: list[str] = []
    for address, failure in zip(target.addresses, tried, strict=False):
        if failure is None:
            return Reachability(target.node, address, failures)
        failures.append(f"{address} port {target.port}: {failure}")
    return Reachability(target.node, "", failures)


def _try(address: str, target: HostAddresses, key: bytes) -> str | None:
    """Try one address; returns why it is not the host's."""
    try:
        _greet(address, target.port, target.node, key).close()
    except _AnotherHostError:
        return "another host answers there"
    except TimeoutError:
        return f"no answer in {_TRY_S:g} s (a firewall?)"
    except EOFError:
        return "whoever listens there is not of this job"
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno else str(exc)
        return why[:1].lower() + why[1:]
    return None


class _AnotherHostError(Exception):
    """Who answers is of this job, but not the host that was meant."""


def _greet(address: str, port: int, node: int, key: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), _TRY_S)
    try:
        nonce = os.urandom(_NONCE_NBYTES)
        connection.sendall(_QUESTION.pack(node, nonce, _signature(key, b"ask", 0, nonce)))
        until = time.monotonic() + _TRY_S
        who, proof = _ANSWER.unpack(_receive(connection, _ANSWER.size, until))
        connection.settimeout(_TRY_S)
        if not hmac.compare_digest(proof, _signature(key, b"answer", who, nonce)):
            raise EOFError
        if who != node:
            raise _AnotherHostError
    except BaseException:
        connection.close()
        raise
    return connection


def _measured(found: Reachability, port: int, key: bytes) -> Reachability:
    if not found.address:
        return found
    try:
        with _greet(found.address, port, found.node, key) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(_PINGS):
                started = time.perf_counter()
                connection.sendall(_PING)
                _receive(connection, 1)
                trips.append(time.perf_counter() - started)
            started = time.perf_counter()
            connection.sendall(_BULK)
            chunk = bytes(_CHUNK_NBYTES)
            for _ in range(_BULK_NBYTES // _CHUNK_NBYTES):
                connection.sendall(chunk)
            _receive(connection, 1)
            took = time.perf_counter() - started
    except (OSError, EOFError, _AnotherHostError):
        return found
    return found._replace(latency_s=min(trips) / 2, nbytes_per_s=_BULK_NBYTES / took)


class Trial:
    """`reach_all` in a thread; its results come in the owner's loop.

    Args:
        selector: the loop; the data of a key is a function to call when it is ready.
        done: called with the results.
        targets, key, measures: see `reach_all`.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        done: Callable[[list[Reachability]], object],
        targets: Sequence[HostAddresses],
        key: bytes,
        *,
        measures: bool = False,
    ) -> None:
        self._selector, self._done = selector, done
        self._end, self._theirs = os.pipe()
        self._found: list[Reachability] = []
        selector.register(self._end, selectors.EVENT_READ, self._finish)

        def run() -> None:
            try:
                self._found = reach_all(targets, key, measures=measures)
            finally:
                os.close(self._theirs)

        threading.Thread(target=run, name="pycoll-reach", daemon=True).start()

    def _finish(self) -> None:
        self._selector.unregister(self._end)
        os.close(self._end)
        self._done(self._found)
