"""A program that uses torch.distributed runs on pycoll however it is started, and hears of ends."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from script_jobs import RUN

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

LIMIT_S = 60 * PATIENCE

WORK = """
import sys, time
import torch
import torch.distributed as dist

def add_up():
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    sys.stdout.write(f"{dist.get_backend()} {dist.get_rank()}: {x.tolist()}\\n")
"""

BY_LAUNCHER = (
    WORK
    + """
dist.init_process_group("pycoll")
add_up()
dist.destroy_process_group()
"""
)

BY_SPAWN = (
    WORK
    + """
import torch.multiprocessing as mp

def main(rank, size, where):
    dist.init_process_group("pycoll", init_method=where, rank=rank, world_size=size)
    add_up()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (3, sys.argv[1]), 3)
"""
)

DIES = """
import os, signal
from torch.nn.parallel import DistributedDataParallel

def train(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        loss = model(torch.ones(2, 4)).sum()
        if step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            loss.backward()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            sys.stdout.write(f"{rank} after {time.monotonic() - began:.1f} s: {text}\\n")
            sys.stdout.flush()
            os._exit(0)
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )


def lines(size: int) -> list[str]:
    total = size * (size + 1) / 2
    return [f"pycoll {rank}: {[total] * 3}" for rank in range(size)]


def launchers() -> dict[str, list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return {"pycoll-run": [*RUN, "-n"], "torchrun": torchrun}


@pytest.mark.parametrize("by", ["pycoll-run", "torchrun"])
def test_a_program_needs_the_name_of_the_backend_alone(by: str, script: Any) -> None:
    done = run(*launchers()[by], "2", script(BY_LAUNCHER))
    assert (done.returncode, sorted(done.stdout.split("\n")[:-1])) == (0, lines(2)), done.stderr


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_processes_that_are_spawned_meet_by_a_store(
    store: str, script: Any, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{port}"
    done = run(sys.executable, script(BY_SPAWN), where)
    assert (done.returncode, sorted(done.stdout.split("\n")[:-1])) == (0, lines(3)), done.stderr
    assert done.stderr == ""


DEADLINES = (
    WORK
    + """
from datetime import timedelta

dist.init_process_group("pycoll")
patient = dist.new_group(timeout=timedelta(minutes=5))
store = dist.distributed_c10d._get_default_store()
x = torch.ones(3)
if dist.get_rank() == 0:
    work = dist.all_reduce(x, group=patient, async_op=True)
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        sys.stdout.write(f"{str(error)[:20]}\\n")
    store.set("the deadline", "has passed")
    work.wait()
else:
    store.wait(["the deadline"])
    dist.all_reduce(x, group=patient)
    sys.stdout.write(f"{x.tolist()}\\n")
"""
)


def test_the_deadline_of_the_job_is_that_of_groups_without_one_of_their_own(script: Any) -> None:
    done = run(*RUN, "-n", "2", "--op-timeout", "1", script(DEADLINES))
    assert done.stdout.splitlines() == ["pycoll: Timed out : ", "[2.0, 2.0, 2.0]"], done.stderr
    assert done.returncode == 0, done.stderr


DIES_BY_LAUNCHER = WORK + DIES + 'dist.init_process_group("pycoll")\ntrain(dist.get_rank())\n'

DIES_BY_SPAWN = (
    WORK
    + DIES
    + """
import torch.multiprocessing as mp

def main(rank, size, where):
    dist.init_process_group("pycoll", init_method=where, rank=rank, world_size=size)
    train(rank)

if __name__ == "__main__":
    processes = mp.spawn(main, (3, sys.argv[1]), 3, join=False).processes
    for process in processes:
        process.join()
"""
)


@pytest.mark.parametrize("by", ["pycoll-run", "spawn"])
def test_a_rank_that_dies_is_named_by_backward_on_all_others(
    by: str, script: Any, tmp_path: Path
) -> None:
    if by == "spawn":
        done = run(sys.executable, script(DIES_BY_SPAWN), f"file://{tmp_path}/store")
    else:
        done = run(*RUN, "-n", "3", script(DIES_BY_LAUNCHER))
        assert done.returncode == 137, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if " after " in line)
    reason = "its process ended" if by == "spawn" else "SIGKILL"
    pattern = rf"(\d) after (\d+\.\d) s: .*DistNetworkError: pycoll: .*rank 1 .*{reason}"
    found = [re.match(pattern, line) for line in said]
    assert len(found) == 2, done.stdout + done.stderr
    assert all(found), said
    assert [match[1] for match in found if match] == ["0", "2"]
    assert all(float(match[2]) < 5.0 * PATIENCE for match in found if match), said


def test_without_torch_the_import_says_what_is_missing() -> None:
    program = "import sys; sys.modules['torch'] = None; import pycoll.torch"
    done = run(sys.executable, "-c", program)
    assert (
        done.stderr.splitlines()[-1] == "ImportError: pycoll.torch needs PyTorch: pip install torch"
    )


def test_where_nothing_is_loaded_by_itself_the_import_makes_it_known() -> None:
    program = (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import torch.distributed as dist\n"
        "assert not hasattr(dist.Backend, 'PYCOLL')\n"
        "import pycoll.torch\n"
        "pycoll.torch.register()\n"
        "assert dist.Backend('pycoll') == 'pycoll'\n"
        "assert dist.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
    )
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
