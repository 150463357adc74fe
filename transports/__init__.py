"""How bytes move between ranks: an ordered table of transports, opened when needed.

    inproc  ranks as threads of one process, and the link of a rank to itself
    shm     shared memory: the processes of one host
    tcp     ZeroMQ over TCP: works between any two processes

`reasons` says why a transport cannot be used, `check` refuses one with that reason.
"""

from __future__ import annotations

import os

from pycoll.errors import TransportError

TRANSPORTS = ("shm", "tcp")
"""Names that `--transport` takes beside "auto", best first."""

_LATER = {"rdma": "this version has no RDMA transport"}


def reasons() -> dict[str, str | None]:
    """Return for each transport why it cannot be used here, or None if it can."""
    from pycoll.transports.shm import missing_core

    found: dict[str, str | None] = {"shm": missing_core()}
    handed_on = os.environ.get("PYCOLL_SHM", "")
    if found["shm"] is None and handed_on.startswith("-:"):
        found["shm"] = handed_on[2:]
    try:
        import zmq  # noqa: F401
    except ImportError as exc:
        found["tcp"] = f"pyzmq cannot be imported ({exc}); pip install pyzmq"
    else:
        found["tcp"] = None
    return {**found, **_LATER}


def check(name: str) -> str:
    """Return the transport that `name` stands for; "auto" is the best that can be used.

    Raises:
        TransportError: it is unknown or cannot be used: which, why, and what to do.
    """
    if name in _LATER:
        raise TransportError(f"{name}: {_LATER[name]}; use --transport auto")
    if name != "auto" and name not in TRANSPORTS:
        known = ", ".join(("auto", *TRANSPORTS))
        raise TransportError(f"{name}: no such transport; use one of {known}")
    found = reasons()
    if name == "auto":
        name = next((usable for usable in TRANSPORTS if found[usable] is None), TRANSPORTS[-1])
    reason = found[name]
    if reason is not None:
        raise TransportError(f"{name}: {reason}; use --transport auto")
    return name
