"""Ring attention, of examples/parallel, is attention over the whole sequence."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import run_example
from tiers import sizes

import pycoll

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

Comm = Any
PROGRAM = str(Path(__file__).resolve().parents[2] / "examples/parallel/ring_attention.py")


def load_program(path: str) -> Any:
    """Import the program, on a rank."""
    torch.set_num_threads(1)
    return SimpleNamespace(**runpy.run_path(path))


def draw(seed: int, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, *shape, generator=generator, dtype=torch.float64)


@sizes(1, 2, 3, 4)
def test_results_and_gradients_are_those_of_the_whole_sequence(ranks: Any) -> None:
    def program(comm: Comm, path: str, seed: int) -> None:
        ring = load_program(path).RingAttention
        batch, heads, width, block = 1 + seed % 2, 1 + seed % 3, 2 + seed, 1 + 2 * seed
        q, k, v, g = draw(seed, batch, heads, block * comm.size, width)
        # Scores of some hundreds: exp of them overflows unless the running maximum is taken off.
        q = q * 40.0
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = whole[0] @ whole[1].transpose(-1, -2) / width**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        expected = scores.masked_fill(later, float("-inf")).softmax(-1) @ whole[2]
        expected.backward(g)
        mine = slice(block * comm.rank, block * (comm.rank + 1))
        parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        out = ring.apply(*parts, comm)
        out.backward(g[:, :, mine])
        torch.testing.assert_close(out, expected[:, :, mine], rtol=1e-10, atol=1e-11)
        for part, x in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, x.grad[:, :, mine], rtol=1e-10, atol=1e-11)

    for seed in range(4):
        ranks(program, PROGRAM, seed)


def test_a_killed_rank_fails_the_ring() -> None:
    def program(comm: Comm, path: str) -> None:
        ring_attention = load_program(path)
        ring_attention.compare(comm, 12)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ring_attention.compare(comm, 12)

    with pytest.raises(pycoll.PeerFailed, match="SIGKILL") as raised:
        pycoll.run(program, 3, PROGRAM, timeout=50)
    assert raised.value.rank == 1


def test_the_program_compares_with_one_rank(tmp_path: Path) -> None:
    lines = run_example("parallel/ring_attention.py", 3, tmp_path, "--length", "30").splitlines()
    assert lines[0] == "30 tokens on 3 ranks, 10 each"
    assert float(lines[-1].removeprefix("largest difference from attention on one rank: ")) < 1e-12
