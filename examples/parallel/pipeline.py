"""Train a network that is cut into stages, by every pipeline schedule, and measure the bubble.

pycoll-run -n 4 -x OMP_NUM_THREADS=1 examples/parallel/pipeline.py
pycoll-run -n 4 examples/parallel/pipeline.py --compute-ms 50 --plot pipeline.png

Each rank has some of the layers. Activations go from rank to rank, their gradients come back, and a
schedule says which micro-batch a rank computes next: docs/parallel/pipeline.md explains the five.
Whatever the schedule, the network that comes out is the one that a single process trains.

How idle ranks are shows only where each has a core of its own. With --compute-ms 50 they compute
nothing: a forward waits 50 ms and a backward 100 ms, while real messages travel. So the bubble of
many ranks is measured on any machine, beside the formula.
"""

import argparse
import time

import numpy as np
from pipeline_diagrams import bubble, plot, time_pipeline

import pycoll
from pycoll.parallel import PIPELINE_SCHEDULES, Action, prove_pipeline, run_pipeline

RATE = 0.5
TOLERANCE = 1e-12  # relative: products of the same float64 matrices, added up in another order


class Layers:
    """Layers y = tanh(x w), in chunks: those of a rank's stages, or all in one chunk.

    Three methods are what a schedule calls. The first layer takes its inputs from `batch`, and the
    last compares with the targets there.
    """

    def __init__(self, chunks, num_layers, width):
        self.numbers = chunks
        self.num_layers = num_layers
        self.weights = {
            n: np.random.default_rng(n).normal(0.0, width**-0.5, (width, width))
            for layers in chunks
            for n in layers
        }
        self.gradients = {n: np.zeros_like(w) for n, w in self.weights.items()}
        self.batch = None

    def forward(self, action, x):
        """Return the output (after the last layer: the loss), and what the backward needs."""
        inputs, targets = self.batch
        x = inputs[action.micro_batch] if x is None else x
        kept = {}
        for n in self.numbers[action.chunk]:
            y = np.tanh(x @ self.weights[n])
            kept[n] = x, y
            x = y
        if n == self.num_layers - 1:
            kept["error"] = y - targets[action.micro_batch]
            return np.mean(kept["error"] ** 2), kept
        return y, kept

    def backward(self, action, kept, dy):
        """Return the gradient of the input; keep what the gradients of the weights need."""
        if dy is None:
            dy = 2.0 / kept["error"].size * kept["error"]
        for n in reversed(self.numbers[action.chunk]):
            x, y = kept[n]
            dz = dy * (1.0 - y * y)
            kept[n] = x, dz
            dy = dz @ self.weights[n].T
        return dy

    def backward_weights(self, action, kept, dy):
        """Add to the gradients of the weights."""
        for n in self.numbers[action.chunk]:
            x, dz = kept[n]
            self.gradients[n] += x.T @ dz

    def update(self, micro_batches):
        """Make a step with the mean over the micro-batches."""
        for n, gradient in self.gradients.items():
            self.weights[n] -= RATE / micro_batches * gradient
            gradient[:] = 0.0


class Waits:
    """In place of layers: each of the three methods waits, and messages have the same size."""

    def __init__(self, seconds, shape):
        self.seconds = seconds
        self.result = np.zeros(shape)

    def forward(self, action, x):
        """Wait."""
        time.sleep(self.seconds)
        return self.result, None

    def backward(self, action, kept, dy):
        """Wait."""
        time.sleep(self.seconds)
        return self.result

    def backward_weights(self, action, kept, dy):
        """Wait."""
        time.sleep(self.seconds)


def batches(args):
    """Make the same batches wherever they are made: inputs, and targets that can be learned."""
    random = np.random.default_rng(1000)
    teacher = random.normal(0.0, args.width**-0.5, (args.width, args.width))
    for _ in range(args.steps):
        inputs = random.normal(size=(args.micro_batches, args.rows, args.width))
        yield inputs, np.tanh(inputs @ teacher)


def train_alone(args, num_layers):
    """Train all layers in one process, one micro-batch after the other; return also the loss."""
    layers = Layers([range(num_layers)], num_layers, args.width)
    for layers.batch in batches(args):
        losses = []
        for i in range(args.micro_batches):
            loss, kept = layers.forward(Action("F", i), None)
            layers.backward(Action("B", i), kept, None)
            layers.backward_weights(Action("W", i), kept, None)
            losses.append(loss)
        layers.update(args.micro_batches)
    return layers.weights, np.mean(losses)


def train(comm, args, name, chunks, num_layers):
    """Train by a schedule; return all layers, the last loss, bytes that a micro-batch sends."""
    many = num_layers // (comm.size * chunks)  # layers of a stage
    stages = [chunk * comm.size + comm.rank for chunk in range(chunks)]
    layers = Layers([range(s * many, (s + 1) * many) for s in stages], num_layers, args.width)
    functions = layers.forward, layers.backward, layers.backward_weights
    with comm.dup() as line:  # a communicator of its own: nothing else is sent there
        for layers.batch in batches(args):
            run = run_pipeline(line, name, args.micro_batches, *functions, chunks=chunks)
            layers.update(args.micro_batches)
        sent = comm.all_reduce(line.counters().sent_bytes.sum())
    everyone = comm.all_gather([layers.weights])
    loss = np.mean(run.outputs) if run.outputs else None  # the last rank has them
    loss = comm.broadcast(loss, root=comm.size - 1)
    all_layers = {n: w for [weights] in everyone for n, w in weights.items()}
    return all_layers, loss, sent / (args.steps * args.micro_batches)


