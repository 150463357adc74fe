"""Data-parallel training that goes on when ranks die: two of eight are killed while it runs.

    pycoll-run -n 8 --survive examples/survive.py

Every rank draws batches of its own, and in each step all take the mean of their gradients. Two
ranks, chosen at random, are killed at random moments. The others go on without them: with fewer
ranks a step has fewer samples, and nothing else changes. At the end rank 0 of those that are left
compares the loss with that of trainings in which nobody dies, computed alone with other samples.
"""

import argparse
import random
import signal

import numpy as np

import pycoll

FEATURES, BATCH, STEPS, RATE = 20, 32, 400, 0.2
TEACHER = np.random.default_rng(1).normal(0.0, 0.5, FEATURES)  # what is to be learned
TEST_SAMPLES = 5000
SEEDS = 10  # trainings without failures, to know how much chance changes the loss

# In standard deviations of those losses. In 150 trainings on six ranks the loss was at most 6.2
# from their mean; in 60 on a single rank it was 14 on average, and before any step it is 370.
DEVIATIONS = 12.0


def samples(draw, count):
    """Draw inputs, and labels that the teacher gives by chance."""
    x = draw.normal(size=(count, FEATURES))
    return x, (draw.random(count) < 1.0 / (1.0 + np.exp(-x @ TEACHER))).astype(float)


def gradient(weights, draw):
    """The gradient of the logistic loss on a fresh batch."""
    x, y = samples(draw, BATCH)
    return x.T @ (1.0 / (1.0 + np.exp(-x @ weights)) - y) / BATCH


def loss(weights):
    """The loss on samples that nobody trains with."""
    x, y = samples(np.random.default_rng(2), TEST_SAMPLES)
    scores = x @ weights
    return float(np.mean(np.logaddexp(0.0, scores) - y * scores))


class Training:
    """What a rank knows: the weights, and how many steps have led to them."""

    def __init__(self):
        self.step, self.weights = 0, np.zeros(FEATURES)

    def share(self, comm):
        """Take over the state of the rank that is furthest.

        Where a rank has died in a step, some may have finished that step, and others not.
        """
        _, furthest = comm.all_reduce((self.step, comm.rank), op="maxloc")
        self.step, self.weights = comm.broadcast((self.step, self.weights), root=furthest)

    def run(self, comm, draw, dies_at):
        """Take the steps that are left."""
        while self.step < STEPS:
            if self.step == dies_at:
                die_soon()
            mean = comm.all_reduce(gradient(self.weights, draw), op="avg")
            self.weights = self.weights - RATE * mean
            self.step += 1


def train(comm, draw, dies_at):
    """Train on as many ranks as live; returns their communicator, and the weights."""
    training = Training()
    while True:
        try:
            training.share(comm)
            training.run(comm, draw, dies_at)
            finished = True
        except pycoll.PeerFailed:
            finished = False
        # All that live get one answer here: they leave together, or go on together.
        if comm.agree(finished):
            return comm, training.weights
        comm = comm.shrink()


def train_alone(seed, size):
    """The weights of a training without failures on `size` ranks."""
    draws = [np.random.default_rng((seed, rank)) for rank in range(size)]
    weights = np.zeros(FEATURES)
    for _ in range(STEPS):
        weights = weights - RATE * np.mean([gradient(weights, draw) for draw in draws], axis=0)
    return weights


def die_soon():
    """Be killed within a millisecond, wherever this process is then: nothing handles this alarm."""
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-3))


def main():
    """Train, lose ranks, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=2, help="how many ranks are killed")
    deaths = parser.parse_args().deaths
    comm = pycoll.init()
    size = comm.size
    victims = random.sample(range(size), min(deaths, size - 1))
    moments = {rank: random.randrange(STEPS // 10, STEPS * 3 // 4) for rank in victims}
    moments = comm.broadcast(moments)  # those of rank 0 count
    comm, weights = train(comm, np.random.default_rng((0, comm.rank)), moments.get(comm.rank))
    if comm.rank == 0:
        without = [loss(train_alone(seed, size)) for seed in range(1, SEEDS + 1)]
        mean, deviation = np.mean(without), np.std(without)
        print(f"{comm.size} of {size} ranks are left: {', '.join(map(str, comm.members))}")
        print(f"loss {loss(weights):.5f}; without failures {mean:.5f} +- {deviation:.5f}")
        if abs(loss(weights) - mean) > DEVIATIONS * deviation:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
