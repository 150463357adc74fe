"""The transformer of examples/parallel trains on every grid as on one rank."""

from __future__ import annotations

import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_runs import run_example
from patience import PATIENCE
from tiers import sizes
from transformer_program import PROGRAM, load_program

import pycoll

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.parallel

Comm = Any
SMALL = {"layers": 4, "width": 16, "length": 12, "batch": 8, "micro_batches": 2}
STEPS = 50
SAME = "largest relative difference from the losses of one rank: "


def train(comm: Comm, path: str, shape: Any, settings: Any, steps: int, files: Any) -> Any:
    """Train on a grid of the first ranks; the losses."""
    program = load_program(path)
    grid = comm.sub(range(math.prod(shape)))
    if grid is None:
        return None
    trainer = program.Trainer(program.make_grid(grid, shape), program.Settings(**settings))
    load, save = files
    if load:
        trainer.load(load)
    losses = program.train(trainer, steps)
    if save:
        trainer.save(save)
    return losses


def check(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for losses, wanted in zip(got, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-9, abs=0.0)


DENSE, SPARSE = SMALL, {**SMALL, "experts": 5, "top": 2}
ALONE = (1, 1, 1, 1)


@pytest.fixture(scope="module")
def of_one(pools: Any) -> Any:
    """The losses of one rank, without and with experts; the first is that of guessing."""
    both = [pools(1)(train, PROGRAM, ALONE, s, STEPS, (None, None))[0] for s in (DENSE, SPARSE)]
    for losses in both:
        assert losses[0] > 5.0 > 4.0 > losses[-1]
    return both


# Shapes are (data, context, pipeline, tensor).
GRIDS = {
    2: [
        ((2, 1, 1, 1), DENSE, {"zero": 0}),
        ((2, 1, 1, 1), DENSE, {"zero": 1}),
        ((2, 1, 1, 1), DENSE, {"zero": 2}),
        ((2, 1, 1, 1), SPARSE, {"zero": 3}),
        ((1, 2, 1, 1), DENSE, {}),
        ((1, 1, 2, 1), DENSE, {"zero": 0}),
        ((1, 1, 2, 1), DENSE, {"schedule": "interleaved", "stages": 2, "zero": 3}),
        ((1, 1, 1, 2), DENSE, {}),
        ((1, 1, 1, 2), SPARSE, {"sequence": True, "chunks": 3}),
    ],
    3: [
        ((3, 1, 1, 1), DENSE, {"zero": 2}),
        ((1, 3, 1, 1), SPARSE, {"zero": 3}),
        ((1, 1, 3, 1), SPARSE, {}),
        ((1, 1, 1, 3), DENSE, {"chunks": 2}),
    ],
    4: [
        ((2, 1, 2, 1), SPARSE, {"schedule": "interleaved", "stages": 2, "zero": 3}),
        ((2, 2, 1, 1), SPARSE, {"zero": 2}),
        ((1, 2, 1, 2), SPARSE, {"sequence": True, "zero": 3}),
        ((1, 2, 2, 1), DENSE, {"schedule": "gpipe", "zero": 2}),
    ],
    8: [
        ((2, 1, 2, 2), DENSE, {"zero": 1, "sequence": True, "chunks": 2}),
        ((2, 2, 1, 2), SPARSE, {"zero": 3, "sequence": True}),
        ((1, 2, 2, 2), SPARSE, {"zero": 2, "chunks": 2}),
    ],
}


@pytest.mark.parametrize(
    ("ranks", "shape", "settings", "how"),
    [(size, *case) for size, cases in GRIDS.items() for case in cases],
    indirect=["ranks"],
    scope="module",
)
def test_every_grid_has_the_losses_of_one_rank(
    ranks: Any, of_one: Any, shape: Any, settings: Any, how: Any
) -> None:
    far = settings is SPARSE and how.get("zero") == 3 and math.prod(shape) in (2, 8)
    steps = STEPS if far else 8
    got = ranks(train, PROGRAM, shape, {**settings, **how}, steps, (None, None))
    check(got, [of_one[settings is SPARSE][:steps]] * math.prod(shape))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6], indirect=True, scope="module")
