"""What a benchmark found: medians and ratios, as a table, as JSON, and as a picture."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pycoll._support.wording import seconds_text, size_text

# Where a size is that of one rank's whole value; elsewhere it is that of one block.
OF_A_VALUE = frozenset({"broadcast", "reduce", "all_reduce", "iall_reduce", "send", "halo"})


class JobSample(NamedTuple):
    """What one job measured.

    Attributes:
        side: as in `bench_sides.Side.name`.
        others_cores: cores that processes of others used meanwhile, on average.
        figures: for each size `nbytes` and distance `alias`, `seconds` a call, `calls` in the
            timed loop, and from pycoll `copy_seconds`: one pass of NumPy over the same bytes. With
            `Conditions.usage`, of a call: `cpu_seconds` of all ranks, and `wire_bytes`.
        versions: of what was measured.
    """

    collective: str
    ranks: int
    round: int
    side: str
    others_cores: float
    figures: list[dict[str, Any]]
    versions: dict[str, str]


class Spread(NamedTuple):
    """Seconds a call, over the rounds."""

    median: float
    low: float
    high: float


class Row(NamedTuple):
    """One collective in one size.

    Attributes:
        sides: in the order of measurement.
        copy: one copy of the same bytes; None where there are none, or pycoll was not measured.
        alias: bytes from the source to the result, modulo the size of a page.
    """

    collective: str
    ranks: int
    nbytes: int
    sides: dict[str, Spread]
    copy: Spread | None
    alias: int = 0

    @property
    def ours(self) -> list[str]:
        """The sides that are pycoll."""
        return [name for name in self.sides if name.startswith("pycoll ")]

    @property
    def best_peer(self) -> str | None:
        """The quickest of the others, by its median."""
        peers = [name for name in self.sides if name not in self.ours]
        return min(peers, key=lambda name: self.sides[name].median, default=None)

    def ratio(self, side: str) -> float | None:
        """How many times quicker `side` is than the best peer; None without peers."""
        if self.best_peer is None:
            return None
        return self.sides[self.best_peer].median / self.sides[side].median

    def copies(self, side: str) -> float | None:
        """In which a call of `side` takes as long as this many copies of the same bytes."""
        return self.sides[side].median / self.copy.median if self.copy else None


def spread(seconds: Sequence[float]) -> Spread:
    """The median of some times, with the smallest and the largest."""
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


def rows(samples: Iterable[JobSample]) -> list[Row]:
    """Put together what the rounds found, in the order in which it was measured."""
    times: dict[tuple[str, int, int, int], dict[str, list[float]]] = {}
    copies: dict[tuple[str, int, int, int], list[float]] = {}
    for sample in samples:
        for figure in sample.figures:
            key = sample.collective, sample.ranks, figure["nbytes"], figure["alias"]
            times.setdefault(key, {}).setdefault(sample.side, []).append(figure["seconds"])
            if figure["nbytes"] and "copy_seconds" in figure:
                copies.setdefault(key, []).append(figure["copy_seconds"])
    return [
        Row(
            *key[:3],
            alias=key[3],
            sides={side: spread(seconds) for side, seconds in sides.items()},
            copy=spread(copies[key]) if key in copies else None,
        )
        for key, sides in times.items()
    ]


def as_dict(row: Row) -> dict[str, Any]:
    """A row for JSON, with its ratios; times in seconds."""
    return {
        "collective": row.collective,
        "ranks": row.ranks,
        "nbytes": row.nbytes,
        "alias": row.alias,
        "seconds": {side: times._asdict() for side, times in row.sides.items()},
        "copy_seconds": row.copy._asdict() if row.copy else None,
        "best_peer": row.best_peer,
        "best_peer_over_ours": {side: row.ratio(side) for side in row.ours},
        "ours_over_copy": {side: row.copies(side) for side in row.ours},
    }


# ---------------------------------------------------------------- text


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time is a handy number, and how many of them a second has."""
    if seconds < 1e-3:
        return "us", 1e6
    return ("ms", 1e3) if seconds < 1 else ("s", 1.0)


