"""`pycoll-run --restarts`: a job whose ranks have failed begins again, on the hosts that are left.

Each attempt is a job of its own, with its own processes and its own key: what is left of one cannot
join the next. Nothing is left of it when the next begins, on hosts that can be reached. On a host
that is lost, ranks may live until its launcher has heard nothing for as long as makes it end them.
The next attempt waits until then, or two attempts might write to the same files.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import time
from collections.abc import Callable, Collection, Sequence

from pycoll._launcher.job_spec import Options
from pycoll._launcher.outcome import CANNOT_START, TIMED_OUT, Outcome, own_lines, signal_name
from pycoll._launcher.signals import caught_signals
from pycoll._launcher.spawn import Job
from pycoll.errors import Error

_MARGIN_S = 2.0  # for another host to end its ranks when it has noticed that it is alone


def run_again(
    argv: Sequence[str],
    restarts: int,
    plan: Callable[[Collection[str]], Options],
    keep: Callable[[Job, int], object],
    tell: Callable[[str], object],
    stdin: int | None,
) -> tuple[Job, Outcome]:
    """Run a job, and again whenever its ranks have failed.

    It is over if it has ended well, or if something else than its ranks has ended it: a signal, its
    time, output that nobody reads, a program that cannot be run.

    Args:
        argv: the program of every rank and its arguments.
        restarts: how often it is begun again at most.
        plan: called with the names of lost hosts; returns how the job is to run without them.
        keep: called with each job that another one follows, and its number from 0.
        tell: shows lines of the launcher's own.
        stdin: see `Job`.

    Returns:
        The last job, and how all of it has ended.
    """
    lost: set[str] = set()
    options = plan(lost)
    late_at = time.monotonic() + (math.inf if options.timeout_s is None else options.timeout_s)
    for_ranks: list[int] = []
    with (
        selectors.DefaultSelector() as selector,
        caught_signals(selector, for_ranks) as signals,
    ):
        while True:
            job = Job(argv, options, stdin=stdin, late_at=late_at)
            outcome = job.run()
            lost_now, quiet_at = _lost(job)
            if not _may_end_otherwise(outcome, options.attempt, lost_now - lost):
                return job, outcome
            number = options.attempt + 1
            restart = f"restart {number} of {restarts}"
            if number > restarts:
                return job, outcome._replace(report=f"{outcome.report}\nno restart is left")
            keep(job, options.attempt)
            _set_calls_aside(options.log_dir, options.attempt)
            try:
                planned = plan(lost | lost_now)._replace(attempt=number)
            except Error as exc:  # no host is left
                return job, outcome._replace(report=f"{outcome.report}\nno {restart}: {exc}")

            def say(text: str, log_dir: str | None = options.log_dir) -> None:
                tell(text)
                _record(log_dir, text)

            say(f"{restart}: {outcome.report.partition(chr(10))[0]}")
            if lost_now - lost:
                say(_without(lost_now - lost, options.size, planned.size))
            _wait(selector, signals, min(quiet_at, late_at))
            end = _end(signals, late_at, options.timeout_s)
            if end is not None:
                end = end._replace(report=f"{end.report}: no {restart}")
                _record(options.log_dir, f"{end.report}\nexit status {end.status}")
                return job, end
            while for_ranks:
                say(f"{signal_name(for_ranks.pop())} came between two attempts: nobody got it")
            lost |= lost_now
            options = planned


def _lost(job: Job) -> tuple[set[str], float]:
    """All names of the hosts that were lost, and when their ranks have ended; 0: none was."""
    if job.hosts is None:
        return set(), 0.0
    names = {host.name for host in job.hosts.lost_hosts}
    others = {name for name, other in job.hosts.same.items() if other in names}
    left = [host for host in job.hosts.lost_hosts if host.ranks and not host.is_swept]
    ends = [host.line.silent_at() + _MARGIN_S for host in left]
    return names | others, max(ends, default=0.0)


def _may_end_otherwise(outcome: Outcome, attempt: int, newly_lost: Collection[str]) -> bool:
    """Whether there is reason to begin again."""
    if outcome.culprit is not None:
        return outcome.status != 0 and not outcome.is_decided
    # Hosts that were there before are not there now.
    return attempt > 0 and outcome.status == CANNOT_START and bool(newly_lost)


def _without(lost: Collection[str], before: int, now: int) -> str:
    """Say who is left out, and how many ranks there are in the next attempt."""
    change = f"{now} rank{'s' * (now != 1)}" + (f" instead of {before}" if now != before else "")
    return f"without {', '.join(sorted(lost))}: {change}"


def _wait(selector: selectors.BaseSelector, signals: Sequence[int], until: float) -> None:
    """Wait until then, of time.monotonic(), or for a signal."""
    while not signals and (left_s := until - time.monotonic()) > 0:
        for key, _ in selector.select(left_s):
            key.data()


def _end(signals: Sequence[int], late_at: float, limit_s: float | None) -> Outcome | None:
    """How the job ends between two attempts; None: it goes on."""
    if signals:
        return Outcome(128 + signals[0], None, f"ended by {signal_name(signals[0])}")
    if time.monotonic() >= late_at:
        return Outcome(TIMED_OUT, None, f"the job took longer than {limit_s:g} s")
    return None


def _record(log_dir: str | None, text: str) -> None:
    """Write to the launcher's log what no attempt says."""
    if log_dir is not None:
        path = os.path.join(log_dir, "launcher.log")
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(own_lines(text))


def _set_calls_aside(log_dir: str | None, attempt: int) -> None:
    """Keep what ranks have called last (`kept_calls`), which the next attempt may write anew."""
    if log_dir is not None:
        path = os.path.join(log_dir, "calls.txt")
        with contextlib.suppress(OSError):
            os.replace(path, path_of_attempt(path, attempt))


def path_of_attempt(path: str, attempt: int) -> str:
    """The file beside `path` for an attempt that another one follows."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"attempt{attempt}.{name}")
