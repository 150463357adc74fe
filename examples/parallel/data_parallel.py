"""Data-parallel training two ways: parameter servers beside a ring all_reduce.

    pip install '.[examples]' && pycoll-run -n 4 examples/parallel/data_parallel.py

The digits are learned once by a ring, once by synchronous servers, and by servers that let workers
be some steps ahead of each other. Ring and synchronous servers must give what one process gives.
Then every way moves one gradient between 2, 3, ... ranks, and the communicators' own counters say
how many bytes the busiest rank has sent. `--plot FILE` draws both. docs/parallel/data.md explains.
"""

import argparse
import itertools
import time

import numpy as np
from sklearn.datasets import load_digits

import pycoll
from pycoll.parallel import ParameterServer

LAYERS = (64, 32, 10)  # 8 x 8 pixels in, one hidden layer, ten digits out
BATCH, RATE, SEED = 100, 0.3, 1
SLOW_S = 0.003  # the rank that is slow in a step waits so long: a machine with other work to do
TOLERANCE = 1e-9  # other orders of additions make 1e-14, one image left out 1e-4


def views(flat):
    """See one flat vector as the weight matrix and the bias of each layer, without copying."""
    layers, start = [], 0
    for n_in, n_out in itertools.pairwise(LAYERS):
        middle, stop = start + n_in * n_out, start + n_in * n_out + n_out
        layers.append((flat[start:middle].reshape(n_in, n_out), flat[middle:stop]))
        start = stop
    return layers


LENGTH = sum((i + 1) * o for i, o in itertools.pairwise(LAYERS))


class Digits:
    """The images, the first weights, and the batches: the same on every rank."""

    def __init__(self, steps):
        data, random = load_digits(), np.random.default_rng(SEED)
        self.images, self.labels = data.data / 16.0, data.target
        self.weights = np.zeros(LENGTH)
        for matrix, _ in views(self.weights):
            matrix[:] = random.normal(0.0, np.sqrt(2.0 / len(matrix)), matrix.shape)
        self.batches = random.integers(0, len(self.images), (steps, BATCH))
        self.slow = random.random((steps, 64)) < 0.2  # by step and rank

    def forward(self, weights, images):
        (w1, b1), (w2, b2) = views(weights)
        hidden = np.maximum(images @ w1 + b1, 0.0)
        scores = hidden @ w2 + b2
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, scores / scores.sum(axis=1, keepdims=True)

    def loss(self, weights):
        right = self.forward(weights, self.images)[1][np.arange(len(self.labels)), self.labels]
        return float(-np.log(right).mean())

    def gradient(self, weights, step, worker=0, num_workers=1):
        """A worker's share of the mean gradient of a batch."""
        share = np.array_split(self.batches[step], num_workers)[worker]
        images, labels = self.images[share], self.labels[share]
        hidden, error = self.forward(weights, images)
        error[np.arange(len(labels)), labels] -= 1.0
        before = (error @ views(weights)[1][0].T) * (hidden > 0.0)
        parts = images.T @ before, before.sum(axis=0), hidden.T @ error, error.sum(axis=0)
        return np.concatenate([part.ravel() for part in parts]) / BATCH

    def wait(self, step, rank):
        if self.slow[step, rank]:
            time.sleep(SLOW_S)


def descend(weights, gradient):
    """Take a step, in place."""
    weights -= RATE * gradient


def by_ring(comm, digits, waits=True):
    """Train with every rank as a worker; yield the weights before each step, and the last ones."""
    weights = digits.weights.copy()
    for step in range(len(digits.batches)):
        yield weights
        gradient = digits.gradient(weights, step, comm.rank, comm.size)
        if waits:
            digits.wait(step, comm.rank)
        comm.all_reduce(gradient, out=gradient, algorithm="ring")
        descend(weights, gradient)
    yield weights


def by_servers(servers, digits):
    """The same on a worker of parameter servers."""
    weights = np.empty(LENGTH)
    for step in range(len(digits.batches)):
        servers.pull(weights)
        yield weights
        gradient = digits.gradient(weights, step, servers.comm.rank, servers.num_workers)
        digits.wait(step, servers.comm.rank)
        servers.push(gradient)
    yield servers.finish(weights)


def curve(weights, digits, every):
    """Train; return the loss now and then, the last weights, and the seconds without the losses."""
    losses, last, seconds, step = [], None, 0.0, 0
    while True:
        begin = time.perf_counter()
        now = next(weights, None)
        seconds += time.perf_counter() - begin
        if now is None:
            return losses, last, seconds
        if step % every == 0:
            losses.append(digits.loss(now))
        last, step = now.copy(), step + 1


