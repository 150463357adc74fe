"""Jobs by `pycoll-run`, as its tests start them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

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
