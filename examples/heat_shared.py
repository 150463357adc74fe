"""The heat equation of heat.py without a message: ranks read their neighbors' rows where they lie.

pycoll-run -n 4 examples/heat_shared.py
python examples/heat_shared.py                          # one rank, alone

The plate is cut into strips of rows, one for each rank. Each rank makes its strip in shared memory,
and comm.share() shows every rank's strip to all others, as NumPy arrays. So nothing is sent: a rank
computes its first and last row from the rows next to them, which lie in the strips of its
neighbors. comm.barrier() says when those are ready. All ranks must be on one host.

At the end rank 0 reads all strips, and computes the whole plate alone: that gives the same bits.
"""

import argparse

import numpy as np
from heat import RATE, hot_plate, solve_alone, step

import pycoll


def share_copy(comm, mine):
    """Copy this rank's rows to shared memory; return every rank's strip, by rank."""
    strip = pycoll.empty(mine.shape)
    strip[:] = mine
    return comm.share(strip)  # waits for all ranks, so all strips are filled


def all_rows(strips, plate):
    """Return the rows of the whole plate, each where its owner has it, and the frame's two."""
    return [plate[0], *(row for strip in strips for row in strip), plate[-1]]


def step_row(above, here, below, new):
    """Compute one row of the next step, as step() in heat.py does, from three rows anywhere."""
    middle, west, east = here[1:-1], here[:-2], here[2:]
    new[1:-1] = middle + RATE * ((above[1:-1] + below[1:-1]) + (west + east) - 4.0 * middle)


def solve(comm, plate, steps):
    """Return every rank's strip of the plate after so many steps."""
    height, width = plate.shape[0] - 2, plate.shape[1] - 2
    first = 1 + height * comm.rank // comm.size
    end = 1 + height * (comm.rank + 1) // comm.size
    edges = [y for y in range(first, end) if y in (first, end - 1)]  # one, if there is one row

    old_strips, new_strips = (share_copy(comm, plate[first:end]) for _ in range(2))
    old_rows, new_rows = all_rows(old_strips, plate), all_rows(new_strips, plate)
    for _ in range(steps):
        old, new = old_strips[comm.rank], new_strips[comm.rank]
        step(old, new, 1, end - first - 1, 1, width + 1)
        for y in edges:
            step_row(old_rows[y - 1], old_rows[y], old_rows[y + 1], new_rows[y])
        # In a step all ranks read old strips and write new ones, so nobody writes what another one
        # reads. Behind this barrier all new rows are there, to be read in the next step; and nobody
        # reads old ones any more, which the next step overwrites. With one array, a second barrier
        # would have to stand between reading and writing.
        comm.barrier()
        old_strips, new_strips = new_strips, old_strips
        old_rows, new_rows = new_rows, old_rows
    return old_strips


def main():
    """Solve together, then check on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--height", type=int, default=200, help="rows of cells")
    parser.add_argument("--width", type=int, default=300, help="columns of cells")
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    plate = hot_plate(args.height, args.width)

    with pycoll.init() as comm:
        strips = solve(comm, plate, args.steps)
        if comm.rank == 0:
            after = np.concatenate(strips)  # nothing is sent here either
            same = np.array_equal(after, solve_alone(plate, args.steps)[1:-1])
            print(f"{comm.size} strips, {args.height} x {args.width} cells, {args.steps} steps")
            print(f"the same bits as computed alone: {same}")
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
