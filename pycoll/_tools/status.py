"""`pycoll status`: which rank waits for whom, and where every thread is, of a job that runs."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pycoll._tools import jobs
from pycoll.errors import Error

_EXAMPLES = """\
examples:
  pycoll status                 the job that runs, or a list if several do
  pycoll status 4711            the job whose pycoll-run is process 4711
  pycoll status 3f2a --json     the job whose id begins so
  pycoll status --native        with frames in C, by py-spy

It shows who waits for whom, what each process does, and the Python stacks of its threads. It finds
jobs of this user that pycoll-run, pycoll.run or a Pool has started on this machine, with their
ranks on other hosts. The ranks go on meanwhile.
"""

_OURS = "/pycoll/_"  # in the path of a file of pycoll's
_IN_PYCOLL = "        (in pycoll)"
_PY_SPY = "py-spy"
_PY_SPY_S = 20.0

Fields = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("job", nargs="?", metavar="JOB", help="the beginning of its id, or pycoll-run's process")
    add("--json", action="store_true", help="print JSON")
    add("--no-stacks", action="store_true", help="only the table")
    add("--native", action="store_true", help="stacks with frames in C, by py-spy")


def main(arguments: argparse.Namespace) -> int:
    """Show a job that runs, or which do.

    Raises:
        ValueError: an option makes no sense.
    """
    if arguments.native and shutil.which(_PY_SPY) is None:
        raise ValueError(f"--native needs {_PY_SPY} (pip install {_PY_SPY})")
    try:
        job = jobs.find(arguments.job)
        found = job.ask("status")
    except jobs.SeveralError as exc:
        if arguments.job is None:  # that was the question
            return _list(arguments.json)
        return _refuse(exc)
    except Error as exc:
        return _refuse(exc)
    if arguments.native or not arguments.no_stacks:
        _add_native(found["ranks"], with_all=arguments.native)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(job.title())
    print("\n".join(found["table"]))
    if not arguments.no_stacks:
        print("\n".join(_stacks(found["ranks"])))
    return 0


def _list(as_json: bool) -> int:
    found, silent = jobs.running()
    if as_json:
        print(json.dumps([job.about for job in found], indent=1))
    else:
        print("\n".join([*(job.title() for job in found), *silent]))
    return 0


def _refuse(error: Error) -> int:
    print(f"pycoll status: {error}", file=sys.stderr)
    return 1


def _stacks(ranks: Sequence[Fields]) -> list[str]:
    """The stacks of all ranks; those of ranks that are the same are shown once."""
    from pycoll._support.wording import ranks_text

    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        groups[tuple(_stack(rank))].append(rank["rank"])
    lines = []
    for stack, members in groups.items():
        lines += ["", f"{ranks_text(members)}:", *stack]
    return lines


def _stack(rank: Fields) -> list[str]:
    lines = []
    for thread in rank["threads"] or ():
        lines.append(f"    {thread['name']}")
        for is_ours, frames in itertools.groupby(thread["frames"], lambda frame: _OURS in frame[0]):
            lines += [_IN_PYCOLL] if is_ours else map("        {0[0]}:{0[1]} {0[2]}".format, frames)
    if rank["threads"] is None:
        lines.append(f"    {_why_not(rank)}")
    return lines + [f"    {line}" for line in rank.get("native", ())]


def _why_not(rank: Fields) -> str:
    """Say why there are no stacks of a rank."""
    state = rank["state"]
    if not rank["process"]:
        return f"no stacks: {state}"
    if state == "stopped":
        return "no stacks: it is stopped (SIGCONT lets it go on)"
    if state.startswith(("running", "blocked")):
        return f"no stacks: it is {state}, in something that does not let go of Python's lock"
    return f"no stacks: it does not answer, and is {state}"


def _add_native(ranks: Sequence[Fields], *, with_all: bool) -> None:
    """Add what py-spy says of ranks that do not answer, and `with_all` of the others on this host.

    It may look into a process only as root, or where the kernel lets it (ptrace_scope 0).
    """
    if shutil.which(_PY_SPY) is None:
        return
    for rank in ranks:
        is_stopped = rank["state"] == "stopped"  # then py-spy cannot look
        is_asked = with_all or rank["threads"] is None
        if rank["process"] and not rank["host"] and is_asked and not is_stopped:
            rank["native"] = _py_spy(rank["process"])


def _py_spy(process: int) -> list[str]:
    command = [_PY_SPY, "dump", "--pid", str(process), "--native"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PY_SPY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return [f"{_PY_SPY}: {exc}"]
    if done.returncode == 0:
        lines = [f"by {_PY_SPY}, with frames in C:", *done.stdout.splitlines()]
    elif re.search("permi(tted|ssion)", done.stderr, re.IGNORECASE):
        lines = [
            f"{_PY_SPY} may not look into process {process}: call pycoll status as root, or see",
            "docs/status.md (Frames in C)",
        ]
    else:
        lines = f"{_PY_SPY}: {done.stderr.partition('Stack backtrace:')[0]}".splitlines()
    return [line for line in lines if line.strip()]
