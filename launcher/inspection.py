"""What a job answers to `pycoll status` and `pycoll top`: who waits for whom, and what ranks do.

The launcher knows what ranks wait in, the kernel what a process does, and each rank answers for its
threads (`pycoll._runtime.inspected`). So a rank that is stopped, or keeps Python's lock, is shown
by the first two, and said not to answer.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pycoll._launcher import guardian, wait_table
from pycoll._launcher.host import Host, LocalHost
from pycoll._launcher.job_socket import Asker, JobSocket
from pycoll._launcher.job_spec import JobSpec
from pycoll._launcher.notes import NOTED
from pycoll._launcher.rendezvous_server import Server
from pycoll._launcher.watch import WaitReport, Watch

if TYPE_CHECKING:
    from pycoll._launcher.awaited import Awaited, WaitSums
    from pycoll._launcher.hosts import Hosts
    from pycoll._launcher.outcome import RankState
    from pycoll._launcher.recorder import CallRecorder

_ANSWER_S = 1.0
"""Who has not answered then does not in time: it is stopped, or keeps Python's lock."""

_NOTES_NOW = 256
"""So many of the last notes of each rank tell `pycoll top` for whom it waits."""

Fields = dict[str, Any]

_NOT_JOINED = "has not called pycoll.init()"


