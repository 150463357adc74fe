"""Which hosts a job has, as users name them: `-H a:4,b:4`, or a file."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from pycoll.errors import Error


class Slots(NamedTuple):
    """So many ranks on a host."""

    host: str
    ranks: int


def parse_hosts(text: str) -> list[Slots]:
    """Read `a:4,b:4`, or `a,b`: one rank each. A host may come several times.

    An IPv6 address is written in brackets: `[fd77::2]:4`.

    Raises:
        Error: the text is something else.
    """
    return [_parse(entry.strip(), "-H") for entry in text.split(",")]


def read_hostfile(path: str) -> list[Slots]:
    """Read a file with a host a line, `a slots=4` or `a:4`; what follows a `#` is a comment.

    Raises:
        Error: it cannot be read, or says something else; which line.
    """
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise Error(f"--hostfile {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        others = [w for w in words[1:] if not w.startswith(("slots=", "max_slots=", "max-slots="))]
        if others or len(slots) > 1:
            raise Error(f"{where}: {line.strip()!r} is not HOST, HOST:4 or HOST slots=4")
        found.append(_parse(f"{words[0]}:{slots[0]}" if slots else words[0], where))
    if not found:
        raise Error(f"--hostfile {path} names no host")
    return found


def _parse(entry: str, where: str) -> Slots:
    host, colon, number = entry, "", ""
    if not entry.endswith("]"):  # "[fd77::2]" has no number
        head, colon, tail = entry.rpartition(":")
        if colon and (head.endswith("]") or ":" not in head):
            host, number = head, tail
        elif colon:
            raise Error(f"{where}: {entry!r}: an IPv6 address is written in brackets: [{entry}]:4")
    host = host.removeprefix("[").removesuffix("]")
    if not host or host.startswith("-") or (colon and not (number.isdecimal() and int(number))):
        raise Error(f"{where}: {entry!r} is not HOST or HOST:RANKS, as node1:4")
    return Slots(host, int(number) if number else 1)


def lay_out(slots: Sequence[Slots], size: int | None) -> tuple[list[str], list[int]]:
    """Put ranks on hosts, in the order in which their slots are named.

    Args:
        slots: the hosts; `a:2,b:1,a:1` puts ranks 0, 1 and 3 on a.
        size: number of ranks; None: as many as there are slots.

    Returns:
        The hosts that have ranks, and by rank the index of its host among them.

    Raises:
        Error: there are fewer slots than ranks.
    """
    every = [host for host, ranks in slots for _ in range(ranks)]
    if size is not None:
        if size > len(every):
            raise Error(f"-n {size} needs as many slots, the hosts have {len(every)}: -H a:4,b:4")
        every = every[:size]
    names = list(dict.fromkeys(every))
    return names, [names.index(host) for host in every]


def spread(slots: Sequence[Slots], size: int) -> list[Slots]:
    """The slots, or so many more on each host, in equal blocks, that there is one for each rank."""
    if size <= sum(each.ranks for each in slots):
        return list(slots)
    hosts = list(dict.fromkeys(each.host for each in slots))
    block = -(-size // len(hosts))
    return [Slots(host, block) for host in hosts]


def is_here(name: str) -> bool:
    """Return whether a host is the one that this process is on: its name, or an address."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    import ipaddress  # not at the top: most jobs have one host

    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
