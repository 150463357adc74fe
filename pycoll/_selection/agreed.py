"""What the ranks of a job have agreed on when they met, and choose algorithms by.

Rank 0's settings count for all: PYCOLL_ALGORITHM, PYCOLL_SEGMENT and the table of costs. It says
them when the ranks meet, if they are not pycoll's own. Each rank says which cores it may use, and
all take the same number for a host. Each rank also says whether it encrypts (PYCOLL_ENCRYPT), and
all must do the same. So it is with the file that PYCOLL_TOPOLOGY names.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll._selection import costs, topology
from pycoll._support.environment import encrypts
from pycoll._support.lazy_import import LazyModule
from pycoll._support.machine import boot_id
from pycoll.errors import BootstrapError

if TYPE_CHECKING:
    from pycoll import schedules
    from pycoll._selection.costs import CostTable
else:  # a job that has set nothing and talks through shared memory needs neither
    schedules = LazyModule("pycoll.schedules")

SHARED_MEMORY = "shared_memory"
"""The algorithm that is no schedule: an exchange of slots in shared memory."""

MAX_SAID_NBYTES = 48 << 10
"""What a rank says when ranks meet is bounded, and a table is only a part of it."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Rule(NamedTuple):
    """What PYCOLL_ALGORITHM says about one collective.

    Attributes:
        names: of algorithms.
        excluded: those of that name are not to be used; otherwise only those are.
    """

    names: tuple[str, ...]
    excluded: bool

    def allows(self, name: str) -> bool:
        """Whether an algorithm may be used, if another can serve."""
        return (name in self.names) != self.excluded

    def __str__(self) -> str:
        return ("^" if self.excluded else "") + ",".join(self.names)


class Agreed(NamedTuple):
    """What decides, beside the call itself, how it runs; the same on all ranks of a job.

    Attributes:
        table: of costs; None: pycoll's own.
        rules: by collective.
        segment_nbytes: length of segments; None: that of the table's formula, 0: never cut.
        sharing: numbers of the hosts whose ranks share memory.
        cores: by number of a host those its ranks may use together.
        machines: by number of a host what is the same for hosts that are one machine: containers,
            or emulated hosts.
        networks: by number of a host the RDMA network that all its ranks are in; a host that is
            not there has none.
        ring: numbers of the hosts, in the order that the file of PYCOLL_TOPOLOGY gives them; none:
            no such file. `topology`: which.
        gpus: numbers of the hosts whose ranks may all have a GPU, and may read the others'.
    """

    table: CostTable | None = None
    rules: Mapping[str, Rule] = {}
    segment_nbytes: int | None = None
    sharing: frozenset[int] = frozenset()
    cores: Mapping[int, float] = {}
    machines: Mapping[int, bytes] = {}
    networks: Mapping[int, str] = {}
    ring: tuple[int, ...] = ()
    topology: str = ""
    gpus: frozenset[int] = frozenset()

    @property
    def costs(self) -> CostTable:
        """The table that counts."""
        return self.table if self.table is not None else costs.shipped()

    def order(self, hosts: Sequence[int]) -> tuple[int, ...]:
        """Return ranks in the order in which they stand in schedules; (): by their numbers.

        Args:
            hosts: by rank the number of its host.
        """
        return topology.ranks_in_order(self.ring, hosts) if self.ring else ()


# --- what a rank says ------------------------------------------------------------------------


def said(environ: Mapping[str, str], rank: int) -> dict[str, Any]:
    """Return what a rank says when the ranks meet, for `agree`.

    Raises:
        BootstrapError: a setting makes no sense; the message names it, and what there is.
    """
    own = _cores_here() | {"machine": _machine()}
    if encrypts(environ):
        own["encrypt"] = True
    if environ.get("PYCOLL_TOPOLOGY"):
        try:
            own["topology"] = topology.said(environ, rank)
        except ValueError as exc:
            raise BootstrapError(str(exc)) from None
    if _may_have_gpu(environ):
        own["gpu"] = True
    return own | _settings(environ) if rank == 0 else own


