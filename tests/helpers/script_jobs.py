"""Jobs of scripts: ranks that check for themselves what they see of one that fails.

Every script begins with `PRELUDE`, and with NumPy as `np` if it names that; a rank for which all
was as it should be calls `ok()`. A script waits for anything but the clock: for a message, for what
the launcher says a rank is doing (`await_table`), for the end of a process (`await_end`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from patience import PATIENCE

RUN = [sys.executable, "-m", "pycoll._launcher"]

LIMIT_S = 50 * PATIENCE
"""No job takes this long: it is ended then, and says what each rank was doing."""

PRELUDE = """
import os, re, select, signal, sys, threading, time
import pycoll

PATIENCE = float(os.environ["TEST_PATIENCE_OF_PYCOLL"])
SIGKILL = "killed by signal 9 (SIGKILL)"

def ok():
    sys.stdout.write(f"{rank} ok\\n")
    sys.stdout.flush()

def links():
    "The names of what connects this rank to the others."
    transport = comm._group.engine.transport
    return {transport.link_name(r) for r in range(size) if r != rank}

def error_of(call, *args, within=5.0, **kwargs):
    "The error of a call that must fail."
    start = time.monotonic()
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        took = time.monotonic() - start
        assert took < within * PATIENCE, f"{took:.1f} s until {error!r}"
        return error
    raise AssertionError(f"{call} returned {result!r}")

def error_like(kind, text, call, *args, **kwargs):
    error = error_of(call, *args, **kwargs)
    assert type(error) is kind, repr(error)
    assert re.search(text, str(error), re.DOTALL), str(error)
    return error

def peer_failed(rank, reason, call, *args, **kwargs):
    error = error_like(pycoll.PeerFailed, f"rank {rank} ", call, *args, **kwargs)
    assert (error.rank, error.reason) == (rank, reason), repr(error)
    assert reason in str(error)
    return error

def await_table(*wanted):
    "Wait until the launcher knows that each (rank, pattern) is what that rank does."
    while True:
        table = str(error_like(pycoll.OperationTimeout, "", comm.recv, rank, timeout=0.05))
        if all(re.search(f"rank {peer}: {doing}", table) for peer, doing in wanted):
            return

def await_end(pid):
    pidfd = os.pidfd_open(pid)
    select.select([pidfd], [], [])
    os.close(pidfd)
"""

INIT = """
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""


class Done(NamedTuple):
    """How a job ended.

    Attributes:
        status: its exit status.
        stdout, stderr: what it printed.
        content: the ranks that called `ok`, in order.
    """

    status: int
    stdout: str
    stderr: str
    content: list[int]


def all_well(done: Done, size: int) -> None:
    """Every rank was content, and nobody complained."""
    assert done.content == [*range(size)], done.stdout + done.stderr
    assert (done.status, done.stderr) == (0, ""), f"status {done.status}:\n{done.stderr}"


class Jobs:
    """Runs scripts on ranks; the folder they are in is their first argument."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, n: int, text: str, *options: str, init: str = INIT) -> list[str]:
        """Write a script; return the command that runs it on `n` ranks."""
        script = self.folder / "script.py"
        # Importing NumPy costs as much as all else that a rank does to join.
        numpy = "import numpy as np\n" if "np." in init + text else ""
        script.write_text(numpy + PRELUDE + init + text)
        limit = ["--timeout", str(LIMIT_S)]
        return [*RUN, "-n", str(n), *limit, *options, str(script), str(self.folder)]

    def __call__(self, n: int, text: str, *options: str, init: str = INIT) -> Done:
        """Run a script on `n` ranks to its end; `init` comes between the prelude and it."""
        done = subprocess.run(
            self.command(n, text, *options, init=init),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 10,
            check=False,
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        content = sorted(int(line[0]) for line in lines if line[1:] == ["ok"])
        return Done(done.returncode, done.stdout, done.stderr, content)
