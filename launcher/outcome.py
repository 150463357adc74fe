"""What became of a job's ranks, which of them was the cause, and how that is told."""

from __future__ import annotations

import errno
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from pycoll._support.wording import ranks_text
from pycoll.errors import BootstrapError, Error

CANNOT_START = 69
"""The status of a job that cannot be started here and now: EX_UNAVAILABLE of sysexits.h."""

TIMED_OUT = 124
"""The status of a job that took too long, as that of the command `timeout`."""

DEADLOCKED = errno.EDEADLK
"""The status of a job that was ended because ranks wait for each other for ever."""

_NO_HANDLER = "{} was passed on to all ranks, and ends a program that has no handler for it"
_ERROR_LINES = 12  # lines of a traceback, or of standard error, in a report


class CannotStartError(Error):
    """A job cannot be started here and now; its command line is not wrong."""


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        status: its exit status.
        culprit: the rank that was the cause, if one was.
        report: what to print about it.
        reason: what became of the culprit, for example "exit status 3".
        table: what each rank was doing when the job's time was over, or in a deadlock.
        is_decided: the launcher has ended the job, or was about to.
        is_lost: nothing can come of the culprit any more, nor of its host.
    """

    status: int
    culprit: int | None
    report: str
    reason: str = ""
    table: tuple[str, ...] = ()
    is_decided: bool = False
    is_lost: bool = False


class Decision(NamedTuple):
    """Why the launcher itself ended a job: when, with which exit status, what to print."""

    at: float
    status: int
    text: str
    table: tuple[str, ...] = ()


class Raised(NamedTuple):
    """An exception that ended a rank's program."""

    error: str
    text: str
    peer_failed: bool