def number(value: float | None) -> str:
    """Three digits, or a dash."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def size_meaning(collective: str) -> str:
    """What the size of this collective counts, in words."""
    return "one rank's value" if collective in OF_A_VALUE else "one block"


class TextTable(NamedTuple):
    """A table of text: what it shows, the heads of its columns, and its cells."""

    title: str
    heads: list[str]
    cells: list[list[str]]


def table(found: Sequence[Row]) -> TextTable:
    """The table of one collective: median (smallest-largest) of every side, and the ratios."""
    first = found[0]
    size = "" if not first.nbytes else f"; size: {size_meaning(first.collective)}"
    several = len(first.ours) > 1
    aliased = any(row.alias for row in found)
    heads = ["size", *(["alias"] if aliased else []), "", *first.sides]
    for side in first.ours:
        name = side.partition(" ")[2] if several else "ours"
        heads += [f"best peer/{name}"] if first.best_peer else []
        heads += [f"{name}/copy"] if first.copy else []
    cells = []
    for row in found:
        unit, factor = time_unit(min(times.median for times in row.sides.values()))
        line = [size_text(row.nbytes) if row.nbytes else "-"]
        line += [str(row.alias)] if aliased else []
        line.append(unit)
        for times in row.sides.values():
            median, low, high = (number(seconds * factor) for seconds in times)
            line.append(median if low == high else f"{median} ({low}-{high})")
        for side in row.ours:
            line += [number(row.ratio(side))] if first.best_peer else []
            line += [number(row.copies(side))] if first.copy else []
        cells.append(line)
    return TextTable(f"{first.collective}, {first.ranks} ranks{size}", heads, cells)


def show(what: TextTable) -> None:
    """Print a table."""
    print(plain(what))


def plain(what: TextTable) -> str:
    """The table in columns of blanks."""
    lines = [what.heads, *what.cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join([what.title, *(line.rstrip() for line in text), ""])


def markdown(what: TextTable) -> str:
    """The table for a document."""
    marks = ["---:" for _ in what.heads]
    return "\n".join("| " + " | ".join(line) + " |" for line in (what.heads, marks, *what.cells))


# ---------------------------------------------------------------- picture


def check_files(plot: Path | None, written: Path | None) -> None:
    """Find out before the work what would fail after it.

    Raises:
        ValueError: a file cannot be written.
    """
    if plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install matplotlib")
        from matplotlib.backend_bases import (  # type: ignore[import-not-found, unused-ignore]
            FigureCanvasBase,
        )

        known = FigureCanvasBase.get_supported_filetypes()
        ending = plot.suffix.removeprefix(".").lower()
        if ending and ending not in known:
            formats = ", ".join(f".{name}" for name in sorted(known))
            raise ValueError(f"--plot {plot}: matplotlib draws {formats}")
    for path in (plot, written):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path}")


def plot(found: Sequence[Row], path: Path) -> None:
    """Draw time over size, both logarithmic: a panel a collective, a curve a side."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    panels: dict[tuple[str, int, int], list[Row]] = {}
    for row in found:
        panels.setdefault((row.collective, row.ranks, row.alias), []).append(row)
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(6.4 * across, 4.4 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, ((collective, ranks, alias), drawn) in zip(grid.flat, panels.items(), strict=False):
        (_points if collective == "barrier" else _curves)(axes, drawn)
        axes.set_title(f"{collective}, {ranks} ranks" + (f", alias {alias}" if alias else ""))
        axes.set_yscale("log")
        axes.set_ylabel("time of a call")
        axes.yaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _curves(axes: Any, drawn: Sequence[Row]) -> None:
    sizes = [row.nbytes for row in drawn]
    for side in drawn[0].sides:
        times = [row.sides[side] for row in drawn]
        style = "o-" if side in drawn[0].ours else "s--"
        [line] = axes.plot(sizes, [t.median for t in times], style, markersize=4, label=side)
        low, high = [t.low for t in times], [t.high for t in times]
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if drawn[0].copy:
        copies = [row.copy.median for row in drawn if row.copy]
        axes.plot(sizes, copies, ":", color="gray", label="one copy of the bytes")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes], rotation=45, minor=False)
    axes.set_xlabel(f"size of {size_meaning(drawn[0].collective)}")
    axes.legend(loc="upper left")  # times rise with the size: there is room


def _points(axes: Any, drawn: Sequence[Row]) -> None:
    for side, (median, low, high) in drawn[0].sides.items():
        axes.errorbar([side], [median], [[median - low], [high - median]], fmt="o", capsize=4)
