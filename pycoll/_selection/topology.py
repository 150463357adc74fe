"""The file that PYCOLL_TOPOLOGY names: in which order the hosts stand, around rings and in trees.

`pycoll topology --measure` writes one, and a person may: of all that can be in it, a job needs the
names of the hosts in their order, ``ring = ["a", "c", "b"]``. Rank 0 reads it for all. The file of
another rank may be missing where that runs, but not be another.
"""

from __future__ import annotations

import socket
import tomllib
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pycoll._support.wording import a_kind

VARIABLE = "PYCOLL_TOPOLOGY"

MAX_SAID_NBYTES = 8 << 10
"""What a rank says when ranks meet is bounded; this is enough for some thousand names of hosts."""


def parse(text: str, path: str) -> dict[str, Any]:
    """Read a file's text, TOML, as a table.

    Raises:
        ValueError: it is none; the message names the file.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ValueError(f"{path} is no TOML: {exc}") from None


def names_in(table: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    """Return a list of different names of hosts; without the key: none.

    Raises:
        ValueError: it is something else; the message names the file.
    """
    names = table.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        said = a_kind(names) if not isinstance(names, list) else "something else in it"
        raise ValueError(f'{path}: {key} is a list of names of hosts, as ["a", "b"], not {said}')
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: {key} has {twice} twice; name each host once")
    return tuple(names)


def ring_in(table: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """Return the hosts in their order; without one: none.

    Raises:
        ValueError: it is no order of the hosts in the file; the message names the file.
    """
    ring, hosts = names_in(table, "ring", path), names_in(table, "hosts", path)
    if ring and hosts and set(ring) != set(hosts):
        odd = sorted(set(ring) ^ set(hosts))[0]
        where, other = ("ring", "hosts") if odd in ring else ("hosts", "ring")
        raise ValueError(f"{path}: {odd} is in {where}, but not in {other}; name the same hosts")
    return ring


def host_name(environ: Mapping[str, str]) -> str:
    """Return what this rank calls its host."""
    return environ.get("PYCOLL_HOST") or socket.gethostname()


def names_of(hosts: Mapping[int, str]) -> dict[int, str]:
    """Return by number of a host its name; hosts that are pretended on one are called 0, 1, ..."""
    if len(set(hosts.values())) < len(hosts):
        return {number: str(number) for number in hosts}
    return dict(hosts)


def said(environ: Mapping[str, str], rank: int) -> dict[str, Any]:
    """Return what a rank says of its file and its host when the ranks meet, for `agree`.

    Raises:
        ValueError: the file cannot be read, or has no order; the message names it.
    """
    path = environ[VARIABLE]
    own: dict[str, Any] = {"file": path, "host": host_name(environ)}
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as exc:
        if rank > 0 and isinstance(exc, FileNotFoundError):
            return own  # rank 0's counts
        why = exc.strerror if isinstance(exc, OSError) else "it is no text"
        raise ValueError(f"{VARIABLE}: {path} cannot be read: {why}") from None
    own["sum"] = zlib.crc32(text.encode())
    if rank == 0:
        ring = ring_in(parse(text, f"{VARIABLE}: {path}"), f"{VARIABLE}: {path}")
        if not ring:
            raise ValueError(
                f'{VARIABLE}: {path} has no order of hosts, as ring = ["a", "b"]; where it says '
                f"how wide the links are, `pycoll topology {path} -o {path}` finds one"
            )
        own["ring"] = zlib.compress("\n".join(ring).encode())
        if len(own["ring"]) > MAX_SAID_NBYTES:
            raise ValueError(f"{VARIABLE}: {path} has too many hosts to tell all ranks")
    return own


def agree(infos: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the numbers of the hosts in their order, from what all ranks have said.

    Args:
        infos: in order of rank: `node`, the number of the host, and `topology`, what `said` says.

    Raises:
        ValueError: a rank has another file, or its host is not in the file.
    """
    first = infos[0]["topology"]
    for rank, info in enumerate(infos):
        own = info["topology"]
        if own.get("sum", first["sum"]) != first["sum"]:
            raise ValueError(
                f"{VARIABLE}: {own['file']} of rank {rank}, on {own['host']}, differs from "
                f"{first['file']} of rank 0, on {first['host']}; give both ranks the same file"
            )
    names = names_of({info["node"]: info["topology"]["host"] for info in infos})
    if len(names) == 1:
        return ()
    ring = zlib.decompress(first["ring"]).decode().split("\n")
    places = {name: place for place, name in enumerate(ring)}
    order = {}
    for number, name in sorted(names.items()):
        place = places.get(name, places.get(name.partition(".")[0]))
        if place is None:
            raise ValueError(
                f"{VARIABLE}: host {name} of this job is not in {first['file']}, which has "
                f"{', '.join(ring[:8])}{', ...' if len(ring) > 8 else ''}; measure the hosts of "
                "the job with pycoll topology --measure"
            )
        order[number] = place
    return tuple(sorted(order, key=order.__getitem__))


def ranks_in_order(ring: Sequence[int], hosts: Sequence[int]) -> tuple[int, ...]:
    """Return ranks in the order of their hosts, those of a host by rank; (): as they are.

    Args:
        ring: numbers of hosts in their order.
        hosts: by rank the number of its host.
    """
    place = {host: place for place, host in enumerate(ring)}
    order = tuple(sorted(range(len(hosts)), key=lambda rank: (place[hosts[rank]], rank)))
    return order if order != tuple(range(len(hosts))) else ()
