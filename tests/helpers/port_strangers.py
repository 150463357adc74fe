"""Strangers at a port of a job: they have no key, and say nothing, nonsense, or too little."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

from patience import PATIENCE

LIMIT_S = 30.0 * PATIENCE
SILENT, SPEAKING = 200, 20

# What libzmq says first; what browsers say; how TLS begins.
ZMTP = b"\xff" + bytes(8) + b"\x7f"
KNOWN = (
    ZMTP,
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


class Strangers:
    """Connections to a port, which stay open."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.address = (host, port)
        self.silent: list[socket.socket] = []
        self.slow: list[socket.socket] = []
        self.speaking: list[socket.socket] = []
        self._chooser = random.Random(port)

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each in (*self.silent, *self.slow, *self.speaking):
            each.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, LIMIT_S)

    def come(self, silent: int = SILENT) -> None:
        """Connect, many of each kind: so many that say nothing, and others."""
        self.silent += [self.connect() for _ in range(silent)]
        for number in range(SPEAKING):
            self.slow.append(self.connect())
            self.slow[-1].sendall(ZMTP[: 1 + number % len(ZMTP)])
        said = [self._chooser.randbytes(self._chooser.randrange(1, 500)) for _ in range(SPEAKING)]
        for words in (*KNOWN, *said, bytes(100_000)):
            self.speaking.append(self.connect())
            self.say(self.speaking[-1], words)
        for each in self.slow:
            self.say(each, b"\0")

    @staticmethod
    def say(connection: socket.socket, words: bytes) -> None:
        with contextlib.suppress(OSError):  # it has been cut
            connection.sendall(words)

    def is_cut_after(self, words: bytes) -> bool:
        """Whether who says this is cut, whatever it is answered before."""
        with self.connect() as stranger:
            self.say(stranger, words)
            deadline = time.monotonic() + LIMIT_S
            try:
                while stranger.recv(4096):
                    if time.monotonic() > deadline:
                        return False
            except ConnectionError:
                pass
            except TimeoutError:
                return False
            return True


class Recorder:
    """One between the two ends of connections who hands on what they say, and keeps it.

    Attributes:
        port: where it listens.
        said: what was said to the other port, by connection.
    """

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.said: list[bytearray] = []
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._ends):
            each.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller = self._listener.accept()[0]
                called = socket.create_connection(self._to)
                self._ends += [caller, called]
                self.said.append(bytearray())
                for ends in (caller, called, self.said[-1]), (called, caller, None):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    @staticmethod
    def _hand_on(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
