"""The transformer of examples/parallel trains on every grid as on one rank."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import run_example
from tiers import sizes

import pycoll

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.parallel

Comm = Any
PROGRAM = str(Path(__file__).resolve().parents[2] / "examples/parallel/transformer.py")
SMALL = {"layers": 4, "width": 16, "length": 12, "batch": 8, "micro_batches": 2}
STEPS = 50
SAME = "largest relative difference from the losses of one rank: "


def load_program(path: str) -> Any:
    """Import the program, on a rank, once."""
    if "transformer" in sys.modules:
        return sys.modules["transformer"]
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("transformer", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["transformer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(comm: Comm, path: str, shape: Any, settings: Any, steps: int, files: Any) -> Any:
    """Train on a grid of the first ranks; the losses."""
    program = load_program(path)
    grid = comm.sub(range(shape[0] * shape[1] * shape[2]))
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


@pytest.fixture(scope="module")
def of_one(pools: Any) -> Any:
    """The losses of one rank; the first is that of guessing, the last much better."""
    losses = pools(1)(train, PROGRAM, (1, 1, 1), SMALL, STEPS, (None, None))[0]
    assert losses[0] > 5.0 > 4.0 > losses[-1]
    return losses


GRIDS_OF_2 = [
    ((2, 1, 1), {}),
    ((2, 1, 1), {"zero": True}),
    ((1, 2, 1), {}),
    ((1, 2, 1), {"schedule": "interleaved", "stages": 2}),
    ((1, 1, 2), {}),
    ((1, 1, 2), {"sequence": True, "chunks": 3}),
]


@sizes(2)
@pytest.mark.parametrize(("shape", "how"), GRIDS_OF_2)
def test_two_ranks_have_the_losses_of_one(ranks: Any, of_one: Any, shape: Any, how: Any) -> None:
    check(ranks(train, PROGRAM, shape, {**SMALL, **how}, STEPS, (None, None)), [of_one] * 2)


@sizes(3)
@pytest.mark.parametrize(
    ("shape", "how"),
    [((3, 1, 1), {"zero": True}), ((1, 3, 1), {}), ((1, 1, 3), {"chunks": 2})],
)
def test_uneven_parts_have_the_losses_of_one(ranks: Any, of_one: Any, shape: Any, how: Any) -> None:
    check(ranks(train, PROGRAM, shape, {**SMALL, **how}, STEPS, (None, None)), [of_one] * 3)


@sizes(8)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_a_grid_of_eight_has_the_losses_of_one(
    ranks: Any, of_one: Any, sequence: bool, zero: bool
) -> None:
    how = {**SMALL, "sequence": sequence, "zero": zero, "chunks": 2}
    check(ranks(train, PROGRAM, (2, 2, 2), how, STEPS, (None, None)), [of_one] * 8)


@sizes(4)
def test_a_checkpoint_goes_on_with_another_grid(ranks: Any, of_one: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{i}.npz") for i in range(3)]
    runs = [
        ((2, 2, 1), {"zero": True}, (None, files[0])),
        ((1, 1, 2), {"sequence": True}, (files[0], files[1])),
        ((1, 3, 1), {}, (files[1], files[2])),
        ((2, 1, 2), {"zero": True}, (files[2], None)),
    ]
    losses: list[float] = []
    for shape, how, names in runs:
        losses += ranks(train, PROGRAM, shape, {**SMALL, **how}, 6, names)[0]
    assert losses == pytest.approx(of_one[:24], rel=1e-9, abs=0.0)


@sizes(2)
def test_what_cannot_be_cut_for_the_grid_is_refused(ranks: Any) -> None:
    def program(comm: Comm, path: str) -> None:
        transformer = load_program(path)
        grid = transformer.make_grid(comm, (2, 1, 1))
        with pytest.raises(ValueError, match="make batch larger"):
            transformer.Trainer(grid, transformer.Settings(batch=3, micro_batches=2))
        grid = transformer.make_grid(comm, (1, 2, 1))
        with pytest.raises(ValueError, match="3 layers are too few for 4 pipeline stages"):
            transformer.Trainer(grid, transformer.Settings(layers=3, stages=2))

    ranks(program, PROGRAM)


def test_a_killed_rank_fails_all_others() -> None:
    def program(comm: Comm, path: str) -> Any:
        transformer = load_program(path)
        grid = transformer.make_grid(comm, (2, 1, 2))
        trainer = transformer.Trainer(grid, transformer.Settings(**SMALL, zero=True))
        transformer.train(trainer, 2)
        if comm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        transformer.train(trainer, 2)

    with pytest.raises(pycoll.PeerFailed, match=r"SIGKILL") as raised:
        pycoll.run(program, 4, PROGRAM, timeout=50)
    assert raised.value.rank == 3


def test_the_program_checks_itself_saves_and_goes_on(tmp_path: Path) -> None:
    def run(size: int, *options: str) -> list[str]:
        small = ("--steps", "4", "--layers", "2", "--width", "16", "--length", "8", *options)
        return run_example("parallel/transformer.py", size, tmp_path, *small).splitlines()

    sent = "bytes sent in a step by the busiest rank: dp "
    first = run(2, "--grid", "1", "1", "2", "--sequence", "--check", "--save", "a.npz")
    assert first[0].startswith("steps 0 to 4: loss ")
    assert first[-2].startswith(sent)
    assert float(first[-1].removeprefix(SAME)) <= 1e-9
    second = run(3, "--zero", "--load", "a.npz", "--slow", "1", "--check")
    assert second[0].startswith("steps 4 to 8: loss ")
    assert float(second[-1].removeprefix(SAME)) <= 1e-9
