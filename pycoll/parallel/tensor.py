"""Tensor parallelism in PyTorch: the layers of one network, cut over the ranks of a communicator.

Activations are ``(sequence, batch, width)``. A pair of linear layers is cut so that nothing moves
between the two: the first by its outputs ("column"), the second by its inputs ("row"). What
surrounds the pair are the conjugate operators f and g of Megatron-LM (Shoeybi et al. 2019,
section 3):

                       ┌ x A₁ ─ gelu ─ · B₁ ┐            f: forward nothing,    backward all_reduce
        x ───── f ─────┤                    ├─ g ── y
                       └ x A₂ ─ gelu ─ · B₂ ┘            g: forward all_reduce, backward nothing

With ``sequence=True`` each rank has a part of the sequence outside of such pairs, where layer norm
is (Korthikanti et al. 2022, section 4.2.2). Then f is an all_gather, whose backward is a
reduce_scatter, and g the reverse of that; an all_reduce costs as much as both.

All of it is collective over `comm`, forward and backward. Widths need not be divisible by the
number of ranks; a sequence that is cut must be. What does not fit is a TypeError or a ValueError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pycoll import Communicator
from pycoll._support.public_edge import edge


@edge
def bounds(count: int, part: int, parts: int) -> slice:
    """The `part`-th of `parts` slices of ``range(count)``, whose lengths differ by at most 1."""
    if count < 0 or not 0 <= part < parts:
        raise ValueError(f"{count} things in {parts} parts have no part {part}")
    return slice(count * part // parts, count * (part + 1) // parts)


@edge
def copy_to(x: Tensor, comm: Communicator, *, sequence: bool = False) -> Tensor:
    """f: `x`, the same on all ranks; or, if `sequence`, the whole of which each rank has a part.

    A weight that each rank uses for its part of the result passes it, too: gradients are summed.
    """
    _check(comm, x)
    there, back = (_gather, _scatter) if sequence else (_nothing, _sum)
    return _Conjugate.apply(x, comm, there, back) if comm.size > 1 else x


@edge
def reduce_from(x: Tensor, comm: Communicator, *, sequence: bool = False) -> Tensor:
    """g: the sum of the ranks' `x`; if `sequence`, this rank's part of it."""
    _check(comm, x)
    if sequence:
        _pieces(x, comm)
    there, back = (_scatter, _gather) if sequence else (_sum, _nothing)
    return _Conjugate.apply(x, comm, there, back) if comm.size > 1 else x


@edge
def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, *, sequence: bool = False
) -> Tensor:
    """f, then a linear layer cut by its outputs: this rank's columns of ``x @ whole.T + bias``.

    Args:
        x: ``(sequence, batch, inputs)``, the same on all ranks; this rank's part of the sequence
            if `sequence`. Then it alone is kept for the backward, which gathers the whole again.
        weight: ``(outputs / size, inputs)``, this rank's rows of the whole. So is `bias`, or None.
    """
    _check_linear(x, weight, bias, comm)
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
    """A linear layer cut by its inputs, then g: ``whole_x @ whole.T + bias``.

    Args:
        x: ``(sequence, batch, inputs / size)``, as `column_linear` returns it.
        weight: ``(outputs, inputs / size)``.
        bias: the whole one, or None.
        chunks: the product is computed in so many parts, along the sequence. The sum of one goes
            on while the next is computed.
    """
    _check_linear(x, weight, bias, comm)
    if chunks < 1 or not isinstance(chunks, int):
        raise ValueError(f"chunks is an integer of at least 1, not {chunks}")
    if sequence:
        _pieces(x, comm)
        bias = None if bias is None else copy_to(bias, comm)
    y: Tensor = _Row.apply(x, weight, comm, sequence, chunks)
    return y if bias is None else y + bias


def _check(comm: Any, *tensors: Any) -> None:
    if not hasattr(comm, "all_reduce"):
        raise TypeError(f"comm is a communicator, not {type(comm).__name__}")
    for x in tensors:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        if not isinstance(x, Tensor) or x.dtype != tensors[0].dtype or not x.is_floating_point():
            raise TypeError(f"tensors of one floating-point dtype are needed, not {kind}")


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator) -> None:
    tensors = [x, weight] if bias is None else [x, weight, bias]
    _check(comm, *tensors)
    fits = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"shapes do not fit: {', '.join(str(tuple(t.shape)) for t in tensors)}")


def _pieces(x: Tensor, comm: Communicator) -> Tensor:
    """View a whole sequence as the parts of all ranks."""
    if x.dim() == 0 or x.shape[0] % comm.size:
        raise ValueError(f"axis 0 of {tuple(x.shape)} is not divisible by {comm.size} ranks")
    return x.reshape(comm.size, x.shape[0] // comm.size, *x.shape[1:])


def _nothing(x: Tensor, comm: Communicator) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, comm: Communicator) -> Tensor:
    return comm.all_reduce(x)


def _gather(x: Tensor, comm: Communicator) -> Tensor:
    return comm.all_gather(x).flatten(0, 1)


def _scatter(x: Tensor, comm: Communicator) -> Tensor:
    return comm.reduce_scatter(_pieces(x, comm))


class _Conjugate(torch.autograd.Function):
    """One function of the forward, its transpose of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, there: Any, back: Any) -> Tensor:
        ctx.comm, ctx.back = comm, back
        return there(x, comm)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(g, ctx.comm), None, None, None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, sequence: bool) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)
        return functional.linear(_gather(x, comm) if sequence else x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.sequence:
            gathering = ctx.comm.iall_gather(x)
            summing = ctx.comm.ireduce_scatter(_pieces(g @ weight, ctx.comm))
            x = gathering.wait().flatten(0, 1)
        else:
            summing = ctx.comm.iall_reduce(g @ weight)
        of_weight = torch.einsum("...o,...i->oi", g, x)  # meanwhile
        return summing.wait(), of_weight, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, comm: Communicator, sequence: bool, chunks: int
    ) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)
        length = x.shape[0] // comm.size if sequence else x.shape[0]
        chunks = min(chunks, max(length, 1))
        ctx.parts = [bounds(length, i, chunks) for i in range(chunks)]
        y = x.new_empty(length, *x.shape[1:-1], weight.shape[0])
        requests = []
        for part in ctx.parts:
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
            return g @ weight, torch.einsum("...o,...i->oi", g, x), None, None, None
        pieces = _pieces(x, ctx.comm)
        of_pieces, of_weight = x.new_empty(pieces.shape), torch.zeros_like(weight)
        requests = [ctx.comm.iall_gather(g[part]) for part in ctx.parts]
        for part, request in zip(ctx.parts, requests, strict=True):
            whole = request.wait()
            of_pieces[:, part] = whole @ weight
            of_weight += torch.einsum("...o,...i->oi", whole, pieces[:, part])
        return of_pieces.flatten(0, 1), of_weight, None, None, None
