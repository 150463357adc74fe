"""What `pycoll-run --check` prints: how hosts reach each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pycoll._launcher.host_routes import HostRoute

_CLOCK_S = 1.0
"""A clock that is off by more is worth a word: file times and logs differ then."""


def lines(
    names: Sequence[str],
    ways: Sequence[HostRoute],
    clocks: Mapping[str, float],
    same: Mapping[str, str],
) -> list[str]:
    """Draw a table: a row for who connects, a column for whom it reaches.

    Args:
        names: of the hosts that are there.
        ways: how they reach each other.
        clocks: by how many seconds those of other hosts are ahead of this host's.
        same: of names that mean a host which has another: that other.
    """
    cells = {(way.by, way.to): _cell(way) for way in ways}
    heads = ["from \\ to", *names]
    rows = [heads, *([by, *(cells.get((by, to), "-") for to in names)] for by in names)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    drawn = []
    if len(names) > 1:
        drawn = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    drawn += [f"{name} is {other}, the same host" for name, other in same.items()]
    for way in ways:
        if not way.reach.address:
            drawn += [f"{way.by} cannot reach {way.to}:"]
            drawn += [f"    {failure}" for failure in way.reach.failures]
    for name, ahead_s in clocks.items():
        if abs(ahead_s) > _CLOCK_S:
            before = "ahead of" if ahead_s > 0 else "behind"
            drawn.append(f"the clock of {name} is {abs(ahead_s):.1f} s {before} this host's")
    return drawn


def _cell(way: HostRoute) -> str:
    found = way.reach
    if not found.address:
        return "no way"
    text = found.address
    if found.nbytes_per_s:
        text += f" {1e6 * found.latency_s:.0f} us {_rate(found.nbytes_per_s)}"
    return text


def _rate(nbytes_per_s: float) -> str:
    if nbytes_per_s >= 1e9:
        return f"{nbytes_per_s / 1e9:.1f} GB/s"
    return f"{nbytes_per_s / 1e6:.0f} MB/s"
