"""Which RDMA devices this machine has, and which of them pycoll uses or why it uses none.

    /sys/class/infiniband/DEVICE/ports/PORT/      state, rate, link_layer, lid
        gids/INDEX                                an address by which peers reach the port
        gid_attrs/types/INDEX, .../ndevs/INDEX    its kind, and the network interface it is of
    /sys/class/infiniband_verbs/uverbsN/ibdev     whose device file /dev/infiniband/uverbsN is

All of it is read from files and nothing imports pyverbs: that is quick, and pyverbs may be missing.
Functions take the `root` of the file system these paths are in.
"""

from __future__ import annotations

import errno
import grp
import os
import re
import socket
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from typing import NamedTuple

INFINIBAND, ETHERNET, IWARP = "InfiniBand", "Ethernet", "iWARP"
"""Link layers. Over Ethernet it is RoCE."""

# Version 1 of RoCE is not routed. A link-local IPv6 address is none of these: soft-RoCE does not
# reach it.
_ROCE_BEST_FIRST = (
    ("RoCE v2", socket.AF_INET),
    ("RoCE v2", socket.AF_INET6),
    ("IB/RoCE v1", socket.AF_INET),
)


class Gid(NamedTuple):
    """One address of a port.

    table_index: its place in the port's table.
    address: as of IPv6; an IPv4 address is written ``::ffff:192.0.2.1``.
    kind: ``"RoCE v2"``, or ``"IB/RoCE v1"``, which is also what InfiniBand has.
    netdev: name of the network interface whose address it is, "" if there is none.
    """

    table_index: int
    address: str
    kind: str
    netdev: str


class Port(NamedTuple):
    """One port of a device, as the kernel describes it; what cannot be read is empty.

    number: from 1.
    state: ``"ACTIVE"``, ``"DOWN"``, ``"INIT"``, ...
    link_layer: `INFINIBAND`, `ETHERNET` or `IWARP`.
    rate: as text with its unit, ``"100 Gb/sec (4X EDR)"``.
    lid: its address in the InfiniBand subnet, 0 on Ethernet.
    gids: those that are set, by index.
    """

    device: str
    number: int
    state: str
    link_layer: str
    rate: str
    lid: int
    gids: tuple[Gid, ...]


class ChosenDevice(NamedTuple):
    """The device, the port and the address that pycoll uses; the fields are those of `Port`."""

    device: str
    port: int
    gid: Gid
    link_layer: str
    lid: int

    def __str__(self) -> str:
        gid = self.gid
        return f"{self.device} port {self.port}, GID {gid.table_index} {gid.address} ({gid.kind})"


def ports(root: str = "/") -> list[Port]:
    """Return every port of every RDMA device, mlx5_2 before mlx5_10."""
    return [_port(device, number, root) for device, number in _names(root)]


def find(environ: Mapping[str, str], root: str = "/") -> ChosenDevice | str:
    """Return the first port that can be used, or in one line why there is none and what to do.

    ``PYCOLL_RDMA_DEVICE`` (``DEVICE`` or ``DEVICE:PORT``) and ``PYCOLL_RDMA_GID`` (an index) of
    `environ` narrow the choice; a name or number that does not exist is a reason.
    """
    there = _names(root)
    if not there:
        return (
            "this machine has no RDMA device (soft-RoCE makes one: "
            "rdma link add rxe0 type rxe netdev eth0)"
        )
    wanted = environ.get("PYCOLL_RDMA_DEVICE", "")
    candidates = [name for name in there if wanted in ("", name[0], f"{name[0]}:{name[1]}")]
    if not candidates:
        known = ", ".join(f"{device}:{number}" for device, number in there)
        return f"PYCOLL_RDMA_DEVICE={wanted} is no device or port here; there are {known}"
    if reason := _missing_pyverbs():
        return reason
    active: list[str] = []
    down: list[str] = []
    for device, number in candidates:
        port = _port(device, number, root, brief=not environ.get("PYCOLL_RDMA_GID"))
        gid = usable_gid(port, environ, root)
        if isinstance(gid, Gid):
            return ChosenDevice(device, number, gid, port.link_layer, port.lid)
        (active if port.state == "ACTIVE" else down).append(f"{device} port {number}: {gid}")
    # Of a card, often only some ports have a cable: that is not the news.
    first, *others = active + down
    return f"{first} (and {len(others)} more: pycoll info)" if others else first


def usable_gid(port: Port, environ: Mapping[str, str], root: str = "/") -> Gid | str:
    """Return the address to use on a port, or why the port cannot be used and what to do.

    ``PYCOLL_RDMA_GID`` of `environ` decides if it is set, else `best_gid`.
    """
    if port.link_layer not in (INFINIBAND, ETHERNET):
        return f"its link layer is {port.link_layer or 'unknown'}, not InfiniBand or RoCE"
    if reason := _cannot_open(port.device, root):
        return reason
    interface = next((gid.netdev for gid in port.gids if gid.netdev), "INTERFACE")
    if port.state != "ACTIVE":
        if port.link_layer == ETHERNET:
            todo = f"ip link set {interface} up"
        elif port.state == "INIT":
            todo = "it waits for a subnet manager (opensm)"
        else:
            todo = "look at its cable and switch"
        return f"state {port.state or 'unknown'}, not ACTIVE: {todo}"
    wanted = environ.get("PYCOLL_RDMA_GID", "")
    if wanted:
        known = {str(gid.table_index): gid for gid in port.gids}
        return known.get(wanted) or (
            f"PYCOLL_RDMA_GID={wanted} is no GID of it; there are {', '.join(known) or 'none'}"
        )
    gid = best_gid(port)
    if gid is not None:
        return gid
    if port.link_layer == INFINIBAND:
        return "its GID 0 is not set"
    todo = f"ip address add A.B.C.D/24 dev {interface}"
    return f"no IPv4 or global IPv6 address on {interface}: {todo}"


