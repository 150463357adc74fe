"""Runs a job: has its ranks started, watches them, and ends them together.

One thread and one selector: ranks are watched by their host (`host`), their output, the rendezvous
and signals by a descriptor each. A failure is told to the other ranks at once; those that do not
end by themselves get SIGTERM after 2 s and SIGKILL after 4 s (`Options.grace_s`), with everything
they started. With `--survive` only the rank that has failed gets these signals, and what it has
started.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from pycoll._launcher.host import reserve_descriptors
from pycoll._launcher.hosts import Hosts
from pycoll._launcher.inspection import Inspection
from pycoll._launcher.job_spec import JobSpec, Options
from pycoll._launcher.outcome import (
    CANNOT_START,
    DEADLOCKED,
    TIMED_OUT,
    Outcome,
    Raised,
    RankState,
    judge,
    own_lines,
    refusal,
    unconnected,
)
from pycoll._launcher.outcome import signal_name as name_of
from pycoll._launcher.output import Relay, Target
from pycoll._launcher.rank_ends import RankEnds
from pycoll._launcher.rendezvous_server import Notice, Server
from pycoll._launcher.signals import caught_signals
from pycoll._launcher.watch import Watch
from pycoll._support.environment import UNENCRYPTED, knows_unencrypted, warn_after
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._trace.timeline import RankTrace

LINGER_S = 0.25
"""After the last end: for late messages, and for children that still print."""

_NEVER = float("inf")


class Job(RankEnds):
    """One job, to be run once.

    Args:
        argv: the program of every rank and its arguments.
        options: how to run it.
        pass_fds: descriptors every rank inherits under the same numbers; they stay the caller's.
        stdout, stderr: where output goes: a file, or a function that is called with a rank and
            whole lines (bytes; rank -1: the launcher's own); None: sys.stdout and sys.stderr.
        stdin: standard input of rank 0 (None: this process's); the other ranks have none.
        late_at: when it has taken too long, of time.monotonic(); infinity: as its options say.

    Attributes:
        id: the value of PYCOLL_JOB in every process of the job; on several hosts with the number
            of the host behind it.
        server: where the ranks meet; made by `run`.
        selector: what its loop waits for; the data of a key is a function to call.
        signals: caught and not handled yet.
        hosts: its hosts, when it has been opened.
        traces: what the ranks have recorded, in order, when they have ended.
    """

    def __init__(
        self,
        argv: Sequence[str],
        options: Options,
        *,
        pass_fds: Sequence[int] = (),
        stdout: Target = None,
        stderr: Target = None,
        stdin: int | IO[Any] | None = None,
        late_at: float = _NEVER,
    ) -> None:
        super().__init__(options)
        self.id = os.urandom(16).hex()
        self.hosts: Hosts | None = None
        self.traces: Sequence[RankTrace] = ()
        self._argv = list(argv)
        self._pass_fds = tuple(pass_fds)
        self._stdout, self._stderr, self._stdin = stdout, stderr, stdin
        self.signals: list[int] = []
        self._for_ranks: list[int] = []  # signals that have come, and mean the ranks
        self._passed_on: set[int] = set()
        self._ended: Mapping[int, str] = {}  # ranks at the end of a task, and what the table says
        self._record: Callable[[str], object] = lambda text: None  # to the launcher's log
        self._late_at = late_at  # when the whole job has taken too long

    def run(self) -> Outcome:
        """Run the job to its end; returns how it ended.

        In the main thread SIGINT, SIGTERM and SIGHUP end the job while it runs (unless they are
        ignored); the handlers are put back afterwards. In another thread no handler is touched.

        Raises:
            Exception: whatever `stdout` or `stderr` raised when called; the job has been ended.
        """
        with contextlib.ExitStack() as stack:
            self.open(stack)
            stack.enter_context(self.catching())
            outcome = self.start() or self.watch() or Outcome(0, None, "")
            self._record(own_lines(f"{outcome.report}\nexit status {outcome.status}"))
            return outcome

    def open(self, stack: contextlib.ExitStack) -> None:
        """Prepare; the stack undoes it, and ends what is left of the job."""
        self._started = time.monotonic()
        if self._options.timeout_s is not None and self._late_at == _NEVER:
            self._late_at = self._started + self._options.timeout_s
        self._stack = stack
        self.selector = stack.enter_context(selectors.DefaultSelector())

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Catch signals, as `run` does; else none is heeded."""
        for_ranks = self._for_ranks if self._options.passes_on else None
        with caught_signals(self.selector, for_ranks) as self.signals:
            yield

    def start(self) -> Outcome | None:
        """Have the ranks started; returns how it ended if they cannot be."""
        try:
            self._open(self._stack)
            self._hosts.start()
        except (OSError, Error) as exc:
            return refusal(exc, self._argv[0], self._options.size)
        return None

    def watch(self, until: Callable[[float], float | None] = lambda now: _NEVER) -> Outcome | None:
        """Watch the ranks until the job is over; returns how it ended.

        Args:
            until: called with the time (monotonic) whenever something may have happened; returns
                when to call it again at the latest, or None: then this returns None, too.
        """
        if not self._watch(until):
            return None
        ended = time.monotonic() - LINGER_S
        self._inspection.ask_for_stragglers(ended)
        self._hosts.sweep(self._hear)
        if self._options.trace_records and self._hosts.have_started:
            self.traces = self._hosts.traces(self._ranks)
        self._inspection.finish_calls("")
        self._inspection.tell_stragglers(self._ranks, ended)
        self._relay.finish()
        self._flush()
        return self._outcome()

    def time_out(self, limit_s: float) -> None:
        """End the job because it, or a part of it, has taken longer than that."""
        self.give_up(TIMED_OUT, f"the job took longer than {limit_s:g} s", self.server.table())

    def give_up(self, status: int, text: str, table: Sequence[str] = ()) -> None:
        """End the job: SIGTERM, later SIGKILL. See `outcome.Decision`."""
        now = time.monotonic()
        self._decide(now, status, text, table)
        self._plan.end(now)

    # Starting.

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Make all that a job needs but its ranks; the stack undoes it, the ranks' ends first."""
        options = self._options
        reserve_descriptors(options.size)
        key = os.urandom(32)
        self._relay = Relay(
            sys.stdout if self._stdout is None else self._stdout,
            sys.stderr if self._stderr is None else self._stderr,
            self.selector,
            tag=options.tag_output,
            log_dir=options.log_dir,
            attempt=options.attempt,
        )
        stack.callback(self._relay.close)
        self._record = self._relay.record
        self.server = Server(
            options.size,
            key,
            before_failure=lambda rank: self._inspection.keep_calls(f"rank {rank} had failed"),
            on_failure=lambda: self._hosts.tell_failure(),
            doing=lambda rank: self._ended.get(rank) or self._hosts.of(rank).doing(rank),
            beside=self._beside,
        )
        stack.callback(self.server.close)
        self.selector.register(self.server.fileno(), selectors.EVENT_READ, _nothing)
        after_s = warn_after({**os.environ, **options.exports})
        self._watch_waits = Watch(
            self.server,
            options.size,
            after_s,
            self._tell_of_waits,
            lambda rank, pid: self._hosts.of(rank).state(rank, pid),
            lambda rank: self._inspection.unfinished(rank),
        )
        spec = JobSpec(self.id, key, options, self._argv, self._pass_fds, self._stdin)
        self._inspection = Inspection(spec, self.server, self._watch_waits, self.selector, stack)
        spec = self._inspection.spec
        self._hosts = self.hosts = Hosts(spec, self.selector, self, self.server, self._relay, stack)
        self._inspection.hosts = self._hosts
        stack.callback(self.server.close_port)
        self.say(f"job {self.id}: {options.size} ranks meet at {self.server.endpoint}")

    # Watching.

    def _watch(self, until: Callable[[float], float | None]) -> bool:
        """Serve the ranks until all have ended, and for as long after as something may come.

        Returns whether that is so; or `until` has returned None.
        """
        while True:
            now = time.monotonic()
            asked = until(now)
            if asked is None:
                return False
            wake = min(asked, self._act(now))
            if self._over_at is not None and (now >= self._over_at or self._nothing_to_come()):
                return True
            # Sending from `_act` may have used up the server's readiness: look again before sleep.
            if self._hear():
                continue
            ready = self.selector.select(None if wake == _NEVER else max(0.0, wake - now))
            self._hear()  # what a rank said last is heard before its end is seen
            for key, _ in ready:
                key.data()

    def _act(self, now: float) -> float:
        """Do what is due; returns when to call this again."""
        wake = [self._relay.update(now), self._watch_waits.update(now), self._hosts.update(now)]
        wake.append(self._inspection.update(now))
        self._heed_signals(now)
        if self._relay.error is not None:
            self._give_up_output()
        for rank in self._ranks:
            if rank.lost_at is not None and now >= rank.lost_at + LINGER_S:
                self._lose(rank, now)
            elif rank.lost_at is not None:
                wake.append(rank.lost_at + LINGER_S)
        if now >= self._late_at:
            self._late_at = _NEVER
            if self._over_at is None:
                self.time_out(self._options.timeout_s or 0.0)
            if not self._hosts.have_started:
                self._over_at = now
        wake.append(self._late_at)
        for signum in self._plan.take(now):
            self._signal_ranks(signum, now)
        wake.extend(self._plan.times)
        wake.extend(self._lost.update(now))
        if self._over_at is None and all(rank.status is not None for rank in self._ranks):
            self._over_at = now + LINGER_S
        if self._over_at is not None:
            wake.append(self._over_at)
        return min(wake)

    def _nothing_to_come(self) -> bool:
        return not self._hosts.have_started or (
            self._relay.ended
            and all(rank.told_fully() and rank.lost_at is None for rank in self._ranks)
        )

    def _hear(self) -> bool:
        """Handle all that ranks have sent to the rendezvous; returns whether there was anything."""
        heard = False
        while notices := self.server.progress():
            heard = True
            for notice in notices:
                self._note(self._ranks[notice.rank], notice)
        return heard

    def _note(self, rank: RankState, notice: Notice) -> None:
        now = time.monotonic()
        match notice.kind:
            case "joined":
                rank.joined = int(notice.fields["pid"])
                self._hosts.of(rank.rank).watch_joined(rank.rank, rank.joined)
            case "left":
                rank.left = True
                self._end_lost(rank)
            case "note":
                self.say(f"rank {rank.rank}: {notice.fields['text']}")
            case "unencrypted" if not knows_unencrypted(os.environ):
                self.tell([UNENCRYPTED])
            case "raised":
                fields = notice.fields
                rank.raised = Raised(fields["error"], fields["text"], fields["peer_failed"])
                if fields["peer_failed"] and fields["needed"] != -1:
                    self._blame(self._ranks[fields["needed"]], rank, now)
                self._failed(rank, now)
                self._end_lost(rank)
            case "abort":
                rank.abort_code = int(notice.fields["code"])
                self._plan.end(now)
                self._failed(rank, now)
            case "cut":
                peer, reason = self._ranks[notice.fields["rank"]], notice.fields["reason"]
                if not self._goes_on:
                    rank.cut = f"its link to rank {peer.rank} was cut: {reason}"
                elif rank.failed_at is None:
                    self._part(peer, rank, reason, now)
            case "shrunk" if self._options.survive:  # else that a rank has failed counts
                for number in notice.fields["left_out"]:
                    self._ranks[number].left_out = True

    def refused(self, host: str, error: OSError) -> None:
        """Called when the ranks of a host cannot be started."""
        outcome = refusal(error, self._argv[0], self._options.size, is_here=not host)
        self._refuse(outcome.status, f"{host}: {outcome.report}" if host else outcome.report)

    def unreachable(self, lines: Sequence[str]) -> None:
        """Called when some hosts cannot be reached."""
        self._refuse(CANNOT_START, "\n".join(lines))

    def checked(self) -> None:
        """Called when it is known how the hosts reach each other, if that was to be found out."""
        hosts = self._hosts
        works = not hosts.absent and all(way.reach.address for way in hosts.ways)
        self._refuse(0 if works else CANNOT_START, "")

    # Ending.

    def _signal_ranks(self, signum: int, now: float) -> None:
        """Send a signal to every process of the job."""
        if self._plan.is_given_up:
            self._over_at = now
        for rank in self._ranks:
            rank.signalled = rank.signalled or rank.status is None
        self._hosts.signal(signum)

    def signalled(self, signum: int) -> None:
        """Called when another host was sent a signal that is for the ranks."""
        self._for_ranks.append(signum)

    def _heed_signals(self, now: float) -> None:
        while self._for_ranks:
            signum = self._for_ranks.pop(0)
            if self._hosts.have_started:
                self._passed_on.add(signum)
                self._hosts.pass_on(signum)
            else:
                self.tell([f"{name_of(signum)} came before the ranks had started: nobody got it"])
        while self.signals:
            signum = self.signals.pop(0)
            text = f"ended by {name_of(signum)} after {now - self._started:.1f} s"
            # Who interrupts a job that seems to hang wants to know why.
            hangs = signum == signal.SIGINT and self.server.is_anyone_waiting()
            self._decide(now, 128 + signum, text, self.server.table() if hangs else ())
            self._plan.pass_on(signum, now)
            if not self._hosts.have_started:
                self._over_at = now

    def _tell_of_waits(self, lines: Sequence[str], is_certain: bool) -> None:
        """Show who waits for whom, or act on it if it is certain that they wait for ever."""
        self._inspection.keep_calls(lines[0])
        if is_certain and self._options.ends_deadlocks:
            self.give_up(DEADLOCKED, lines[0], lines[1:])
        else:
            self.tell(lines)

    def _beside(self, rank: int, pid: int) -> str:
        """What a rank does that does not wait in pycoll."""
        state = self._hosts.of(rank).state(rank, pid)
        return "; ".join(filter(None, [state, self._inspection.unfinished(rank)]))

    def _give_up_output(self) -> None:
        """Our output cannot be written: end as a command does whose reader has gone."""
        error = self._relay.error
        assert error is not None
        if self._decision is None and isinstance(error, BrokenPipeError):
            self.give_up(128 + signal.SIGPIPE, "")
        elif self._decision is None:
            self.give_up(1, f"cannot write the ranks' output: {error.strerror or error}")

    def _flush(self) -> None:
        """Write what was read, however slow its reader is, until a signal comes."""
        while not self._relay.idle and not self.signals:
            for key, _ in self.selector.select():
                key.data()
            self._hear()  # or its descriptor would stay ready
        self._heed_signals(time.monotonic())
        if self._relay.error is not None:
            self._give_up_output()

    def _outcome(self) -> Outcome:
        if not self._hosts.have_started and self._decision is not None:
            return Outcome(self._decision.status, None, self._decision.text)
        outcome = judge(
            self._ranks, self._decision, self._started, self._relay.tail, self._passed_on
        )
        cause = None if outcome.culprit is None else self._ranks[outcome.culprit]
        if cause is not None and cause.raised is None and cause.abort_code is None:
            difference = self._inspection.finish_calls(f"rank {cause.rank} had failed")
            report = "\n".join(filter(None, [outcome.report, difference]))
            outcome = outcome._replace(report=report)
        if outcome.status == 0 and not outcome.report:
            outcome = outcome._replace(report=unconnected(self._ranks, self._argv[0]))
        return outcome

    def progress(self, text: str) -> None:
        """Show how far the start is, on a terminal."""
        if self._relay.has_terminal:
            self.tell([text])


def _nothing() -> None:
    """What to do when a descriptor only had to wake us."""
