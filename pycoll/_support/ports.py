"""Ports at which processes of a job listen, and whether a process can reach its own host."""

from __future__ import annotations

import contextlib
import errno
import socket

BACKLOG = 4096
"""The kernel lowers it to net.core.somaxconn. A short one makes ranks that come in a burst wait for
a repeated SYN, a second later."""

# The kernel makes it about 8 hours. All who listen here are spoken to first.
_SILENT_S = 1 << 15

_FIRST_AGREED, _AGREED = 20000, 10000


def listen(host: str) -> socket.socket:
    """Return a TCP socket that listens on a free port of `host`, an IP address.

    A connection over which nothing has been said waits in the kernel and takes no descriptor.

    Raises:
        OSError: `host` is no address of this host, or too many files are open.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setblocking(False)
        leave_silent(listener)
        listener.bind((host, 0))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def leave_silent(listener: socket.socket) -> None:
    """Let connections over which nothing has been said wait in the kernel."""
    with contextlib.suppress(OSError):  # a sandbox that does not know it does without
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)


def agreed_port(what: bytes) -> int:
    """Return a port that all who know `what` work out; below those that systems hand out."""
    import hashlib  # not sooner: most jobs have another way

    digest = hashlib.blake2b(what, person=b"pycoll port").digest()
    return _FIRST_AGREED + int.from_bytes(digest[:4], "little") % _AGREED


def endpoint(host: str, port: int | str) -> str:
    """Return ``tcp://host:port``."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def endpoint_of(listener: socket.socket) -> str:
    """Return where a listener can be reached."""
    return endpoint(*listener.getsockname()[:2])


def why_unreachable(host: str) -> str | None:
    """Return why nobody can be reached at `host`, if it is the loopback interface and that is down.

    Connections would be refused then as if nobody listened.
    """
    if not host.startswith("127.") and host != "::1":
        return None
    try:
        with socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
        ) as probe:
            probe.connect((host, 9))  # nothing is sent
    except OSError as exc:
        if exc.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL):
            return "the loopback interface is down: bring it up (ip link set lo up)"
    return None
