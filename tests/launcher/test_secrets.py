"""Where a job's key can be read, and where it cannot."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_jobs import run as run_words
from tiers import smoke

Run = Callable[..., subprocess.CompletedProcess[str]]

# Every rank writes its key to a file before it joins. Then it looks for the key in everything that
# shows the environment of processes, or their command lines; rank 1 fails in a collective.
LOOK = """
import os, pathlib, subprocess, sys, traceback
key = os.environ["PYCOLL_KEY"]
folder = pathlib.Path(sys.argv[1])
rank = os.environ["PYCOLL_RANK"]
(folder / f"key.{rank}").write_text(key)
import pycoll
comm = pycoll.init()
comm.barrier()

def read(path):
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return b""

own = read("/proc/self/environ")
assert f"PYCOLL_JOB={os.environ['PYCOLL_JOB']}".encode() in own, "it is ended by this"
assert b"PYCOLL_KEY=" + b"-" * 64 in own
assert key.encode() not in own
assert key not in subprocess.run(["env"], capture_output=True, text=True).stdout
assert "PYCOLL_KEY" not in os.environ
for process in pathlib.Path("/proc").iterdir():
    if process.name.isdigit():
        assert key.encode() not in read(process / "cmdline"), process
        assert key.encode() not in read(process / "environ"), process
if comm.rank == 0:
    status = [sys.executable, "-m", "pycoll", "status", os.environ["PYCOLL_JOB"][:8], "--json"]
    print(subprocess.run(status, capture_output=True, text=True, check=True).stdout)
comm.barrier()

def combine(a, b):
    if comm.rank == 1:
        raise TypeError("as it should")
    return a | b

comm.all_reduce({1}, op=combine)
"""


def test_the_key_is_nowhere_to_be_seen_once_all_have_joined(
    run: Run, tmp_path: Path, sockets: Path
) -> None:
    script, shown = tmp_path / "look.py", tmp_path / "shown"
    shown.mkdir()
    script.write_text(LOOK)
    options = ("--verbose", "--log-dir", str(shown / "logs"), "--trace", str(shown / "trace.json"))
    hosts = ("-H", "localhost:1,other:2", "-x", "XDG_RUNTIME_DIR")
    done = run(*options, *hosts, str(script), str(tmp_path))
    assert done.returncode == 1
    assert "TypeError: as it should" in done.stderr, done.stderr
    assert "AssertionError" not in done.stderr, done.stderr
    assert '"frames"' in done.stdout  # of pycoll status
    keys = {(tmp_path / f"key.{rank}").read_text() for rank in range(3)}
    assert len(keys) == 1
    key = keys.pop()
    files = [path.read_bytes() for path in shown.rglob("*") if path.is_file()]
    assert len(files) == 6  # three ranks, the launcher, the trace, the last calls
    raw = bytes.fromhex(key)
    for text in (*files, done.stdout.encode(), done.stderr.encode()):
        for form in (key.encode(), key[:16].encode(), raw, base64.b64encode(raw)[:16]):
            assert form not in text


def test_who_is_started_by_a_rank_is_told_whose_child_it_is() -> None:
    # It has no key, and shall not hear that a variable is missing.
    script = """
import os, subprocess, sys, pycoll
comm = pycoll.init()
done = subprocess.run([sys.executable, "-c", "import pycoll; pycoll.init()"],
                      capture_output=True, text=True)
assert done.returncode == 1
print(os.getpid(), done.stderr.splitlines()[-1])
"""
    done = run_words("-n", "1", "--", sys.executable, "-c", script)
    pid, _, text = done.stdout.decode().partition(" ")
    assert "BootstrapError" in text
    assert f"process {pid}" in text


@smoke
def test_a_key_that_is_wrong_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "5ec2e7" * 10
    place = {"PYCOLL_RANK": "0", "PYCOLL_SIZE": "2", "PYCOLL_RENDEZVOUS": "tcp://127.0.0.1:9"}
    for key in (secret + "zz", secret[:8]):
        done = subprocess.run(
            [sys.executable, "-c", "import pycoll; pycoll.init(timeout=5)"],
            env={**os.environ, **place, "PYCOLL_KEY": key},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "PYCOLL_KEY" in done.stderr
        assert key not in done.stderr