class RankState:
    """What is known of one rank.

    Attributes:
        status: how its process ended: exit status, or minus the signal; None: it has not.
        joined: the process that joined the job as this rank.
        left: it has finalized.
        raised: the exception that it told of.
        abort_code: the code it aborted the job with.
        lost_at: when the process that joined ended, if that is not the first one.
        gone: it is lost with its host, or will be: which and why; its process may live.
        cut: it has lost its link to a rank that lives: which and why.
        died: the process that joined ended without finalizing, and is not the one started here.
        needed_by: its process ended with status 0 without finalizing, and this rank needed it.
        failed_at: when the first sign of its failure came.
        signalled: the launcher had sent it a signal that ends a process before it ended.
        left_out: in a job that survives the others go on without it, after a shrink().
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.status: int | None = None
        self.joined: int | None = None
        self.left = False
        self.raised: Raised | None = None
        self.abort_code: int | None = None
        self.died = False
        self.needed_by: int | None = None
        self.lost_at: float | None = None
        self.gone = ""
        self.cut = ""
        self.failed_at: float | None = None
        self.signalled = False
        self.left_out = False

    @property
    def victim(self) -> bool:
        """Whether it failed because another rank had."""
        return self.raised is not None and self.raised.peer_failed and self.abort_code is None

    @property
    def well(self) -> bool:
        """Whether it ended as it should."""
        # What it found out when it had left came too late for its exit status.
        raised = self.left and self.raised is not None
        failed = raised or self.died or self.needed_by is not None or self.abort_code is not None
        return self.status == 0 and not failed and not self.gone

    @property
    def job_status(self) -> int:
        """The exit status of the job if this rank is the cause."""
        if self.abort_code is not None:
            return self.abort_code
        if self.status and not self.signalled:
            return self.status if self.status > 0 else 128 - self.status
        return 1

    def told_fully(self) -> bool:
        """Whether its end is explained: no message of it can be on its way any more."""
        failed_itself = self.status is not None and self.status > 0 and not self.signalled
        return self.joined is None or self.left or self.raised is not None or not failed_itself

    def describe_so_far(self) -> str:
        """What became of it, whose process may still live."""
        if self.status is None and self.raised is not None and not self.gone:
            return f"raised {self.raised.error}"
        return self.describe()

    def describe(self) -> str:
        """What became of it, after "rank N ..."."""
        if self.gone:
            return self.gone
        if self.status is None:
            ended = "did not end"
        elif self.signalled and self.status < 0:
            ended = f"ended by the launcher with {signal_name(-self.status)}"
        else:
            ended = end_text(self.status)
        if self.abort_code is not None:
            return f"called abort({self.abort_code})"
        if self.raised is not None and not (self.status == 0 and self.well):
            when = " at its end" if self.status == 0 else ""
            cut = f" ({self.cut})" if self.cut and self.victim else ""
            return f"raised {self.raised.error}{cut}{when}, {ended}"
        if self.died:
            return f"lost process {self.joined}, which had joined the job, {ended}"
        if self.needed_by is not None:
            return ended_in_need(ended, self.needed_by)
        return ended


def signal_name(signum: int) -> str:
    """The name of a signal, or "signal N" if it has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def end_text(status: int) -> str:
    """How a process ended: "exit status 3" or "killed by signal 9 (SIGKILL)"."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by signal {-status} ({signal_name(-status)})"


def ended_in_need(ended: str, rank: int) -> str:
    """Say that a process ended without finalizing, though `rank` needed it; `ended`: how."""
    return f"ended without finalizing ({ended}), though rank {rank} needed it"


def refusal(exc: Exception, program: str, size: int, is_here: bool = True) -> Outcome:
    """The outcome when not all ranks could be started, of this host or another.

    Args:
        exc: why.
        program: what the ranks should run.
        size: how many there should be.
        is_here: it was this host.
    """
    reason, status = str(exc), CANNOT_START
    if isinstance(exc, OSError):
        reason = exc.strerror or reason
        if exc.filename == program:
            if is_here and isinstance(exc, FileNotFoundError) and os.path.exists(program):
                reason = "the interpreter that its first line names does not exist"
            status = 127 if isinstance(exc, FileNotFoundError) else 126
            return Outcome(status, None, f"cannot run {program}: {reason}")
        if exc.filename is not None:
            reason = f"{exc.filename}: {reason}"
    elif not isinstance(exc, BootstrapError):  # a setting that makes no sense
        status = 2
    return Outcome(status, None, f"cannot start {size} rank{'s' * (size > 1)}: {reason}")


def judge(
    ranks: Sequence[RankState],
    decision: Decision | None,
    started: float,
    stderr_of: Callable[[int], str],
    passed_on: Collection[int] = (),
) -> Outcome:
    """The outcome of a job that is over.

    The cause is the earliest death or exception; that another rank failed is the cause of nothing
    unless there is nothing else. Ranks without which the others have gone on do not count, unless
    one has ended the job.

    Args:
        ranks: what is known of each.
        decision: why the launcher itself has ended the job; None: it has not.
        started: when the job was, of time.monotonic().
        stderr_of: returns the end of a rank's standard error.
        passed_on: signals that ranks were sent, and that end a program without a handler.
    """
    counted = [rank for rank in ranks if not rank.left_out or rank.abort_code is not None]
    if decision is None and all(rank.well for rank in counted):
        return Outcome(0, None, "")
    failed = _failures(counted) or _failures(ranks)
    first = next((pair for pair in failed if not pair[1].victim), None)
    if decision is not None and (first is None or decision.at <= first[0]):
        text = decision.text
        report = _join(text, _others(ranks, None)) if text else ""
        return Outcome(decision.status, None, report, table=decision.table, is_decided=True)
    at, cause = first or failed[0]
    if first is None:  # the others may know of a lost host, or link, before the launcher does
        lost = [rank for rank in counted if rank.gone] or [rank for rank in counted if rank.cut]
        cause = next(iter(lost), cause)
    head = f"rank {cause.rank} failed after {at - started:.1f} s: {cause.describe()}"
    shown = cause if cause.needed_by is None else ranks[cause.needed_by]
    detail = shown.raised.text if shown.raised else stderr_of(shown.rank)
    whose = (
        f"rank {shown.rank}, which needed it, wrote last:" if shown is not cause and detail else ""
    )
    died_of = [s for s in passed_on if cause.status in (-s, 128 + s) and not cause.signalled]
    hint = _NO_HANDLER.format(signal_name(died_of[0])) if died_of else ""
    then = f"then {decision.text}" if decision is not None and decision.table else ""
    report = _join(head, whose, last_lines(detail), hint, then, _others(ranks, cause))
    return Outcome(
        cause.job_status,
        cause.rank,
        report,
        cause.describe(),
        is_decided=decision is not None,
        is_lost=bool(cause.gone),
    )


def _failures(ranks: Iterable[RankState]) -> list[tuple[float, RankState]]:
    """Ranks that have failed, in the order in which they have; and when."""
    failed = [(rank.failed_at, rank) for rank in ranks if rank.failed_at is not None]
    return sorted(failed, key=lambda pair: pair[0])


def _others(ranks: Iterable[RankState], cause: RankState | None) -> str:
    groups = defaultdict(list)
    for rank in ranks:
        if rank is not cause:
            groups[rank.describe()].append(rank.rank)
    if not groups:
        return ""
    ends = "; ".join(f"{ranks_text(numbers)}: {text}" for text, numbers in groups.items())
    return ends if cause is None else f"the others: {ends}"


def unconnected(ranks: Sequence[RankState], program: str) -> str:
    """Say that several Python programs ended well, but none has joined the job; "": it is not so.

    Other programs may have been started for what each does alone.
    """
    is_python = os.path.basename(program).startswith("python")
    if len(ranks) < 2 or not is_python or any(rank.joined is not None for rank in ranks):
        return ""
    return f"no rank called pycoll.init(): pycoll has not connected the {len(ranks)} processes"


def own_lines(text: str) -> str:
    """Lines of the launcher's as users see them: those that are not indented say whose they are."""
    lines = [line for line in text.splitlines() if line]
    return "".join(f"{line}\n" if line[0] == " " else f"pycoll-run: {line}\n" for line in lines)


def _join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def last_lines(text: str, count: int = _ERROR_LINES) -> str:
    """The last lines of a text that are not empty, indented; a progress bar's last state only."""
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join([f"    {line}" for line in lines if line.strip()][-count:])
