"""Send micro-batches down a pipeline in which every rank holds one layer of a network.

pycoll-run -n 4 -x OMP_NUM_THREADS=1 examples/pipeline.py
pycoll-run -n 4 -x OMP_NUM_THREADS=1 examples/pipeline.py --micro-batches 64

A rank computes its layer for one micro-batch while the next arrives and the last leaves: two
buffers for each direction, one in use and one on its way. OMP_NUM_THREADS=1: the ranks themselves
keep the cores busy.

With P ranks and M micro-batches each rank works in M turns of M + P - 1: the rest is the bubble, in
which the pipeline fills and drains. More micro-batches make it smaller. At the end the last rank
computes all layers alone, to show that the pipeline did not change the result.
"""

import argparse
import time

import numpy as np

import pycoll

# The same products of the same matrices: only a BLAS that rounds by how memory is aligned differs.
TOLERANCE = 1e-12


def weights_of(number, width):
    """Make the weights of a layer: random, but the same wherever they are made."""
    return np.random.default_rng(number).normal(0.0, width**-0.5, (width, width))


def layer(x, weights, out):
    """Compute one layer."""
    np.matmul(x, weights, out=out)
    np.tanh(out, out=out)


def stage(comm, batches, results):
    """Be one stage of the pipeline; returns the seconds spent in the layer.

    The first rank takes its input from `batches`, the last puts its output into `results`.
    """
    last = comm.size - 1
    before = comm.rank - 1 if comm.rank > 0 else pycoll.PROC_NULL
    after = comm.rank + 1 if comm.rank < last else pycoll.PROC_NULL
    weights = weights_of(comm.rank, batches.shape[2])
    arrivals, departures = np.empty((2, 2, *batches.shape[1:]))

    busy = 0.0
    arriving, departing = comm.irecv(before, out=arrivals[0]), []
    for i, batch in enumerate(batches):
        x, y = arriving.wait(), departures[i % 2]
        if i + 1 < len(batches):
            arriving = comm.irecv(before, out=arrivals[(i + 1) % 2])
        if i >= 2:
            departing[i - 2].wait()  # what y holds has left

        start = time.perf_counter()
        layer(x if comm.rank > 0 else batch, weights, out=y)
        busy += time.perf_counter() - start

        departing.append(comm.isend(y, dest=after))
        if comm.rank == last:
            results[i] = y
    pycoll.wait_all(departing[-2:])
    return busy


def main():
    """Run the pipeline, measure how idle it was, and check the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=512, help="of every layer")
    args = parser.parse_args()

    shape = (args.micro_batches, args.rows, args.width)
    batches = np.random.default_rng(1000).normal(size=shape)
    results = np.empty(shape)
    with pycoll.init() as comm:
        stage(comm, batches[:2], results)  # to warm up
        comm.barrier()
        start = time.perf_counter()
        busy = stage(comm, batches, results)
        elapsed = comm.all_reduce(time.perf_counter() - start, op="max")
        idle = 1.0 - comm.all_reduce(busy, op="avg") / elapsed

        if comm.rank == comm.size - 1:
            x = batches
            for number in range(comm.size):
                y, weights = np.empty(shape), weights_of(number, args.width)
                for i in range(len(x)):
                    layer(x[i], weights, out=y[i])
                x = y
            difference = np.abs(results - x).max()
            bubble = (comm.size - 1) / (args.micro_batches + comm.size - 1)
            print(f"{comm.size} ranks, {args.micro_batches} micro-batches in {elapsed:.3f} s")
            print(f"idle: {idle:.1%} of the ranks' time; the bubble is {bubble:.1%}")
            if comm.local_size > pycoll.usable_cores():
                print(f"only {pycoll.usable_cores()} cores: ranks also wait for a core")
            print(f"largest difference from one rank alone: {difference:.1e}")
            if difference > TOLERANCE:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
