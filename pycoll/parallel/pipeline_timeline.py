"""When a pipeline schedule computes what: the ideal times, and the bubble diagram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycoll._support.public_edge import edge
from pycoll.parallel.pipeline import Action, PipelineMessage, PipelineSchedule, messages
from pycoll.parallel.pipeline_proof import prove_pipeline


class TimedAction(NamedTuple):
    """An action, and from when to when it computed."""

    action: Action
    start: float
    end: float


Timeline = Sequence[Sequence[TimedAction]]
"""By rank its actions in their order."""

WITH_W = {"F": 1.0, "B": 1.0, "W": 1.0}
WITHOUT_W = {"F": 1.0, "B": 2.0}
"""Costs where a backward of a layer has twice the products of its forward."""


@edge
def time_pipeline(
    schedule: str | PipelineSchedule,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    costs: Mapping[str, float] | None = None,
    message: float = 0.0,
) -> list[list[TimedAction]]:
    """Compute when each action starts and ends if messages never wait for memory.

    Args:
        schedule, ranks, micro_batches, chunks: as for `prove_pipeline`.
        costs: by kind, how long an action of one chunk takes; None: F 1, B 1, W 1, or F 1, B 2 in a
            schedule without W.
        message: how long a message travels; nobody has to compute for that.

    Raises:
        ProofError: the schedule is wrong.
        ValueError: there is no such schedule, or none for these numbers.
    """
    programs = prove_pipeline(schedule, ranks, micro_batches, chunks).programs
    if costs is None:
        split = any(action.kind == "W" for action in programs[0])
        costs = WITH_W if split else WITHOUT_W
    arrival: dict[PipelineMessage | None, float] = {None: 0.0}
    lines: list[list[TimedAction]] = [[] for _ in programs]
    while sum(map(len, lines)) < sum(map(len, programs)):
        for rank, (program, line) in enumerate(zip(programs, lines, strict=True)):
            for action in program[len(line) :]:
                into, out = messages(action, rank, ranks, chunks)
                if into not in arrival:
                    break
                start = max(arrival[into], line[-1].end if line else 0.0)
                line.append(TimedAction(action, start, start + costs[action.kind]))
                if out:
                    arrival[out] = line[-1].end + message
    return lines


def makespan(times: Timeline) -> float:
    """Return the time from the first start to the last end."""
    return max(line[-1].end for line in times) - min(line[0].start for line in times)


def bubble_fraction(times: Timeline) -> float:
    """Return the time in which ranks are idle as a part of the time in which they compute."""
    busy = sum(end - start for line in times for _, start, end in line)
    return makespan(times) * len(times) / busy - 1.0


def draw_pipeline(times: Timeline, unit: float = 1.0) -> str:
    """Draw a line of text for each rank; a column is `unit` of time.

    A column shows what is computed in its middle: ``F3`` (``F3.1``: of chunk 1), ``--`` where that
    goes on, and ``.`` where the rank is idle.
    """
    width = max(len(str(timed.action)) for line in times for timed in line)
    first = min(line[0].start for line in times)
    rows = []
    for rank, line in enumerate(times):
        cells = ["."] * round(makespan(times) / unit)
        for action, *span in line:
            begin, after = (round((at - first) / unit) for at in span)
            names = [str(action)] + ["-" * width] * (after - begin - 1)
            cells[begin:after] = names[: after - begin]
        rows.append(f"rank {rank} " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)


COLOURS = {"F": ("#2f5d9b", "#a9c6ea"), "B": ("#2e7d4f", "#a5dbb8"), "W": ("#b5651d", "#f3cfa6")}
"""By kind: of the first chunk, and of all later ones."""


def plot_pipeline(diagrams: Mapping[str, Timeline], path: str, unit: str = "time") -> None:
    """Draw bubble diagrams one above the other into a file, by matplotlib.

    Each has a row for each rank, with the numbers of the micro-batches. All have the same scale.

    Args:
        diagrams: timelines by their titles; each begins at its first start.
        path: of the picture; its ending says what kind it is.
        unit: of time, for the axis.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.patches import Patch  # type: ignore[import-not-found, unused-ignore]

    rows = sum(map(len, diagrams.values()))
    size = (11.0, 0.8 + 0.5 * len(diagrams) + 0.22 * rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(diagrams), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, times) in zip(grid, diagrams.items(), strict=True):
        first = min(line[0].start for line in times)
        for rank, line in enumerate(times):
            for (kind, i, chunk), start, end in line:
                colour, width = COLOURS[kind][chunk > 0], end - start
                axes.barh(rank, width, 0.9, start - first, color=colour, ec="white", lw=0.4)
                ink = "black" if chunk else "white"
                middle = start - first + width / 2
                axes.text(
                    middle, rank, i, color=ink, size=6, ha="center", va="center", clip_on=True
                )
        axes.set_title(title, size=9, loc="left")
        axes.set_yticks(range(len(times)), [f"rank {rank}" for rank in range(len(times))], size=7)
        axes.invert_yaxis()
        axes.set_facecolor("#ececec")
    kinds = dict.fromkeys(a.kind for times in diagrams.values() for a, _, _ in times[0])
    words = {"F": "forward", "B": "backward", "W": "gradients of weights"}
    grid[-1].set_xlabel(unit, size=8)
    shades = [Patch(color=COLOURS[kind][0], label=words[kind]) for kind in kinds]
    shades.append(Patch(color="#ececec", label="idle: the bubble"))
    figure.legend(handles=shades, loc="outside upper right", ncols=4, fontsize=7)
    figure.savefig(path, dpi=150)
