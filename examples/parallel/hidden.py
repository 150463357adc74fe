"""Communication while computing: how much time it saves, beside the bound.

    pip install torch && pycoll-run -n 2 --transport tcp examples/parallel/hidden.py

Two things of transformer.py are measured. In a row-parallel linear layer (docs/parallel/tensor.md)
the sum of one chunk goes on while the product of the next is computed. After a step of ZeRO's
optimizer (docs/parallel/zero.md) the parameters of later layers arrive during the forward of the
first ones.

What computes is a wait here, in place of the kernel of a GPU, which needs no core: so what is
measured is what is hidden, not how ranks share the cores of this machine. The wait is as long as
the communication takes alone. By the bound the longer of the two is not saved, nor is the computing
of the first chunk, during which there is nothing to send yet; for the optimizer, nor is the arrival
of the first layer.
"""

import argparse
import statistics
import time
from unittest import mock

import torch
from torch.nn import functional

import pycoll
from pycoll.parallel import ShardedOptimizer, row_linear


class Kernels:
    """What waits in place of computing: `seconds` for all of the rows, or layers."""

    def __init__(self, whole):
        self.whole, self.seconds = whole, 0.0

    def linear(self, x, weight, bias=None):
        """Wait for the share of the rows of x; return what has the shape of the product."""
        y = x.new_zeros(*x.shape[:-1], weight.shape[0])
        time.sleep(self.seconds * x.numel() / self.whole)
        return y

    def layer(self, x):
        """Wait for one layer."""
        time.sleep(self.seconds / self.whole)
        return x


def measure(comm, repeats, run):
    """Return the median time of a run that all ranks begin together, of the slowest rank."""
    times = []
    for _ in range(repeats):
        comm.barrier()
        begin = time.perf_counter()
        run()
        times.append(comm.all_reduce(time.perf_counter() - begin, "max"))
    return statistics.median(times)


def tensor_parallel(comm, options):
    """Measure a row-parallel layer; return its times: communication, in one chunk, in several."""
    width = 1024
    rows = int(options.mib * 2**20) // (width * 4)  # of float32
    x, weight = torch.zeros(rows, 1, 8), torch.zeros(width, 8)
    kernels = Kernels(x.numel())

    def run(chunks):
        with mock.patch.object(functional, "linear", kernels.linear), torch.no_grad():
            row_linear(x, weight, None, comm, chunks=chunks)

    run(options.chunks)  # opens connections
    alone = kernels.seconds = measure(comm, options.repeats, lambda: run(1))
    times = [measure(comm, options.repeats, lambda c=c: run(c)) for c in (1, options.chunks)]
    return alone, *times


def optimizer(comm, options):
    """Measure what follows a step: all parameters gathered, then layers; and both at once."""
    layers = options.chunks
    each = int(options.mib * 2**20) // (4 * layers)
    groups = [[torch.zeros(each, requires_grad=True)] for _ in range(layers)]
    zero = ShardedOptimizer(groups, comm, lambda shards: torch.optim.SGD(shards, lr=0.0))
    kernels = Kernels(layers)

    def forward(first):
        """Make a step; then time the layers, all of whose parameters come first, or as needed."""
        x = torch.zeros(())
        for number, group in enumerate(groups):
            x = zero.run(number, lambda x, p: x + p[0], x, *group)
        x.backward()
        comm.barrier()
        begin = time.perf_counter()
        zero.step()
        if first:
            zero.ready()
        x = torch.zeros(())
        for number in range(layers):
            x = zero.run(number, kernels.layer, x)
        zero.ready()
        return comm.all_reduce(time.perf_counter() - begin, "max")

    def median(first):
        return statistics.median(forward(first) for _ in range(options.repeats))

    forward(True)
    alone = kernels.seconds = median(True)
    return alone, median(True), median(False)


def main():
    """Measure both and print them in units of the communication alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=4, help="of a product; layers of a network")
    parser.add_argument("--mib", type=float, default=64, help="summed, or gathered")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with pycoll.init() as comm:
        results = {
            "row_linear": tensor_parallel(comm, options),
            "all_gather": optimizer(comm, options),
        }
    if comm.rank == 0:
        print(f"{options.mib:g} MiB; unit: the communication alone; computing: a wait of one unit")
        print(f"            one after the other  {options.chunks:2} chunks  bound   saved")
        for name, (alone, apart, together) in results.items():
            bound = 1 + 1 / options.chunks
            print(
                f"{name:12}{apart / alone:19.2f}{together / alone:12.2f}{bound:8.2f}"
                f"{1 - together / apart:7.0%}"
            )


if __name__ == "__main__":
    main()
