"""Jobs by `pycoll-run`, as its tests start them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from patience import PATIENCE

RUN = [sys.executable, "-m", "pycoll._launcher"]


LIMIT_S = 60 * PATIENCE


Done = subprocess.CompletedProcess[bytes]


Environments = Callable[..., list[dict[str, str]]]


def run(*args: str, stdin: bytes = b"", **variables: str) -> Done:
    return subprocess.run(
        [*RUN, *args],
        input=stdin,
        capture_output=True,
        env=os.environ | variables,
        timeout=LIMIT_S,
        check=False,
    )


def shell(n: int, text: str, *options: str, **variables: str) -> Done:
    return run("-n", str(n), *options, "--", "sh", "-c", text, **variables)


@contextlib.contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher that runs, ended with everything at the end of the test."""
    process = subprocess.Popen(
        [*RUN, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        process.wait(LIMIT_S)


def read_lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().decode().strip() for _ in range(count)]


def assert_ended(pids: Iterable[int], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"process {pid} is still there"
        finally:
            os.close(pidfd)