def best_gid(port: Port) -> Gid | None:
    """Return the address to use on a port unless the user says another, None if none will do.

    InfiniBand: index 0. RoCE: version 2 before 1, IPv4 before IPv6, never a link-local one.
    """
    ranks = [_preference(gid, port.link_layer) for gid in port.gids]
    best = min((rank for rank in ranks if rank is not None), default=None)
    return None if best is None else port.gids[ranks.index(best)]


def _preference(gid: Gid, link_layer: str) -> int | None:
    """0 for the best that there can be, None if it will not do."""
    if link_layer == INFINIBAND:
        return 0 if gid.table_index == 0 else None
    what = gid.kind, _family(gid.address)
    return _ROCE_BEST_FIRST.index(what) if what in _ROCE_BEST_FIRST else None


def _family(address: str) -> int | None:
    """AF_INET if an IPv4 address is inside, AF_INET6 for IPv6, None if it is link-local."""
    raw = socket.inet_pton(socket.AF_INET6, address)
    if raw[:12] == bytes(10) + b"\xff\xff":
        return socket.AF_INET
    link_local = raw[0] == 0xFE and raw[1] & 0xC0 == 0x80
    return None if link_local else socket.AF_INET6


# ---------------------------------------------------------------- what the kernel says


def _names(root: str) -> list[tuple[str, int]]:
    """Every (device, number of a port)."""
    folder = os.path.join(root, "sys/class/infiniband")
    return [
        (device, number)
        for device in sorted(_list(folder), key=_natural)
        for number in _numbers(f"{folder}/{device}/ports")
    ]


def _natural(name: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def _port(device: str, number: int, root: str, brief: bool = False) -> Port:
    """Read a port; if `brief`, addresses only up to one that cannot be bettered.

    The table may have a thousand places, nearly all of them not set.
    """
    folder = os.path.join(root, f"sys/class/infiniband/{device}")
    link_layer = _read(f"{folder}/ports/{number}/link_layer")
    if _read(f"{folder}/node_type").startswith("4"):  # "4: RNIC": these say Ethernet, too
        link_layer = IWARP
    folder = f"{folder}/ports/{number}"
    try:
        lid = int(_read(f"{folder}/lid"), 16)
    except ValueError:
        lid = 0
    state = _read(f"{folder}/state").rpartition(" ")[2]  # "4: ACTIVE"
    gids = []
    for index in _numbers(f"{folder}/gids"):
        gid = _gid(folder, index)
        if gid is not None:
            gids.append(gid)
            if brief and _preference(gid, link_layer) == 0:
                break
    rate = _read(f"{folder}/rate")
    return Port(device, number, state, link_layer, rate, lid, tuple(gids))


def _gid(folder: str, index: int) -> Gid | None:
    try:
        raw = bytes.fromhex(_read(f"{folder}/gids/{index}").replace(":", ""))
    except ValueError:
        return None
    # All of an entry that is not set is 0; some drivers then leave the prefix of the subnet.
    if len(raw) != 16 or not any(raw[8:]):
        return None
    kind = _read(f"{folder}/gid_attrs/types/{index}")
    netdev = _read(f"{folder}/gid_attrs/ndevs/{index}")
    return Gid(index, socket.inet_ntop(socket.AF_INET6, raw), kind, netdev) if kind else None


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _numbers(folder: str) -> list[int]:
    return sorted(int(name) for name in _list(folder) if name.isdecimal())


def _read(path: str) -> str:
    """The text of a file, "" if it cannot be read (EINVAL: an entry without a value)."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


# ---------------------------------------------------------------- what else it takes


def _missing_pyverbs() -> str | None:
    """Why pyverbs cannot be imported, without importing it."""
    spec = PathFinder.find_spec("pyverbs")
    if spec is None:
        return (
            "pyverbs is missing: apt install python3-pyverbs ibverbs-providers (Debian, Ubuntu) or "
            "dnf install python3-pyverbs (RHEL, Fedora), for the distribution's own Python (a venv "
            "of it: --system-site-packages); from PyPI only in the version of rdma-core"
        )
    # Its modules are compiled, each for one version of Python, and only their names tell.
    folders = spec.submodule_search_locations
    if PathFinder.find_spec("pyverbs.device", folders) is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        where = ", ".join(folders or ()) or spec.origin
        return f"pyverbs in {where} is not for Python {version}: run the distribution's own Python"
    return None


def _cannot_open(device: str, root: str) -> str | None:
    """Why the device file of an RDMA device cannot be opened, which is the first thing done."""
    sysfs = os.path.join(root, "sys/class/infiniband_verbs")
    name = next((n for n in _list(sysfs) if _read(f"{sysfs}/{n}/ibdev") == device), None)
    if name is None:
        return "it has no device file: modprobe ib_uverbs"
    path = os.path.join(root, "dev/infiniband", name)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"{path} is missing (in a container: --device=/dev/infiniband)"
    except PermissionError as exc:
        if exc.errno == errno.EPERM:  # of the cgroup
            return f"{path} is not for this container: --device=/dev/infiniband"
        return f"no permission to open {path}: {_who_may(path)}"
    except OSError as exc:
        return f"{path} cannot be opened: {exc.strerror}"
    return None


def _who_may(path: str) -> str:
    """How a user gets the permission to open a device file."""
    rule = 'udev rule KERNEL=="uverbs*", MODE="0666"'
    try:
        found = os.stat(path)
    except OSError:  # nor may this user look into the folder
        return rule
    if found.st_gid == 0 or found.st_mode & 0o060 != 0o060:
        return rule
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"join the group {group}, or {rule}"
