"""How long ranks may go on: `--grace`, PYCOLL_GRACE, and what comes when."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launcher_jobs import run
from tiers import smoke

import pycoll
from pycoll._launcher.signal_plan import SignalPlan

TERM, KILL, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT


def times(plan: SignalPlan, until: float = 100.0) -> dict[int, float]:
    """When each signal is first sent; the ranks live on."""
    first: dict[int, float] = {}
    now = 0.0
    while now < until and plan:
        for signum in plan.take(now):
            first.setdefault(signum, now)
        now = min(plan.times, default=until)
    return first


@smoke
def test_what_ranks_are_sent_and_when() -> None:
    plan = SignalPlan(7.0)
    plan.fail(0.0)
    assert times(plan) == {TERM: 7.0, KILL: 14.0}
    plan = SignalPlan(7.0)
    plan.end(0.0)
    assert times(plan) == {TERM: 0.0, KILL: 7.0}
    for signum, planned in (TERM, {TERM: 0.0, KILL: 7.0}), (INT, {INT: 0.0, TERM: 7.0, KILL: 14.0}):
        plan = SignalPlan(7.0)
        plan.pass_on(signum, 0.0)
        assert times(plan) == planned


def test_any_time_and_none() -> None:
    plan = SignalPlan(math.inf)
    plan.end(0.0)
    assert times(plan) == {TERM: 0.0}
    plan.pass_on(INT, 1.0)
    plan.pass_on(INT, 1.0)  # who presses Ctrl-C twice has no patience
    assert KILL in plan.take(1.0)
    plan = SignalPlan(0.0)
    plan.fail(0.0)
    assert plan.take(0.0) == [TERM, KILL]


# Rank 0 ends the job. Rank 1 needs a second to save what it has: it is told, or sent SIGTERM.
SAVE = """
import pathlib, signal, sys, time
import pycoll
comm = pycoll.init()
how, file = sys.argv[1], pathlib.Path(sys.argv[2])

def save(*_):
    time.sleep(1.0)
    file.write_text("all of it")
    sys.exit(0)

if how == "SIGTERM":
    signal.signal(signal.SIGTERM, save)
comm.barrier()
if comm.rank == 0:
    comm.abort(3) if how == "SIGTERM" else sys.exit(3)
try:
    comm.recv(0)
except pycoll.PeerFailed:
    if how == "PeerFailed":
        save()
    while True:
        time.sleep(1.0)
"""


@pytest.fixture
def saving(tmp_path: Path) -> Any:
    """The status of a job whose rank 1 saves, and whether it could."""

    def status_and_file(how: str, *options: str, **variables: str) -> tuple[int, bool]:
        script, file = tmp_path / "save.py", tmp_path / "saved"
        script.write_text(SAVE)
        done = run("-n", "2", *options, str(script), how, str(file), **variables)
        return done.returncode, file.exists()

    return status_and_file


@pytest.mark.parametrize("how", ["PeerFailed", "SIGTERM"])
def test_a_rank_may_save_for_as_long_as_was_said(saving: Any, how: str) -> None:
    assert saving(how, "--grace", "60", PYCOLL_GRACE="0.1") == (3, True)


@pytest.mark.parametrize("how", ["PeerFailed", "SIGTERM"])
def test_a_rank_that_takes_longer_is_ended(saving: Any, how: str) -> None:
    assert saving(how, PYCOLL_GRACE="0.1") == (3, False)


def test_a_long_time_to_save_ends_with_the_time_of_the_whole_job(saving: Any) -> None:
    begun = time.monotonic()
    assert saving("not at all", "--grace", "600", "--timeout", "1.5") == (3, False)
    assert time.monotonic() - begun < 300


def test_ranks_of_a_function_have_the_time_that_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "late"

    def work(comm: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        comm.barrier()
        if comm.rank == 0:
            raise KeyError("first")
        time.sleep(1.0)
        file.write_text("not ended")

    monkeypatch.setenv("PYCOLL_GRACE", "0.1")
    with pytest.raises(KeyError, match="first"):
        pycoll.run(work, 2)
    assert not file.exists()
    monkeypatch.setenv("PYCOLL_GRACE", "soon")
    with pytest.raises(pycoll.Error, match="PYCOLL_GRACE is 'soon', but must be seconds"):
        pycoll.run(work, 2)


def test_ranks_of_a_pool_are_interrupted_after_the_time_that_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(comm: Any) -> float:
        if comm.rank == 0:
            raise KeyError("first")
        begun = time.monotonic()
        try:
            time.sleep(1.5)  # by default it would end before the interrupt
        except KeyboardInterrupt:
            vars(__import__("colorsys"))["after"] = time.monotonic() - begun
        return 0.0

    monkeypatch.setenv("PYCOLL_GRACE", "0.1")
    with pycoll.Pool(2) as pool:
        with pytest.raises(KeyError, match="first"):
            pool.run(work)
        assert 0.0 < pool.run(lambda comm: getattr(__import__("colorsys"), "after", 0.0))[1] < 1.5