def train(comm, digits, every, num_servers, staleness):
    """Train by servers; return on rank 0 loss curve, weights, seconds and who was ahead how far."""
    servers = ParameterServer(comm, LENGTH, num_servers)
    if servers.is_server:
        served = servers.serve(digits.weights.copy(), descend, staleness)
        ahead = served.ahead.tolist() if comm.rank == comm.size - 1 else None
        result = None
    else:
        result, ahead = curve(by_servers(servers, digits), digits, every), None
    return result, comm.broadcast(ahead, root=comm.size - 1)


def busiest_bytes(comm, num_servers):
    """Bytes that the busiest rank sends for one step of K bytes; 0 servers: by a ring."""
    if num_servers == 0:
        gradient = np.ones(840 * 32)  # every number of ranks up to 8 divides it
        before = comm.counters().sent_bytes.sum()
        comm.all_reduce(gradient, algorithm="ring")
        sent = comm.counters().sent_bytes.sum() - before
    else:
        servers = ParameterServer(comm, 840 * 32, num_servers)
        if servers.is_server:
            servers.serve(np.zeros(840 * 32), descend)
        else:
            for _ in range(3):
                servers.push(servers.pull())
            servers.finish()
        steps = 4 if servers.is_server else 3  # the last parameters are sent, too
        sent = servers.comm.counters().sent_bytes.sum() / steps
    return max(comm.all_gather(float(sent))) / (8 * 840 * 32)


def formula(size, num_servers):
    """The same as computed, in values of K bytes; each worker sends one."""
    if num_servers == 0:
        return 2 * (size - 1) / size
    return max(1, (size - num_servers) / num_servers)


def count(comm):
    """Return {(servers, ranks): values sent by the busiest rank}, counted on all sizes."""
    counted = {}
    for size in range(2, comm.size + 1):
        few = comm.sub(range(size))
        for num_servers in (0, 1, 2):
            if few is not None and num_servers < size:
                counted[num_servers, size] = busiest_bytes(few, num_servers)
    return counted


def draw(file, curves, counted, every):
    """Draw the bytes over the number of ranks, and the losses over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = {0: "ring", 1: "one server", 2: "two servers"}
    for number, name in names.items():
        sizes = [size for servers, size in counted if servers == number]
        (line,) = left.plot(sizes, [formula(size, number) for size in sizes])
        dots = [counted[number, size] for size in sizes]
        left.plot(sizes, dots, "o", color=line.get_color(), label=f"{name}, counted")
    left.set(xlabel="ranks", ylabel="K bytes sent by the busiest rank in a step", ylim=(0, None))
    left.set_title("lines: 2 (N - 1) / N, and workers / servers (at least 1)")
    for name, losses in curves.items():
        right.semilogy(np.arange(len(losses)) * every, losses, label=name)
    right.set(xlabel="step", ylabel="loss")
    for axes in (left, right):
        axes.legend()
    figure.savefig(file, dpi=110)


def main():
    """Train in all ways, count, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    digits, every = Digits(options.steps), max(1, options.steps // 50)
    curves, rows, fine = {}, [], True

    with pycoll.init() as comm:
        if comm.size < 2:
            raise SystemExit("two ranks at least: pycoll-run -n 4 examples/parallel/...")
        alone = curve(by_ring(comm.sub([comm.rank]), digits, waits=False), digits, every)[1]
        losses, weights, seconds = curve(by_ring(comm, digits), digits, every)
        runs = [("ring", losses, weights, seconds, None)]
        for name, num_servers, staleness in (
            ("servers, synchronous", 1, None),
            ("two servers, synchronous", 2, None),
            ("servers, bound 0", 1, 0),
            ("servers, bound 1", 1, 1),
            ("servers, bound 4", 1, 4),
        ):
            if num_servers < comm.size:
                result, ahead = train(comm, digits, every, num_servers, staleness)
                runs.append((name, *(result or (None, None, None)), ahead))
        for name, losses, weights, seconds, ahead in runs:
            if comm.rank == 0:
                curves[name] = losses
                away = np.abs(weights - alone).max()
                if "bound" not in name:
                    fine &= away < TOLERANCE
                most = len(ahead) - 1 if ahead else 0
                rows.append((name, losses[-1], away, 1e3 * seconds / options.steps, most))
        counted = count(comm)

    if comm.rank > 0:
        return
    print(f"{'':26}{'loss':>8}{'from one process':>18}{'ms a step':>11}{'most ahead':>12}")
    for name, loss, away, milliseconds, most in rows:
        print(f"{name:26}{loss:8.4f}{away:18.1e}{milliseconds:11.2f}{most:12}")
    for (num_servers, size), values in counted.items():
        fine &= abs(values - formula(size, num_servers)) < 1e-9
    print(f"bytes of the busiest of {comm.size} ranks in a step, in parameters:", end=" ")
    print(
        ", ".join(
            f"{values:.3f} by {n or 'no'} server{'s' * (n != 1)}"
            for (n, size), values in counted.items()
            if size == comm.size
        )
    )
    print("equal to one process, and bytes as the formulas say:", fine)
    if options.plot:
        draw(options.plot, curves, counted, every)
    if not fine:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
