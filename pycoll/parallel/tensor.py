"""Tensor parallelism in PyTorch: the layers of one network, cut over the ranks of a communicator.

Activations are ``(sequence, batch, width)``. A pair of linear layers is cut so that nothing moves
between the two: the first by its outputs ("column"), the second by its inputs ("row"). What
surrounds the pair are the conjugate operators f and g of Megatron-LM (Shoeybi et al. 2019,
section 3):

                       ┌ x A₁ ─ gelu ─ · B₁ ┐            f: forward nothing,    backward all_reduce
        x ───── f ─────┤                    ├─ g ── y
                       └ x A₂ ─ gelu ─ · B₂ ┘            g: forward all_reduce, backward nothing

With ``sequence=True`` also the layers around such a pair (layer norm, dropout) are cut, by the
sequence: each rank has ``sequence / size`` of it there (Korthikanti et al. 2022, section 4.2.2).
Then f is an all_gather, whose backward is a reduce_scatter, and g the reverse of that; an
all_reduce costs as much as both, so no more bytes move, and a rank keeps 1/size of the activations.

Every function is collective over `comm`, forward and backward. Widths and vocabularies need not be
divisible by the number of ranks; a sequence that is cut must be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pycoll import Communicator
from pycoll._support.public_edge import edge


def bounds(count: int, part: int, parts: int) -> slice:
    """The `part`-th of `parts` slices of ``range(count)``, whose lengths differ by at most 1."""
    return slice(count * part // parts, count * (part + 1) // parts)


@edge
def cut(whole: Tensor, axis: int | None, comm: Communicator) -> Tensor:
    """Return a copy of this rank's part of a whole tensor, cut along `axis`; of all, if None.

    Raises:
        ValueError: there are fewer of that axis than ranks.
    """
    if axis is None:
        return whole.clone()
    count = whole.shape[axis]
    if count < comm.size:
        raise ValueError(f"an axis of length {count} cannot be cut for {comm.size} ranks")
    mine = bounds(count, comm.rank, comm.size)
    return whole.narrow(axis, mine.start, mine.stop - mine.start).clone()


@edge
def join(part: Tensor, axis: int | None, comm: Communicator) -> Tensor:
    """Return the whole tensor, on every rank: the reverse of `cut`."""
    if axis is None or comm.size == 1:
        return part
    return torch.cat(comm.all_gatherv(part.contiguous()), dim=axis)


@edge
def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """f: each rank goes on with `x`; backward, the gradients of the ranks are summed.

    Cost: backward all_reduce of x: 2 (size - 1) / size bytes of it sent by each rank.
    """
    return _Copy.apply(x, comm) if comm.size > 1 else x


@edge
def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """g: the sum of the ranks' `x`; backward, each has the gradient of the sum.

    Cost: forward all_reduce of x.
    """
    return _Reduce.apply(x, comm) if comm.size > 1 else x


@edge
def gather_sequence(x: Tensor, comm: Communicator) -> Tensor:
    """F with sequence parallelism: the whole sequence; backward, summed gradients of this part.

    Args:
        x: ``(sequence / size, ...)``.

    Cost: all_gather, backward reduce_scatter: each (size - 1) / size of the whole's bytes.
    """
    return _Gather.apply(x, comm) if comm.size > 1 else x


@edge
def reduce_scatter_sequence(x: Tensor, comm: Communicator) -> Tensor:
    """G with sequence parallelism: this rank's part of the sum of the ranks' `x`.

    Args:
        x: ``(sequence, ...)``.

    Cost: reduce_scatter, backward all_gather.

    Raises:
        ValueError: the sequence is not divisible by the number of ranks.
    """
    _pieces(x, comm)
    return _ReduceScatter.apply(x, comm) if comm.size > 1 else x


@edge
def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, *, sequence: bool = False
) -> Tensor:
    """This rank's columns of ``x @ whole.T + bias``: f, then a linear layer cut by its outputs.

    Backward, what f does goes on behind the matrix product for the weight.

    Args:
        x: ``(sequence, batch, inputs)``, the same on all ranks; this rank's part of the sequence
            if `sequence`. Then it alone is kept for the backward, which gathers the whole again.
        weight: ``cut(whole, 0, comm)``: ``(outputs / size, inputs)``.
        bias: ``cut(whole_bias, 0, comm)`` or None.

    Returns:
        ``(sequence, batch, outputs / size)``.
    """
    y: Tensor = _Column.apply(x, weight, comm, sequence)
    return y if bias is None else y + bias


@edge
def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm: Communicator,
    *,
    sequence: bool = False,
    chunks: int = 1,
) -> Tensor:
    """``whole_x @ whole.T + bias``, where each rank has some of the inputs: a linear layer, then g.

    Args:
        x: ``(sequence, batch, inputs / size)``, as `column_linear` returns it.
        weight: ``cut(whole, 1, comm)``: ``(outputs, inputs / size)``.
        bias: the whole one, added after the sum; or None. With `sequence` its gradient is that of
            this rank's part of the sequence: sum it over the ranks.
        chunks: the product is computed in so many parts, along the sequence. The sum of one goes
            on while the next is computed.

    Returns:
        ``(sequence, batch, outputs)``; this rank's part of the sequence if `sequence`.

    Raises:
        ValueError: chunks is less than 1, or `sequence` and the sequence is not divisible by the
            number of ranks.
    """
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, not {chunks}")
    if sequence:
        _pieces(x, comm)
    y: Tensor = _Row.apply(x, weight, comm, sequence, chunks)
    return y if bias is None else y + bias


@edge
def vocabulary_embedding(
    tokens: Tensor, table: Tensor, vocabulary: int, comm: Communicator, *, sequence: bool = False
) -> Tensor:
    """The rows of a table of which each rank has a part: ``whole[tokens]``, then g.

    Args:
        tokens: integers below `vocabulary`, ``(sequence, batch)``, the same on all ranks.
        table: ``cut(whole, 0, comm)``.

    Returns:
        ``(sequence, batch, width)``; this rank's part of the sequence if `sequence`.
    """
    elsewhere, local = _local(tokens, vocabulary, comm)
    rows = functional.embedding(local, table).masked_fill(elsewhere[..., None], 0.0)
    return reduce_scatter_sequence(rows, comm) if sequence else reduce_from(rows, comm)


@edge
def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator
) -> Tensor:
    """-log softmax(whole logits)[targets], of logits of which each rank has some columns.

    Three numbers for each token are reduced, instead of its whole row of logits.

    Args:
        logits: ``(..., vocabulary / size)``, as `column_linear` returns it.
        targets: integers below `vocabulary`, ``(...)``.

    Returns:
        One loss for each token, ``(...)``, the same on all ranks.
    """
    return _CrossEntropy.apply(logits, targets, vocabulary, comm)


def _local(tokens: Tensor, vocabulary: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return where tokens are other ranks', and the rows of the others in this rank's part."""
    mine = bounds(vocabulary, comm.rank, comm.size)
    elsewhere = (tokens < mine.start) | (tokens >= mine.stop)
    return elsewhere, (tokens - mine.start).masked_fill(elsewhere, 0)


