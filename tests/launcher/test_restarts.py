"""`pycoll-run --restarts`: what begins again, on which hosts, what is kept, and what ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from launcher_jobs import run as run_words
from launcher_jobs import shell
from tiers import few, smoke

from pycoll._launcher.cli import main
from pycoll._launcher.job_spec import Options
from pycoll._launcher.restarts import run_again

Run = Callable[..., subprocess.CompletedProcess[str]]

FAILED = r"pycoll-run: restart {} of {}: rank {} failed after [0-9.]+ s: {}\n"


@smoke
def test_a_job_begins_again_until_it_ends_well(tmp_path: Path) -> None:
    text = """
echo $PYCOLL_ATTEMPT $PYCOLL_KEY
[ $PYCOLL_RANK = 0 ] || [ $PYCOLL_ATTEMPT = 2 ] || { echo bad >&2; kill -9 $$; }
"""
    done = shell(2, text, "--restarts", "5", "--log-dir", str(tmp_path))
    killed = r"killed by signal 9 \(SIGKILL\)"
    assert done.returncode == 0
    restarts = "bad\n" + FAILED.format(1, 5, 1, killed) + "bad\n" + FAILED.format(2, 5, 1, killed)
    assert re.fullmatch(restarts, done.stderr.decode())
    lines = done.stdout.decode().split()
    assert sorted(lines[::2]) == ["0", "0", "1", "1", "2", "2"]
    assert len(set(lines[1::2])) == 3  # who has the key of one attempt cannot join the next
    log = (tmp_path / "rank.1.log").read_text()
    assert re.sub(r"\b[0-9a-f]{64}\b", "KEY", log).splitlines() == [
        "0 KEY", "bad", "pycoll-run: attempt 1", "1 KEY", "bad", "pycoll-run: attempt 2", "2 KEY",
    ]  # fmt: skip
    log = (tmp_path / "launcher.log").read_text()
    assert re.findall(r"^pycoll-run: (?:exit status (\d+)$|restart (\d) of 5)", log, re.M) == [
        ("137", ""), ("", "1"), ("137", ""), ("", "2"), ("0", ""),
    ]  # fmt: skip


def test_the_status_is_that_of_the_last_attempt() -> None:
    done = shell(1, "exit $((3 + PYCOLL_ATTEMPT))", "--restarts", "1")
    assert done.returncode == 4
    first = FAILED.format(1, 1, 0, "exit status 3")
    last = r"pycoll-run: rank 0 failed after [0-9.]+ s: exit status 4\n"
    assert re.fullmatch(f"{first}{last}pycoll-run: no restart is left\n", done.stderr.decode())


@pytest.mark.parametrize(
    ("text", "status", "options"),
    [
        ("exit 0", 0, []),
        ("sleep 1000", 124, ["--timeout", "0.3"]),
        ("kill -INT $PPID; sleep 1000", 130, []),
        ("kill -TERM $PPID; sleep 1000", 143, []),
    ],
)
def test_what_no_rank_has_caused_is_the_end(text: str, status: int, options: list[str]) -> None:
    done = shell(1, f"echo begun; {text}", "--restarts", "3", *options)
    assert (done.returncode, done.stdout) == (status, b"begun\n")
    assert b"restart" not in done.stderr


def test_ctrl_c_after_a_failure_is_the_end() -> None:
    # Who presses Ctrl-C while ranks are being ended wants no other attempt. Rank 1 does so when it
    # is sent SIGTERM, since rank 0 has failed.
    text = """
