"""A long computation that is saved while it goes on, and goes on from there on any number of ranks.

pycoll-run -n 4 --restarts 3 examples/checkpoint.py --steps 20000
pycoll-run -n 4 --restarts 1 examples/checkpoint.py --kill-at 700     # a rank dies there, once
pycoll-run -n 2 examples/checkpoint.py --steps 40000                  # goes on, on two ranks
kill -USR1 PID                                # of pycoll-run: save at the next step, and end

Heat spreads on a plate, of which each rank has some rows. Every so often the rows are saved, in two
stages. First the ranks of each host give a copy of theirs to the first rank there, in memory:
nobody computes meanwhile, but that is short. Then a thread of that rank writes them to a file, and
all compute on. When every host has written its file, rank 0 gives their folder the name by which it
is found: a save counts as a whole, or not at all, wherever a rank is killed.

At the start rank 0 reads the last whole save, once, and hands out the rows: to as many ranks as
there are now. All hosts need the same folder, on a file system that they share.
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import signal
import sys
import time

import numpy as np

import pycoll

RATE = 0.2  # share of the difference to each neighbor that flows in a step; stable up to 0.25
KEPT = 2  # whole saves that are kept


def rows_of(rank, size, height):
    """Return which rows of the plate a rank has: the first, and the one after the last."""
    return rank * height // size, (rank + 1) * height // size


def step(comm, rows, first, height):
    """Return the rows of a rank one step later; the edge of the plate stays as it is."""
    above = comm.rank - 1 if comm.rank > 0 else pycoll.PROC_NULL
    below = comm.rank + 1 if comm.rank < comm.size - 1 else pycoll.PROC_NULL
    framed = np.pad(rows, ((1, 1), (0, 0)))
    comm.sendrecv(rows[0], above, below, out=framed[-1])
    comm.sendrecv(rows[-1], below, above, out=framed[0])
    here = framed[1:-1, 1:-1]
    flow = (framed[:-2, 1:-1] + framed[2:, 1:-1]) + (framed[1:-1, :-2] + framed[1:-1, 2:])
    new = rows.copy()
    new[:, 1:-1] = here + RATE * (flow - 4.0 * here)
    if first == 0:
        new[0] = rows[0]
    if first + len(rows) == height:
        new[-1] = rows[-1]
    return new


class Saver:
    """Saves the rows of all ranks, in two stages."""

    def __init__(self, comm, folder):
        self.comm, self.folder = comm, pathlib.Path(folder)
        self.host = comm.split_by_host()
        self.writers = comm.split(0 if self.host.rank == 0 else None)  # one a host
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.number = 0  # of the step that is being saved
        self.file = self.all_written = None  # that this rank writes; of all writers

    def load(self, height, width):
        """Return the step that was saved last, and this rank's rows of it; step 0: a new plate."""
        found, plate = 0, None
        if self.comm.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for torn in self.folder.glob("step-*.new"):  # a rank died while it was written
                shutil.rmtree(torn)
            plate = np.zeros((height, width))
            plate[0], plate[height // 3, width // 4 : width // 2] = 100.0, 400.0
            for whole in sorted(self.folder.glob("step-*"))[-1:]:
                found = int(whole.name.removeprefix("step-"))
                for file in whole.glob("*.npz"):
                    with np.load(file) as pieces:
                        for first, rows in pieces.items():
                            plate[int(first) : int(first) + len(rows)] = rows
        size = self.comm.size
        parts = [slice(*rows_of(rank, size, height)) for rank in range(size)]
        rows = self.comm.scatterv(None if plate is None else [plate[part] for part in parts])
        return self.comm.broadcast(found), rows

    def begin(self, number, first, rows):
        """Begin to save a step: copy the rows in memory. A save before it is ended first."""
        self.go_on(to_its_end=True)
        firsts, copies = self.host.gather(first), self.host.gatherv(rows)
        if self.writers is not None:
            pieces = {str(first): copy for first, copy in zip(firsts, copies, strict=True)}
            self.number, self.file = number, self.thread.submit(self.write, number, pieces)

    def write(self, number, pieces):
        """Write what the ranks of this host have, in a thread."""
        folder = self.folder / f"step-{number:09d}.new"
        folder.mkdir(exist_ok=True)
        with open(folder / f"host-{self.comm.node}.npz", "wb") as file:
            np.savez(file, **pieces)
            file.flush()
            os.fsync(file.fileno())

    def go_on(self, to_its_end=False):
        """Go on with a save, without waiting unless it is to come to its end."""
        if self.file is not None and (to_its_end or self.file.done()):
            self.file.result()  # raises what has gone wrong
            self.file, self.all_written = None, self.writers.ibarrier()
        if self.all_written is not None and (to_its_end or self.all_written.test()):
            self.all_written.wait()
            self.all_written = None
            if self.comm.rank == 0:
                path = self.folder / f"step-{self.number:09d}"
                os.rename(f"{path}.new", path)
                for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
                    shutil.rmtree(old)


class Bar:
    """A progress bar, which is drawn ten times a second at most."""

    def __init__(self, steps, is_shown):
        self.steps, self.is_shown, self.due = steps, is_shown, 0.0

    def show(self, number):
        if self.is_shown and (number == self.steps or time.monotonic() >= self.due):
            self.due = time.monotonic() + 0.1
            done = 40 * number // self.steps
            end = "\n" if number == self.steps else ""
            line = f"\r[{'#' * done}{'.' * (40 - done)}] step {number} of {self.steps}{end}"
            print(line, end="", file=sys.stderr, flush=True)


def main():
    """Compute, and save now and then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints", help="where it is saved")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=500, help="save after so many steps")
    parser.add_argument("--height", type=int, default=300)
    parser.add_argument("--width", type=int, default=400)
    parser.add_argument("--kill-at", type=int, help="the last rank kills itself there, once")
    args = parser.parse_args()

    comm = pycoll.init()
    if comm.size > args.height:
        raise SystemExit(f"{args.height} rows are too few for {comm.size} ranks")
    attempt = int(os.environ.get("PYCOLL_ATTEMPT", "0"))
    asked = False

    def ask(signum, frame):
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, ask)
    saver = Saver(comm, args.folder)
    number, rows = saver.load(args.height, args.width)
    first = rows_of(comm.rank, comm.size, args.height)[0]
    if comm.rank == 0:
        print(f"attempt {attempt}: {comm.size} ranks begin at step {number}", flush=True)
    bar = Bar(args.steps, comm.rank == 0)
    is_over = False
    while number < args.steps and not is_over:
        if number == args.kill_at and attempt == 0 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rows = step(comm, rows, first, args.height)
        number += 1
        is_over = comm.all_reduce(asked)  # on all ranks in the same step
        if number % args.every == 0 or number == args.steps or is_over:
            saver.begin(number, first, rows)
        saver.go_on()
        bar.show(number)
    saver.go_on(to_its_end=True)
    plate = comm.gatherv(rows)
    if comm.rank == 0:
        digest = hashlib.sha256(np.concatenate(plate)).hexdigest()[:16]
        print(f"saved at step {number}, the plate is {digest}", flush=True)


if __name__ == "__main__":
    main()
