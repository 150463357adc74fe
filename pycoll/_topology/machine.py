"""What a machine is made of, from /sys: sockets, NUMA nodes, caches, cores, GPUs, network devices.

Source: the kernel's Documentation/ABI: stable/sysfs-devices-node, stable/sysfs-devices-system-cpu,
testing/sysfs-bus-pci, testing/sysfs-class-net, stable/sysfs-class-infiniband. A file may be missing
anywhere: then what it would say is not known. The CPUs of one thing are among those of another, or
are not: that alone decides what is inside what, so any order of sockets, nodes and caches will do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")  # 3D, other display, accelerator
_VGA = "0x0300"  # which the chip of a server's management has, too
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}

_ORDER = ("machine", "socket", "NUMA node", "L4", "L3", "L2")
"""Of things with the same CPUs the one that is named first here is outside."""


class MachineDevice(NamedTuple):
    """A GPU or a network device.

    Attributes:
        kind: "GPU" or "network".
        name: its address on the PCI bus, or the name of its interface.
        text: what else is known, in words.
        node: the number of the NUMA node it is at; None: not known.
        gigabits: a network device's speed in 10**9 bits a second; None: not known, or none.
    """

    kind: str
    name: str
    text: str
    node: int | None
    gigabits: float | None = None


class Part(NamedTuple):
    """A part of a machine: itself, a socket, a NUMA node or a cache that several cores share.

    Attributes:
        kind: as in `_ORDER`.
        number: of the socket or node; None: it has none.
        nbytes: of the node's memory, or the cache; 0: not known.
        cpus: the numbers of its CPUs.
        cores: of each core in it, but not in a part of it, the CPUs: its hardware threads.
        parts: what is inside.
        devices: what is connected to it.
    """

    kind: str
    number: int | None
    nbytes: int
    cpus: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...] = ()
    parts: tuple[Part, ...] = ()
    devices: tuple[MachineDevice, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it: what is not known is left out, CPUs are a list as 0-3,8."""
        said = self._asdict() | {"cpus": list_text(self.cpus), "nbytes": self.nbytes or None}
        said["cores"] = [list_text(core) for core in self.cores]
        said["parts"] = [part.as_json() for part in self.parts]
        said["devices"] = [
            {name: value for name, value in device._asdict().items() if value is not None}
            for device in self.devices
        ]
        return {name: value for name, value in said.items() if value not in (None, [])}

    def count(self, kind: str) -> int:
        """Return how many parts or devices of a kind are in it; "core": cores, "CPU": CPUs."""
        here = sum(device.kind == kind for device in self.devices)
        here += len(self.cores) if kind == "core" else 0
        here += sum(map(len, self.cores)) if kind == "CPU" else 0
        return here + sum((part.kind == kind) + part.count(kind) for part in self.parts)


def perceive(root: str = "/sys") -> Part:
    """Return what a machine is made of.

    Args:
        root: of its /sys, or of a copy.

    Raises:
        ValueError: there is no CPU in it.
    """
    folder = f"{root}/devices/system/cpu"
    cpus = [cpu for cpu in _numbered(folder, "cpu") if _is_online(folder, cpu)]
    if not cpus:
        raise ValueError(f"{root} has no CPUs (devices/system/cpu): is it a /sys?")
    threads = {cpu: _shared(f"{folder}/cpu{cpu}/topology", cpu, cpus) for cpu in cpus}
    cores = tuple(dict.fromkeys(tuple(threads[cpu]) for cpu in cpus))
    found = [*_sockets(folder, cpus), *_nodes(root, cpus), *_caches(folder, cpus, threads)]
    devices = [*_gpus(root), *_network(root)]
    return _nested(Part("machine", None, 0, tuple(cpus)), found, cores, devices)


def _nested(
    machine: Part,
    found: Iterable[Part],
    cores: Sequence[tuple[int, ...]],
    devices: Sequence[MachineDevice],
) -> Part:
    """Put everything into the smallest thing it is inside of."""
    parts = [machine, *found]
    # From the outside; of those with the same CPUs in the order of kinds.
    parts.sort(key=lambda part: (-len(part.cpus), _ORDER.index(part.kind), part.cpus))
    sets = [frozenset(part.cpus) for part in parts]
    inside: list[list[int]] = [[] for _ in parts]
    for index in range(1, len(parts)):
        # Memory without cores is inside of nothing but the machine.
        outer = [before for before in range(index) if sets[index] and sets[index] <= sets[before]]
        inside[outer[-1] if outer else 0].append(index)
    of_part: list[list[tuple[int, ...]]] = [[] for _ in parts]
    for core in cores:
        around = next(o for o in reversed(range(len(parts))) if sets[o].issuperset(core))
        of_part[around].append(core)
    nodes = {part.number for part in parts if part.kind == "NUMA node"}

    def whole(index: int) -> Part:
        part = parts[index]
        if part.kind == "machine":
            here = [device for device in devices if device.node not in nodes]
        elif part.kind == "NUMA node":
            here = [device for device in devices if device.node == part.number]
        else:
            here = []
        within = sorted(inside[index], key=lambda each: parts[each].cpus or (len(cores) << 8,))
        return part._replace(
            cores=tuple(of_part[index]), parts=tuple(map(whole, within)), devices=tuple(here)
        )

    return whole(0)


# --- CPUs ------------------------------------------------------------------------------------


def _is_online(folder: str, cpu: int) -> bool:
    return _read(f"{folder}/cpu{cpu}/online") != "0" and os.path.isdir(
        f"{folder}/cpu{cpu}/topology"
    )