[ $PYCOLL_RANK = 1 ] || exit 3
trap 'kill -INT $PPID; exit 0' TERM
while :; do sleep 0.01; done
"""
    done = shell(2, text, "--restarts", "3", "--grace", "0.2")
    assert done.returncode == 3
    assert b"restart" not in done.stderr


def test_a_program_that_cannot_be_run_is_the_end() -> None:
    done = run_words("--restarts", "3", "--", "./no-such-program")
    assert done.returncode == 127
    assert done.stderr == b"pycoll-run: cannot run ./no-such-program: No such file or directory\n"


@pytest.mark.parametrize(
    ("limit_s", "status", "report"),
    [
        (None, 130, "ended by SIGINT: no restart 1 of 1"),
        (2.0, 124, "the job took longer than 2 s: no restart 1 of 1"),
    ],
)
def test_the_job_may_end_between_two_attempts(
    limit_s: float | None, status: int, report: str, tmp_path: Path
) -> None:
    def plan(lost: Collection[str]) -> Options:
        return Options(1, timeout_s=limit_s, log_dir=str(tmp_path))

    def hear(text: str) -> None:
        assert text.startswith("restart 1 of 1: rank 0 failed")
        if limit_s is None:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            time.sleep(limit_s)

    argv = ["sh", "-c", "exit 3"]
    _, outcome = run_again(argv, 1, plan, lambda job, attempt: None, hear, None)
    assert (outcome.status, outcome.report) == (status, report)
    log = (tmp_path / "launcher.log").read_text().splitlines()
    assert log[-2:] == [f"pycoll-run: {report}", f"pycoll-run: exit status {status}"]


def test_there_is_a_trace_of_each_attempt_and_what_ranks_called_last_if_it_failed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, pycoll
comm = pycoll.init()
for _ in range(2 + int(os.environ["PYCOLL_ATTEMPT"])):
    comm.barrier()
if os.environ["PYCOLL_ATTEMPT"] == "0":
    os._exit(3)
""")
    file = tmp_path / "trace.json"
    options = ("--trace", str(file), "--log-dir", str(tmp_path), "--restarts", "1")
    done = run_words("-n", "2", *options, str(script))
    assert done.returncode == 0
    assert "barrier" in (tmp_path / "attempt0.calls.txt").read_text()
    assert not (tmp_path / "calls.txt").exists()
    for path, count in (tmp_path / "attempt0.trace.json", 2), (file, 3):
        events = json.loads(path.read_text())["traceEvents"]
        barriers = [e for e in events if e["ph"] == "X" and e["name"].startswith("barrier")]
        assert len(barriers) == 2 * count, path


RANKS = """
import os, sys, pycoll
comm = pycoll.init()
comm.barrier()
print(os.environ["PYCOLL_ATTEMPT"], comm.rank, comm.size, os.environ["PYCOLL_HOST"])
if os.environ["PYCOLL_ATTEMPT"] == "0":
    sys.exit(3)
"""


@pytest.mark.parametrize(
    "case",
    few(
        [(["-H", "localhost:1,other:2,third:1"], "2 ranks instead of 4", "localhost third")],
        [(["-n", "3", "-H", "localhost:1,other:2,third:2"], "3 ranks", "localhost third third")],
    ),
)
def test_a_host_that_is_there_no_more_is_left_out(
    run: Run, tmp_path: Path, case: tuple[list[str], str, str]
) -> None:
    places, without, ranks = case
    seen = tmp_path / "seen"
    before = f"[ $name != other ] || {{ [ ! -e {seen} ] && touch {seen}; }} || exit 255"
    options = ("--restarts", "5", *places)
    done = run(*options, script=RANKS, before=before, PYCOLL_ENCRYPT="0")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("pycoll-run: ")]
    assert re.fullmatch(FAILED.format(1, 5, r"\d", "exit status 3")[:-2], told[0])
    assert told[1:] == [
        "pycoll-run: restart 2 of 5: other: pycoll could not be started there "
        "(ssh: exit status 255)",
        f"pycoll-run: without other: {without}",
    ]
    last = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("2 ")]
    hosts = ranks.split()
    assert sorted(last) == [[str(r), str(len(hosts)), host] for r, host in enumerate(hosts)]


def test_where_no_host_is_left_nothing_begins(run: Run, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    before = f"[ ! -e {seen} ] && touch {seen} || exit 255"
    done = run("--restarts", "5", "-H", "other:1", script=RANKS, before=before)
    assert done.returncode == 69
    assert done.stderr.splitlines()[-1] == "pycoll-run: no restart 2 of 5: no host is left"


@pytest.mark.exhaustive
def test_ranks_of_a_lost_host_have_ended_when_the_job_begins_again(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "lost at"
    script = f"""
import os, pathlib, signal, time, pycoll
comm = pycoll.init()
file = pathlib.Path({str(file)!r})
if os.environ["PYCOLL_ATTEMPT"] == "1":
    print(comm.size, time.monotonic() - float(file.read_text()) > 8)
elif comm.node == 1:
    file.write_text(str(time.monotonic()))
    os.kill(os.getppid(), signal.SIGKILL)  # the launcher there
comm.barrier()
"""
    done = run("--restarts", "1", "-H", "localhost:1,other:1", script=script, PYCOLL_ENCRYPT="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 True\n"
    assert "restart 1 of 1: rank 1 failed" in done.stderr
    assert "lost with its host other" in done.stderr
    assert "pycoll-run: without other: 1 rank instead of 2" in done.stderr


def test_nodes_have_one_attempt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"NODES": "2", "NODE": "0", "RENDEZVOUS": "tcp://127.0.0.1:9", "KEY": "00" * 32}
    for name, value in node.items():
        monkeypatch.setenv(f"PYCOLL_{name}", value)
    assert main(["--restarts", "1", __file__]) == 2
    assert "--restarts does not go with PYCOLL_NODES" in capsys.readouterr().err