def test_random_networks_on_random_grids_have_the_losses_of_one_rank(ranks: Any) -> None:
    """Lengths, batches, layers and experts that nothing divides."""

    def program(comm: Comm, path: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        grids = [s for s in itertools.product(range(1, 7), repeat=4) if math.prod(s) == comm.size]
        shape = grids[random.integers(len(grids))]
        data, context, pipeline, tensor = shape
        tensor = tensor if tensor <= 4 else 1
        shape = (data, context, pipeline, tensor)
        micro_batches = int(random.integers(1, 4))
        sequence = bool(random.integers(2))
        few = (data * context, 2)
        settings = {
            "layers": pipeline + int(random.integers(2)),
            "width": 4 * int(random.integers(1, 4)),
            "length": context * tensor * 2 if sequence else context + int(random.integers(9)),
            "batch": data * micro_batches + int(random.integers(3)),
            "experts": max(few) + int(random.integers(3)) if random.integers(2) else 0,
            "top": int(random.integers(1, 3)),
            "micro_batches": micro_batches,
            "sequence": sequence,
            "chunks": int(random.integers(1, 4)),
            "zero": int(random.integers(4)),
        }
        got = train(comm, path, shape, settings, 3, (None, None))
        expected = train(comm.sub([comm.rank]), path, (1, 1, 1, 1), settings, 3, (None, None))
        assert got is None or got == pytest.approx(expected, rel=1e-9, abs=0.0), (shape, settings)

    for seed in range(3):
        ranks(program, PROGRAM, seed)


@sizes(4)
@pytest.mark.parametrize("settings", [DENSE, SPARSE], ids=["mlp", "experts"])
def test_a_checkpoint_goes_on_with_another_grid(
    ranks: Any, of_one: Any, tmp_path: Path, settings: Any
) -> None:
    files = [str(tmp_path / f"{i}.npz") for i in range(4)]
    runs = [
        ((2, 1, 2, 1), {"zero": 3}, (None, files[0])),
        ((1, 1, 1, 2), {"sequence": True, "zero": 0}, (files[0], files[1])),
        ((1, 1, 3, 1), {"zero": 2}, (files[1], files[2])),
        ((1, 2, 1, 2), {"zero": 2}, (files[2], files[3])),
        ((2, 2, 1, 1), {"zero": 1}, (files[3], None)),
    ]
    losses: list[float] = []
    for shape, how, names in runs:
        losses += ranks(train, PROGRAM, shape, {**settings, **how}, 3, names)[0]
    assert losses == pytest.approx(of_one[settings is SPARSE][:15], rel=1e-9, abs=0.0)


@sizes(2)
def test_what_cannot_be_cut_for_the_grid_is_refused(ranks: Any) -> None:
    def program(comm: Comm, path: str) -> None:
        transformer = load_program(path)
        for shape, settings, text in (
            ((2, 1, 1, 1), {"batch": 3, "micro_batches": 2}, "every micro-batch needs a sequence"),
            ((1, 1, 2, 1), {"layers": 3, "stages": 2}, "3 layers are too few for 4 pipeline"),
            ((1, 1, 1, 2), {"length": 7, "sequence": True}, "not divisible by 2 tensor parallel"),
            ((1, 2, 1, 1), {"length": 1}, "every rank of the context axis needs a token"),
            ((1, 2, 1, 1), {"experts": 1}, "1 experts are too few for 2 ranks"),
            ((1, 2, 1, 1), {"experts": 2, "top": 3}, "2 experts are too few"),
            ((2, 1, 1, 1), {"width": 30}, "width must be divisible by the 4 heads"),
            ((2, 1, 1, 1), {"top": 0}, "top and layers must be at least 1"),
            ((2, 1, 1, 1), {"zero": 4}, "stage=4 is from 0 to 3"),
        ):
            grid = transformer.make_grid(comm, shape)
            with pytest.raises(ValueError, match=text):
                transformer.Trainer(grid, transformer.Settings(**settings))

    ranks(program, PROGRAM)


def test_a_killed_rank_fails_all_others() -> None:
    def program(comm: Comm, path: str) -> Any:
        transformer = load_program(path)
        grid = transformer.make_grid(comm, (2, 2, 1, 1))
        settings = transformer.Settings(**SMALL, experts=4, zero=3)
        trainer = transformer.Trainer(grid, settings)
        transformer.train(trainer, 2)
        if comm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        transformer.train(trainer, 2)

    with pytest.raises(pycoll.PeerFailed, match=r"SIGKILL") as raised:
        pycoll.run(program, 4, PROGRAM, timeout=50 * PATIENCE)
    assert raised.value.rank == 3


def test_the_program_checks_itself_draws_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def run(size: int, *options: str) -> list[str]:
        small = ("--steps", "4", "--layers", "2", "--width", "16", "--length", "8", *options)
        return run_example("parallel/transformer.py", size, tmp_path, *small).splitlines()

    first = run(2, "--grid", "1", "1", "2", "--sequence", "--plot", "a.png", "--save", "a.npz")
    assert first[0].startswith("steps 0 to 4: loss ")
    assert first[-2].startswith("bytes sent in a step by the busiest rank: data 0, context 0, ")
    assert first[-1].startswith("most bytes held by a rank: parameters ")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    second = run(2, "--context", "2", "--zero", "3", "--load", "a.npz", "--slow", "1", "--check")
    assert second[0].startswith("steps 4 to 8: loss ")
    assert float(second[-1].removeprefix(SAME)) <= 1e-9
