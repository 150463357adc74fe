"""Data-parallel training two ways: parameter servers beside a ring all_reduce.

    pip install '.[examples]' && pycoll-run -n 4 examples/parallel/data_parallel.py

The digits are learned once by a ring, once by synchronous servers, and by servers that let workers
be some steps ahead of each other. Ring and synchronous servers must give what one process gives.
Ranks would share the cores of a small machine, so that computing a gradient is a wait here: it
takes COMPUTE_S, and SLOW_S more where a worker is slow. So the seconds are those of a machine with
enough cores. `--slow lot`: one worker in five, in each step; `--slow one`: always the first.
Then every way moves one gradient between 2, 3, ... ranks, and the communicators' own counters say
how many bytes the busiest rank has sent. `--plot FILE` draws all. docs/parallel/data.md explains.
"""

import argparse
import itertools
import time

import numpy as np
from parameter_server import ParameterServer
from sklearn.datasets import load_digits

import pycoll

LAYERS = (64, 32, 10)  # 8 x 8 pixels in, one hidden layer, ten digits out
BATCH, RATE, SEED = 100, 0.3, 1
COMPUTE_S, SLOW_S = 0.004, 0.016
NAMES = {0: "ring", 1: "one server", 2: "two servers"}
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
    """The images, the first weights, the batches, and who is slow when: equal on all ranks."""

    def __init__(self, steps, slow):
        data, random = load_digits(), np.random.default_rng(SEED)
        self.images, self.labels = data.data / 16.0, data.target
        self.weights = np.zeros(LENGTH)
        for matrix, _ in views(self.weights):
            matrix[:] = random.normal(0.0, np.sqrt(2.0 / len(matrix)), matrix.shape)
        self.batches = random.integers(0, len(self.images), (steps, BATCH))
        by_lot, first = random.random((steps, 64)) < 0.2, np.arange(64) == 0
        self.seconds = COMPUTE_S + SLOW_S * np.where(slow == "lot", by_lot, first)  # step, worker

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

    def ideal_seconds(self, num_workers, staleness):
        """How long the waits alone take. A ring is as synchronous servers are."""
        ended = [np.zeros(num_workers)]  # by step and worker
        for seconds in self.seconds[:, :num_workers]:
            all_ended = ended[-1 - min(staleness or 0, len(ended) - 1)].max()
            ended.append(np.maximum(ended[-1], all_ended) + seconds)
        return ended[-1].max()


def descend(weights, gradient):
    """Take a step, in place."""
    weights -= RATE * gradient


class Curve:
    """Weights and seconds after every so many updates; the losses are computed at the end."""

    def __init__(self, every):
        self.every, self.updates, self.kept, self.began = every, 0, [], time.perf_counter()

    def add(self, weights):
        """Take the weights before the first update, and after each."""
        if self.updates % self.every == 0:
            self.kept.append((time.perf_counter() - self.began, weights.copy()))
        self.updates += 1

    def losses(self, digits):
        """Return the seconds, and the losses."""
        return [s for s, _ in self.kept], [digits.loss(weights) for _, weights in self.kept]


def by_ring(comm, digits, curve):
    """Train with every rank as a worker; return the weights."""
    weights = digits.weights.copy()
    curve.add(weights)
    for step, seconds in enumerate(digits.seconds):
        gradient = digits.gradient(weights, step, comm.rank, comm.size)
        if comm.size > 1:
            time.sleep(seconds[comm.rank])
        comm.all_reduce(gradient, out=gradient, algorithm="ring")
        descend(weights, gradient)
        curve.add(weights)
    return weights


def by_servers(comm, digits, num_servers, staleness, curve):
    """Train by servers; return the weights (of a server None), and who was ahead how far."""
    servers = ParameterServer(comm, LENGTH, num_servers)
    if servers.is_server:
        if staleness is not None:
            curve.every *= servers.num_workers  # each gradient is an update

        def update(shard, gradient):
            descend(shard, gradient)
            curve.add(shard)

        weights = digits.weights.copy()
        curve.add(weights[servers.shard])
        return None, servers.serve(weights, update, staleness).ahead
    weights = np.empty(LENGTH)
    for step, seconds in enumerate(digits.seconds):
        servers.pull(weights)
        gradient = digits.gradient(weights, step, comm.rank, servers.num_workers)
        time.sleep(seconds[comm.rank])
        servers.push(gradient)
    return servers.finish(weights), None


