"""What collectives cost: a few measured constants of a machine, and the times that follow.

How much an algorithm has to do (`flows`) is counted in units of six constants, which each kind of
link has (`LinkCosts`); `CostTable.seconds` is the sum of the products. Because a formula never
knows everything, the table also has, for what was measured, the factor between the two: by number
of ranks and by size.

All ranks must come to the same result to the last bit, whatever their C library: so there are sums,
products and quotients here, and no logarithms or powers.

A table is a file, costs.json: pycoll's own, or one that `pycoll tune` has written.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from functools import cache
from typing import Any, NamedTuple

VERSION = 1
"""Of the format of costs.json."""

CORE, SHM, TCP, NET, RDMA = "core", "shm", "tcp", "net", "rdma"
LINKS = {
    CORE: "collectives in shared memory",
    SHM: "messages in shared memory",
    TCP: "TCP on one machine",
    NET: "TCP between machines, an estimate",
    RDMA: "RDMA, an estimate",
}
"""Kinds of links."""

WHOLE, CUT = "whole", "cut"
"""Whether each chunk is one message, or travels in segments."""

MAX_NBYTES = 1 << 20
"""No table is larger: it would be something else."""

MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6
"""Between what a table says and what was measured."""


class LinkCosts(NamedTuple):
    """Constants of one kind of link, in seconds.

    Attributes:
        call: processor time of a rank for a call.
        step: from sending a message to what the receiver does next.
        path: a byte on its way from rank to rank.
        message: processor time of one end of a message that a core sees to beside the steps.
        byte: the same of a byte.
        combine: a byte that is combined with another.
    """

    call: float
    step: float
    path: float
    message: float
    byte: float
    combine: float


# What no machine was there to measure is an estimate: messages take as much Python as in shared
# memory, and the network adds this (100 Gbit/s). Bytes are moved by devices and take no processor.
RDMA_STEP_S = 3e-6
RDMA_BYTE_S = 8e-11


def estimated_rdma(shm: LinkCosts) -> LinkCosts:
    """Return the constants of RDMA on a machine whose messages in shared memory have these."""
    return shm._replace(step=shm.step + RDMA_STEP_S, path=RDMA_BYTE_S, byte=0.0)


class Work(NamedTuple):
    """How much of each a call takes; in the order of `LinkCosts`."""

    calls: float = 0.0
    steps: float = 0.0
    path_nbytes: float = 0.0
    ends: float = 0.0
    end_nbytes: float = 0.0
    combined_nbytes: float = 0.0


class CostTable(NamedTuple):
    """Costs of a machine.

    Attributes:
        origin: where it was measured, in words.
        cores: number of cores there.
        links: by kind.
        sizes: in bytes, ascending: those of the factors.
        factors: (link, collective, algorithm, WHOLE or CUT) -> {ranks: by size, measured time by
            that of the formula}. A row of one factor holds for all sizes.
        lanes: connections by tcp between two ranks with which large messages were quickest.
    """

    origin: str
    cores: int
    links: dict[str, LinkCosts]
    sizes: tuple[int, ...]
    factors: dict[tuple[str, str, str, str], dict[int, tuple[float, ...]]]
    lanes: int = 1

    def seconds(self, *works: tuple[str, Work]) -> float:
        """Return what the formula says of a call that takes so much work on these links."""
        return math.fsum(
            amount * constant
            for link, work in works
            for amount, constant in zip(work, self.links[link], strict=True)
        )

    def factor(
        self, row: tuple[str, str, str, str], size: int, nbytes: int, crowded: bool
    ) -> float:
        """Return measured time by that of the formula; 1 if nothing like it was measured.

        An algorithm that was not measured takes the median of the others of its collective. Sizes
        between two that were measured take a factor between theirs, and other numbers of ranks
        that of the nearest, if one was measured where there are `crowded` ranks, more than cores,
        or are not.
        """
        rows = self.factors.get(row)
        if not rows:
            link, collective, _, how = row
            others = [
                self.factor(other, size, nbytes, crowded)
                for other in self.factors
                if (other[0], other[1], other[3]) == (link, collective, how)
            ]
            return _median(others) if others else 1.0
        alike = [ranks for ranks in rows if (ranks > self.cores) == crowded]
        if size not in rows or size not in alike:
            if not alike:
                return 1.0
            size = min(alike, key=lambda ranks: max(ranks / size, size / ranks))
        factors = rows[size]
        if len(factors) == 1 or nbytes <= self.sizes[0]:
            return factors[0]
        above = bisect_right(self.sizes, nbytes)
        if above == len(self.sizes):
            return factors[-1]
        low, high = self.sizes[above - 1], self.sizes[above]
        share = (_lg(nbytes) - _lg(low)) / (_lg(high) - _lg(low))
        return factors[above - 1] + share * (factors[above] - factors[above - 1])

    def as_json(self) -> str:
        """Return the text of a file that `parse` reads."""
        factors: dict[str, Any] = {}
        for (link, collective, algorithm, how), rows in sorted(self.factors.items()):
            of_algorithm = factors.setdefault(link, {}).setdefault(collective, {})
            of_algorithm.setdefault(algorithm, {})[how] = {
                str(ranks): [float(f"{factor:.3g}") for factor in row]
                for ranks, row in sorted(rows.items())
            }
        links = {
            name: {key: float(f"{value:.3g}") for key, value in link._asdict().items()}
            for name, link in self.links.items()
        }
        head = {
            "version": VERSION,
            "origin": self.origin,
            "cores": self.cores,
            "tcp_links": self.lanes,
            "links": links,
            "sizes": list(self.sizes),
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lines.append(f' "factors": {_indented(factors, 2)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _lg(number: int) -> float:
    """Return about the logarithm to base 2: a straight line between powers of two."""
    power = number.bit_length() - 1
    return power + number / (1 << power) - 1


def _indented(value: dict[str, Any], depth: int) -> str:
    """Dump nested maps, one line for each algorithm."""
    if depth == 5 or not value:
        return json.dumps(value)
    pad = " " * depth
    rows = [f"{pad}{json.dumps(key)}: {_indented(row, depth + 1)}" for key, row in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * (depth - 1) + "}"


def _median(values: list[float]) -> float:
    # Importing statistics takes a rank twice as long as all else here.
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


# --- files -----------------------------------------------------------------------------------


SHIPPED = os.path.join(os.path.dirname(__file__), "costs.json")
"""pycoll's own table."""


