"""ZeroMQ contexts, and who may talk to the listening sockets of one.

ZAP, the ZeroMQ authentication protocol: libzmq asks the handler at ``inproc://zeromq.zap.01``
about each connection to a socket that has a ZAP domain. Where nothing answers there it lets anyone
in, so a listening socket is set up by `guard` before it binds, and is closed before its
`Authenticator` is.

Source: https://rfc.zeromq.org/spec/27/
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import zmq
from zmq.utils import z85

_HANDLER = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_USERNAME = b"pycoll"
_CURVE_KEY_NBYTES = 32

# What a context's user needs: libzmq two threads, the `Authenticator` one, and pyzmq one for what
# is sent without a copy; about 15 descriptors.
_THREADS, _DESCRIPTORS = 4, 24


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context that can be used: libzmq ends the process where it may start no thread.

    Raises:
        OSError: there are too few threads or descriptors left for it: which limit was reached.
    """
    descriptors: list[int] = []
    threads: list[threading.Thread] = []
    over = threading.Event()
    try:
        for _ in range(_DESCRIPTORS):
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(_THREADS):
            threads.append(threading.Thread(target=over.wait, daemon=True))
            threads[-1].start()
    except RuntimeError as exc:
        threads.pop()
        text = "no thread can be started: check pids.max of the cgroup, and ulimit -u"
        raise OSError(errno.EAGAIN, text) from exc
    except OSError as exc:
        raise OSError(exc.errno, f"{exc.strerror}: check ulimit -n") from exc
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for descriptor in descriptors:
            os.close(descriptor)
    return zmq.Context(io_threads=1)


def guard(socket: zmq.Socket[bytes], domain: str) -> None:
    """Have every peer of `socket` pass the `Authenticator` of its context; call it before bind().

    With a libzmq that knows ZMQ_ZAP_ENFORCE_DOMAIN, peers are turned away while no handler runs.
    """
    socket.zap_domain = domain.encode()
    with contextlib.suppress(zmq.ZMQError):
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Keys(NamedTuple):
    """The CURVE key pairs of who listens and of who connects, in Z85 (40 bytes of ASCII each)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def derive(cls, key: bytes, purpose: bytes) -> Keys:
        """Derive both from a job's key; the public halves are as secret as that.

        Raises:
            zmq.ZMQError: libzmq was built without CURVE.
        """
        server, client = (
            z85.encode(hashlib.blake2b(key, digest_size=32, person=purpose + side).digest())
            for side in (b" srv", b" cli")
        )
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)


class Authenticator:
    """A daemon thread that lets in the peers it was told to allow, and refuses all others (400).

    A context has one. The thread starts with the first `allow_plain` or `allow_curve`. What is
    allowed adds up and may be added while peers connect; all methods may be called by any thread.

    Args:
        context: the context of the listening sockets; it stays the caller's, who terminates it
            after `close()`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._allowed: dict[tuple[bytes, bytes], tuple[bytes, ...]] = {}
        self._thread: threading.Thread | None = None
        self._stop_fd = -1
        self._pid = os.getpid()
        self._closed = False

    def __enter__(self) -> Authenticator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def allow_plain(self, domain: str, password: bytes) -> None:
        """Let in peers that give the user name "pycoll" and `password` (mechanism PLAIN).

        Raises:
            ValueError: the password is empty.
            RuntimeError: see `allow_curve`.
        """
        if not password:
            raise ValueError("an empty password would let anyone in")
        self._allow(domain, b"PLAIN", password)

    def allow_curve(self, domain: str, public_key: bytes) -> None:
        """Let in peers that own `public_key`, 32 raw bytes (mechanism CURVE).

        Raises:
            ValueError: the key has another length.
            RuntimeError: this authenticator is closed, or the context has another one.
        """
        if len(public_key) != _CURVE_KEY_NBYTES:
            raise ValueError(f"a public key has {_CURVE_KEY_NBYTES} bytes, not {len(public_key)}")
        self._allow(domain, b"CURVE", public_key)

    def close(self) -> None:
        """Stop the thread; may be called again. Close the listening sockets before."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread, self._thread = self._thread, None
        # In a forked child the thread does not exist, and its sockets must not be touched.
        if thread is None or os.getpid() != self._pid:
            return
        os.eventfd_write(self._stop_fd, 1)
        thread.join()
        os.close(self._stop_fd)

    def _allow(self, domain: str, mechanism: bytes, credential: bytes) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("this authenticator is closed")
            key = (domain.encode(), mechanism)
            self._allowed[key] = (*self._allowed.get(key, ()), credential)
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        handler = self._context.socket(zmq.REP)
        handler.linger = 0
        try:
            handler.bind(_HANDLER)
        except zmq.ZMQError as exc:
            handler.close()
            raise RuntimeError("this ZeroMQ context already has an authenticator") from exc
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._serve, args=(handler, self._stop_fd), name="pycoll-zap", daemon=True
        )
        self._thread.start()

    def _serve(self, handler: zmq.Socket[bytes], stop_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(handler, zmq.POLLIN)
        poller.register(stop_fd, zmq.POLLIN)
        try:
            while stop_fd not in dict(poller.poll()):
                handler.send_multipart(self._answer(handler.recv_multipart()))
            # At once, while close() is done later by libzmq's reaper: a peer that asked in between
            # would wait for an answer for ever.
            handler.unbind(_HANDLER)
        except zmq.ContextTerminated:
            pass  # the owner ended the context first; there is nobody left to answer
        finally:
            handler.close()

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        if self._passes(request):
            return [_VERSION, request_id, b"200", b"OK", _USERNAME, b""]
        return [_VERSION, request_id, b"400", b"not allowed", b"", b""]

    def _passes(self, request: Sequence[bytes]) -> bool:
        # Frames: version, request id, domain, address, routing id, mechanism, credentials...
        if len(request) < 6 or request[0] != _VERSION:
            return False
        domain, mechanism, credentials = request[2], request[5], request[6:]
        if mechanism == b"PLAIN":
            if len(credentials) != 2 or not hmac.compare_digest(credentials[0], _USERNAME):
                return False
        elif mechanism != b"CURVE" or len(credentials) != 1:
            return False
        with self._lock:
            allowed = self._allowed.get((domain, mechanism), ())
        # The whole list, so that the time taken says nothing about which one fits.
        return sum(hmac.compare_digest(credentials[-1], one) for one in allowed) > 0
