"""A task farm: rank 0 hands out tasks that take different times; who is ready gets the next.

pycoll-run -n 4 examples/pool.py

The tasks are the rows of a picture of the Mandelbrot set: those through its middle take much longer
than those at its edge, so to deal them out beforehand would let some ranks wait for others.
"""

import argparse
import collections

import pycoll

STEPS = 200  # a point that has not left by then belongs to the set
DONE = 1  # tag of a result


def farm(comm, function, tasks):
    """Yield (number, worker, result) of each task on rank 0; the others work, and yield nothing."""
    if comm.size == 1:
        yield from ((number, 0, function(task)) for number, task in enumerate(tasks))
    elif comm.rank == 0:
        waiting = enumerate(tasks)
        for worker in range(1, comm.size):
            comm.send(next(waiting, None), dest=worker)
        for _ in tasks:
            status = comm.probe(tag=DONE)  # whose result is there?
            number, result = comm.recv(status.source, DONE)
            comm.send(next(waiting, None), dest=status.source)
            yield number, status.source, result
    else:
        while (work := comm.recv(source=0)) is not None:
            number, task = work
            comm.send((number, function(task)), dest=0, tag=DONE)


def row(y, width=72):
    """Return one line of the picture."""
    return "".join(point(complex(-2.1 + 2.8 * x / width, y)) for x in range(width))


def point(c):
    """Return a letter for how long a point stays."""
    z = 0j
    for step in range(STEPS):
        z = z * z + c
        if abs(z) > 2:
            return " .:-=+*%"[min(step // 3, 7)]
    return "#"


parser = argparse.ArgumentParser(description="Draw the Mandelbrot set on all ranks.")
parser.add_argument("--rows", type=int, default=24)
rows = parser.parse_args().rows

with pycoll.init() as comm:
    heights = [1.2 - 2.4 * i / max(rows - 1, 1) for i in range(rows)]
    picture = {}
    done_by = collections.Counter()
    for number, worker, line in farm(comm, row, heights):
        picture[number] = line
        done_by[worker] += 1
    if comm.rank == 0:
        print("\n".join(picture[number] for number in range(rows)))
        print(", ".join(f"rank {rank}: {n} rows" for rank, n in sorted(done_by.items())))