def _settings(environ: Mapping[str, str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    try:
        if text := environ.get("PYCOLL_ALGORITHM"):
            parse_rules(text)
            said["algorithm"] = text
        if text := environ.get("PYCOLL_SEGMENT"):
            said["segment"] = parse_segment(text)
        # Without the variable most have no such file, and a look for it costs no import.
        path = environ.get("PYCOLL_COSTS") or home_file(environ)
        if environ.get("PYCOLL_COSTS") or os.path.exists(path):
            packed = zlib.compress(costs.read(path).encode())
            if len(packed) > MAX_SAID_NBYTES:
                raise ValueError(f"the table of costs {path} is too large to tell all ranks")
            said["costs"], said["costs_file"] = packed, path
    except ValueError as exc:
        raise BootstrapError(str(exc)) from None
    return said


def _cores_here() -> dict[str, Any]:
    from pycoll._support.environment import usable_cores

    cpus = os.sched_getaffinity(0)
    mask = sum(1 << cpu for cpu in cpus)
    said: dict[str, Any] = {"cpus": mask.to_bytes(mask.bit_length() // 8 + 1, "little")}
    usable = usable_cores()
    if usable < len(cpus):
        said["quota"] = usable
    return said


def _may_have_gpu(environ: Mapping[str, str]) -> bool:
    """Whether this process may find an NVIDIA driver, as far as files tell; it is not loaded."""
    if environ.get("PYCOLL_CUDA_IPC") == "0":
        return False
    folders = filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    paths = ["/dev/nvidiactl", "/dev/dxg", *(f"{folder}/libcuda.so.1" for folder in folders)]
    return any(map(os.path.exists, paths))


def _machine() -> bytes:
    """Return what tells running kernels apart, in short."""
    return boot_id().encode()[:13]


def agree(infos: Sequence[Mapping[str, Any]]) -> Agreed:
    """Return what follows from what all ranks have said, in order of rank.

    Raises:
        BootstrapError: rank 0's settings make no sense to this rank: it has registered other
            algorithms; or only some ranks encrypt.
    """
    _check_all_or_none(infos, "encrypt", "PYCOLL_ENCRYPT=1")
    _check_all_or_none(infos, "topology", "PYCOLL_TOPOLOGY")
    hosts: dict[int, list[Mapping[str, Any]]] = {}
    machines: dict[bytes, list[Mapping[str, Any]]] = {}
    for info in infos:
        hosts.setdefault(info["node"], []).append(info)
        machines.setdefault(info.get("machine", b""), []).append(info)
    first = infos[0]
    ring: tuple[int, ...] = ()
    try:
        if "topology" in first:
            ring = topology.agree(infos)
    except ValueError as exc:
        raise BootstrapError(str(exc)) from None
    try:
        table = None
        if packed := first.get("costs"):
            table = costs.parse(zlib.decompress(packed).decode(), first["costs_file"])
            table = table._replace(origin=f"{first['costs_file']}: {table.origin}")
        rules = parse_rules(first["algorithm"]) if "algorithm" in first else {}
    except ValueError as exc:
        raise BootstrapError(f"rank 0's settings are not for this rank: {exc}") from None
    return Agreed(
        table=table,
        rules=rules,
        segment_nbytes=first.get("segment"),
        sharing=frozenset(host for host, here in hosts.items() if all("shm" in i for i in here)),
        cores={host: _cores(here, machines) for host, here in hosts.items()},
        machines={host: here[0].get("machine", b"") for host, here in hosts.items()},
        networks={host: found for host, here in hosts.items() if (found := _network(here))},
        ring=ring,
        topology=first["topology"]["file"] if ring else "",
        gpus=frozenset(host for host, here in hosts.items() if all("gpu" in i for i in here)),
    )


def _check_all_or_none(infos: Sequence[Mapping[str, Any]], key: str, variable: str) -> None:
    """Raise BootstrapError if only some ranks have said something of `key`."""
    having = [rank for rank, info in enumerate(infos) if info.get(key)]
    if having and len(having) < len(infos):
        others = [rank for rank in range(len(infos)) if rank not in set(having)]
        raise BootstrapError(
            f"{variable} is set for {_ranks(having)}, but not for {_ranks(others)}; "
            "set it for all ranks or for none"
        )


def _ranks(ranks: Sequence[int]) -> str:
    """Return a few ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _network(here: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the RDMA network that all ranks of a host are in, if there is one."""
    first, *others = {info.get("rdma", {}).get("network") for info in here}
    return None if others else first


def _cores(
    here: Sequence[Mapping[str, Any]], machines: Mapping[bytes, Sequence[Mapping[str, Any]]]
) -> float:
    """Return a host's cores: of its machine those for its share of the ranks."""
    machine = machines[here[0].get("machine", b"")]
    # Ranks may be bound to different cores, and then there are as many as they have together.
    mask = 0
    for info in machine:
        mask |= int.from_bytes(info["cpus"], "little")
    cores = mask.bit_count()
    quotas = [info.get("quota", cores) for info in machine]
    return float(min(cores, max(quotas)) * len(here) / len(machine))


def home_file(environ: Mapping[str, str]) -> str:
    """Return where a user's table is if PYCOLL_COSTS does not say, and `pycoll tune` writes."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(home, "pycoll", "costs.json")


# --- the grammar -----------------------------------------------------------------------------


def check_settings(environ: Mapping[str, str]) -> None:
    """Read what rank 0 will, but for names of algorithms, which its program may register.

    Raises:
        ValueError: a setting makes no sense: what, and what there is.
    """
    if text := environ.get("PYCOLL_ALGORITHM"):
        parse_rules(text, any_name=True)
    if text := environ.get("PYCOLL_SEGMENT"):
        parse_segment(text)


def parse_rules(text: str, any_name: bool = False) -> dict[str, Rule]:
    """Read PYCOLL_ALGORITHM, for example ``"all_reduce:double_tree;broadcast:^ring,chain"``.

    Args:
        text: the variable's value.
        any_name: let algorithms pass that are not known here.

    Raises:
        ValueError: it makes no sense: what, and what there is.
    """
    rules: dict[str, Rule] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        collective, colon, listed = (word.strip() for word in part.partition(":"))
        what = f"PYCOLL_ALGORITHM: {part!r}"
        if not colon:
            raise ValueError(
                f"{what} is not COLLECTIVE:NAME,... or COLLECTIVE:^NAME,..., "
                'as in "all_reduce:double_tree;broadcast:^chain"'
            )
        try:
            known = [SHARED_MEMORY, *schedules.names(collective)]
        except ValueError as exc:
            raise ValueError(f"{what}: {exc}") from None
        if collective in rules:
            raise ValueError(f"{what}: {collective} was there before; name its algorithms once")
        excluded = listed.startswith("^")
        names = tuple(name.strip() for name in listed.removeprefix("^").split(","))
        for name in names:
            if name not in known and not any_name:
                raise ValueError(
                    f"{what}: {collective} has no algorithm {name!r}; it has {', '.join(known)}"
                )
        rules[collective] = Rule(names, excluded)
        if not any(map(rules[collective].allows, {*known, *names})):
            raise ValueError(f"{what} leaves no algorithm of {collective}")
    return rules


def parse_segment(text: str) -> int:
    """Read PYCOLL_SEGMENT: bytes, as ``262144`` or ``256K``.

    Raises:
        ValueError: it is none.
    """
    return parse_bytes(text, "PYCOLL_SEGMENT", "0 cuts nothing")


def parse_bytes(text: str, variable: str, otherwise: str) -> int:
    """Read a number of bytes, as ``262144``, ``256K`` or ``256KiB``.

    Raises:
        ValueError: it is none; the text ends with `otherwise`.
    """
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:] in _UNITS else ""
    digits = digits.removesuffix(unit)
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
        raise ValueError(
            f"{variable} is {text!r}, which is no length: write bytes, as 262144 or 256K; "
            f"{otherwise}"
        )
    return int(digits) * _UNITS[unit]
