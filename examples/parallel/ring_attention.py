"""Ring attention: exact attention over a sequence that is cut over the ranks.

    pip install torch && pycoll-run -n 4 examples/parallel/ring_attention.py

Each rank has a block of the queries, keys and values. The keys and values go round the ring; each
rank attends to the block it has while the next one arrives, and merges what it finds with what it
had, by the running maximum and sum of the softmax. No rank ever has more than two blocks of them.
The result, and the gradients, are those of attention over the whole sequence but for rounding,
which the program checks. Source: Liu et al. 2023, Ring Attention with Blockwise Transformers.
"""

import argparse
import math

import torch

import pycoll


def scores_of(q, k, query_block, key_block):
    """Return q · k / sqrt(width), (batch, heads, queries, keys); -inf where a key is later."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if query_block == key_block:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


class RingAttention(torch.autograd.Function):
    """Causal attention; q, k and v are this rank's (batch, heads, length / size, width)."""

    @staticmethod
    def forward(ctx, q, k, v, comm):
        """Send the keys and values round the ring once."""
        ctx.comm = comm
        largest = q.new_full(q.shape[:-1], -math.inf)
        total, out = torch.zeros_like(largest), torch.zeros_like(q)
        for block, (kb, vb) in round_the_ring(comm, torch.stack([k, v])):
            if block > comm.rank:
                continue  # all of its keys are later: causal attention does not see them
            scores = scores_of(q, kb, comm.rank, block)
            new = torch.maximum(largest, scores.amax(-1))
            weights = torch.exp(scores - new[..., None])
            shrink = torch.exp(largest - new)  # what was summed was relative to the old maximum
            total = total * shrink + weights.sum(-1)
            out = out * shrink[..., None] + weights @ vb
            largest = new
        out = out / total[..., None]
        ctx.save_for_backward(q, k, v, out, largest + total.log())
        return out

    @staticmethod
    def backward(ctx, g):
        """Send them round again, and their gradients with them, to which each rank adds its own."""
        q, k, v, out, log_total = ctx.saved_tensors
        comm, scale = ctx.comm, 1 / math.sqrt(q.shape[-1])
        inner = (g * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        travelling = torch.zeros(2, *k.shape, dtype=k.dtype)
        for block, (kb, vb) in round_the_ring(comm, torch.stack([k, v])):
            if block <= comm.rank:
                weights = torch.exp(scores_of(q, kb, comm.rank, block) - log_total[..., None])
                of_scores = weights * (g @ vb.transpose(-1, -2) - inner) * scale
                dq += of_scores @ kb
                travelling[0] += of_scores.transpose(-1, -2) @ q
                travelling[1] += weights.transpose(-1, -2) @ g
            # The gradients follow their block; after the last step they are where it began.
            travelling = comm.sendrecv(travelling, right, left, sendtag=1, recvtag=1)
        return dq, travelling[0], travelling[1], None


def round_the_ring(comm, mine):
    """Yield (whose it is, block) for each rank's block; the next one travels meanwhile."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size):
        moving = []
        if step < comm.size - 1:
            moving = [comm.irecv(left), comm.isend(mine, right)]
        yield (comm.rank - step) % comm.size, mine
        if moving:
            mine = moving[0].wait()
            moving[1].wait()


def whole_attention(q, k, v):
    """Causal attention on one rank."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def compare(comm, length, batch=2, heads=2, width=8, seed=1):
    """Return the largest difference from attention on one rank, of results and gradients."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, width)
    q, k, v, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = whole_attention(*whole)
    expected.backward(g)

    block = length // comm.size
    mine = slice(comm.rank * block, (comm.rank + 1) * block)
    parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    out = RingAttention.apply(*parts, comm)
    out.backward(g[:, :, mine])
    pairs = [(out, expected), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]
    worst = max(float((got - x[:, :, mine]).detach().abs().max()) for got, x in pairs)
    return comm.all_reduce(worst, "max")


def main():
    """Compare with one rank, and say what a rank would hold and send."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=256, help="tokens, a multiple of the ranks")
    length = parser.parse_args().length
    torch.set_num_threads(1)
    with pycoll.init() as comm:
        if length < 1 or length % comm.size:
            raise SystemExit(f"--length must be a positive multiple of {comm.size}")
        worst = compare(comm, length)
        if comm.rank == 0:
            block = length // comm.size
            print(f"{length} tokens on {comm.size} ranks, {block} each")
            print(f"scores held at a time: {block} x {block}, in place of {length} x {length}")
            print(f"largest difference from attention on one rank: {worst:.1e}")
    if not worst < 1e-12:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
