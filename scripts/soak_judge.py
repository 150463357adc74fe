"""What must be right of a job of soak_hosts.py: what ranks are told, what it says, what is left."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hosts_bed import Bed
    from soak_hosts import HostsJob

EMPTY_S = 30.0  # on a quiet machine half of that suffices
PASSED_ON = re.compile(r"raised PeerFailed: rank (\d+) failed: (?!raised PeerFailed)(.*)")
SOCKETS = "/run/soak"  # each host has /run for itself


class Wrong(Exception):
    """Something is not as it must be."""


class Blow(NamedTuple):
    """What has happened to a job for good.

    Attributes:
        name: one of `soak_hosts.BLOWS`.
        ranks: those that are lost by it.
        hosts: those that are lost.
        reasons: how what became of the ranks begins.
        status: of the job, if it ends by it.
    """

    name: str
    ranks: frozenset[int] = frozenset()
    hosts: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ()
    status: int = 0


def passed_on(of: int, reason: str) -> tuple[int, str]:
    """Who has failed first, and how: a communicator without those that are lost ends with a rank
    that needed one of them.
    """
    found = PASSED_ON.search(reason)
    return (int(found[1]), found[2]) if found else (of, reason)


def judge_ranks(job: HostsJob, what: str, must: set[int], blow: Blow) -> None:
    """Check what ranks were told: these must have been, others may."""
    told = job.of(what)
    if missing := must - set(told):
        raise Wrong(f"ranks {sorted(missing)} have not told that they {what}")
    for rank, each in told.items():
        if rank in blow.ranks or rank in job.lost:
            continue
        if each.get("error") == "BootstrapError" and rank not in job.of("joined"):
            continue
        of, reason = each["of"], each["reason"]
        if of not in blow.ranks:
            of, reason = passed_on(of, reason)
        wrong = each.get("error", "PeerFailed") != "PeerFailed" or of not in blow.ranks
        if wrong or not reason.startswith(blow.reasons):
            raise Wrong(f"of {blow} rank {rank} was told {each}")


def judge_report(job: HostsJob, pattern: str, blow: Blow) -> None:
    """Check that pycoll-run has said that, of a rank that was lost, with the right reason."""
    text = (job.folder / "stderr").read_text()
    found = re.findall(rf"^pycoll-run: ({pattern})$", text, re.MULTILINE)
    if not found:
        raise Wrong(f"pycoll-run has not said {pattern!r}")
    match = re.search(r"rank (\d+) failed after [0-9.]+ s: (.*)", found[-1])
    assert match is not None
    if int(match[1]) not in blow.ranks or not match[2].startswith(blow.reasons):
        raise Wrong(f"of {blow} pycoll-run has said {found[-1]!r}")


def judge_traces(job: HostsJob) -> None:
    """Check what holds of every job: no rank was double, nothing of the launcher failed."""
    is_torn = "pycoll-run is killed" in " ".join(job.done)  # perhaps in the middle of a line
    strange = [each for each in job.told if each["what"] in ("nonsense", "is double")]
    if strange and not (is_torn and strange == job.told[-1:]):
        raise Wrong(f"told: {strange}")
    text = (job.folder / "stderr").read_text()
    if re.search(r'File ".*launcher/', text) or "AssertionError" in text:
        raise Wrong("a traceback that must not be")


def left_on(hosts: Bed, host: str) -> list[str]:
    """What is left of jobs on a host."""
    files = hosts.run(host, "find", "/dev/shm", SOCKETS, "-mindepth", "1").stdout.split()
    return [*hosts.processes(host), *files]


def await_nothing(hosts: Bed) -> list[str]:
    """What is left of a job on each host after a while."""
    wrong = []
    deadline = time.monotonic() + EMPTY_S
    for host in hosts.names:
        while (left := left_on(hosts, host)) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            wrong.append(f"left on {host}: {left}")
            hosts.end_all(host)
            hosts.run(host, "find", "/dev/shm", SOCKETS, "-mindepth", "1", "-delete")
    return wrong
