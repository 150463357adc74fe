"""Ring attention, of examples/parallel, is attention over the whole sequence."""

from __future__ import annotations

import os
import re
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import run_example
from patience import PATIENCE
from tiers import sizes

import pycoll

torch = pytest.importorskip("torch")

from pycoll.parallel import bounds  # noqa: E402

pytestmark = pytest.mark.parallel

Comm = Any
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "examples/parallel/ring_attention.py")
PAGE = (ROOT / "docs/parallel/sequence.md").read_text(encoding="utf-8")


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
        ring = load_program(path).ring_attention
        batch, heads, width, length = 1 + seed % 2, 1 + seed % 3, 2 + seed, comm.size + 5 * seed
        q, k, v, g = draw(seed, batch, heads, length, width)
        # Scores of some hundreds: exp of them overflows unless the running maximum is taken off.
        q = q * 40.0
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = whole[0] @ whole[1].transpose(-1, -2) / width**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        expected = scores.masked_fill(later, float("-inf")).softmax(-1) @ whole[2]
        expected.backward(g)
        mine = bounds(length, comm.rank, comm.size)
        parts = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
        out = ring(*parts, comm)
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
        pycoll.run(program, 3, PROGRAM, timeout=50 * PATIENCE)
    assert raised.value.rank == 1


@sizes(2)
def test_blocks_that_do_not_fit_are_refused(ranks: Any) -> None:
    def program(comm: Comm, path: str) -> None:
        ring = load_program(path).ring_attention
        x = torch.zeros(1, 2, 3, 4)
        with pytest.raises(ValueError, match="blocks of shapes"):
            ring(x, x[:, :, :2], x, comm)
        with pytest.raises(ValueError, match="blocks of shapes"):
            ring(x[:, :, :0], x[:, :, :0], x[:, :, :0], comm)
        with pytest.raises(TypeError, match=r"blocks of torch\.int64"):
            ring(x.long(), x.long(), x.long(), comm)

    ranks(program, PROGRAM)


def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```console\n\$ .* -n 4 \S+ring_attention\.py\n(.*?)```", PAGE, re.S)
    lines = run_example("parallel/ring_attention.py", 4, tmp_path).splitlines()
    assert lines[:-1] == shown.splitlines()[:-1]
    assert float(lines[-1].removeprefix("largest difference from attention on one rank: ")) < 1e-12
    assert [line.split("; ")[0].split(": ")[1] for line in lines[2:4]] == [
        line.rpartition(" is ")[2] for line in lines[2:4]
    ]
