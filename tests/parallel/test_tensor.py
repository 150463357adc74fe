"""The tensor-parallel layers against the whole layer on one process, forward and backward.

Every rank draws the whole tensors from one seed and computes with them alone, too. A result of the
right value is that one's, or this rank's part of it, in float64 but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiers import sizes

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from pycoll.parallel import tensor  # noqa: E402

pytestmark = pytest.mark.parallel

Comm = Any
Tensor = Any
SEEDS = range(4)


def drawing(seed: int) -> tuple[Callable[..., Tensor], Callable[[int, int], int]]:
    """What draws a tensor that wants a gradient, and a number from low to high."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    return values, number


def part(whole: Tensor, axis: int | None, comm: Comm) -> Tensor:
    """This rank's part as a leaf of its own."""
    return tensor.cut(whole.detach(), axis, comm).requires_grad_()


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check_gradient(leaf: Tensor, whole: Tensor, axis: int | None, comm: Comm) -> None:
    check(leaf.grad, tensor.cut(whole.grad, axis, comm))


@sizes(1, 2, 3)
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_what_is_cut_is_joined_again(ranks: Any, axis: int | None) -> None:
    def program(comm: Comm) -> None:
        whole = drawing(7)[0](5, 4, 3)
        mine = tensor.cut(whole, axis, comm)
        if axis is not None:
            lengths = comm.all_gather(mine.shape[axis])
            assert sum(lengths) == whole.shape[axis]
            assert max(lengths) - min(lengths) <= 1
        assert torch.equal(tensor.join(mine, axis, comm), whole)

    ranks(program)