def _pieces(x: Tensor, comm: Communicator) -> Tensor:
    """View a whole sequence as the parts of all ranks."""
    if x.shape[0] % comm.size:
        raise ValueError(f"a sequence of {x.shape[0]} is not divisible by {comm.size} ranks")
    return x.reshape(comm.size, x.shape[0] // comm.size, *x.shape[1:])


def _weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    return g.flatten(0, -2).T @ x.flatten(0, -2)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(g), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter(_pieces(g, ctx.comm)), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(_pieces(x, comm))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(g).flatten(0, 1), None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, sequence: bool) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)
        return functional.linear(comm.all_gather(x).flatten(0, 1) if sequence else x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence:
            gathering = ctx.comm.iall_gather(x)
            summing = ctx.comm.ireduce_scatter(_pieces(g @ weight, ctx.comm))
            x = gathering.wait().flatten(0, 1)
        else:
            summing = ctx.comm.iall_reduce(g @ weight)
        of_weight = _weight_gradient(g, x)  # meanwhile
        return summing.wait(), of_weight, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, sequence: bool, chunks: int
    ) -> Tensor:
        ctx.comm, ctx.sequence, ctx.chunks = comm, sequence, chunks
        ctx.save_for_backward(x, weight)
        length = x.shape[0] // comm.size if sequence else x.shape[0]
        y = x.new_empty(length, *x.shape[1:-1], weight.shape[0])
        requests = []
        for part in _chunks(length, chunks):
            if sequence:  # of every rank's part of the sequence a piece
                product = functional.linear(_pieces(x, comm)[:, part], weight)
                requests.append(comm.ireduce_scatter(product, out=y[part]))
            else:
                requests.append(comm.iall_reduce(functional.linear(x[part], weight), out=y[part]))
        for request in requests:
            request.wait()
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        if not ctx.sequence:
            return g @ weight, _weight_gradient(g, x), None, None, None
        parts = _chunks(g.shape[0], ctx.chunks)
        pieces = _pieces(x, ctx.comm)
        of_pieces, of_weight = x.new_empty(pieces.shape), torch.zeros_like(weight)
        requests = [ctx.comm.iall_gather(g[part]) for part in parts]
        for part, request in zip(parts, requests, strict=True):
            whole = request.wait()
            of_pieces[:, part] = whole @ weight
            of_weight += _weight_gradient(whole, pieces[:, part])
        return of_pieces.flatten(0, 1), of_weight, None, None, None


def _chunks(length: int, chunks: int) -> list[slice]:
    parts = [bounds(length, i, chunks) for i in range(chunks)]
    return [part for part in parts if part.start < part.stop]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator
    ) -> Tensor:
        elsewhere, local = _local(targets, vocabulary, comm)
        largest = comm.all_reduce(logits.amax(-1), "max")
        shifted = logits - largest[..., None]
        own = shifted.gather(-1, local[..., None])[..., 0].masked_fill(elsewhere, 0.0)
        powers = shifted.exp()
        total, target = comm.all_reduce(torch.stack([powers.sum(-1), own]))
        ctx.save_for_backward(powers / total[..., None], elsewhere, local)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, elsewhere, local = ctx.saved_tensors
        hot = torch.zeros_like(probabilities)
        hot.scatter_(-1, local[..., None], (~elsewhere)[..., None].to(hot.dtype))
        return (probabilities - hot) * g[..., None], None, None, None
