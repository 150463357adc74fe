"""The heat equation on a plate that is cut into blocks, one for each rank.

pycoll-run -n 4 examples/heat.py
pycoll-run -n 6 examples/heat.py --picture heat.png     # with matplotlib

In a step every cell takes heat from its four neighbors. At the edge of a block some of them belong
to another rank: these values, the halo, are received into a frame around the block. While they
travel, each rank computes the inside of its block, which needs no halo; then the edge.

At the end rank 0 collects the blocks, and computes the whole plate alone: that gives the same bits.
"""

import argparse
import itertools
import math

import numpy as np

import pycoll

RATE = 0.2  # share of the difference to each neighbor that flows in a step; stable up to 0.25


def step(old, new, top, bottom, left, right):
    """Compute rows top to bottom - 1 and columns left to right - 1 of the next step."""
    here = old[top:bottom, left:right]
    above, below = old[top - 1 : bottom - 1, left:right], old[top + 1 : bottom + 1, left:right]
    west, east = old[top:bottom, left - 1 : right - 1], old[top:bottom, left + 1 : right + 1]
    new[top:bottom, left:right] = here + RATE * ((above + below) + (west + east) - 4.0 * here)


def exchange(grid, block):
    """Start to send the edges of a block to its neighbors, and to receive theirs into its frame.

    At the edge of the plate the neighbor is PROC_NULL: nothing is sent, and the frame stays.
    """
    above, below = grid.shift("y", 1)  # what moves down comes from above and goes below
    west, east = grid.shift("x", 1)
    return [
        grid.irecv(above, out=block[0, 1:-1]),
        grid.irecv(below, out=block[-1, 1:-1]),
        grid.irecv(west, out=block[1:-1, 0]),
        grid.irecv(east, out=block[1:-1, -1]),
        grid.isend(block[1, 1:-1], above),
        grid.isend(block[-2, 1:-1], below),
        grid.isend(block[1:-1, 1], west),
        grid.isend(block[1:-1, -2], east),
    ]


def solve(grid, block, steps):
    """Return a block, with its frame, after so many steps."""
    height, width = block.shape[0] - 2, block.shape[1] - 2
    edges = (
        (1, 2, 1, width + 1),
        (height, height + 1, 1, width + 1),
        (2, height, 1, 2),
        (2, height, width, width + 1),
    )
    old, new = block.copy(), block.copy()
    for _ in range(steps):
        requests = exchange(grid, old)
        step(old, new, 2, height, 2, width)
        pycoll.wait_all(requests)
        for edge in edges:
            step(old, new, *edge)
        old, new = new, old
    return old


def solve_alone(plate, steps):
    """Return the whole plate, with its frame, after so many steps, without any communication."""
    old, new = plate.copy(), plate.copy()
    for _ in range(steps):
        step(old, new, 1, plate.shape[0] - 1, 1, plate.shape[1] - 1)
        old, new = new, old
    return old


def hot_plate(height, width):
    """Return a plate with a hot ring and three hot discs, in a frame that stays cold."""
    y, x = np.ogrid[: height + 2, : width + 2]
    y, x = (y - 0.5) / height, (x - 0.5) / height
    middle = np.hypot(y - 0.5, x - 0.5 * width / height)
    corners = np.minimum(np.hypot(y - 0.22, x - 0.2), np.hypot(y - 0.78, x + 0.2 - width / height))
    hot = (np.abs(middle - 0.33) < 0.05) | (middle < 0.12) | (corners < 0.1)
    return np.where(hot, 100.0, 0.0)


def near_square(size):
    """Return (rows, columns) of a grid of ranks that is as square as can be."""
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    return rows, size // rows


def part(cells, ranks, rank):
    """Return the part of a row of cells that is a rank's, with a frame of one cell around it."""
    return slice(cells * rank // ranks, cells * (rank + 1) // ranks + 2)


def draw(file, before, after, steps, grid_shape):
    """Draw the plate before and after, and where the ranks' blocks meet."""
    from matplotlib.figure import Figure

    (height, width), (rows, columns) = before.shape, grid_shape
    tops = [part(height, rows, y).start for y in range(rows)]
    lefts = [part(width, columns, x).start for x in range(columns)]
    faint = {"colors": "white", "alpha": 0.4, "linewidth": 0.8, "linestyle": "--"}

    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    figure.suptitle(f"Heat spreads over a plate that {rows} x {columns} ranks share")
    panels = figure.subplots(1, 2, sharey=True)
    titles = "start", f"after {steps} steps"
    for panel, plate, title in zip(panels, (before, after), titles, strict=True):
        image = panel.imshow(
            plate, cmap="inferno", vmin=0.0, vmax=100.0, extent=(0, width, height, 0)
        )
        panel.set(title=title, xlabel="column of cells")
        panel.hlines(tops[1:], 0, width, **faint)
        panel.vlines(lefts[1:], 0, height, **faint)
    for rank, (top, left) in enumerate(itertools.product(tops, lefts)):
        place = (left + 0.015 * width, top + 0.015 * width)
        panels[1].text(*place, f"rank {rank}", color="white", alpha=0.6, size=8, va="top")
    panels[0].set_ylabel("row of cells")
    figure.colorbar(image, ax=panels, label="temperature", pad=0.01)
    figure.savefig(file, dpi=75)


def main():
    """Solve together, then check on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--height", type=int, default=200, help="rows of cells")
    parser.add_argument("--width", type=int, default=300, help="columns of cells")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", metavar="FILE", help="draw the plate before and after")
    args = parser.parse_args()
    plate = hot_plate(args.height, args.width)

    with pycoll.init() as comm:
        rows, columns = near_square(comm.size)
        grid = comm.grid((rows, columns), names=("y", "x"))
        y, x = grid.coords
        block = plate[part(args.height, rows, y), part(args.width, columns, x)]
        block = solve(grid, block, args.steps)
        blocks = grid.gatherv(block[1:-1, 1:-1], root=0)

    if blocks is not None:
        after = np.block([blocks[y * columns : (y + 1) * columns] for y in range(rows)])
        same = np.array_equal(after, solve_alone(plate, args.steps)[1:-1, 1:-1])
        print(f"{rows} x {columns} ranks, {args.height} x {args.width} cells, {args.steps} steps")
        print(f"{after.sum() / plate.sum():.1%} of the heat is still on the plate")
        print(f"the same bits as computed alone: {same}")
        if args.picture:
            draw(args.picture, plate[1:-1, 1:-1], after, args.steps, (rows, columns))
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
