"""Runs of pycoll-run that several files of tests start."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_runs import LIMIT_S, SSH
from launcher_jobs import Environments, shell
from node_jobs import Nodes


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`pycoll-run` with words, and a script; `before` is what ssh does before the agent."""

    def run(
        *words: str,
        script: str = "",
        before: str = "",
        stdin: Any = subprocess.DEVNULL,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        ssh = tmp_path / "ssh"
        ssh.write_text(SSH.replace("BEFORE", before))
        ssh.chmod(0o755)
        program = tmp_path / "script.py"
        program.write_text(script)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "pycoll._launcher",
                *words,
                *([program] if script else []),
            ],
            env={**os.environ, "PATH": path, **variables},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return run


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where jobs of this test have their sockets, whose paths have at most 108 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short, "pycoll")


@pytest.fixture
def nodes() -> Iterator[Callable[[int], Nodes]]:
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Nodes:
            made = Nodes(count)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def environments(tmp_path: Path) -> Environments:
    """The environments of the ranks of a job with these options, started in this environment."""

    def read(n: int, *options: str, **variables: str) -> list[dict[str, str]]:
        dump = f"cat /proc/$$/environ > {tmp_path}/$PYCOLL_RANK"
        done = shell(n, dump, *options, **variables)
        assert (done.returncode, done.stderr) == (0, b"")
        texts = [(tmp_path / str(rank)).read_text() for rank in range(n)]
        return [dict(line.split("=", 1) for line in t.split("\0")[:-1]) for t in texts]

    return read
