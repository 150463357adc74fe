"""Data-parallel training in PyTorch: train_digits.py with a module and an optimizer.

    pip install torch '.[examples]' && pycoll-run -n 4 examples/train_digits_torch.py

Every rank holds the whole network and a share of the handwritten digits. In each step it computes
the gradients of a few images of its own, comm.all_reduce_many takes the mean over all ranks, and
every optimizer makes the same step. So the networks, equal from the start by a broadcast, stay
equal to the last bit. Runs with any number of ranks, also with plain `python`.
"""

import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import pycoll

LAYERS = (64, 64, 10)  # 8 x 8 pixels in, one hidden layer, ten digits out
EPOCHS, BATCH = 30, 100  # a batch is what all ranks together take in a step
RATE, MOMENTUM = 0.2, 0.9
SEED = 1


def load(device):
    """Return images and labels: those to test with (train_digits.py's), and those to learn from."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    order = torch.from_numpy(np.random.default_rng(SEED).permutation(len(images)))
    test, rest = order[:360], order[360:]
    return (images[test], labels[test]), (images[rest], labels[rest])


def train(comm, network, images, labels, show):
    """Train with this rank's images, as many as every other's.

    Returns the loss of the last epoch, the seconds spent in communication, and those in all.
    """
    parameters = list(network.parameters())
    with torch.no_grad():  # which PyTorch, too, wants for parameters that are written to
        for parameter in parameters:
            comm.broadcast(parameter, root=0)  # fills those of the other ranks

    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
    random = torch.Generator().manual_seed(SEED + comm.rank)
    share = max(1, BATCH // comm.size)
    steps = len(images) // share
    talking, start = 0.0, time.perf_counter()
    epochs = tqdm(range(EPOCHS), desc="epochs", disable=not show)
    for _ in epochs:
        total = 0.0
        order = torch.randperm(len(images), generator=random)
        for batch in order[: steps * share].split(share):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
            loss.backward()
            total += loss.item()  # on a GPU, this also waits until the gradients are there

            before = time.perf_counter()  # what follows is also waiting for slower ranks
            gradients = comm.all_reduce_many([p.grad for p in parameters], "avg")
            talking += time.perf_counter() - before

            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        mean_loss = comm.all_reduce(total / steps, op="avg")
        epochs.set_postfix(loss=f"{mean_loss:.4f}")
    return mean_loss, talking, time.perf_counter() - start


def main():
    """Train together, then show that all ranks have come to the same network."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    test, (images, labels) = load(device)

    with pycoll.init() as comm:
        # PyTorch would use all cores in each rank, and its threads would get in each other's way.
        torch.set_num_threads(max(1, pycoll.usable_cores() // comm.local_size))
        torch.manual_seed(comm.rank)  # the networks begin differently, until the broadcast
        n_in, n_hidden, n_out = LAYERS
        network = nn.Sequential(nn.Linear(n_in, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_out))
        network.to(device)

        # As many images for each rank: then the mean of the ranks' gradients is that of all images.
        many = len(images) // comm.size
        mine = slice(comm.rank * many, (comm.rank + 1) * many)
        show = comm.rank == 0
        loss, talking, took = train(comm, network, images[mine], labels[mine], show)

        with torch.no_grad():
            accuracy = (network(test[0]).argmax(dim=1) == test[1]).float().mean().item()
        accuracies = comm.all_gather(torch.tensor(accuracy)).tolist()
        everyone = comm.all_gather(nn.utils.parameters_to_vector(network.parameters()))

    bits = everyone.view(torch.int32)  # one row for each rank
    same = bool((bits == bits[0]).all()) and accuracies == accuracies[:1] * len(accuracies)
    if show:
        print(f"test accuracy: {accuracy:.1%} of {len(test[0])} images (at least 95 % wanted)")
        print(f"parameters and accuracy have the same bits on all {len(bits)} ranks: {same}")
        print(f"loss {loss:.4f} after {took:.1f} s, {talking / took:.0%} of it in all_reduce_many")
    if not (same and accuracy > 0.95):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
