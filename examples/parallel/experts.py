"""Expert parallelism: a layer of experts that are spread over the ranks, and tokens that travel.

    pip install torch && pycoll-run -n 4 examples/parallel/experts.py --top 2

A router chooses for each token the experts that compute it. Every rank has some of the experts and
some of the tokens: all_to_allv brings each token to its experts, a second one brings the results
back, and the gradients go the same ways in reverse. The layer predicts the next byte of the
standard library's sources from the three before. The losses are those of one rank, which the
program checks. Sources: Lepikhin et al. 2020, GShard; Fedus et al. 2021, Switch Transformers.
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import pycoll
from pycoll.parallel import bounds

CONTEXT, WIDTH, RATE = 3, 24, 0.01
BALANCE = 0.01  # the weight of the loss that keeps experts equally busy
SEED = 1


class AllToAll(torch.autograd.Function):
    """Rows to other ranks: the first counts[0] to rank 0, and so on; gradients come back."""

    @staticmethod
    def forward(ctx, rows, counts, comm):
        """Return the rows from all ranks, in their order."""
        received = comm.all_to_allv(list(rows.split(counts)))
        ctx.comm, ctx.counts = comm, [len(part) for part in received]
        return torch.cat(received)

    @staticmethod
    def backward(ctx, g):
        """Send each gradient to where its row came from."""
        return torch.cat(ctx.comm.all_to_allv(list(g.split(ctx.counts)))), None, None


def route(x, router, top):
    """Return the probabilities of all experts, and the chosen ones with theirs: (tokens, top)."""
    probabilities = (x @ router.T).softmax(-1)
    weights, chosen = probabilities.topk(top)
    return probabilities, weights, chosen


def expert_layer(x, router, experts, many, top, comm):
    """Add to each token what its experts make of it.

    x is (tokens, width), this rank's; router (many, width), the same on all ranks; experts those of
    this rank, ``bounds(many, comm.rank, comm.size)`` of all.

    Returns the result, the probabilities, and how many of this rank's tokens each expert got.
    """
    probabilities, weights, chosen = route(x, router, top)
    order = chosen.flatten().argsort(stable=True)  # by expert, so also by rank
    token = order // top
    busy = torch.bincount(chosen.flatten(), minlength=many)
    of_ranks = [busy[bounds(many, rank, comm.size)] for rank in range(comm.size)]

    # Who gets how many: from each rank a list with a number for each expert here.
    coming = comm.all_to_allv(of_ranks)
    counts = [int(part.sum()) for part in of_ranks]
    rows = AllToAll.apply(x[token], counts, comm)

    own = torch.arange(len(experts))
    expert_of_row = torch.cat([own.repeat_interleave(part) for part in coming])
    results = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        here = (expert_of_row == number).nonzero()[:, 0]
        results = results.index_add(0, here, expert(rows[here]))

    back = AllToAll.apply(results, [int(part.sum()) for part in coming], comm)
    weighted = back * weights.flatten()[order][:, None]
    return x.index_add(0, token, weighted), probabilities, busy


class Network:
    """Bytes in, an expert layer, the logits of the next byte; this rank's experts of it."""

    def __init__(self, many, top, comm):
        self.many, self.top, self.comm = many, top, comm
        generator = torch.Generator().manual_seed(SEED)

        def draw(*shape):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return (values / shape[-1] ** 0.5).requires_grad_()

        each = WIDTH // CONTEXT
        self.shared = [draw(256, each), draw(many, WIDTH), draw(256, WIDTH)]
        # Every rank draws all of them, and keeps its own.
        experts = [(draw(4 * WIDTH, WIDTH), draw(WIDTH, 4 * WIDTH)) for _ in range(many)]
        self.own = experts[bounds(many, comm.rank, comm.size)]
        tensors = [*self.shared, *(weight for pair in self.own for weight in pair)]
        self.optimizer = torch.optim.Adam(tensors, lr=RATE)

    def step(self, tokens):
        """Train with a batch, (tokens, CONTEXT + 1); return its loss, and how busy experts were."""
        comm, table, router, head = self.comm, *self.shared
        mine = tokens[bounds(len(tokens), comm.rank, comm.size)]
        experts = [lambda x, a=a, b=b: functional.gelu(x @ a.T) @ b.T for a, b in self.own]
        x = table[mine[:, :CONTEXT]].flatten(1)
        x, probabilities, busy = expert_layer(x, router, experts, self.many, self.top, comm)
        loss = functional.cross_entropy(x @ head.T, mine[:, CONTEXT], reduction="sum") / len(tokens)
        # many * (share of the tokens) * (mean probability), summed over experts: least if equal.
        busy = comm.all_reduce(busy)
        shares = busy.double() / busy.sum()
        balance = self.many * (shares * probabilities.sum(0)).sum() / len(tokens)

        self.optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        # An expert has had the tokens of all ranks, so its gradients are whole; others are not.
        gradients = comm.all_reduce_many([tensor.grad for tensor in self.shared])
        for tensor, gradient in zip(self.shared, gradients, strict=True):
            tensor.grad = gradient
        for weight in (weight for pair in self.own for weight in pair):
            if weight.grad is None:  # no token has come; one rank would have the same zeros
                weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        return comm.all_reduce(loss.item()), busy


def train(comm, many, top, steps, batch):
    """Return the losses, and how many tokens each expert got in the last step."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    random = np.random.default_rng(SEED)
    network, losses, busy = Network(many, top, comm), [], None
    for _ in range(steps):
        starts = random.integers(len(text) - CONTEXT, size=batch)
        tokens = torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
        loss, busy = network.step(tokens)
        losses.append(loss)
    return losses, busy.tolist()


def main():
    """Train on all ranks and on one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=1, help="experts of a token")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=512, help="tokens of all ranks together")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with pycoll.init() as comm:
        if not 1 <= options.top <= options.experts:
            raise SystemExit("--top must be from 1 to --experts")
        if min(options.experts, options.batch) < comm.size:
            raise SystemExit(f"--experts and --batch must be at least {comm.size}")
        numbers = (options.experts, options.top, options.steps, options.batch)
        losses, busy = train(comm, *numbers)
        worst = 0.0
        if comm.rank == 0:
            expected, _ = train(comm.sub([0]), *numbers)
            worst = max(abs(a / b - 1.0) for a, b in zip(losses, expected, strict=True))
            print(f"loss {losses[0]:.4f}, then {losses[-1]:.4f}")
            print(f"tokens of each expert: {busy}")
            print(f"largest relative difference from the losses of one rank: {worst:.1e}")
        worst = comm.broadcast(worst, root=0)
    if not worst <= 1e-9:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
