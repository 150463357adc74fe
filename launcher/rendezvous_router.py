"""The launcher's end of the rendezvous for ranks that come over TCP, by ZeroMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pycoll.launcher.rendezvous_wire import MAX_FRAME_NBYTES
from pycoll.launcher.rendezvous_zmq import Wakeup, derive_keys
from pycoll.zap import Authenticator, guard

_ZAP_DOMAIN = "pycoll.rendezvous"

# Requests handled at a time, so that a rank that floods cannot hold the launcher's loop.
_BATCH = 1000

# Messages kept for a rank that does not read (it is stopped); what comes on top is dropped.
_SEND_QUEUE = 100_000

_CLOSE_LINGER_MS = 200


class Caller(NamedTuple):
    """A connection, and the router that has it."""

    router: Router
    identity: bytes

    def send(self, frame: bytes) -> None:
        """Send; never blocks. Nothing if the connection is gone."""
        self.router.send(self.identity, frame)


class Router:
    """A ROUTER that lets in whoever has the job's key: one of the carriers of `rendezvous_server`.

    Args:
        listener: a TCP socket that listens; it becomes the router's own.
        key: the job's.

    Raises:
        BootstrapError: libzmq was built without CURVE.
    """

    def __init__(self, listener: int, key: bytes) -> None:
        keys = derive_keys(key)
        self._closed = False
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context)
        self._wakeup = Wakeup()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        self._authenticator.allow_curve(_ZAP_DOMAIN, z85.decode(keys.client_public))
        socket.curve_server = True
        socket.curve_publickey = keys.server_public
        socket.curve_secretkey = keys.server_secret
        guard(socket, _ZAP_DOMAIN)
        socket.maxmsgsize = MAX_FRAME_NBYTES
        # A rank stopped in the middle of the handshake is slow, not lost.
        socket.handshake_ivl = 0
        socket.sndhwm = _SEND_QUEUE
        socket.use_fd = listener
        socket.bind("tcp://127.0.0.1:*")  # the listener's own address is what counts
        self._wakeup.add(socket)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` may have something."""
        return self._wakeup.fileno()

    def receive(self) -> Iterator[tuple[Caller, bytes]]:
        """Give what has come, and from where."""
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # Whatever comes from now on makes the descriptor readable by itself.
                self._wakeup.clear()
                return
            if len(frames) == 2:
                yield Caller(self, frames[0]), frames[1]
        self._wakeup.set()

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send to a connection."""
        # A ROUTER drops what is for a connection that is gone, and never blocks.
        self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        self._wakeup.restore(self._socket)

    def close(self) -> None:
        """Stop listening, and disconnect; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.close()
        self._socket.close(_CLOSE_LINGER_MS)
        self._authenticator.close()
        self._context.term()
