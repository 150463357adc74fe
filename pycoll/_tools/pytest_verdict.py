"""One result for a test that ran on several ranks, made of what each rank has reported.

A rank's report is a mapping:

    phases    setup, call, teardown, "pytest" for what went wrong around them, and "after the test"
              for what was found when the rank left the job, each a mapping:
              when; outcome (passed, failed, skipped, xfailed, xpassed or xpassed(strict)); victim
              (it failed because another rank had); text (of the failure); crash (path, line,
              message); reason and skip (as in pytest's reports); sections (name, text)
    warnings  module and name of the class, text, file, line
    done      it has come to its end
    stack     where it was when the job ended it, if it could tell
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll._support.wording import ranks_text

if TYPE_CHECKING:
    from pycoll._functions.function import Ended

Phase = dict[str, Any]
Pairs = list[tuple[int, Phase]]
"""Phases with their ranks."""

_BAD = ("failed", "xfailed", "xpassed(strict)")  # outcomes that explain an exit status
_WHEN = {0: "before or in setup", 1: "in the test", 2: "in teardown"}  # by the phases behind it
# What differs between ranks that fail alike: addresses, and what a communicator is shown as.
_OWN = re.compile(r"\b0x[0-9a-f]+|\brank \d+ of \d+")


class _Crash(NamedTuple):
    """Where a test failed, and one line about it."""

    path: str = ""
    lineno: int = 0
    message: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


class _Failure(NamedTuple):
    """A part of what is shown: a heading with a text below, or a line alone."""

    title: str
    text: str = ""
    crash: _Crash = _Crash()


class Representation:
    """What pytest shows of a failure on several ranks: the `longrepr` of a report."""

    def __init__(self, failures: list[_Failure]) -> None:
        self._failures = failures
        title, _, crash = failures[0]
        message = f"{title}: {crash.message}" if crash.message else title
        self.reprcrash = crash._replace(message=message)

    def toterminal(self, tw: Any) -> None:
        """Write it to a pytest TerminalWriter."""
        for title, text, _ in self._failures:
            if text:
                tw.sep("-", title)
            else:
                tw.line(title)
            for line in text.splitlines():
                tw.line(line, red=line.startswith("E "), bold=line.startswith("E "))

    def __str__(self) -> str:
        lines = []
        for title, text, _ in self._failures:
            lines += [f" {title} ".center(80, "-"), text] if text else [title]
        return "\n".join(lines)


class Verdict:
    """One result for a test.

    A test that is expected to fail (xfail) did so if it failed as expected on one rank, and on the
    others only because of that. It is skipped if all ranks skipped it.

    Attributes:
        outcome: passed, failed, skipped, xfailed or xpassed.
        reason: of a skip or xfail, or what failed in one line.
    """

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._ranks: list[dict[str, Any]] = [
            {"phases": [], "warnings": [], "done": False} if report is None else report.head
            for report in ended.reports
        ]
        failed, lost = self._of("failed"), self._lost()
        xpassed = self._of("xpassed(strict)")
        causes = [pair for pair in failed if not pair[1]["victim"]]
        victims = [pair for pair in failed if pair[1]["victim"]]
        # An xfail that names no exception covers also what no rank could report.
        self._may_be_expected = bool(lost) and not failed
        self._failures: list[_Failure] = []
        if causes or (lost and not self._of("xfailed")):
            # A rank that failed because another one did is shown in one line.
            self._failures = [*lost, *_fold(causes, first=ended.outcome.culprit), *_brief(victims)]
        elif not self._of("xfailed"):
            self._failures = _fold(victims or xpassed)
        if self._failures:
            self._failures += self._rest(failed or xpassed)
        self.outcome = self._decide()
        if self._failures:
            self.reason = Representation(self._failures).reprcrash.message
        else:
            reasons = [phase["reason"] for _, phase in self._of(self.outcome)]
            self.reason = "; ".join(dict.fromkeys(reasons))

    def fill(self, report: Any) -> None:
        """Complete pytest's report of the test's call."""
        for rank, said in enumerate(self._ranks):
            for phase in said["phases"]:
                report.sections += [(f"{name}, rank {rank}", t) for name, t in phase["sections"]]
        match self.outcome:
            case "failed":
                if self._may_be_expected and hasattr(report, "wasxfail"):
                    return
                vars(report).pop("wasxfail", None)
                report.outcome, report.longrepr = "failed", Representation(self._failures)
            case "xfailed":
                report.outcome, report.wasxfail = "skipped", self.reason
            case "xpassed":
                report.outcome, report.wasxfail = "passed", self.reason
            case "skipped":
                path, line, _ = self._of("skipped")[0][1]["skip"]
                report.longrepr = (path, line, f"Skipped: {self.reason}")

    def warn_again(self) -> None:
        """Repeat the warnings of the ranks here, the same one of several ranks once."""
        seen = {tuple(warning) for said in self._ranks for warning in said["warnings"]}
        for module, name, text, file, line in sorted(seen):
            category = getattr(sys.modules.get(module), name, UserWarning)
            with contextlib.suppress(Warning):  # an error here, but not in the ranks
                warnings.warn_explicit(text, category, file, line)

    def _decide(self) -> str:
        if self._failures:
            return "failed"
        skipped = {rank for rank, _ in self._of("skipped")}
        if self._of("xfailed"):
            return "xfailed"
        if len(skipped) == len(self._ranks):
            return "skipped"
        return "xpassed" if self._of("xpassed") else "passed"

    def _of(self, outcome: str) -> Pairs:
        """The phases with this outcome, each with its rank."""
        return [
            (rank, phase)
            for rank, said in enumerate(self._ranks)
            for phase in said["phases"]
            if phase["outcome"] == outcome
        ]

    def _lost(self) -> list[_Failure]:
        """What no rank could report: the test took too long, or a rank died."""
        ended, outcome = self._ended, self._ended.outcome
        if ended.timed_out:
            said = outcome.report.partition(";")[0].replace("the job", "the test")
            text = "\n".join(["What each rank was doing:", *ended.table])
            return [_Failure(said, text), *self._stacks()]
        if ended.deadlock:
            return [_Failure(ended.deadlock, "\n".join(ended.table)), *self._stacks()]
        silent = [rank for rank, said in enumerate(self._ranks) if not said["done"]]
        reason = ended.reason
        if outcome.culprit is not None:
            phases = self._ranks[outcome.culprit]["phases"]
            explained = any(phase["outcome"] in _BAD for phase in phases)
            silent = [] if explained else [outcome.culprit]
        elif silent:
            reason = "exit status 0"
        when = [_WHEN.get(len(said["phases"]), "after the test") for said in self._ranks]
        return [_Failure(f"rank {rank} died {when[rank]}: {reason}") for rank in silent]

    def _stacks(self) -> list[_Failure]:
        """Where ranks were when they were asked to end, those at the same place together."""
        groups: dict[str, list[int]] = {}
        for rank, said in enumerate(self._ranks):
            if "stack" in said:
                groups.setdefault(said["stack"], []).append(rank)
        return [_Failure(f"{ranks_text(ranks)}, stack", stack) for stack, ranks in groups.items()]

    def _rest(self, failed: Pairs) -> list[_Failure]:
        """One line for the ranks that did not fail."""
        told = {rank for rank, _ in failed} | {self._ended.outcome.culprit}
        rest = [rank for rank in range(len(self._ranks)) if rank not in told]
        done = [rank for rank in rest if self._ranks[rank]["done"]]
        cut = [rank for rank in rest if not self._ranks[rank]["done"]]
        found = [_Failure(f"{ranks_text(done)}: no failure")] if done else []
        if cut and self._ended.outcome.culprit is not None:
            found += [
                _Failure(f"{ranks_text(cut)}: not done when the job was ended"),
                *self._stacks(),
            ]
        return found


def _fold(pairs: Pairs, first: int | None = None) -> list[_Failure]:
    """What failed, ranks with the same text together; that of the rank `first` is shown first."""
    groups: dict[tuple[str, str], Pairs] = {}
    for rank, phase in sorted(pairs, key=lambda pair: pair[0] != first):
        groups.setdefault((phase["when"], _OWN.sub("*", phase["text"])), []).append((rank, phase))
    return [
        _Failure(_title(group), group[0][1]["text"], _Crash(*group[0][1]["crash"]))
        for group in groups.values()
    ]


def _brief(pairs: Pairs) -> list[_Failure]:
    """One line for all ranks that failed alike at the same place."""
    groups: dict[str, Pairs] = {}
    for rank, phase in pairs:
        path, line, message = phase["crash"]
        place = f"{path.removeprefix(os.getcwd() + os.sep)}:{line}"
        groups.setdefault(f"{message.partition(chr(10))[0]} ({place})", []).append((rank, phase))
    return [_Failure(f"{_title(group)}: {said}") for said, group in groups.items()]


def _title(group: Pairs) -> str:
    when = group[0][1]["when"]
    return ranks_text({rank for rank, _ in group}) + ("" if when == "call" else f" ({when})")
