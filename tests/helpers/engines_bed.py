"""Clusters of Ray and Dask on pretended hosts (`hosts_bed`), two threads a host."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hosts_bed import Bed
from patience import PATIENCE

HEAD = "10.77.0.1"
_OF_A_JOB = ("pycoll._launcher", "call.py", "script.py", "prte", "mpirun", "hydra", "torchrun")


def why_not(*modules: str) -> str:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)} (pip install '.[ray,dask]')" if missing else ""


@contextlib.contextmanager
def ray(bed: Bed) -> Iterator[str]:
    """Have Ray on all hosts; its address."""
    command = str(Path(sys.executable).with_name("ray"))
    common = ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"]
    for index, name in enumerate(bed.names, 1):
        role = [f"--address={HEAD}:6379"]
        if index == 1:
            role = ["--head", "--port=6379", "--include-dashboard=false"]
        own = [f"--node-ip-address=10.77.0.{index}"]
        # Its processes would hold a pipe open.
        with (bed.folder / f"ray.{name}.log").open("w") as log:
            started = bed.popen(
                name, command, "start", *role, *own, *common, stdout=log, stderr=log
            )
            assert started.wait(PATIENCE * 60) == 0
    yield f"{HEAD}:6379"


@contextlib.contextmanager
def dask(bed: Bed) -> Iterator[str]:
    """Have Dask on all hosts; the scheduler's address."""
    command = str(Path(sys.executable).with_name("dask"))
    address = f"tcp://{HEAD}:8786"
    daemons: list[subprocess.Popen[str]] = []
    with (bed.folder / "dask.log").open("w") as log:
        try:
            words = ["scheduler", "--host", HEAD, "--no-dashboard", "--no-show"]
            daemons.append(bed.popen("hosta", command, *words, stdout=log, stderr=log))
            for index, name in enumerate(bed.names, 1):
                words = ["worker", address, "--host", f"10.77.0.{index}", "--nthreads", "2"]
                daemons.append(
                    bed.popen(name, command, *words, "--no-dashboard", stdout=log, stderr=log)
                )
            yield address
        finally:
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(PATIENCE * 20)


def ranks_left(bed: Bed, name: str) -> list[str]:
    """What is left of a job on a host."""
    return [words for words in bed.processes(name) if any(part in words for part in _OF_A_JOB)]


def until_no_ranks(bed: Bed, limit_s: float) -> None:
    deadline = time.monotonic() + PATIENCE * limit_s
    while left := [words for name in bed.names for words in ranks_left(bed, name)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
