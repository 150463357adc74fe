"""Compute and draw the bubble diagrams of pipeline schedules. No ranks are started.

python examples/parallel/pipeline_diagrams.py --schedule 1f1b --ranks 4 --micro-batches 8
python examples/parallel/pipeline_diagrams.py --ranks 4 --micro-batches 8 --plot diagrams.png

Each line is a rank, each column a time in which it computes (F: a forward, B: a backward, W: the
gradients of the weights) or is idle. docs/parallel/pipeline.md explains the schedules, and
pipeline.py runs them.
"""

import argparse

from pycoll.parallel import PIPELINE_SCHEDULES, TimedAction, prove_pipeline
from pycoll.parallel.pipeline import messages

# A backward has twice the products of its forward.
WITH_W, WITHOUT_W = {"F": 1.0, "B": 1.0, "W": 1.0}, {"F": 1.0, "B": 2.0}
COLOURS = {"F": ("#2f5d9b", "#a9c6ea"), "B": ("#2e7d4f", "#a5dbb8"), "W": ("#b5651d", "#f3cfa6")}


def time_pipeline(schedule, ranks, micro_batches, chunks=1, costs=None, message=0.0):
    """Return by rank when each action starts and ends, if messages never wait for memory.

    `costs` says by kind how long an action of a chunk takes; `message`, how long a message travels,
    for which nobody has to compute.
    """
    programs = prove_pipeline(schedule, ranks, micro_batches, chunks).programs
    if costs is None:
        costs = WITH_W if any(action.kind == "W" for action in programs[0]) else WITHOUT_W
    arrival, lines = {None: 0.0}, [[] for _ in programs]
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


def makespan(times):
    """Return the time from the first start to the last end."""
    return max(line[-1].end for line in times) - min(line[0].start for line in times)


def bubble(times, work=None):
    """Return how long a rank is idle between its first and its last action, per time of work.

    Of the rank where that is longest. `work` is what computing should take; None: what it took.
    """
    return max(
        (line[-1].end - line[0].start) / (work or sum(end - start for _, start, end in line)) - 1.0
        for line in times
    )


def draw_text(times, unit=1.0):
    """Return a line for each rank; a column is `unit` of time, and shows what is in its middle."""
    width = max(len(str(timed.action)) for line in times for timed in line)
    first, rows = min(line[0].start for line in times), []
    for rank, line in enumerate(times):
        cells = ["."] * round(makespan(times) / unit)
        for action, *span in line:
            begin, after = (round((at - first) / unit) for at in span)
            names = [str(action)] + ["-" * width] * (after - begin - 1)
            cells[begin:after] = names[: after - begin]
        rows.append(f"rank {rank} " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)


def plot(diagrams, path, unit="time"):
    """Draw timelines, by their titles, one above the other and in the same scale."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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
                at, ink = start - first + width / 2, "black" if chunk else "white"
                axes.text(at, rank, i, color=ink, size=6, ha="center", va="center", clip_on=True)
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


def main():
    """Print the diagrams, with the bubbles of their formulas; or plot them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--schedule", choices=PIPELINE_SCHEDULES, help="default: all of them")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="of a rank, where interleaved")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture, by matplotlib")
    args = parser.parse_args()
    diagrams = {}
    for name, schedule in PIPELINE_SCHEDULES.items():
        if args.schedule in (None, name):
            chunks = args.chunks if schedule.many_chunks else 1
            times = time_pipeline(name, args.ranks, args.micro_batches, chunks)
            formula = schedule.bubble(args.ranks, args.micro_batches, chunks)
            diagrams[f"{name}: bubble {bubble(times):.1%}, by its formula {formula:.1%}"] = times
    if args.plot:
        plot(diagrams, args.plot)
    else:
        print("\n\n".join(f"{title}\n{draw_text(times)}" for title, times in diagrams.items()))


if __name__ == "__main__":
    main()
