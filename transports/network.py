"""The transport between ranks that neither shared memory nor RDMA connects: tcp or zmq.

All ranks of a job use the same one. It is zmq if a rank has chosen that, or if the job is
encrypted; otherwise it is tcp, which is the core's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycoll._transports.base import Transport
from pycoll.errors import BootstrapError, TransportError

NETWORKS = TCP, ZMQ = "tcp", "zmq"
MAX_LANES = 16
"""Connections by tcp between two ranks, at most."""

_CANNOT_ENCRYPT = "tcp", "rdma"


def why_not_encrypted(name: str) -> str | None:
    """Return why the transport `name` cannot be used in an encrypted job, or None if it can."""
    if name not in _CANNOT_ENCRYPT:
        return None
    return f"{name}: it does not encrypt, and the job is encrypted; use --transport auto or zmq"


def said(chosen: str) -> dict[str, str]:
    """Return what a rank says when the ranks meet, for `choose`.

    Args:
        chosen: the transport that the user wants, or "auto".
    """
    return {"network": chosen} if chosen in NETWORKS else {}


def choose(infos: Sequence[Mapping[str, Any]], encrypt: bool) -> str:
    """Return the network of a job, from what all ranks have said, in order of rank.

    Raises:
        BootstrapError: ranks want different ones; the message names two of them.
    """
    if encrypt:
        return ZMQ
    first: dict[str, int] = {}
    for rank, info in enumerate(infos):
        if "network" in info:
            first.setdefault(info["network"], rank)
    if len(first) > 1:
        raise BootstrapError(
            f"rank {first[TCP]} uses the transport tcp, but rank {first[ZMQ]} uses zmq; "
            "choose one for all ranks with pycoll-run --transport"
        )
    return next(iter(first), TCP)


def lanes(environ: Mapping[str, str], found: int) -> int:
    """Return how many connections two ranks have by tcp: PYCOLL_TCP_LINKS, if that is set.

    Args:
        found: what the table of costs says.

    Raises:
        BootstrapError: the variable is no number from 1 to 16.
    """
    text = environ.get("PYCOLL_TCP_LINKS")
    if not text:
        return min(found, MAX_LANES)
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LANES:
        raise BootstrapError(
            f"PYCOLL_TCP_LINKS is {text!r}: two ranks have 1 to {MAX_LANES} connections"
        )
    return int(text)


def listening_at(addresses: Mapping[int, str]) -> str:
    """Return the address to listen on.

    Args:
        addresses: by number of a host its address, as this host reaches it; empty if the job has
            one real host: then it is on loopback only.
    """
    if not addresses:
        return "127.0.0.1"
    return "::" if any(":" in address for address in addresses.values()) else "0.0.0.0"


def open_zmq(rank: int, key: bytes, addresses: Mapping[int, str], encrypt: bool) -> Transport:
    """Open the transport zmq.

    Args:
        rank: this rank.
        key: the job's.
        addresses: see `listening_at`.
        encrypt: the user wants encryption. It also encrypts without that between real hosts.

    Raises:
        TransportError: it cannot listen, or cannot encrypt.
    """
    import zmq

    from pycoll._support.zmq_auth import Keys
    from pycoll._transports.zeromq import ZmqTransport

    try:
        keys = Keys.derive(key, b"pycoll zmq") if encrypt or addresses else None
    except zmq.ZMQError as exc:
        raise TransportError(
            f"zmq: rank {rank} cannot encrypt: this libzmq has no CURVE ({exc.strerror}); "
            "install pyzmq from its wheel (pip install pyzmq)"
        ) from exc
    return ZmqTransport(rank, listening_at(addresses), keys)
