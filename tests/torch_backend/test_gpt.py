"""examples/torch_gpt.py learns the same however it is run, and goes on after it was killed."""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import EXAMPLES
from patience import PATIENCE
from script_jobs import RUN
from torch_groups import process_group
from transformer_program import load_program

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.torch

PROGRAM = str(EXAMPLES / "torch_gpt.py")
LIMIT_S = 60 * PATIENCE
SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 16, "batch": 6, "rate": 0.02}
SHORT = {**SMALL, "steps": 6, "every": 2, "write": 3}

Comm = Any


def train(comm: Comm, path: str, backend: str = "pycoll", **more: Any) -> Any:
    """The losses of each step, and those of validation by step."""
    program = load_program(path)
    with process_group(comm, backend):
        settings = {"parallel": "ddp", "checkpoint": None, **SHORT, **more}
        return program.train(argparse.Namespace(**settings))


def train_alone(comm: Comm, path: str) -> Any:
    with comm.sub([comm.rank]) as alone:
        losses, validation = train(alone, path)
    assert [step for step, _ in validation] == [2, 4, 6]
    assert losses[0] == pytest.approx(5.55, abs=0.05)  # that of guessing, log(256)
    assert min(losses[3:]) < losses[0] - 0.5  # it learns
    return losses, validation


def check(got: Any, expected: Any) -> None:
    """The losses are the same, but for rounding in float32."""
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=0.0)


def train_in_each_way(comm: Comm, path: str) -> None:
    expected = train_alone(comm, path)
    for backend, parallel in itertools.product(("pycoll", "gloo"), ("ddp", "fsdp")):
        check(train(comm, path, backend, parallel=parallel), expected)


@pytest.mark.parametrize("ranks", [3], indirect=True, scope="module")
def test_the_losses_are_those_of_one_process(ranks: Any) -> None:
    ranks(train_in_each_way, PROGRAM)


class Interrupted(Exception):
    pass


def train_until(last: int, comm: Comm, path: str, **more: Any) -> None:
    """Train, and be interrupted after so many steps; those of other programs counted, too."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    made = 0

    def interrupt(optimizer: Any, *_: Any) -> None:
        nonlocal made
        made += bool(optimizer.param_groups[0]["lr"])  # of 0: when a state is made, to be filled
        if made == last:
            raise Interrupted

    hook = register_optimizer_step_post_hook(interrupt)
    with pytest.raises(Interrupted):
        train(comm, path, **more)
    hook.remove()


def go_on_in_another_way(comm: Comm, path: str, folder: str) -> None:
    expected = train_alone(comm, path)
    train_until(3, comm, path, checkpoint=Path(folder))
    train_until(3, comm, path, checkpoint=Path(folder), parallel="fsdp")  # of 2, 3 and 4
    comm.barrier()
    if comm.rank == 0:
        assert sorted(at.name[-1] for at in Path(folder).iterdir()) == ["2", "4"]
        with comm.sub([0]) as alone:
            check(train(alone, path, checkpoint=Path(folder)), expected)
    comm.barrier()
    got = train(comm, path, checkpoint=Path(folder), parallel="fsdp")  # there is nothing to do
    check(got, expected)


@pytest.mark.parametrize("ranks", [3], indirect=True, scope="module")
def test_it_goes_on_with_other_ranks_and_another_parallelism(ranks: Any, tmp_path: Path) -> None:
    ranks(go_on_in_another_way, PROGRAM, str(tmp_path / "checkpoints"))


KILLED = """
import os, runpy, signal, sys

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(event, args):
    "Die in the first two attempts, while the checkpoint of step 4 is written."
    if (event, me) == ("open", "1 0") and "04.part/__1_0" in str(args[0]):
        die()
    if (event, me) == ("os.rename", "0 1") and "04.part" in str(args[0]):
        die()

me = f"{os.environ['RANK']} {os.environ['PYCOLL_ATTEMPT']}"
if "--checkpoint" in sys.argv:
    sys.addaudithook(watch)
elif me == "1 0":
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: die())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def job(*words: str | Path) -> subprocess.CompletedProcess[str]:
    options = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
    return subprocess.run(
        [*words, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_it_goes_on_when_ranks_are_killed_while_they_save(script: Any, tmp_path: Path) -> None:
    fsdp = ("--parallel", "fsdp")
    drawn, folder = tmp_path / "gpt.png", tmp_path / "checkpoints"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    whole = job(*torchrun, "--nproc-per-node", "2", PROGRAM, *fsdp, "--plot", drawn)
    assert whole.returncode == 0, whole.stderr
    begins, *steps, text = whole.stdout.split("\n", 4)
    assert begins == "fsdp on 2 ranks begins at step 0"
    assert [line.split(":")[0] for line in steps] == ["step 2", "step 4", "step 6"]
    assert text.startswith("def ")
    assert drawn.read_bytes().startswith(b"\x89PNG")

    words = ("-n", "2", "--restarts", "2", script(KILLED), PROGRAM, *fsdp, "--checkpoint", folder)
    again = job(*RUN, *words)
    assert again.returncode == 0, again.stderr
    reports = re.findall(r"restart (\d) of 2: rank (\d) failed .*: (.*)", again.stderr)
    killed = "killed by signal 9 (SIGKILL)"
    assert reports == [("1", "1", killed), ("2", "0", killed)], again.stderr
    anew = [begins.replace("0", "2"), steps[1]]
    assert again.stdout.split("\n", 8) == [begins, *steps[:2], *anew, *anew, steps[2], text]
    assert sorted(path.name[-2:] for path in folder.iterdir()) == ["04", "06"]


def test_ranks_whose_peer_is_killed_say_so(script: Any, tmp_path: Path) -> None:
    fsdp = ("--parallel", "fsdp")
    done = job(*RUN, "-n", "3", "--log-dir", tmp_path, script(KILLED), PROGRAM, *fsdp)
    assert done.returncode == 137, done.stderr
    for rank in (0, 2):
        said = (tmp_path / f"rank.{rank}.log").read_text().splitlines()[-1]
        assert re.search("DistNetworkError: pycoll: rank 1 failed: killed by signal 9", said), said
