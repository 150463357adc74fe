"""The names of the transports, and why one cannot be used here.

    shm     shared memory: the processes of one host
    rdma    InfiniBand and RoCE, by pyverbs: between hosts that have such a device
    tcp     plain sockets: works between any two processes
    zmq     ZeroMQ over TCP: the same, and the only one that encrypts

`reasons` says why a transport cannot be used, `check` refuses one with that reason. Which one two
ranks use is decided where all meet: `Bootstrap` in `pycoll/_world/bootstrap.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pycoll.errors import TransportError

TRANSPORTS = ("shm", "rdma", "tcp", "zmq")
"""Names that `--transport` takes beside "auto", best first."""


def reasons(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return for each transport why it cannot be used here, or None if it can."""
    return {name: _REASONS[name](environ) for name in TRANSPORTS}


def check(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the transport that `name` stands for; "auto" is the best that can be used.

    `environ` is that of the ranks that will use it.

    Raises:
        TransportError: it is unknown or cannot be used: which, why, and what to do.
    """
    if name == "auto":
        usable = (name for name in TRANSPORTS if _REASONS[name](environ) is None)
        name = next(usable, TRANSPORTS[-1])
    if name not in TRANSPORTS:
        known = ", ".join(("auto", *TRANSPORTS))
        raise TransportError(f"{name}: no such transport; use one of {known}")
    reason = _REASONS[name](environ)
    if reason is not None:
        raise TransportError(f"{name}: {reason}; use --transport auto")
    return name


def _no_shm(environ: Mapping[str, str]) -> str | None:
    from pycoll._transports.shm import missing_core

    handed_on = environ.get("PYCOLL_SHM", "")
    return missing_core() or (handed_on[2:] if handed_on.startswith("-:") else None)


def _no_rdma(environ: Mapping[str, str]) -> str | None:
    from pycoll._transports.rdma_devices import find

    found = find(environ)
    return found if isinstance(found, str) else None


def _no_tcp(environ: Mapping[str, str]) -> str | None:
    from pycoll._transports.shm import missing_core

    return missing_core()


def _no_zmq(environ: Mapping[str, str]) -> str | None:
    try:
        import zmq  # noqa: F401
    except ImportError as exc:
        return f"pyzmq cannot be imported ({exc}); pip install pyzmq"
    return None


_REASONS = {"shm": _no_shm, "rdma": _no_rdma, "tcp": _no_tcp, "zmq": _no_zmq}
