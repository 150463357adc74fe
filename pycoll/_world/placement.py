"""What the environment says of this process's place in its job."""

from __future__ import annotations

import os

# Not when an exception is shown: this import evaluates a string, after which Python forgets that
# it must end with the status of an interrupt.
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pycoll._rendezvous.wire import already_joined, read_key
from pycoll.errors import BootstrapError


class JobPlacement(NamedTuple):
    """This process's place in its job, from the environment.

    Attributes:
        is_adopted: pycoll-run has not started it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    rendezvous: str = ""
    key: bytes = b""
    local_ranks: tuple[int, ...] = (0,)
    addresses: Mapping[int, str] = MappingProxyType({})
    link: str = ""
    memory: str = ""
    is_adopted: bool = False


_NEEDED = ("PYCOLL_RANK", "PYCOLL_SIZE", "PYCOLL_RENDEZVOUS", "PYCOLL_KEY")


def environment(timeout: float) -> Mapping[str, str]:
    """The environment, with what pycoll-run would have set if something else started this process.

    Raises:
        BootstrapError: the variables of who did make no sense, or the job could not meet.
    """
    environ: Mapping[str, str] = os.environ
    is_ours = bool(environ.get("PYCOLL_JOB"))  # of pycoll-run, or below such a one
    # Who takes a rank's number away from what it starts wants that to run alone.
    if (parent := environ.get("PYCOLL_PARENT")) and (environ.get("PYCOLL_RANK") or not is_ours):
        rank, pid = map(int, parent.split(":"))
        raise BootstrapError(already_joined(rank, pid, os.getpid()))
    if is_ours:
        return environ
    from pycoll._launcher import exchange

    found: dict[str, str] = {}
    given = [name for name in _NEEDED if environ.get(name)]
    if len(given) == len(_NEEDED):
        place, key = read_place(environ), environ["PYCOLL_KEY"]
        found = exchange.join_at(place.rendezvous, key, place.rank, place.size, timeout)
    elif given in ([], ["PYCOLL_KEY"]):
        launched = exchange.find(environ)
        if launched is not None:
            found = exchange.join(environ, launched, timeout)
    ours = {name: value for name, value in found.items() if name.startswith("PYCOLL_")}
    return {**environ, **ours}


def read_place(environ: Mapping[str, str]) -> JobPlacement:
    """Return what the launcher's variables say; without any, a job of size 1.

    Raises:
        BootstrapError: they are incomplete or make no sense.
    """
    given = [name for name in _NEEDED if environ.get(name)]
    if not given:
        return JobPlacement()
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        raise BootstrapError(
            f"{', '.join(given)} set, but not {', '.join(missing)}: "
            "start this program with pycoll-run, or unset them to run it alone"
        )
    rank, size = _number(environ, "PYCOLL_RANK"), _number(environ, "PYCOLL_SIZE")
    local_rank = _number(environ, "PYCOLL_LOCAL_RANK", rank)
    local_size = _number(environ, "PYCOLL_LOCAL_SIZE", size)
    node = _number(environ, "PYCOLL_NODE", 0)
    if not 0 <= rank < size:
        raise BootstrapError(f"PYCOLL_RANK is {rank}, but PYCOLL_SIZE is {size}")
    if not 0 <= local_rank < local_size <= size:
        raise BootstrapError(
            f"PYCOLL_LOCAL_RANK is {local_rank}, PYCOLL_LOCAL_SIZE {local_size}, "
            f"PYCOLL_SIZE {size}: these do not go together"
        )
    key = read_key(environ["PYCOLL_KEY"])
    first = rank - local_rank
    local_ranks = _local_ranks(environ) or tuple(range(first, first + local_size))
    if len(local_ranks) != local_size or local_ranks[local_rank] != rank:
        raise BootstrapError(
            f"PYCOLL_LOCAL_RANKS is {environ['PYCOLL_LOCAL_RANKS']!r}, PYCOLL_RANK {rank}, "
            f"PYCOLL_LOCAL_RANK {local_rank}, PYCOLL_LOCAL_SIZE {local_size}: "
            "these do not go together"
        )
    rendezvous = environ["PYCOLL_RENDEZVOUS"]
    addresses = _addresses(environ)
    return JobPlacement(
        rank,
        size,
        local_rank,
        local_size,
        node,
        rendezvous,
        key,
        local_ranks,
        addresses,
        link=environ.get("PYCOLL_LINK", ""),
        memory=environ.get("PYCOLL_SHM", ""),
    )


def _addresses(environ: Mapping[str, str]) -> dict[int, str]:
    text = environ.get("PYCOLL_ADDRESSES", "")
    try:
        pairs = (pair.split("=") for pair in text.split(",") if pair)
        return {int(node): address for node, address in pairs}
    except ValueError:
        raise BootstrapError(f"PYCOLL_ADDRESSES is {text!r}, not as 0=10.0.0.1,1=...") from None


def _local_ranks(environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get("PYCOLL_LOCAL_RANKS", "")
    try:
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        raise BootstrapError(f"PYCOLL_LOCAL_RANKS is {text!r}, not ranks, as 0,1,2") from None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise BootstrapError(f"{name} is {text!r}, which is not a number from 0 up")
    return number
