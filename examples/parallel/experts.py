"""Expert parallelism: a layer of experts that are spread over the ranks, and tokens that travel.

    pip install torch
    pycoll-run -n 4 --transport tcp examples/parallel/experts.py --top 2

A router chooses for each token the experts that compute it. Every rank has some of the experts and
some of the tokens: all_to_allv brings each token to its experts, a second one brings the results
back, and the gradients go the same ways in reverse. The program compares results and gradients with
those of one rank, counts bytes (over tcp: in shared memory all_to_allv sends no messages), and
shows how experts become equally busy. transformer.py uses the layer. Sources: Lepikhin et al. 2020,
GShard; Fedus et al. 2021, Switch Transformers; Wang et al. 2024, Auxiliary-Loss-Free Load
Balancing.
"""

import argparse
import itertools

import torch
from torch.nn import functional

import pycoll
from pycoll.parallel import bounds

STEP = 0.001  # of a bias, after Wang et al.
HEAD = 64  # bytes: shape and dtype of each array that all_to_allv sends


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


def expert_layer(x, router, biases, experts, top, comm):
    """Return what each token's experts make of it, and how many tokens of this rank each got.

    Collective. x is (tokens, width), this rank's, and may have no tokens; router is (number of
    experts, width), the same on all ranks; biases, one for each expert, are added to probabilities
    only to choose. experts are functions of (tokens, width): those of this rank,
    ``bounds(number of experts, comm.rank, comm.size)`` of all.
    """
    many, own = len(router), bounds(len(router), comm.rank, comm.size)
    if x.dim() != 2 or router.shape != (many, x.shape[1]) or biases.shape != (many,):
        shapes = [tuple(t.shape) for t in (x, router, biases)]
        raise ValueError(f"tokens, router and biases have the shapes {shapes}")
    if not 1 <= top <= many or len(experts) != own.stop - own.start:
        raise ValueError(f"top is {top}, and {len(experts)} are here of {many} experts")
    probabilities = (x @ router.T).softmax(-1)
    chosen = (probabilities + biases).topk(top).indices  # (tokens, top)
    weights = probabilities.gather(1, chosen)
    order = chosen.flatten().argsort(stable=True)  # by expert, so also by rank
    token = order // top
    busy = torch.bincount(chosen.flatten(), minlength=many)
    of_ranks = [busy[bounds(many, rank, comm.size)] for rank in range(comm.size)]

    # Who gets how many: from each rank a list with a number for each expert here.
    coming = comm.all_to_allv(of_ranks)
    counts = [int(part.sum()) for part in of_ranks]
    rows = AllToAll.apply(x[token], counts, comm)

    numbers = torch.arange(len(experts))
    expert_of_row = torch.cat([numbers.repeat_interleave(part) for part in coming])
    results = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        here = (expert_of_row == number).nonzero()[:, 0]
        results = results.index_add(0, here, expert(rows[here]))

    back = AllToAll.apply(results, [int(part.sum()) for part in coming], comm)
    weighted = back * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, token, weighted), busy


def balance(biases, busy):
    """Change the biases in place: an expert with more tokens than the mean is chosen less.

    busy has the tokens of all ranks, so the biases stay the same on all.
    """
    biases += STEP * (busy.double().mean() - busy).sign()


def draw(many, width, tokens, seed=1):
    """Return tokens, a router, and the weights of all experts; on every rank the same."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, width), (many, width), *[(4 * width, width), (width, 4 * width)] * many]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) / width**0.5 for s in shapes]
    x, router, *weights = [values.requires_grad_() for values in drawn]
    return x, router, list(zip(weights[::2], weights[1::2], strict=True))


def run(comm, many, width, tokens, top):
    """Run the layer forward and backward on this rank's share of the tokens.

    Returns (result, gradients of x and of the router, how busy experts were), of all ranks; and of
    this rank the bytes sent in the forward and the backward, and what the formula says for both.
    """
    x, router, weights = draw(many, width, tokens)
    x = x.detach()[bounds(tokens, comm.rank, comm.size)].requires_grad_()
    own = bounds(many, comm.rank, comm.size)
    experts = [lambda x, a=a, b=b: functional.gelu(x @ a.T) @ b.T for a, b in weights[own]]
    sent = [comm.counters().sent_bytes.sum()]
    y, busy = expert_layer(x, router, torch.zeros(many), experts, top, comm)
    sent.append(comm.counters().sent_bytes.sum())
    y.sin().sum().backward()
    sent.append(comm.counters().sent_bytes.sum())

    of_ranks = comm.all_gather(busy)
    leaving = busy.sum() - busy[own].sum()
    coming = of_ranks[:, own].sum() - busy[own].sum()  # whose results this rank sends back
    rows = int(leaving + coming) * width * 8
    heads = HEAD * (comm.size - 1)
    formula = rows + 8 * (many - (own.stop - own.start)) + 3 * heads, rows + 2 * heads
    whole = [torch.cat(comm.all_gatherv(part)) for part in (y.detach(), x.grad)]
    whole += [comm.all_reduce(router.grad), of_ranks.sum(0)]
    return whole, [int(b - a) for a, b in itertools.pairwise(sent)], formula


def balanced(comm, many, width, tokens, top, rounds=300):
    """Return how busy the experts are after so many changes of their biases."""
    x, router, _ = draw(many, width, tokens)
    mine, biases = x.detach()[bounds(tokens, comm.rank, comm.size)], torch.zeros(many).double()
    probabilities = (mine @ router.detach().T).softmax(-1)
    for _ in range(rounds):
        chosen = (probabilities + biases).topk(top).indices
        busy = comm.all_reduce(torch.bincount(chosen.flatten(), minlength=many))
        balance(biases, busy)
    return busy


def main():
    """Compare with one rank, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=1, help="experts of a token")
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of all ranks together")
    options = parser.parse_args()
    numbers = options.experts, options.width, options.tokens, options.top
    torch.set_num_threads(1)
    with pycoll.init() as comm:
        if not 1 <= options.top <= options.experts or options.experts < comm.size:
            raise SystemExit(f"--experts must be at least --top and {comm.size}, --top at least 1")
        whole, sent, formula = run(comm, *numbers)
        sent, formula = comm.all_gather([sent]), comm.all_gather([formula])
        after = balanced(comm, *numbers)
        worst = 0.0
        if comm.rank == 0:
            expected, _, _ = run(comm.sub([0]), *numbers)
            worst = max(float((a - b).abs().max()) for a, b in zip(whole, expected, strict=True))
            print("bytes sent  forward  formula  backward  formula")
            for rank, ([(f, b)], [(ff, bb)]) in enumerate(zip(sent, formula, strict=True)):
                print(f"rank {rank:<5}{f:9,}{ff:9,}{b:10,}{bb:9,}")
            print(f"tokens of each expert: {whole[-1].tolist()}")
            print(f"after 300 changes of the biases: {after.tolist()}")
            print(f"largest difference from the layer on one rank: {worst:.1e}")
        worst = comm.broadcast(worst, root=0)
    if not worst <= 1e-12:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