@sizes(2, 3)
def test_f_and_g_are_conjugate(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        values, _ = drawing(1)
        x, g = values(2 * comm.size, 3), values(2 * comm.size, 3).detach()
        mine, total = float(comm.rank + 1), comm.size * (comm.size + 1) / 2
        own = tensor.bounds(2 * comm.size, comm.rank, comm.size)
        for apply, x_in, weight, y_out, x_grad in (
            (tensor.copy_to, x, mine, x * mine, g * total),
            (tensor.reduce_from, x, mine, x * total, g * mine),
            (tensor.gather_sequence, x[own], mine, x * mine, g[own] * total),
            (tensor.reduce_scatter_sequence, x, mine, x[own] * total, g * mine),
        ):
            leaf = x_in.detach().clone().requires_grad_()
            before = apply in (tensor.reduce_from, tensor.reduce_scatter_sequence)
            y = apply(leaf * weight, comm) if before else apply(leaf, comm) * weight
            check(y, y_out)
            y.backward(g[own] if len(y) == 2 else g)
            check(leaf.grad, x_grad)

    ranks(program)


@sizes(1, 2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_pair_of_linear_layers_is_that_of_one_rank(ranks: Any, sequence: bool) -> None:
    def program(comm: Comm, sequence: bool, seed: int) -> None:
        values, number = drawing(seed)
        length = number(1, 4) * comm.size if sequence else number(1, 9)
        batch, n_in, n_out = number(1, 3), number(1, 6), number(1, 6)
        hidden, chunks = number(comm.size, 11), number(1, 5)
        x, w1, b1 = values(length, batch, n_in), values(hidden, n_in), values(hidden)
        w2, b2, g = values(n_out, hidden), values(n_out), values(length, batch, n_out).detach()
        y = functional.linear(functional.gelu(functional.linear(x, w1, b1)), w2, b2)
        y.backward(g)

        along = 0 if sequence else None
        cuts = ((x, along), (w1, 0), (b1, 0), (w2, 1), (b2, None))
        x_, w1_, b1_, w2_, b2_ = (part(whole, axis, comm) for whole, axis in cuts)
        h = functional.gelu(tensor.column_linear(x_, w1_, b1_, comm, sequence=sequence))
        y_ = tensor.row_linear(h, w2_, b2_, comm, sequence=sequence, chunks=chunks)
        check(y_, tensor.cut(y, along, comm))
        y_.backward(tensor.cut(g, along, comm))
        if sequence:
            b2_.grad = comm.all_reduce(b2_.grad)
        for leaf, (whole, axis) in zip((x_, w1_, b1_, w2_, b2_), cuts, strict=True):
            check_gradient(leaf, whole, axis, comm)

    for seed in SEEDS:
        ranks(program, sequence, seed)


@sizes(2)
def test_layers_composed_of_f_and_g_are_the_same(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        values, _ = drawing(3)
        x, w1, w2 = values(4, 2, 3), values(6, 3), values(5, 6)
        results = []
        for composed in (False, True):
            x_, w1_, w2_ = part(x, None, comm), part(w1, 0, comm), part(w2, 1, comm)
            if composed:
                h = functional.linear(tensor.copy_to(x_, comm), w1_)
                y = tensor.reduce_from(functional.linear(h, w2_), comm)
            else:
                y = tensor.row_linear(tensor.column_linear(x_, w1_, None, comm), w2_, None, comm)
            y.sin().sum().backward()
            results.append((y.detach(), x_.grad, w1_.grad, w2_.grad))
        for one, other in zip(*results, strict=True):
            check(one, other)

    ranks(program)


@sizes(1, 2, 3)
@pytest.mark.parametrize("sequence", [False, True])
def test_an_embedding_whose_rows_are_cut_is_the_whole_one(ranks: Any, sequence: bool) -> None:
    def program(comm: Comm, sequence: bool, seed: int) -> None:
        values, number = drawing(seed)
        vocabulary, length = number(comm.size, 13), number(1, 4) * comm.size
        table = values(vocabulary, number(1, 5))
        tokens = torch.tensor([[number(0, vocabulary - 1)] * 2 for _ in range(length)])
        y = functional.embedding(tokens, table)
        g = values(*y.shape).detach()
        y.backward(g)

        along = 0 if sequence else None
        table_ = part(table, 0, comm)
        y_ = tensor.vocabulary_embedding(tokens, table_, vocabulary, comm, sequence=sequence)
        check(y_, tensor.cut(y, along, comm))
        y_.backward(tensor.cut(g, along, comm))
        check_gradient(table_, table, 0, comm)

    for seed in SEEDS:
        ranks(program, sequence, seed)


@sizes(1, 2, 3)
def test_cross_entropy_of_cut_logits_is_that_of_the_whole(ranks: Any) -> None:
    def program(comm: Comm, seed: int) -> None:
        values, number = drawing(seed)
        vocabulary, length, batch = number(comm.size, 13), number(1, 7), number(1, 3)
        # So large that exp of them, or of their difference from another rank's largest, overflows.
        logits = (values(length, batch, vocabulary).detach() * 600.0).requires_grad_()
        targets = torch.tensor([[number(0, vocabulary - 1)] * batch for _ in range(length)])
        flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        g = values(length, batch).detach()
        flat.view(length, batch).backward(g)

        logits_ = part(logits, -1, comm)
        loss = tensor.vocabulary_cross_entropy(logits_, targets, vocabulary, comm)
        check(loss, flat.view(length, batch))
        loss.backward(g)
        check_gradient(logits_, logits, -1, comm)

    for seed in SEEDS:
        ranks(program, seed)


RING = {"PYCOLL_ALGORITHM": "all_reduce:ring;all_gather:ring;reduce_scatter:ring"}


@pytest.mark.parametrize(
    "ranks", [(2, (), RING), (3, (), RING)], ids=["2", "3"], indirect=True, scope="module"
)
@pytest.mark.parametrize(("sequence", "shares"), [(False, 4), (True, 5)])
def test_a_pair_sends_the_bytes_of_the_papers(ranks: Any, sequence: bool, shares: int) -> None:
    """Two all_reduces; or two pairs of all_gather and reduce_scatter, and x gathered again."""

    def program(comm: Comm, sequence: bool, shares: int) -> None:
        values, _ = drawing(5)
        length, batch, width, hidden = 6 * comm.size, 2, 5, 12
        x, w1, w2 = values(length, batch, width), values(hidden, width), values(width, hidden)
        x_ = part(x, 0 if sequence else None, comm)
        w1_, w2_ = part(w1, 0, comm), part(w2, 1, comm)
        before = comm.counters().sent_bytes.sum()
        h = tensor.column_linear(x_, w1_, None, comm, sequence=sequence)
        y = tensor.row_linear(h, w2_, None, comm, sequence=sequence, chunks=3)
        y.backward(y.detach().clone())
        sent = comm.counters().sent_bytes.sum() - before
        assert sent == shares * (comm.size - 1) * x.numel() * 8 // comm.size

    ranks(program, sequence, shares)


@sizes(2)
def test_what_cannot_be_cut_is_refused_before_anything_is_sent(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x, w = torch.zeros(3, 1, 2), torch.zeros(2, 2)
        with pytest.raises(ValueError, match="an axis of length 1 cannot be cut for 2 ranks"):
            tensor.cut(torch.zeros(3, 1), 1, comm)
        with pytest.raises(ValueError, match="a sequence of 3 is not divisible by 2 ranks"):
            tensor.reduce_scatter_sequence(x, comm)
        with pytest.raises(ValueError, match="a sequence of 3 is not divisible by 2 ranks"):
            tensor.row_linear(x, w, None, comm, sequence=True)
        with pytest.raises(ValueError, match="chunks must be at least 1, not 0"):
            tensor.row_linear(x, w, None, comm, chunks=0)
        comm.barrier()

    ranks(program)
