"""The launcher's end of the rendezvous for ranks that come over TCP, by ZeroMQ."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pycoll._rendezvous.wire import MAX_FRAME_NBYTES
from pycoll._rendezvous.zmq_keys import Wakeup, derive_keys
from pycoll._support.zmq_auth import Authenticator, Keys, guard, open_context

_ZAP_DOMAIN = "pycoll.rendezvous"

# Requests handled at a time, so that a rank that floods cannot hold the launcher's loop.
_BATCH = 1000

# Messages kept for a rank that does not read (it is stopped); what comes on top is dropped.
_SEND_QUEUE = 100_000

_CLOSE_LINGER_MS = 200

# Within it a connection must have shown that it has the key: it costs a descriptor. A rank that was
# stopped for so long in the middle tries again.
_HANDSHAKE_MS = 10_000


class Caller(NamedTuple):
    """A connection, and the router that has it."""

    router: Router
    identity: bytes

    def send(self, frame: bytes) -> None:
        """Send; never blocks. Nothing if the connection is gone."""
        self.router.send(self.identity, frame)


class Router:
    """A ROUTER that lets in whoever has the job's key: one of the `rendezvous_carriers`.

    Args:
        listener: the descriptor of a TCP socket that listens; it stays the caller's.
        key: the job's.
        max_nbytes: longest frame that is received.

    Raises:
        BootstrapError: libzmq was built without CURVE.
        OSError, zmq.ZMQError: it would have too few threads or descriptors.
    """

    def __init__(self, listener: int, key: bytes, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        keys = derive_keys(key)
        self._max_nbytes = max_nbytes
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._context = open_context()
            undo.callback(self._context.destroy, 0)
            self._authenticator = Authenticator(self._context)
            undo.callback(self._authenticator.close)
            self._wakeup = Wakeup()
            undo.callback(self._wakeup.close)
            self._socket = self._open(listener, keys)
            self._wakeup.add(self._socket)
            undo.pop_all()

    def _open(self, listener: int, keys: Keys) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        self._authenticator.allow_curve(_ZAP_DOMAIN, z85.decode(keys.client_public))
        socket.curve_server = True
        socket.curve_publickey = keys.server_public
        socket.curve_secretkey = keys.server_secret
        guard(socket, _ZAP_DOMAIN)
        socket.maxmsgsize = self._max_nbytes
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.sndhwm = _SEND_QUEUE
        socket.use_fd = os.dup(listener)
        socket.bind("tcp://127.0.0.1:*")  # the listener's own address is what counts
        return socket

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
