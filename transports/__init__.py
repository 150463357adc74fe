"""How bytes move between ranks: an ordered table of transports, opened when needed.

    inproc  ranks as threads of one process, and the link of a rank to itself
    tcp     ZeroMQ over TCP: works between any two processes

`choose` picks for a pair of ranks; `reasons` says why a transport cannot be used.
"""

from __future__ import annotations

from pycoll.errors import TransportError

TRANSPORTS = ("tcp",)
"""Names that `--transport` takes beside "auto", best first."""

_LATER = {
    "shm": "this version has no shared-memory transport",
    "rdma": "this version has no RDMA transport",
}


def reasons() -> dict[str, str | None]:
    """Return for each transport why it cannot be used here, or None if it can."""
    found: dict[str, str | None] = dict(_LATER)
    try:
        import zmq  # noqa: F401
    except ImportError as exc:
        found["tcp"] = f"pyzmq cannot be imported ({exc}); pip install pyzmq"
    else:
        found["tcp"] = None
    return found


def check(name: str) -> str:
    """Return the transport that `name` ("auto" too) stands for.

    Raises:
        TransportError: it is unknown or cannot be used: which, why, and what to do.
    """
    if name == "auto":
        name = TRANSPORTS[0]
    if name in _LATER:
        raise TransportError(f"{name}: {_LATER[name]}; use --transport tcp (or auto)")
    if name not in TRANSPORTS:
        known = ", ".join(("auto", *TRANSPORTS))
        raise TransportError(f"{name}: no such transport; use one of {known}")
    reason = reasons()[name]
    if reason is not None:
        raise TransportError(f"{name}: {reason}")
    return name
