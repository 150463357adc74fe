"""Ring attention: exact attention over a sequence that is cut over the ranks.

    pip install torch && pycoll-run -n 4 examples/parallel/ring_attention.py

Each rank has a block of the queries, keys and values. The keys and values go round the ring; each
rank attends to the block it has while the next one arrives, and merges what it finds with what it
had, by the running maximum and sum of the softmax. Besides its own a rank never has more than two
blocks of them.
The result, and the gradients, are those of attention over the whole sequence but for rounding,
which the program checks; and it counts bytes. transformer.py uses it as its context axis. Source:
Liu et al. 2023, Ring Attention with Blockwise Transformers.
"""

import argparse
import itertools
import math

import torch

import pycoll
from pycoll.parallel import bounds


def ring_attention(q, k, v, comm):
    """Return causal attention of this rank's queries to all keys up to theirs. Collective.

    q, k and v are (batch, heads, length, width), floating-point numbers of one shape: this rank's
    block of the sequence, in the order of the ranks. The lengths of the ranks may differ.
    """
    if q.dim() != 4 or q.shape[2] == 0 or not q.shape == k.shape == v.shape:
        raise ValueError(f"blocks of shapes {[tuple(x.shape) for x in (q, k, v)]}")
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise TypeError(f"blocks of {q.dtype}, {k.dtype} and {v.dtype}")
    return RingAttention.apply(q, k, v, comm)


class RingAttention(torch.autograd.Function):
    """The forward of ring_attention, and its backward."""

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
        travelling = torch.zeros_like(torch.stack([k, v]))
        for block, (kb, vb) in round_the_ring(comm, torch.stack([k, v])):
            if block <= comm.rank:
                weights = torch.exp(scores_of(q, kb, comm.rank, block) - log_total[..., None])
                of_scores = weights * (g @ vb.transpose(-1, -2) - inner) * scale
                dq += of_scores @ kb
                travelling[0] += of_scores.transpose(-1, -2) @ q
                travelling[1] += weights.transpose(-1, -2) @ g
            # The gradients follow their block; after the last step they are where it began.
            if comm.size > 1:
                travelling = comm.sendrecv(travelling, *neighbors(comm), sendtag=1, recvtag=1)
        return dq, travelling[0], travelling[1], None


def scores_of(q, k, query_block, key_block):
    """Return q · k / sqrt(width), (batch, heads, queries, keys); -inf where a key is later."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if query_block == key_block:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def neighbors(comm):
    """Return the ranks on the right and on the left."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def round_the_ring(comm, mine):
    """Yield (whose it is, block) for each rank's block; the next one travels meanwhile."""
    right, left = neighbors(comm)
    for step in range(comm.size):
        moving = []
        if step < comm.size - 1:
            moving = [comm.irecv(left), comm.isend(mine, right)]
        yield (comm.rank - step) % comm.size, mine
        if moving:
            mine = moving[0].wait()
            moving[1].wait()


def compare(comm, length, batch=2, heads=2, width=8, seed=1):
    """Compare with attention on one rank.

    Returns the largest difference, of results and gradients, and the bytes that all ranks sent in
    the forward and in the backward.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, width)
    q, k, v, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    expected.backward(g)

    mine = bounds(length, comm.rank, comm.size)
    parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    sent = [comm.counters().sent_bytes.sum()]
    out = ring_attention(*parts, comm)
    sent.append(comm.counters().sent_bytes.sum())
    out.backward(g[:, :, mine])
    sent.append(comm.counters().sent_bytes.sum())
    pairs = [(out, expected), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]
    worst = max(float((got - x[:, :, mine]).detach().abs().max()) for got, x in pairs)
    forward, backward = (comm.all_reduce(int(b - a)) for a, b in itertools.pairwise(sent))
    return comm.all_reduce(worst, "max"), forward, backward


def main():
    """Compare with one rank, and say what ranks hold and send."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=256, help="tokens, at least one a rank")
    length = parser.parse_args().length
    torch.set_num_threads(1)
    with pycoll.init() as comm:
        if length < comm.size:
            raise SystemExit(f"--length must be at least {comm.size}")
        worst, forward, backward = compare(comm, length)
        if comm.rank == 0:
            many, block = comm.size, -(-length // comm.size)
            print(f"{length} tokens on {many} ranks, {block} each at most")
            print(f"scores held at a time: {block} x {block}, in place of {length} x {length}")
            kv = 2 * 2 * 2 * length * 8 * 8  # bytes of (k and v, batch, heads, length, width)
            forth, both = (many - 1) * kv, (2 * many - 1) * kv * (many > 1)
            print(f"bytes sent by all, forward: {forward:,}; (N - 1) K is {forth:,}")
            print(f"bytes sent by all, backward: {backward:,}; (N - 1) K + N K is {both:,}")
            print(f"largest difference from attention on one rank: {worst:.1e}")
    if not worst < 1e-12:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
