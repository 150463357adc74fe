"""The layer of experts of examples/parallel computes on many ranks what it does on one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import PYCOLL_RUN, run
from tiers import sizes

torch = pytest.importorskip("torch")

from pycoll.parallel import bounds  # noqa: E402

pytestmark = pytest.mark.parallel

Comm = Any
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "examples/parallel/experts.py")
PAGE = (ROOT / "docs/parallel/experts.md").read_text(encoding="utf-8")


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
        biases = draw(many).detach()
        # The whole, one token and one expert at a time.
        probabilities = (x @ router.T).softmax(-1)
        rows, counts = [], [0] * many
        for row, chances in zip(x, probabilities, strict=True):
            y = torch.zeros_like(row)
            for expert in (chances + biases).argsort(descending=True)[:top].tolist():
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
        y, busy = layer(x_, router_, biases, experts, top, comm)
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


@sizes(2)
def test_what_does_not_fit_is_refused(ranks: Any) -> None:
    def program(comm: Comm, path: str) -> None:
        layer = load_program(path).expert_layer
        x, router, biases = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5)
        experts = [torch.tanh] * (2 + comm.rank)
        for wrong in (
            (x[0], router, biases, experts, 1),
            (x, router[:, :3], biases, experts, 1),
            (x, router, biases[:4], experts, 1),
            (x, router, biases, experts[:1], 1),
            (x, router, biases, experts, 0),
            (x, router, biases, experts, 6),
        ):
            with pytest.raises(ValueError, match=r"have the shapes|are here of 5 experts"):
                layer(*wrong, comm)
        comm.barrier()

    ranks(program, PROGRAM)


def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```console\n\$ .*experts\.py --top 2\n(.*?)```", PAGE, re.S)
    words = (PYCOLL_RUN, "-n", "4", "--transport", "tcp", PROGRAM, "--top", "2")
    lines = run(*words, cwd=tmp_path).splitlines()
    assert lines[:-1] == shown.splitlines()[:-1]
    assert float(lines[-1].removeprefix("largest difference from the layer on one rank: ")) < 1e-12
    for line in lines[1:5]:
        _, _, forward, formula, backward, of_backward = line.split()
        assert (forward, backward) == (formula, of_backward)
