"""What `pycoll simulate` has found: as a table, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll._support.wording import seconds_text, size_text
from pycoll._tools.bench_report import (
    TextTable,
    number,
    time_unit,
)
from pycoll._tools.units import bandwidth_text

if TYPE_CHECKING:
    from pycoll._tools.simulate import SimulatedTime
    from pycoll.simulate import Link, Network

BEST = "*"
"""Marks the quickest of a row."""


def describe(
    network: Network, origin: str, ranks: Sequence[int], per_node: int | None
) -> list[str]:
    """Say what was simulated."""
    lines = [f"inside hosts: {_link_text(network.link(True))}"]
    if per_node is not None and per_node < max(ranks):
        adapters = f", {network.adapters} adapters a host" if network.adapters > 1 else ""
        text = _link_text(network.link(False))
        lines.append(f"between hosts of {per_node} ranks: {text}{adapters}")
        if network.hosts_per_rack and network.racks is not None:
            text = _link_text(network.racks)
            lines.append(f"between racks of {network.hosts_per_rack} hosts: {text}")
    if network.reduce_s_per_byte:
        lines.append(f"combining: {bandwidth_text(1 / network.reduce_s_per_byte)}")
    if network.memory_bandwidth != math.inf:
        lines.append(f"memory of a host: {bandwidth_text(network.memory_bandwidth)}")
    if network.cores:
        lines.append(f"cores of a host: {network.cores}")
    return [*lines, *([f"by the table of costs of {origin}"] if origin else [])]


def _link_text(link: Link) -> str:
    text = f"{seconds_text(link.latency_s)}, {bandwidth_text(link.bandwidth)}"
    if link.overhead_s is not None and link.overhead_s != link.latency_s:
        text += f", of which a rank is busy for {seconds_text(link.overhead_s)}"
    return text


def table(collective: str, found: Sequence[SimulatedTime]) -> TextTable:
    """Sizes as rows, algorithms as columns; the quickest is marked."""
    names = list(dict.fromkeys(case.algorithm for case in found))
    rows: dict[tuple[int, int], dict[str, SimulatedTime]] = {}
    for case in found:
        rows.setdefault((case.ranks, case.nbytes), {})[case.algorithm] = case
    cells = []
    for (ranks, nbytes), cases in rows.items():
        times = [case.seconds for case in cases.values() if case.seconds is not None]
        unit, factor = time_unit(min(times, default=1.0))
        line = [str(ranks), size_text(nbytes) if nbytes else "-", unit]
        for name in names:
            seconds, segments = cases[name].seconds, cases[name].segments
            more = "+" if cases[name].held else ""
            cut = f"/{segments}{more}" if (segments > 1 or more) and seconds is not None else ""
            best = BEST if seconds is not None and seconds == min(times) else ""
            line.append(number(None if seconds is None else seconds * factor) + cut + best)
        cells.append(line)
    return TextTable(f"{collective}, computed times", ["ranks", "size", "", *names], cells)


def legend(found: Sequence[SimulatedTime], most_messages: int) -> list[str]:
    """Say what the marks in the table mean."""
    lines = [f"{BEST} the quickest"]
    if any(case.segments > 1 and case.seconds is not None for case in found):
        lines.append("/N each chunk is cut into N segments")
    if any(case.held and case.seconds is not None for case in found):
        lines.append("/N+ more segments should be quicker; --most-messages replays more of them")
    if any(case.seconds is None for case in found):
        lines.append(f"- more than {most_messages} messages; --most-messages replays more")
    return lines


def plot(collective: str, found: Sequence[SimulatedTime], path: Path) -> None:
    """Draw time over ranks, if there are several numbers of them, else over sizes."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    ranks = sorted({case.ranks for case in found})
    sizes = sorted({case.nbytes for case in found})
    over_ranks = len(ranks) > 1
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(case.algorithm for case in found):
        for other in sizes if over_ranks else ranks:
            curve = [
                (case.ranks if over_ranks else case.nbytes, case.seconds)
                for case in found
                if case.algorithm == name
                and case.seconds is not None
                and other == (case.nbytes if over_ranks else case.ranks)
            ]
            several = over_ranks and len(sizes) > 1
            label = f"{name}, {size_text(other)}" if several else name
            if curve:
                axes.plot(*zip(*curve, strict=True), "o-", markersize=4, label=label)
    shown = ranks if over_ranks else sizes
    _label(axes, collective, found, shown, over_ranks)
    figure.savefig(path, dpi=150)


def _label(
    axes: Any,
    collective: str,
    found: Sequence[SimulatedTime],
    shown: Sequence[int],
    over_ranks: bool,
) -> None:
    sizes = {case.nbytes for case in found}
    title = f"{collective}, computed"
    if over_ranks and len(sizes) == 1:
        title = f"{collective} of {size_text(found[0].nbytes)}, computed"
    elif not over_ranks:
        title = f"{collective} on {found[0].ranks} ranks, computed"
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    texts = [str(value) if over_ranks else size_text(value) for value in shown]
    axes.set_xticks(shown, texts, rotation=45, minor=False)
    axes.set_xlabel("ranks" if over_ranks else "size")
    axes.set_ylabel("time of a call")
    axes.yaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))
    axes.yaxis.set_minor_formatter(lambda seconds, _: "")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