class Inspection:
    """Answers those that ask about a job, in the launcher's loop.

    Args:
        spec: what the job runs, and how.
        server: knows what ranks wait in.
        watch: finds out who waits for whom.
        selector: the loop's.
        stack: closes the job's socket.

    Attributes:
        hosts: of the job; whoever makes them sets this.
        spec: with the path of the job's socket, if the guardian of ranks here is to remove it.
    """

    hosts: Hosts

    def __init__(
        self,
        spec: JobSpec,
        server: Server,
        watch: Watch,
        selector: selectors.BaseSelector,
        stack: contextlib.ExitStack,
    ) -> None:
        self._job, self._argv, self._options = spec.job, list(spec.argv), spec.options
        self._server, self._watch = server, watch
        self._started = time.time()
        self._askers: list[Asker] = []
        self._states: dict[int, str] = {}
        self._stacks: dict[int, Fields] = {}
        self._waits: dict[int, WaitSums] = {}
        self._untold: set[Host] = set()
        self._counting: list[Asker] = []
        self._count_until = 0.0
        self._recorder: CallRecorder | None = None
        self._socket = JobSocket(spec.job, selector, self._hear)
        stack.callback(self._socket.close)
        self.spec = spec._replace(socket=self._socket.path)
        if self._options.hosts and self._socket.path:
            # There may be no ranks here, or none before other hosts are there.
            keeper = stack.enter_context(guardian.guarded(spec.job))
            keeper.add_file(self._socket.path)
            stack.callback(keeper.done)
            self.spec = spec

    def keep_calls(self, why: str) -> None:
        """Find out what ranks have called last; the first reason counts."""
        if self._recorder is not None or not self.hosts.have_started:
            return
        from pycoll._launcher.recorder import CallRecorder

        self._recorder = CallRecorder(self._options.log_dir, why, self.hosts.say)
        self._recorder.ask({rank: self.hosts.of(rank) for rank in self._ranks()})

    def finish_calls(self, why: str) -> str:
        """Write what has come until now, if not all has; returns where ranks first differed then.

        "" if that is not known, or of another moment than `why` says.
        """
        difference = self._recorder.finish() if self._recorder is not None else ""
        return difference if self._recorder is not None and self._recorder.why == why else ""

    def tell_stragglers(self, ranks: Sequence[RankState], now: float) -> None:
        """Say at the end of a job which rank the others have waited for."""
        if not self._server.met_at:
            return
        from pycoll._launcher import stragglers

        lines = stragglers.of_job(
            [self.hosts.of(each.rank).tally(each.rank) for each in ranks],
            now - self._server.met_at,
            verbose=self._options.verbose,
            is_well=all(each.status == 0 for each in ranks),
            awaited=self._awaited(),
        )
        if lines:
            self.hosts.tell(lines)

    def unfinished(self, rank: int) -> str:
        """Which calls of a rank are under way that it may not wait for; "" if that is not known."""
        host = self.hosts.of(rank)
        return host.unfinished(rank) if isinstance(host, LocalHost) else ""

    def ask_for_stragglers(self, now: float) -> None:
        """Have all hosts tell what `tell_stragglers` needs, if it will say anything."""
        from pycoll._launcher import stragglers

        is_long = now - self._server.met_at >= stragglers.LONG_S
        if self._server.met_at and (self._options.verbose or is_long):
            self._ask_waits(NOTED)

    def update(self, now: float) -> float:
        """Do what is due; returns when to call this again."""
        if self._counting and (now >= self._count_until or not self._untold):
            askers, self._counting = self._counting, []
            found = self._tallies()
            for asker in askers:
                asker.answer(found)
        return self._count_until if self._counting else float("inf")

    def _ask_waits(self, most: int) -> None:
        """Have all hosts tell for whom their ranks have waited, by so many notes of each kind."""
        self._untold = set(map(self.hosts.of, self._ranks()))
        for host in list(self._untold):
            host.read_waits(self._server.size, most, partial(self._take_waits, host))

    def _take_waits(self, host: Host, waits: Mapping[int, WaitSums]) -> None:
        self._waits.update(waits)
        self._untold.discard(host)

    def _awaited(self) -> Awaited | None:
        """For whom ranks have waited; None: not all hosts have told."""
        from pycoll._launcher import awaited

        if len(self._waits) != self._server.size:
            return None
        return awaited.of_job(self._waits, [self.hosts.of(r).tally(r) for r in self._ranks()])

    def _hear(self, asker: Asker) -> None:
        """Somebody asks: of ranks when these, or their hosts, have answered; of the job at once."""
        want = asker.question.get("want")
        if want == "tallies":
            if not self._counting:
                self._ask_waits(_NOTES_NOW)
                self._count_until = time.monotonic() + _ANSWER_S
            self._counting.append(asker)
            return None
        if want != "status":
            return asker.answer(self._about())
        self._askers.append(asker)
        if len(self._askers) > 1:
            return  # that answer is theirs, too
        self._watch.report(self._answer)

    def _ranks(self) -> range:
        return range(self._server.size) if self.hosts.have_started else range(0)

    def _answer(self, report: WaitReport) -> Iterator[float]:
        """Ask all ranks, and answer when they have, or it is too late for that."""
        # Before a rank is asked, whose thread then runs that answers.
        self._states = {rank: self._state(rank) for rank in self._ranks()}
        self._stacks = {}
        for rank in self._ranks():
            self.hosts.of(rank).ask(rank, self._take_stacks)
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not self._have_answered():
            yield until
        askers, self._askers = self._askers, []
        found = self._status(report)
        for asker in askers:
            asker.answer(found)

    def _state(self, rank: int) -> str:
        text, pid = self._server.state(rank)
        return text or self.hosts.of(rank).state(rank, pid)

    def _host(self, rank: int) -> str:
        return self.hosts.name_of(rank) if len(self.hosts.names) > 1 else ""

    def _take_stacks(self, rank: int, packed: bytes) -> None:
        import msgpack

        try:
            found = msgpack.unpackb(packed)
            self._stacks[rank] = {
                "threads": [
                    {"name": str(name), "frames": [_frame(*frame) for frame in frames]}
                    for name, frames in found["threads"]
                ],
                "ended": bool(found["ended"]),
            }
        except (ValueError, TypeError, KeyError, msgpack.UnpackException):
            pass  # somebody else writes to that socket

    def _have_answered(self) -> bool:
        """Whether all ranks have that can."""
        return all(
            rank in self._stacks or not self._server.state(rank)[1] for rank in self._ranks()
        )

    def _about(self) -> Fields:
        return {
            "job": self._job,
            "process": os.getpid(),
            "command": self._argv,
            "size": self._server.size,
            "seconds": round(time.time() - self._started, 1),
        }

    def _tallies(self) -> Fields:
        ranks = []
        for rank in self._ranks():
            pid = self._server.state(rank)[1]
            tally = self.hosts.of(rank).tally(rank) if pid else None
            fields = {
                "rank": rank,
                "host": self._host(rank),
                "process": pid,
                "state": self._state(rank),
            }
            ranks.append(fields | (tally._asdict() if tally is not None else {}))
        found = self._awaited() if ranks else None
        awaited = found.packed() if found is not None else None
        return {**self._about(), "time": time.monotonic(), "ranks": ranks, "awaited": awaited}

    def _status(self, report: WaitReport) -> Fields:
        ranks = [self._rank(rank, report) for rank in self._ranks()]
        others = {}
        for each in [rank for rank in ranks if rank["waits_in"] is None]:
            lines = [each["state"]]
            if each["process"]:
                lines = [f"{lines[0]}, process {each['process']}", self.unfinished(each["rank"])]
            others[each["rank"]] = "\n".join(filter(None, lines))
        late = {rank["rank"]: _NOT_JOINED for rank in ranks if rank["state"].endswith(_NOT_JOINED)}
        heading = report.heading or "no rank has waited in pycoll for 0.2 s"
        if late and any(rank["process"] for rank in ranks):
            heading = wait_table.waiting_text(late, 0.0)
        if not ranks:
            heading, others = "the ranks have not been started yet", {}
        return {
            **self._about(),
            "heading": heading,
            "deadlock": report.is_deadlock,
            "table": wait_table.table(heading, report.waiters, others) if ranks else [heading],
            "ranks": ranks,
        }

    def _rank(self, rank: int, report: WaitReport) -> Fields:
        told, pid = self._server.state(rank)
        stacks = self._stacks.get(rank)
        text = self._states.get(rank, told)
        if not told and not pid:
            text = f"{text}, {_NOT_JOINED}"
        elif told or text == "stopped":
            pass
        elif not self._server.has_met:
            text = f"{text}, in pycoll.init()"
        elif stacks is not None and stacks["ended"]:
            text = f"{text}, its main thread has ended"
        waiter = report.waiters.get(rank)
        waits_in = None
        if waiter is not None:
            waits_in = {
                "call": waiter.call,
                "which": waiter.which.strip(),
                "where": waiter.where,
                "seconds": round(waiter.waited_s, 1),
                "for": sorted(waiter.awaited),
            }
        return {
            "rank": rank,
            "host": self._host(rank),
            "process": pid,
            "state": text,
            "waits_in": waits_in,
            "threads": stacks["threads"] if stacks is not None else None,
        }


def _frame(path: object, line: int, what: object) -> tuple[str, int, str]:
    return str(path), int(line), str(what)
