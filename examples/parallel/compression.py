"""Gradients compressed before they travel: the loss and the bytes of each compressor, beside none.

    pip install '.[examples]' && pycoll-run -n 4 examples/parallel/compression.py
    pycoll-run -n 4 examples/parallel/compression.py --plot compression.png

The network of examples/train_digits.py is trained once with each compressor of pycoll.parallel, on
the same batches. Each layer's gradient is compressed and starts to travel while that of the layer
before it is computed. The table shows what a rank sends in a step, by formula and as its
communicator has counted, and what came of it. Top-k runs once more without error feedback: what it
leaves out is then lost. Runs with any number of ranks.
"""

import argparse
import itertools
import os

import numpy as np
from sklearn.datasets import load_digits

import pycoll
from pycoll.parallel import (
    BFloat16,
    Buckets,
    ErrorFeedback,
    Float16,
    Int8,
    OneBit,
    PowerSGD,
    TopK,
    Uncompressed,
    iall_reduce,
)

LAYERS = (64, 32, 10)  # 8 x 8 pixels in, one hidden layer, ten digits out
BATCH, SEED = 100, 1
FRACTION, RANK, BLOCK = 0.01, 2, 256
SHAPES = [shape for i, o in itertools.pairwise(LAYERS) for shape in ((i, o), (o,))]
BUCKETS = [(i + 1) * o for i, o in itertools.pairwise(LAYERS)][::-1]  # one a layer, the last first
COUNT = sum(BUCKETS)

# The algorithms that the formulas are of. Else small messages would go by shorter, wider ones, and
# those in shared memory would not be messages at all.
ALGORITHMS = "all_reduce:ring;all_gather:ring;all_to_all:pairwise"


def by_ring(nbytes, n):
    """What a rank sends in a ring all_reduce on n ranks."""
    return 2 * (n - 1) / n * nbytes