def _shared(folder: str, cpu: int, cpus: Iterable[int]) -> list[int]:
    """Return the threads of a CPU's core."""
    text = _read(f"{folder}/core_cpus_list") or _read(f"{folder}/thread_siblings_list")
    return sorted(parse_list(text) & set(cpus)) or [cpu]


def _sockets(folder: str, cpus: Sequence[int]) -> list[Part]:
    found: dict[int, list[int]] = {}
    for cpu in cpus:
        text = _read(f"{folder}/cpu{cpu}/topology/physical_package_id")
        number = int(text) if text.isdecimal() else -1  # which some kernels say themselves
        found.setdefault(number, []).append(cpu)
    return [Part("socket", n, 0, tuple(here)) for n, here in found.items() if n >= 0]


def _nodes(root: str, cpus: Sequence[int]) -> list[Part]:
    folder, found = f"{root}/devices/system/node", []
    for number in _numbered(folder, "node"):
        here = sorted(parse_list(_read(f"{folder}/node{number}/cpulist")) & set(cpus))
        size = re.search(r"MemTotal:\s+(\d+) kB", _read(f"{folder}/node{number}/meminfo"))
        nbytes = int(size[1]) << 10 if size else 0
        if here or nbytes:  # memory without cores is a node, too
            found.append(Part("NUMA node", number, nbytes, tuple(here)))
    return found


def _caches(folder: str, cpus: Sequence[int], threads: dict[int, list[int]]) -> list[Part]:
    """Return the caches that more than one core shares."""
    found: dict[tuple[str, tuple[int, ...]], Part] = {}
    for cpu in cpus:
        for index in _numbered(f"{folder}/cpu{cpu}/cache", "index"):
            cache = f"{folder}/cpu{cpu}/cache/index{index}"
            here = tuple(sorted(parse_list(_read(f"{cache}/shared_cpu_list")) & set(cpus)))
            kind = f"L{_read(f'{cache}/level')}"
            if kind in _ORDER and not set(here) <= set(threads[cpu]):
                found[kind, here] = Part(kind, None, _nbytes(_read(f"{cache}/size")), here)
    return list(found.values())


def _nbytes(text: str) -> int:
    """Return a cache's size, which is said as 32768K."""
    units = {"K": 10, "M": 20, "G": 30}
    digits = text.rstrip("KMG")
    return int(digits) << units.get(text[-1:], 0) if digits.isdecimal() else 0


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def list_text(numbers: Sequence[int]) -> str:
    """Return numbers that ascend as such a list."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


# --- devices ---------------------------------------------------------------------------------


def _gpus(root: str) -> list[MachineDevice]:
    found = []
    folder = f"{root}/bus/pci/devices"
    for address in _names(folder):
        device = f"{folder}/{address}"
        kind, vendor = _read(f"{device}/class")[:6], _read(f"{device}/vendor")
        if kind in _GPU_CLASSES or (kind == _VGA and vendor in _VENDORS):
            model = _read(f"{device}/device").removeprefix("0x")
            words = [f"{_VENDORS.get(vendor, vendor)} {model}"]
            speed, lanes = (_read(f"{device}/max_link_{what}") for what in ("speed", "width"))
            if speed and lanes.isdecimal():
                words.append(f"PCIe {speed.removesuffix(' PCIe')} x{lanes}")
            found.append(MachineDevice("GPU", address, ", ".join(words), _node(device)))
    return found


def _network(root: str) -> list[MachineDevice]:
    """Return the network devices there are in hardware, or made of several such; else others."""
    folder = f"{root}/class/net"
    names = [name for name in _names(folder) if name != "lo" and os.path.isdir(f"{folder}/{name}")]
    real = [
        name
        for name in names
        if any(os.path.exists(f"{folder}/{name}/{what}") for what in ("device", "bonding"))
    ]
    found, seen = [], set()
    for name in real or names:
        device = f"{folder}/{name}/device"
        rdma = _names(f"{device}/infiniband")
        seen.update(rdma)
        speed = _read(f"{folder}/{name}/speed")  # in Mbit/s; -1, or an error: not known
        gigabits = int(speed) / 1000 if speed.isdecimal() and int(speed) else None
        gigabits = gigabits or next((_rate(root, each) for each in rdma), None)
        words = ", ".join(filter(None, (*rdma, _read(f"{folder}/{name}/operstate"))))
        found.append(MachineDevice("network", name, words, _node(device), gigabits))
    for name in _names(f"{root}/class/infiniband"):
        if name not in seen:
            node = _node(f"{root}/class/infiniband/{name}/device")
            found.append(MachineDevice("network", name, "RDMA", node, _rate(root, name)))
    return found


def _rate(root: str, name: str) -> float | None:
    """Return the speed of an RDMA device's first port, which is said as 400 Gb/sec (4X NDR)."""
    ports = f"{root}/class/infiniband/{name}/ports"
    found = re.match(r"([\d.]+) Gb/sec", _read(f"{ports}/{next(iter(_names(ports)), '')}/rate"))
    return float(found[1]) if found else None


def _node(device: str) -> int | None:
    text = _read(f"{device}/numa_node")
    return int(text) if text.isdecimal() else None  # -1: the machine has one, or does not tell


# --- files -----------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # there is none, or the kernel has nothing to say, as of a cable without end
        return ""


def _names(folder: str) -> list[str]:
    try:
        return sorted(
            os.listdir(folder),
            key=lambda name: [
                (not part.isdecimal(), int(part) if part.isdecimal() else part)
                for part in re.split(r"(\d+)", name)
            ],
        )
    except OSError:
        return []


def _numbered(folder: str, word: str) -> list[int]:
    """Return the numbers of the entries word0, word1, ... of a folder."""
    found = (re.fullmatch(rf"{word}(\d+)", name) for name in _names(folder))
    return sorted(int(match[1]) for match in found if match)
