"""Compute while an all_reduce is under way: what does that gain on this machine?

pycoll-run -n 2 examples/overlap.py
pycoll-run -n 2 examples/overlap.py --elements 1000000 --rounds 3

`iall_reduce` starts the sum and returns at once; the ranks compute and then `wait()` for it. Each
kind of computing takes about as long as the all_reduce alone. With both at once, the best to hope
for is the time of the longer of them: a ratio of 1. One after the other is a ratio of 2.

Ranks of one host have no network card that moves data while they compute: cores do it. So the gain
comes from cores without a rank. With as many ranks as cores there is none but the moments in which
a rank would have waited; the program says so.
"""

import argparse
import time
from functools import partial

import numpy as np

import pycoll


def numpy_work(amount):
    """Sines of a small array: NumPy releases Python's interpreter lock meanwhile."""
    x = np.linspace(0.0, 1.0, 10_000)
    for _ in range(amount):
        np.sin(x, out=x)


def python_work(amount):
    """A loop in Python: it holds the interpreter lock but for short breaks."""
    total = 0
    for i in range(1000 * amount):
        total += i * i


def best_time(comm, rounds, *actions):
    """Seconds for the actions, one after the other: the slowest rank's, in the best of rounds."""
    times = []
    for _ in range(1 + rounds):
        comm.barrier()
        start = time.perf_counter()
        for action in actions:
            action()
        times.append(comm.all_reduce(time.perf_counter() - start, op="max"))
    return min(times[1:])  # the first was to warm up


def at_once(comm, x, out, work):
    """Add up the ranks' x into out, and work meanwhile."""
    request = comm.iall_reduce(x, out=out)
    work()
    request.wait()


def main():
    """Measure each alone and both together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=4_000_000, help="float64 to sum up")
    parser.add_argument("--rounds", type=int, default=5, help="the best of them counts")
    args = parser.parse_args()

    with pycoll.init() as comm:
        best = partial(best_time, comm, args.rounds)
        x, out = np.full(args.elements, comm.rank + 1.0), np.zeros(args.elements)
        communicate = partial(at_once, comm, x, out, lambda: None)
        alone = best(communicate)
        if comm.rank == 0:
            print(f"{comm.size} ranks, {pycoll.usable_cores()} usable cores", end=", ")
            print(f"all_reduce of {x.nbytes / 1e6:.1f} MB; milliseconds:")
            print("beside       computing  all_reduce  in turn  at once  ratio to the longer")

        wrong = False
        for kind in (numpy_work, python_work):
            # As much of it as takes about as long as the all_reduce, the same on all ranks.
            amount = max(1, round(500 * alone / best(partial(kind, 500))))
            work = partial(kind, amount)
            computing, in_turn = best(work), best(work, communicate)
            out[:] = 0.0
            both = best(partial(at_once, comm, x, out, work))
            wrong |= not np.all(out == comm.size * (comm.size + 1) / 2)
            if comm.rank == 0:
                times = "{:9.2f}  {:10.2f}  {:7.2f}  {:7.2f}".format(
                    *(1e3 * seconds for seconds in (computing, alone, in_turn, both))
                )
                print(f"{kind.__name__:11}  {times}  {both / max(computing, alone):19.2f}")

        if comm.rank == 0 and comm.local_size >= pycoll.usable_cores():
            print("As many ranks as cores: the cores that compute also move the data.")
        if comm.all_reduce(wrong, op="lor"):
            raise SystemExit("a sum is wrong")


if __name__ == "__main__":
    main()
