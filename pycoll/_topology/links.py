"""Links between hosts: how wide and how slow each is, as a file that people can write, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll._selection import topology
from pycoll._topology.search import HostRing, HostTree, best_ring, best_tree

WIDTHS, LATENCIES = "bandwidth_MBps", "latency_us"

_HEAD = """\
# Links between hosts: a row for each sender, a column for each receiver, in the order of `hosts`.
# Jobs put the hosts into the order of `ring` with PYCOLL_TOPOLOGY=this file.
"""


class HostLinks(NamedTuple):
    """Links between hosts.

    Attributes:
        hosts: their names.
        widths: by sender and receiver, in 10**6 bytes a second; empty: not known.
        latencies: by sender and receiver, in microseconds; empty: not known.
        ring: the hosts in order; empty: to be found.
        origin: who says so.
    """

    hosts: tuple[str, ...]
    widths: Sequence[Sequence[float]] = ()
    latencies: Sequence[Sequence[float]] = ()
    ring: tuple[str, ...] = ()
    origin: str = ""

    def best_ring(self) -> HostRing:
        """Search for the best ring."""
        return best_ring(*self._whole())

    def best_tree(self) -> HostTree:
        """Return the best tree."""
        return best_tree(*self._whole())

    def _whole(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return widths in bytes a second, and latencies in nanoseconds: sums of ints are exact."""
        none = [[0.0] * len(self.hosts)] * len(self.hosts)
        return (
            [[round(wide * 1e6) for wide in row] for row in self.widths or none],
            [[round(late * 1e3) for late in row] for row in self.latencies or none],
        )

    def with_ring(self) -> HostLinks:
        """Return the same with the ring that is best by these links."""
        return self._replace(ring=tuple(self.hosts[n] for n in self.best_ring().order))

    def as_toml(self) -> str:
        """Return the text of the file."""
        lines = [_HEAD]
        if self.origin:
            lines.append(f"origin = {_quoted(self.origin)}")
        lines.append(f"hosts = [{', '.join(map(_quoted, self.hosts))}]")
        if self.ring:
            lines.append(f"ring = [{', '.join(map(_quoted, self.ring))}]")
        for name, rows in ((WIDTHS, self.widths), (LATENCIES, self.latencies)):
            if rows:
                texts = [f"    [{', '.join(map(number_text, row))}],\n" for row in rows]
                lines.append(f"{name} = [\n{''.join(texts)}]")
        return "\n".join([*lines, ""])


def number_text(value: float) -> str:
    """Return a number with three digits that mean something, never as 1e+03."""
    if value >= 100:
        return str(round(value))
    return f"{value:.3g}" if value >= 0.001 or value == 0 else "0.001"


def _quoted(text: str) -> str:
    """Return a string as TOML has it."""
    safe = [c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text]
    return f'"{"".join(safe)}"'


def read(path: str) -> HostLinks:
    """Read a file.

    Raises:
        ValueError: it cannot be read, or makes no sense; the message names it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as exc:
        raise ValueError(f"{path} cannot be read: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is no text") from None
    table = topology.parse(text, path)
    ring = topology.ring_in(table, path)
    hosts = topology.names_in(table, "hosts", path) or ring
    if not hosts:
        raise ValueError(f'{path} has no hosts: write hosts = ["a", "b"]')
    widths = _matrix(table, WIDTHS, len(hosts), path)
    if any(not wide for a, row in enumerate(widths) for b, wide in enumerate(row) if a != b):
        raise ValueError(f"{path}: {WIDTHS} has a 0 between two hosts, which are to communicate")
    latencies = _matrix(table, LATENCIES, len(hosts), path)
    return HostLinks(hosts, widths, latencies, ring, str(table.get("origin", "")))


def _matrix(table: dict[str, Any], key: str, count: int, path: str) -> list[list[float]]:
    rows = table.get(key, [])
    if rows == []:
        return []
    is_square = isinstance(rows, list) and len(rows) == count
    if not is_square or not all(isinstance(row, list) and len(row) == count for row in rows):
        raise ValueError(f"{path}: {key} is {count} rows of {count} numbers, as there are hosts")
    for row in rows:
        for value in row:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(f"{path}: {key} has {value!r}, which is no number from 0 up")
    return [[float(value) for value in row] for row in rows]


# --- what a terminal shows -------------------------------------------------------------------


def text_of(links: HostLinks) -> str:
    """Return the links as matrices, with the ring and the tree that are best."""
    lines = []
    for title, rows in (("MB/s", links.widths), ("latency, us", links.latencies)):
        if rows:
            lines += [*_table_of(links.hosts, rows, title), ""]
    found = _found(links) if links.widths and len(links.hosts) > 1 else []
    ring = " -> ".join(links.ring)
    if ring and f"best ring: {ring}" not in found:
        lines.append(f"ring of the file: {ring}")
    lines += found
    return "\n".join(lines)


def _table_of(hosts: Sequence[str], rows: Sequence[Sequence[float]], title: str) -> list[str]:
    cells = [[f"{title}, to", *hosts]]
    for a, row in enumerate(rows):
        texts = ["-" if a == b else number_text(value) for b, value in enumerate(row)]
        cells.append([f"from {hosts[a]}", *texts])
    wide = [max(len(row[column]) for row in cells) for column in range(len(hosts) + 1)]
    return [
        "  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]).rstrip()
        for row in cells
    ]


def _found(links: HostLinks) -> list[str]:
    ring, tree = links.best_ring(), links.best_tree()
    width, bound = number_text(ring.width / 1e6), number_text(ring.bound / 1e6)
    lines = [
        f"best ring: {' -> '.join(links.hosts[n] for n in ring.order)}",
        f"  its narrowest link has {width} MB/s"
        + (", no ring has a wider one" if ring.width == ring.bound else "")
        + (f"; once around takes {number_text(ring.latency / 1e3)} us" if ring.latency else ""),
    ]
    if ring.width < ring.bound:
        lines.append(f"  a wider one may have been missed; none has more than {bound} MB/s")
    pairs = ", ".join(f"{links.hosts[a]} - {links.hosts[b]}" for a, b in tree.links)
    lines.append(f"best tree: {pairs}")
    lines.append(f"  its narrowest link has {number_text(tree.width / 1e6)} MB/s, no tree has more")
    return lines