def compare(comm, args, schedules):
    """Train by each schedule; return whether each comes to what one process does."""
    num_layers = comm.size * args.chunks
    alone, loss_alone = train_alone(args, num_layers)
    right = True
    if comm.rank == 0:
        print(
            f"{num_layers} layers; after {args.steps} steps in one process: loss {loss_alone:.6f}"
        )
        print("schedule     loss      difference  bytes sent  activations held by each rank")
    for name, chunks in schedules.items():
        weights, loss, sent = train(comm, args, name, chunks, num_layers)
        difference = max(
            abs(loss - loss_alone) / loss_alone,
            *(np.abs(weights[n] - w).max() / np.abs(w).max() for n, w in alone.items()),
        )
        # Of a micro-batch: activations to each stage but the first, as many gradients back.
        expected = 2 * (comm.size * chunks - 1) * 8 * args.rows * args.width
        right = right and difference < TOLERANCE and sent == expected
        if comm.rank == 0:
            held = prove_pipeline(name, comm.size, args.micro_batches, chunks).held
            row = f"{name:12} {loss:.6f}  {difference:<10.1e}  {sent:<10.0f}  "
            print(row + " ".join(map(str, held)), end="")
            print(f" (each 1/{chunks} of a rank's layers)" if chunks > 1 else "")
    return right


def measure(comm, args, schedules):
    """Run each schedule with waits for computing; return the times of all ranks, in forwards."""
    measured = {}
    unit = args.compute_ms / 1000.0
    for name, chunks in schedules.items():
        for seconds in (0.0, unit / chunks):  # the first run opens connections
            waits = Waits(seconds, (args.rows, args.width))
            functions = waits.forward, waits.backward, waits.backward_weights
            comm.barrier()
            run = run_pipeline(comm, name, args.micro_batches, *functions, chunks=chunks)
        everyone = comm.gather(run.times, root=0)
        if comm.rank == 0:
            measured[name] = [
                [t._replace(start=t.start / unit, end=t.end / unit) for t in line]
                for line in everyone
            ]
            # Work is what the waits should take; what they take longer counts as idle time.
            idle = bubble(measured[name], work=3 * args.micro_batches)
            formula = PIPELINE_SCHEDULES[name].bubble(comm.size, args.micro_batches, chunks)
            print(f"{name:12} bubble {idle:6.1%}, by the formula {formula:6.1%}")
    return measured


def draw(args, size, schedules, measured):
    """Draw all diagrams, in units of a rank's forward: the ideal, and what was measured."""
    diagrams = {}
    for name, chunks in schedules.items():
        ideal = [  # in time_pipeline a chunk takes as long as all of them here
            [t._replace(start=t.start / chunks, end=t.end / chunks) for t in line]
            for line in time_pipeline(name, size, args.micro_batches, chunks)
        ]
        diagrams[f"{name}: ideal"] = ideal
        if name in measured:
            diagrams[f"{name}: measured"] = measured[name]
    plot(diagrams, args.plot, "time, in forwards of a rank's layers")


def main():
    """Compare the schedules with one process, or measure them; and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=PIPELINE_SCHEDULES, help="default: all of them")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="of a rank, where interleaved")
    parser.add_argument("--rows", type=int, default=32, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=64, help="of every layer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute-ms", type=float, help="how long a forward waits")
    parser.add_argument("--plot", metavar="FILE", help="draw the bubble diagrams")
    args = parser.parse_args()

    with pycoll.init() as comm:
        schedules = {
            name: args.chunks if schedule.many_chunks else 1
            for name, schedule in PIPELINE_SCHEDULES.items()
            if args.schedule in (None, name)
        }
        if comm.rank == 0:
            print(f"{comm.size} ranks, {args.micro_batches} micro-batches")
        if args.micro_batches % comm.size and schedules.pop("interleaved", None) and not comm.rank:
            print("interleaved is left out: its micro-batches are a multiple of the ranks")
        right, measured = True, {}
        if args.compute_ms is None:
            right = compare(comm, args, schedules)
        else:
            if comm.rank == 0:
                print(
                    f"ranks wait and do not compute ({pycoll.usable_cores()} cores): "
                    f"{args.compute_ms:g} ms a forward, {2 * args.compute_ms:g} ms a backward"
                )
            measured = measure(comm, args, schedules)
        if args.plot and comm.rank == 0:
            draw(args, comm.size, schedules, measured)
    if not right:
        raise SystemExit("not the result of one process, or other bytes than the formula says")


if __name__ == "__main__":
    main()