def by_stripes(block, n):
    """An all_to_all and an all_gather, whose messages are stripes: blocks of equal length."""
    sent = 0
    for count in BUCKETS:
        blocks = -(-count // (n * BLOCK))
        sent += 2 * (n - 1) * blocks * block(-(-count // (n * blocks)))
    return sent


def top_k(n):
    """An all_gather of places and values."""
    return (n - 1) * sum(round(FRACTION * count) for count in BUCKETS) * 8


def factors():
    """The values in PowerSGD's factors, and in the vectors beside them."""
    return sum(RANK * sum(shape) if len(shape) == 2 else shape[0] for shape in SHAPES)


# A compressor for each bucket, and the bytes that a rank sends in a step, of n ranks.
SCHEMES = {
    "none": (Uncompressed, lambda n: by_ring(4 * COUNT, n)),
    "float16": (Float16, lambda n: by_ring(2 * COUNT, n)),
    "bfloat16": (lambda: ErrorFeedback(BFloat16()), lambda n: by_ring(2 * COUNT, n)),
    "int8": (
        lambda: ErrorFeedback(Int8(BLOCK)),
        lambda n: by_stripes(lambda length: length + 4, n),
    ),
    "1 bit": (
        lambda: ErrorFeedback(OneBit(BLOCK)),
        lambda n: by_stripes(lambda length: -(-length // 8) + 8, n),
    ),
    "PowerSGD": (lambda: ErrorFeedback(PowerSGD(RANK)), lambda n: by_ring(4 * factors(), n)),
    "top-k": (lambda: ErrorFeedback(TopK(FRACTION)), top_k),
    "top-k, no feedback": (lambda: TopK(FRACTION), top_k),
}


def forward(weights, images):
    """Hidden activations and class probabilities."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def backward(weights, images, labels, gradients):
    """Write the gradient, summed over the images: the last layer's, then the first one's.

    Yield which of the two is there, and what is to be added to the loss.
    """
    hidden, error = forward(weights, images)
    right = np.arange(len(labels)), labels
    loss = -np.log(error[right]).sum()
    error[right] -= 1
    gradients[0][...], gradients[1][...] = hidden.T @ error, error.sum(axis=0)
    yield 0, loss
    error = (error @ weights[2].T) * (hidden > 0)
    gradients[2][...], gradients[3][...] = images.T @ error, error.sum(axis=0)
    yield 1, 0.0


def train(comm, images, labels, scheme, options):
    """Train from the start; return the weights, and for each epoch the mean loss."""
    random = np.random.default_rng(SEED)  # on all ranks the same weights, and the same batches
    weights = [np.zeros(shape, np.float32) for shape in SHAPES]
    for matrix in weights[::2]:
        matrix[...] = random.normal(0, np.sqrt(2 / len(matrix)), matrix.shape)
    velocities = [np.zeros_like(weight) for weight in weights]

    last, first = weights[2:], weights[:2]  # a bucket each, whose views `backward` writes into
    gradients = Buckets([*last, *first], nbytes=sum(weight.nbytes for weight in first))
    # By layer what is compressed. PowerSGD wants each matrix as it is; the others take the bucket.
    messages = [[flat] for flat in gradients.flats]
    if scheme == "PowerSGD":
        messages = gradients.views[:2], gradients.views[2:]
    compressors = [[SCHEMES[scheme][0]() for _ in layer] for layer in messages]

    losses = []
    for _ in range(options.epochs):
        order, loss = random.permutation(len(images)), 0.0
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            share = np.array_split(batch, comm.size)[comm.rank]
            sums = []
            for layer, add in backward(weights, images[share], labels[share], gradients.views):
                loss += add
                for message, compressor in zip(messages[layer], compressors[layer], strict=True):
                    sums.append(iall_reduce(comm, message, compressor, out=message))
            for request in sums:
                request.wait()
            totals = [*gradients.views[2:], *gradients.views[:2]]
            for weight, velocity, total in zip(weights, velocities, totals, strict=True):
                velocity *= options.momentum
                velocity -= options.rate / len(batch) * total
                weight += velocity
        losses.append(loss / len(images))
    return weights, losses


def draw(path, curves, sent):
    """The loss over the epochs, and over the bytes."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for name, losses in curves.items():
        epochs = np.arange(1, len(losses) + 1)
        left.semilogy(epochs, losses, label=name)
        right.loglog(epochs / len(losses) * sent[name] / 1e6, losses, label=name)
    left.set(xlabel="epoch", ylabel="loss on the images of the epoch")
    right.set(xlabel="MB that a rank has sent")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    """Train with each compressor; print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--plot", metavar="FILE", help="draw the losses, with matplotlib")
    options = parser.parse_args()

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(SEED).permutation(len(images))
    test, rest = order[:360], order[360:]
    steps = options.epochs * -(-len(rest) // BATCH)

    os.environ.setdefault("PYCOLL_ALGORITHM", ALGORITHMS)
    curves, sent, wrong = {}, {}, []
    with pycoll.init() as world:
        show = world.rank == 0
        if show:
            print(f"{world.size} ranks, {COUNT} values of 4 bytes, {steps} steps")
            print(f"{'':20}bytes a rank sends in a step:")
            print(f"{'compressor':20}by formula   counted  of none    loss  test accuracy")
        for name, (_, formula) in SCHEMES.items():
            with world.dup() as comm:  # counts for itself
                weights, losses = train(comm, images[rest], labels[rest], name, options)
                counted = int(comm.counters().sent_bytes.sum())
            losses = world.all_reduce(np.array(losses))
            of_all = world.all_reduce(counted)
            sent[name] = of_all / world.size
            curves[name] = losses.tolist()
            bits = b"".join(weight.tobytes() for weight in weights)
            if any(other != bits for other in world.all_gather(bits)):
                wrong.append(f"{name}: the weights differ between ranks")
            if of_all != round(formula(world.size) * steps * world.size):
                wrong.append(f"{name}: what was sent is not what the formula says")
            if show:
                accuracy = (forward(weights, images[test])[1].argmax(axis=1) == labels[test]).mean()
                per_step = sent[name] / steps
                share = per_step / (by_ring(4 * COUNT, world.size) or 1)
                print(
                    f"{name:20}{formula(world.size):10.0f}{per_step:10.0f}{share:9.1%}"
                    f"{curves[name][-1]:8.4f}{accuracy:15.1%}",
                    flush=True,
                )
    if show:
        print("\n".join(wrong) or "weights: the same bits on all ranks; bytes: as by the formulas")
        if options.plot:
            draw(options.plot, curves, sent)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