def run(comm, digits, every, num_servers, staleness):
    """Train in one way; rank 0 returns weights, curve of losses, seconds, and how far ahead."""
    curve, ahead = Curve(every), None
    comm.barrier()
    begin = time.perf_counter()
    if num_servers == 0:
        weights = by_ring(comm, digits, curve)
    else:
        weights, ahead = by_servers(comm, digits, num_servers, staleness, curve)
    seconds = time.perf_counter() - begin
    # The last rank is in the ring, or a server; of several servers none has all weights.
    losses = curve.losses(digits) if num_servers < 2 and comm.rank == comm.size - 1 else None
    losses, ahead = comm.broadcast((losses, ahead), root=comm.size - 1)
    return weights, losses, seconds, len(ahead or [0]) - 1


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
    """Draw the bytes over the number of ranks, and the losses over updates and seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for number, name in NAMES.items():
        sizes = [size for servers, size in counted if servers == number]
        (line,) = left.plot(sizes, [formula(size, number) for size in sizes])
        dots = [counted[number, size] for size in sizes]
        left.plot(sizes, dots, "o", color=line.get_color(), label=f"{name}, counted")
    left.set(xlabel="ranks", ylabel="K bytes sent by the busiest rank in a step", ylim=(0, None))
    left.set_title("lines: 2 (N - 1) / N, and workers / servers (at least 1)")
    for name, (seconds, losses) in curves.items():
        middle.semilogy(np.arange(len(losses)) * every, losses, label=name)
        right.semilogy(seconds, losses, label=name)
    middle.set(xlabel="updates; with a bound: divided by the workers", ylabel="loss")
    right.set(xlabel="seconds")
    for axes in (left, middle):
        axes.legend()
    figure.savefig(file, dpi=110)


def main():
    """Train in all ways, count, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--slow", choices=("lot", "one"), default="lot", help="which workers are")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    digits, every = Digits(options.steps, options.slow), max(1, options.steps // 50)
    curves, fine = {}, True

    with pycoll.init() as comm:
        if comm.size < 2:
            raise SystemExit("two ranks at least: pycoll-run -n 4 examples/parallel/...")
        show = comm.rank == 0
        alone = by_ring(comm.sub([comm.rank]), digits, Curve(every))
        if show:
            print(f"{'':26}{'loss':>8}{'from one process':>18}", end="")
            print(f"{'ms a step':>11}{'waits alone':>13}{'most ahead':>12}")
        for name, num_servers, staleness in (
            ("ring", 0, None),
            ("servers, synchronous", 1, None),
            ("two servers, synchronous", 2, None),
            ("servers, bound 0", 1, 0),
            ("servers, bound 1", 1, 1),
            ("servers, bound 4", 1, 4),
        ):
            if num_servers >= comm.size:
                continue
            weights, losses, seconds, most = run(comm, digits, every, num_servers, staleness)
            if losses is not None:
                curves[name] = losses
            if show:
                away = np.abs(weights - alone).max()
                fine &= away < TOLERANCE or staleness is not None
                ideal = digits.ideal_seconds(comm.size - num_servers, staleness)
                print(f"{name:26}{digits.loss(weights):8.4f}{away:18.1e}", end="")
                in_ms = (1e3 * each / options.steps for each in (seconds, ideal))
                print("{:11.2f}{:13.2f}{:12}".format(*in_ms, most), flush=True)
        counted = count(comm)

    if not show:
        return
    print("sent by the busiest rank in a step, in lengths of the gradient:")
    print(f"{'ranks':12}" + "".join(f"{size:8}" for size in range(2, comm.size + 1)))
    for number, name in NAMES.items():
        cells = [counted.get((number, size)) for size in range(2, comm.size + 1)]
        shown = ("" if cell is None else f"{cell:.3f}" for cell in cells)
        print(f"{name:12}" + "".join(f"{cell:>8}" for cell in shown))
    for (num_servers, size), values in counted.items():
        fine &= abs(values - formula(size, num_servers)) < 1e-9
    print("equal to one process, and bytes as the formulas say:", fine)
    if options.plot:
        draw(options.plot, curves, counted, every)
    if not fine:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