@cache
def shipped() -> CostTable:
    """Return pycoll's own table."""
    with open(SHIPPED, encoding="utf-8") as file:
        return parse(file.read(), "pycoll's costs.json")


def read(path: str) -> str:
    """Return the text of a table in a file.

    Raises:
        ValueError: it cannot be read, or is no table; the message names it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_NBYTES + 1)
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"the table of costs {path} cannot be read: {exc}") from exc
    parse(text, path)
    return text


def parse(text: str, name: str) -> CostTable:
    """Read a table.

    Args:
        text: as `CostTable.as_json` writes it.
        name: what to call it in errors: its path.

    Raises:
        ValueError: it is none: where, and why.
    """
    try:
        if len(text) > MAX_NBYTES:
            raise ValueError("it is too large")
        return _table(json.loads(text))
    except (ValueError, RecursionError) as exc:
        raise ValueError(
            f"{name} is no table of costs of this version of pycoll: {exc}. "
            "`pycoll tune` writes one."
        ) from exc


def _table(data: object) -> CostTable:
    top = _map(data, "it")
    if top.get("version") != VERSION:
        raise ValueError(f"its version is {top.get('version')!r}, not {VERSION}")
    links = {
        name: LinkCosts(
            *(_number(_map(row, f"link {name}"), key, f"link {name}") for key in LinkCosts._fields)
        )
        for name, row in _map(top.get("links"), "links").items()
    }
    if SHM in links and RDMA not in links:  # it was written when there was no RDMA
        links[RDMA] = estimated_rdma(links[SHM])
    if missing := [name for name in LINKS if name not in links]:
        raise ValueError(f"links has no {missing[0]}")
    sizes = top.get("sizes")
    if not isinstance(sizes, list) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError("sizes is no list of whole numbers above 0")
    if sorted(set(sizes)) != sizes or not sizes:
        raise ValueError("sizes is empty or does not ascend")
    factors = {}
    for link, of_link in _map(top.get("factors"), "factors").items():
        for collective, of_collective in _map(of_link, link).items():
            for algorithm, hows in _map(of_collective, f"{link} {collective}").items():
                where = f"{link} {collective} {algorithm}"
                for how, rows in _map(hows, where).items():
                    factors[link, collective, algorithm, how] = {
                        _ranks(ranks, where): _factors(row, len(sizes), where)
                        for ranks, row in _map(rows, where).items()
                    }
    return CostTable(
        origin=str(top.get("origin", "nobody says where")),
        cores=int(_number(top, "cores", "it", least=1.0)),
        links=links,
        sizes=tuple(sizes),
        factors=factors,
        lanes=int(_number({"tcp_links": 1, **top}, "tcp_links", "it", least=1.0)),
    )


def _map(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no map")
    return value


def _number(row: dict[str, Any], key: str, what: str, least: float = 0.0) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e9:
        raise ValueError(f"{key} of {what} is {value!r}, which is no number from {least:g} up")
    return float(value)


def _ranks(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{where} has factors for {text!r} ranks")
    return int(text)


def _factors(row: object, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) not in (1, count):
        raise ValueError(f"{where} has no list of {count} factors, one for each size")
    for factor in row:
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ValueError(f"{where} has the factor {factor!r}")
        if not MIN_FACTOR <= factor <= MAX_FACTOR:
            raise ValueError(f"{where} has the factor {factor!r}")
    return tuple(map(float, row))
