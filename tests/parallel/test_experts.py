"""The layer of experts of examples/parallel computes on many ranks what it does on one."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import run_example
from tiers import sizes

torch = pytest.importorskip("torch")

from pycoll.parallel import bounds  # noqa: E402

pytestmark = pytest.mark.parallel

Comm = Any
PROGRAM = str(Path(__file__).resolve().parents[2] / "examples/parallel/experts.py")


def load_program(path: str) -> Any:
    """Import the program, on a rank."""
    torch.set_num_threads(1)
    return SimpleNamespace(**runpy.run_path(path))


@sizes(1, 2, 3)
@pytest.mark.parametrize("top", [1, 2])
def test_tokens_get_what_their_experts_compute(ranks: Any, top: int) -> None:
    def program(comm: Comm, path: str, top: int, seed: int) -> None:
        layer = load_program(path).expert_layer
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Any:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.requires_grad_()

        many, width, tokens = 4 + seed, 3 + seed, 1 + 5 * seed
        x, router, g = draw(tokens, width), draw(many, width), draw(tokens, width).detach()
        weights = [draw(width, width) for _ in range(many)]
        # The whole, one token and one expert at a time.
        probabilities = (x @ router.T).softmax(-1)
        rows, counts = [], [0] * many
        for row, chances in zip(x, probabilities, strict=True):
            y = row
            for expert in chances.argsort(descending=True)[:top].tolist():
                y = y + chances[expert] * (weights[expert] @ row).tanh()
                counts[expert] += 1
            rows.append(y)
        expected = torch.stack(rows)
        expected.backward(g)

        mine = bounds(tokens, comm.rank, comm.size)
        own = bounds(many, comm.rank, comm.size)
        x_ = x[mine].detach().clone().requires_grad_()
        router_ = router.detach().clone().requires_grad_()
        weights_ = [w.detach().clone().requires_grad_() for w in weights[own]]
        experts = [lambda rows, w=w: (rows @ w.T).tanh() for w in weights_]
        y, _, busy = layer(x_, router_, experts, many, top, comm)
        torch.testing.assert_close(y, expected[mine], rtol=1e-12, atol=1e-12)
        assert comm.all_reduce(busy).tolist() == counts
        y.backward(g[mine])
        torch.testing.assert_close(x_.grad, x.grad[mine], rtol=1e-12, atol=1e-12)
        total = comm.all_reduce(router_.grad)
        torch.testing.assert_close(total, router.grad, rtol=1e-12, atol=1e-12)
        for got, whole in zip(weights_, weights[own], strict=True):
            wanted = torch.zeros_like(whole) if whole.grad is None else whole.grad
            torch.testing.assert_close(got.grad, wanted, rtol=1e-12, atol=1e-12)

    for seed in range(4):
        ranks(program, PROGRAM, top, seed)


def test_the_program_compares_with_one_rank(tmp_path: Path) -> None:
    small = ("--experts", "5", "--top", "2", "--steps", "10", "--batch", "31")
    lines = run_example("parallel/experts.py", 3, tmp_path, *small).splitlines()
    assert sum(map(int, lines[1].partition("[")[2].rstrip("]").split(","))) == 2 * 31
    said = lines[-1].removeprefix("largest relative difference from the losses of one rank: ")
    assert float(said) <= 1e-9
