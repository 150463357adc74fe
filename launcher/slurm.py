"""Slurm: the hosts of the allocation that this process is in, and how a program is started there.

Sources: the manual pages of srun, sbatch and salloc ("OUTPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

from pycoll._launcher.hostlist import Slots
from pycoll.errors import Error

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def is_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether a job that is started here is to have all hosts of an allocation.

    Not in one of several tasks of srun, which are jobs of their own, nor in a rank of a job.
    """
    is_one = environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    return "SLURM_JOB_NODELIST" in environ and is_one and "PYCOLL_JOB" not in environ


def allocation(environ: Mapping[str, str]) -> list[Slots]:
    """The hosts of the allocation, and how many tasks Slurm would start on each.

    Raises:
        Error: Slurm's variables are not as they should be.
    """
    hosts = expand(environ["SLURM_JOB_NODELIST"])
    # Written by sbatch and salloc if so many tasks were asked for, else so many processors.
    text = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    counts = tasks_per_node(text)
    if len(counts) != len(hosts):
        raise Error(
            f"SLURM_TASKS_PER_NODE is {text!r}, but SLURM_JOB_NODELIST names {len(hosts)} hosts: "
            f"{environ['SLURM_JOB_NODELIST']}"
        )
    slots = [Slots(host, count) for host, count in zip(hosts, counts, strict=True)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        rounds = range(max(counts))
        slots = [Slots(each.host, 1) for turn in rounds for each in slots if each.ranks > turn]
    return slots


def expand(text: str) -> list[str]:
    """The hosts of a list as Slurm writes it: `r[1-2]n[08-10],login`.

    Raises:
        Error: it is no such list.
    """
    found = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        try:
            parts = [
                [part] if index % 2 == 0 else list(_numbers(part))
                for index, part in enumerate(_BRACKETS.split(entry))
            ]
        except ValueError:
            raise Error(f"{text!r} is no list of hosts, as node[01-04],node07") from None
        found += ["".join(words) for words in itertools.product(*parts)]
    return found


def _numbers(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        end = int(last) if dash else int(first)
        found += [str(number).zfill(len(first)) for number in range(int(first), end + 1)]
    return found


def tasks_per_node(text: str) -> list[int]:
    """The numbers that Slurm writes as `4(x2),1`: 4, 4, 1.

    Raises:
        Error: it is something else.
    """
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts = [[int(m[1])] * int(m[2] or 1) for m in matches if m is not None]
    if len(counts) != len(matches):
        raise Error(f"{text!r} is no number of tasks a host, as 4(x2),1")
    return list(itertools.chain.from_iterable(counts))


def is_here(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether this process is inside the allocation, on that host of it.

    The command of salloc is not: it runs where salloc was called.
    """
    return name == environ.get("SLURMD_NODENAME")


def srun_command(name: str, words: Sequence[str]) -> list[str]:
    """The command that runs one task on a host of the allocation, beside whatever runs there.

    It may use all that the allocation has there, and what we write to srun arrives at the task.
    """
    options = (
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--nodelist={name}",
        f"--chdir={os.getcwd()}",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--quiet",
    )
    return ["srun", *options, *words]
