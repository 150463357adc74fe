"""A job names its first cause, whatever a wrapper or a victim would make of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_jobs import Done, run
from tiers import smoke

HIDES = '#!/bin/sh\n"$@" || true\necho processed\n'

RANK = """
import os, signal, pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 1:
    {ending}
{then}
"""


@pytest.fixture
def wrapped(tmp_path: Path) -> Any:
    """Run ranks inside a shell that ends with status 0 however they end."""
    wrapper = tmp_path / "wrap.sh"
    wrapper.write_text(HIDES)

    def run_wrapped(ending: str, then: str) -> Done:
        text = RANK.format(ending=ending, then=then)
        return run("-n", "3", "--", "sh", str(wrapper), sys.executable, "-c", text)

    return run_wrapped


@pytest.mark.parametrize("then", ["comm.barrier()", ""], ids=["needed", "not needed any more"])
def test_a_wrapper_cannot_hide_that_a_rank_was_killed(wrapped: Any, then: str) -> None:
    done = wrapped("os.kill(os.getpid(), signal.SIGKILL)", then)
    assert done.returncode == 1
    said = done.stderr.decode()
    lost = r"rank 1 failed after .*: lost process \d+, which had joined the job, exit status 0\n"
    assert re.search(lost, said), said
    assert bool(then) == ("rank 1 failed: process" in said)
    assert done.stdout == b"processed\n" * 3


def test_a_wrapper_of_ranks_that_end_well_changes_nothing(wrapped: Any) -> None:
    done = wrapped("raise SystemExit", "")
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"processed\n" * 3)


@pytest.mark.parametrize(
    ("ending", "first", "cause"),
    [
        (
            "os._exit(0)",
            "rank 1 is needed, but has ended: exit status 0",
            "rank 1 failed: ended without finalizing (exit status 0), though rank 0 needed it",
        ),
        (
            "sys.exit(0)",
            "rank 1 is needed, but has ended: exit status 0",
            "rank 0 failed: raised PeerFailed: rank 1 is needed, but has ended: exit status 0",
        ),
    ],
    ids=["without finalizing", "finalized"],
)
def test_ranks_that_wait_for_a_victim_hear_of_the_rank_that_ended_first(
    job: Any, ending: str, first: str, cause: str
) -> None:
    done = job(
        4,
        f"""
if rank == 1:
    comm.recv(0)
    {ending}
if rank == 0:
    comm.send("go", 1)
    comm.recv(1)  # what the others wait for ends with this rank
text = str(error_of(comm.recv, 0 if rank == 2 else 2, within=60))
assert text == {cause!r}, text
ok()
raise pycoll.PeerFailed(0, "", text)
""",
    )
    assert done.content == [2, 3], done.stderr
    assert first in done.stderr
    assert done.status == 1
    report = done.stderr[done.stderr.index("pycoll-run: rank ") :].splitlines()
    head = cause if "_exit" in ending else "rank 0 failed: raised PeerFailed, exit status 1"
    assert re.sub(" after [0-9.]* s", "", report[0]) == f"pycoll-run: {head}"
    assert report[-2].strip() == f"pycoll.errors.PeerFailed: {first}"
    whose = "pycoll-run: rank 0, which needed it, wrote last:"
    assert (report[1] == whose) == ("_exit" in ending)


@smoke
def test_a_communicator_without_the_rank_that_was_killed_hears_of_it_all_the_same(job: Any) -> None:
    done = job(
        3,
        """
import os, signal
pair = comm.split(rank // 2)
comm.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    comm.recv(2)
error = error_of(pair.recv, 0, within=60)
assert error.rank == 0
assert str(error) == (
    "rank 0 failed: raised PeerFailed: rank 2 failed: killed by signal 9 (SIGKILL)"
), error
ok()
raise error
""",
    )
    assert done.content == [1], done.stderr
    assert done.status == 137
