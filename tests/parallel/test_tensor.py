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

import pycoll  # noqa: E402
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


def cut(whole: Tensor, axis: int | None, comm: Comm) -> Tensor:
    if axis is None:
        return whole.detach().clone()
    return (
        whole.detach()
        .tensor_split(
            [tensor.bounds(whole.shape[axis], i, comm.size).stop for i in range(comm.size - 1)],
            axis,
        )[comm.rank]
        .clone()
    )


def part(whole: Tensor, axis: int | None, comm: Comm) -> Tensor:
    """This rank's part as a leaf of its own."""
    return cut(whole, axis, comm).requires_grad_()


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check_gradient(leaf: Tensor, whole: Tensor, axis: int | None, comm: Comm) -> None:
    check(leaf.grad, cut(whole.grad, axis, comm))


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (7, 3), (3, 5), (256, 4)])
def test_parts_cover_everything_and_are_equal_but_for_one(count: int, parts: int) -> None:
    cuts = [tensor.bounds(count, i, parts) for i in range(parts)]
    assert [i for one in cuts for i in range(count)[one]] == list(range(count))
    lengths = [one.stop - one.start for one in cuts]
    assert max(lengths) - min(lengths) <= 1


@sizes(2, 3)
def test_f_and_g_are_conjugate(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        values, _ = drawing(1)
        x, g = values(2 * comm.size, 3), values(2 * comm.size, 3).detach()
        mine, total = float(comm.rank + 1), comm.size * (comm.size + 1) / 2
        own = tensor.bounds(2 * comm.size, comm.rank, comm.size)
        copy_to, reduce_from = tensor.copy_to, tensor.reduce_from
        for apply, sequence, x_in, weight, y_out, x_grad in (
            (copy_to, False, x, mine, x * mine, g * total),
            (reduce_from, False, x, mine, x * total, g * mine),
            (copy_to, True, x[own], mine, x * mine, g[own] * total),
            (reduce_from, True, x, mine, x[own] * total, g * mine),
        ):
            leaf = x_in.detach().clone().requires_grad_()
            before = apply is reduce_from
            y = apply(leaf * weight if before else leaf, comm, sequence=sequence)
            y = y if before else y * weight
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
        check(y_, cut(y, along, comm))
        y_.backward(cut(g, along, comm))
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
def test_wrong_arguments_are_refused_at_the_callers_line(ranks: Any) -> None:
    def program(comm: Comm) -> None:
        x, w = torch.zeros(3, 1, 2), torch.zeros(2, 2)
        column, row, f, g = (
            tensor.column_linear,
            tensor.row_linear,
            tensor.copy_to,
            tensor.reduce_from,
        )
        cases: list[tuple[type[Exception], str, Any]] = [
            (
                ValueError,
                "axis 0 of (3, 1, 2) is not divisible by 2 ranks",
                lambda: g(x, comm, sequence=True),
            ),
            (
                ValueError,
                "axis 0 of (3, 1, 2) is not divisible by 2 ranks",
                lambda: row(x, w, None, comm, sequence=True),
            ),
            (
                ValueError,
                "axis 0 of () is not divisible by 2 ranks",
                lambda: g(x.sum(), comm, sequence=True),
            ),
            (
                ValueError,
                "chunks is an integer of at least 1, not 0",
                lambda: row(x, w, None, comm, chunks=0),
            ),
            (
                ValueError,
                "chunks is an integer of at least 1, not 1.5",
                lambda: row(x, w, None, comm, chunks=1.5),
            ),
            (
                ValueError,
                "shapes do not fit: (3, 1, 2), (2, 3)",
                lambda: column(x, w.new_zeros(2, 3), None, comm),
            ),
            (
                ValueError,
                "shapes do not fit: (3, 1, 2), (2, 2), (3,)",
                lambda: column(x, w, w.new_zeros(3), comm),
            ),
            (ValueError, "shapes do not fit: (2,), (2, 2)", lambda: row(w[0], w, None, comm)),
            (
                TypeError,
                "floating-point dtype are needed, not torch.int64",
                lambda: f(x.long(), comm),
            ),
            (
                TypeError,
                "floating-point dtype are needed, not torch.float64",
                lambda: row(x, w.double(), None, comm),
            ),
            (
                TypeError,
                "floating-point dtype are needed, not list",
                lambda: column([1.0], w, None, comm),
            ),
            (TypeError, "comm is a communicator, not int", lambda: f(x, 2)),
            (ValueError, "7 things in 2 parts have no part 2", lambda: tensor.bounds(7, 2, 2)),
        ]
        for kind, text, call in cases:
            with pytest.raises(kind) as raised:
                call()
            assert text in str(raised.value)
            assert raised.traceback[-1].path.name == "test_tensor.py", text
        comm.barrier()

    ranks(program)


@sizes(2)
def test_ranks_that_disagree_get_an_error(ranks: Any) -> None:
    def program(comm: Comm) -> list[str]:
        width = 2 + comm.rank
        calls = [
            lambda one: tensor.row_linear(torch.zeros(4, 1, 2), torch.zeros(width, 2), None, one),
            lambda one: tensor.reduce_from(torch.zeros(4, 2), one, sequence=one.rank == 0),
            lambda one: tensor.copy_to(torch.zeros(width, 2), one, sequence=True),
        ]
        errors = []
        for call in calls:
            with comm.dup() as one:
                try:
                    call(one)
                except pycoll.Error as exc:
                    errors.append(type(exc).__name__)
        return errors

    assert ranks(program) == [["MismatchError"] * 3] * 2
