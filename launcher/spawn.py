"""Starts the ranks of a job on this machine, watches them, and ends them together.

One thread and one selector: ranks are watched by pidfd, their output by pipe, the rendezvous and
signals by a descriptor each. A failure is told to the other ranks at once; those that do not end by
themselves get SIGTERM after 2 s and SIGKILL after 4 s, with everything they started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from pycoll.errors import Error
from pycoll.launcher import guardian
from pycoll.launcher.environment import (
    cpus_of_cores,
    rank_environment,
    shared_environment,
    usable_cores,
    warn_after,
)
from pycoll.launcher.host_memory import JobMemory
from pycoll.launcher.outcome import Decision, Outcome, Raised, RankState, end_text, judge
from pycoll.launcher.outcome import signal_name as name_of
from pycoll.launcher.output import Relay, Target
from pycoll.launcher.rendezvous_pairs import link_variable
from pycoll.launcher.rendezvous_server import Notice, Server
from pycoll.launcher.signals import caught_signals
from pycoll.launcher.wait_table import PREFIX
from pycoll.launcher.watch import Watch

_TERM_S, _KILL_S = 2.0, 4.0  # from the first failure to SIGTERM, and to SIGKILL
_KILL_AGAIN_S, _MAX_KILLS = 0.5, 10  # for what is still there; after the last we give it up
_LINGER_S = 0.25  # after the last end: for late messages, and for children that still print
_POLL_S = 0.05  # between looks at the ranks where there are no pidfds
_NEVER = float("inf")
# Of a rank: process, joined process, two pipes, log file, connection, eventfd; and of its host,
# which may be its alone: the memory, and the mapping, for which Python keeps it open once more.
_DESCRIPTORS_OF_A_RANK = 9
_DESCRIPTORS = 64  # what else a job opens: about 25, most of it libzmq's
_SPARE = 16  # kept for the end: to look at processes takes two or three
_EXIT_STATUS = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Options(NamedTuple):
    """How a job runs: the options of `pycoll-run`, checked already.

    Attributes:
        size: number of ranks.
        transport: name of the transport, or "auto".
        op_timeout_s: default deadline of every operation (None: none).
        timeout_s: longest time for the whole job (None: unlimited).
        tag_output: put the rank before each line of output (None: on a terminal).
        log_dir: folder for one file a rank with what it prints.
        bind: "core" keeps each rank on a core of its own, "none" on none.
        emulate_hosts: number of hosts to pretend (None: the one this is).
        verbose: tell on standard error what happens.
        exports: variables for the ranks' environment.
    """

    size: int
    transport: str = "auto"
    op_timeout_s: float | None = None
    timeout_s: float | None = None
    tag_output: bool | None = None
    log_dir: str | None = None
    bind: str = "none"
    emulate_hosts: int | None = None
    verbose: bool = False
    exports: Mapping[str, str] = MappingProxyType({})


class _Rank(RankState):
    """A rank with its process.

    The process stays a zombie until the job is over, so that its number, which is its session's
    too, cannot pass to another.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(rank)
        self.process = process
        self.pid = process.pid
        self.pidfd = _pidfd(process.pid)
        self.joined_pidfd: int | None = None
        self.lost_at: float | None = None  # when the process that joined, not this one, ended


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel, or a container that forbids it
        return None


def _reserve_descriptors(size: int) -> None:
    """Make sure that this process may open what a job needs: libzmq hangs where it may not."""
    needed = len(os.listdir("/proc/self/fd")) + _DESCRIPTORS_OF_A_RANK * size
    needed += _DESCRIPTORS + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE, f"that takes {needed} open files, {hard} are allowed (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Job:
    """One job, to be run once.

    Args:
        argv: the program of every rank and its arguments.
        options: how to run it.
        pass_fds: descriptors every rank inherits under the same numbers; they stay the caller's.
        stdout, stderr: where output goes: a file, or a function that is called with a rank and
            whole lines (bytes; rank -1: the launcher's own); None: sys.stdout and sys.stderr.
        stdin: standard input of rank 0 (None: this process's); the other ranks have none.

    Attributes:
        id: the value of PYCOLL_JOB in every process of the job.
        server: where the ranks meet; made by `run`.
    """

    server: Server

    def __init__(
        self,
        argv: Sequence[str],
        options: Options,
        *,
        pass_fds: Sequence[int] = (),
        stdout: Target = None,
        stderr: Target = None,
        stdin: int | IO[Any] | None = None,
    ) -> None:
        self.id = os.urandom(16).hex()
        self._argv = list(argv)
        self._options = options
        self._pass_fds = tuple(pass_fds)
        self._stdout, self._stderr, self._stdin = stdout, stderr, stdin
        self._ranks: list[_Rank] = []
        self._started = time.monotonic()
        self._signals: list[int] = []  # caught and not handled yet
        self._interrupted = False  # by Ctrl-C, once
        self._decision: Decision | None = None
        self._plan: dict[int, float] = {}  # signals for the ranks, and when to send them
        self._num_kills = 0
        self._swept = False
        self._spare: list[int] = []  # descriptors for the end
        self._over_at: float | None = None  # when the job is left, all ranks having ended

    def run(self) -> Outcome:
        """Run the job to its end; returns how it ended.

        In the main thread SIGINT, SIGTERM and SIGHUP end the job while it runs (unless they are
        ignored); the handlers are put back afterwards. In another thread no handler is touched.

        Raises:
            Exception: whatever `stdout` or `stderr` raised when called; the job has been ended.
        """
        self._started = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._signals = stack.enter_context(caught_signals(self._selector))
            try:
                self._open(stack)
                self._start_ranks()
            except (OSError, Error) as exc:
                return self._refusal(exc)
            self._watch()
            self._sweep()
            self._relay.finish()
            self._flush()
            return self._outcome()

    # Starting.

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Make all that a job needs but its ranks; the stack undoes it, the ranks' ends first."""
        options = self._options
        _reserve_descriptors(options.size)
        key = os.urandom(32)
        self._relay = Relay(
            sys.stdout if self._stdout is None else self._stdout,
            sys.stderr if self._stderr is None else self._stderr,
            self._selector,
            tag=options.tag_output,
            log_dir=options.log_dir,
        )
        stack.callback(self._relay.close)
        self._memory = JobMemory(options.size, options.emulate_hosts or 1, usable_cores())
        stack.callback(self._memory.close)
        self.server = Server(
            options.size, key, on_failure=self._memory.tell_failure, doing=self._memory.doing
        )
        stack.callback(self.server.close)
        self._selector.register(self.server.fileno(), selectors.EVENT_READ, _nothing)
        after_s = warn_after({**os.environ, **options.exports})
        self._watch_waits = Watch(self.server, options.size, after_s, self._tell)
        self._environment = shared_environment(
            options.size,
            job=self.id,
            key=key,
            rendezvous=self.server.endpoint,
            transport=options.transport,
            op_timeout_s=options.op_timeout_s,
            exports=options.exports,
        )
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE)]
        stack.callback(self._free_descriptors)
        stack.callback(self._reap)  # not before the guardian has ended, which knows them by number
        self._guardian = stack.enter_context(guardian.guarded(self.id))
        stack.callback(self._sweep)
        self._say(f"job {self.id}: {options.size} ranks meet at {self.server.endpoint}")

    def _start_ranks(self) -> None:
        cores = cpus_of_cores() if self._options.bind == "core" else []
        allowed = os.sched_getaffinity(0)
        try:
            for number in range(self._options.size):
                cpus = cores[number % len(cores)] if cores else None
                if cpus:  # a child inherits the affinity of the thread that starts it
                    os.sched_setaffinity(0, cpus)
                self._start_rank(number, cpus)
        finally:
            if cores:
                os.sched_setaffinity(0, allowed)

    def _start_rank(self, number: int, cpus: set[int] | None) -> None:
        options = self._options
        memory = self._memory.of(number)
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for _ in range(2):
                end, their_end = os.pipe()
                ours.append(end)
                theirs.append(their_end)
            theirs.append(self.server.open_link())
            own = rank_environment(number, options.size, options.emulate_hosts or 1)
            own["PYCOLL_LINK"] = link_variable(theirs[2])
            own["PYCOLL_SHM"] = memory.variable
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL if number else self._stdin,
                stdout=theirs[0],
                stderr=theirs[1],
                env={**self._environment, **own},
                pass_fds=(*self._pass_fds, *memory.descriptors, theirs[2]),
                start_new_session=True,
            )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        rank = _Rank(number, process)
        self._ranks.append(rank)
        self._guardian.add_session(rank.pid)
        self._relay.add(number, *ours)
        self._watch_pidfd(rank.pidfd, lambda: self._see_end(rank))
        bound = f" on CPUs {sorted(cpus)}" if cpus else ""
        self._say(f"rank {number}: process {rank.pid}{bound}")

    def _refusal(self, exc: OSError | Error) -> Outcome:
        """The outcome when not all ranks could be started."""
        program, reason = self._argv[0], str(exc)
        if isinstance(exc, OSError):
            reason = exc.strerror or reason
            if exc.filename == program:
                if isinstance(exc, FileNotFoundError) and os.path.exists(program):
                    reason = "the interpreter that its first line names does not exist"
                status = 127 if isinstance(exc, FileNotFoundError) else 126
                return Outcome(status, None, f"cannot run {program}: {reason}")
            if exc.filename is not None:
                reason = f"{exc.filename}: {reason}"
        size = self._options.size
        return Outcome(2, None, f"cannot start {size} rank{'s' * (size > 1)}: {reason}")

    # Watching.

    def _watch(self) -> None:
        """Serve the ranks until all have ended, and for as long after as something may come."""
        while True:
            now = time.monotonic()
            wake = self._act(now)
            if self._over_at is not None and (now >= self._over_at or self._nothing_to_come()):
                return
            # Sending from `_act` may have used up the server's readiness: look again before sleep.
            if self._hear():
                continue
            ready = self._selector.select(None if wake == _NEVER else max(0.0, wake - now))
            self._hear()  # what a rank said last is heard before its end is seen
            for key, _ in ready:
                key.data()

    def _act(self, now: float) -> float:
        """Do what is due; returns when something will be."""
        options = self._options
        wake = [self._relay.update(now), self._watch_waits.update(now)]
        self._heed_signals(now)
        if self._relay.error is not None:
            self._give_up_output(now)
        for rank in self._ranks:
            if rank.lost_at is not None and now >= rank.lost_at + _LINGER_S:
                self._lose(rank, now)
            elif rank.lost_at is not None:
                wake.append(rank.lost_at + _LINGER_S)
            if rank.status is None and rank.pidfd is None:
                self._see_end(rank)
                wake.append(now + _POLL_S)
        if options.timeout_s is not None and not self._plan and self._over_at is None:
            if now >= self._started + options.timeout_s:
                self._time_out(now)
            wake.append(self._started + options.timeout_s)
        for signum, due in list(self._plan.items()):
            if now >= due:
                del self._plan[signum]
                self._signal_ranks(signum, now)
        wake.extend(self._plan.values())
        if self._over_at is None and all(rank.status is not None for rank in self._ranks):
            self._over_at = now + _LINGER_S
        if self._over_at is not None:
            wake.append(self._over_at)
        return min(wake)

    def _nothing_to_come(self) -> bool:
        return self._relay.ended and all(rank.told_fully() for rank in self._ranks)

    def _hear(self) -> bool:
        """Handle all that ranks have sent to the rendezvous; returns whether there was anything."""
        heard = False
        while notices := self.server.progress():
            heard = True
            for notice in notices:
                self._note(self._ranks[notice.rank], notice)
        return heard

    def _note(self, rank: _Rank, notice: Notice) -> None:
        now = time.monotonic()
        match notice.kind:
            case "joined":
                self._see_joined(rank, int(notice.fields["pid"]), now)
            case "left":
                rank.left = True
            case "raised":
                fields = notice.fields
                rank.raised = Raised(fields["error"], fields["text"], fields["peer_failed"])
                self._failed(rank, now)
            case "abort":
                rank.abort_code = int(notice.fields["code"])
                self._failed(rank, now)
                self._schedule({signal.SIGTERM: now, signal.SIGKILL: now + _TERM_S})

    def _see_joined(self, rank: _Rank, pid: int, now: float) -> None:
        rank.joined = pid
        if pid == rank.pid or rank.joined_pidfd is not None:
            return
        try:
            rank.joined_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            rank.lost_at = now
        except (AttributeError, OSError):  # it cannot be watched; its parent is
            return

        def see_lost() -> None:
            self._unwatch(rank.joined_pidfd)
            rank.joined_pidfd = None
            rank.lost_at = time.monotonic()

        self._watch_pidfd(rank.joined_pidfd, see_lost)

    def _lose(self, rank: _Rank, now: float) -> None:
        """The process that joined has ended, and nothing more came of it: its parent lives on."""
        rank.lost_at = None
        if rank.left or rank.status is not None:
            return
        rank.died = True
        self.server.rank_ended(rank.rank, f"process {rank.joined}, which had joined, died", False)
        self._failed(rank, now)

    def _see_end(self, rank: _Rank) -> None:
        """Find out whether and how a rank ended (that it was stopped is no end)."""
        try:
            result = os.waitid(os.P_PID, rank.pid, _EXIT_STATUS)
        except ChildProcessError:  # the program that runs us has taken its status
            rank.status = rank.process.poll() or 0
        else:
            if result is None:
                return
            exited = result.si_code == os.CLD_EXITED
            rank.status = result.si_status if exited else -result.si_status
        self._unwatch(rank.pidfd)
        rank.pidfd = None
        text = end_text(rank.status)
        self._say(f"rank {rank.rank}: {text}")
        self.server.rank_ended(rank.rank, text, rank.status == 0)
        if rank.status != 0:
            self._failed(rank, time.monotonic())

    def _failed(self, rank: _Rank, now: float) -> None:
        """A rank failed: unless that is our own doing, the others have some seconds to end."""
        if rank.failed_at is None and not rank.signalled:
            rank.failed_at = now
            self._schedule({signal.SIGTERM: now + _TERM_S, signal.SIGKILL: now + _KILL_S})

    # Ending.

    def _schedule(self, plan: Mapping[int, float]) -> None:
        """Plan signals for the ranks; each is sent once, at the earliest time planned for it."""
        for signum, at in plan.items():
            self._plan[signum] = min(at, self._plan.get(signum, at))

    def _signal_ranks(self, signum: int, now: float) -> None:
        """Send a signal to every process of the job."""
        living = [rank for rank in self._ranks if rank.status is None]
        if signum == signal.SIGKILL:
            self._num_kills += 1
            if self._num_kills < _MAX_KILLS:
                self._plan[signum] = now + _KILL_AGAIN_S
            else:
                self._over_at = now
        for rank in living:
            rank.signalled = True
        self._free_descriptors()
        try:
            reached = guardian.signal_members(self._sessions(), self.id, signum)
        except OSError as exc:  # who is in the ranks' process groups was reached
            self._say(f"{name_of(signum)} to the ranks: cannot look for others: {exc.strerror}")
        else:
            self._say(f"{name_of(signum)} to {len(reached)} processes")

    def _sessions(self) -> set[int]:
        return {rank.pid for rank in self._ranks}

    def _decide(self, now: float, status: int, text: str, table: Sequence[str] = ()) -> None:
        """End the job for a reason of our own; the first one counts."""
        if table:
            text = "\n    ".join([f"{text}; what each rank did:", *table])
        if self._decision is None:
            self._decision = Decision(now, status, text, tuple(table))

    def _heed_signals(self, now: float) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            text = f"ended by {name_of(signum)} after {now - self._started:.1f} s"
            # Who interrupts a job that seems to hang wants to know why.
            hangs = signum == signal.SIGINT and self.server.is_anyone_waiting()
            self._decide(now, 128 + signum, text, self.server.table() if hangs else ())
            if signum == signal.SIGINT and self._interrupted:
                self._schedule({signal.SIGKILL: now})
            elif signum == signal.SIGTERM:
                self._schedule({signum: now, signal.SIGKILL: now + _KILL_S})
            else:
                term, kill = now + _TERM_S, now + _KILL_S
                self._schedule({signum: now, signal.SIGTERM: term, signal.SIGKILL: kill})
            self._interrupted = self._interrupted or signum == signal.SIGINT

    def _time_out(self, now: float) -> None:
        text = f"the job took longer than {self._options.timeout_s:g} s"
        self._decide(now, 124, text, self.server.table())
        self._schedule({signal.SIGTERM: now, signal.SIGKILL: now + _TERM_S})

    def _give_up_output(self, now: float) -> None:
        """Our output cannot be written: end as a command does whose reader has gone."""
        error = self._relay.error
        assert error is not None
        if self._decision is None:
            self._schedule({signal.SIGTERM: now, signal.SIGKILL: now + _TERM_S})
        if isinstance(error, BrokenPipeError):
            self._decide(now, 128 + signal.SIGPIPE, "")
        else:
            self._decide(now, 1, f"cannot write the ranks' output: {error.strerror or error}")

    def _sweep(self) -> None:
        """Kill whatever is left of the job; where this process cannot, the guardian does."""
        if self._swept:
            return
        self._swept = True
        self._free_descriptors()
        if self._ranks:
            try:
                killed = guardian.sweep(self._sessions(), self.id)
            except OSError as exc:
                self._say(f"the guardian kills what is left: {exc.strerror}")
                return
            if killed:
                self._say(f"SIGKILL to {len(killed)} processes that were left")
        self._guardian.done()

    def _free_descriptors(self) -> None:
        """Give up those that were kept; whoever comes to the port cannot have them."""
        self.server.close_port()
        while self._spare:
            os.close(self._spare.pop())

    def _flush(self) -> None:
        """Write what was read, however slow its reader is, until a signal comes."""
        while not self._relay.idle and not self._signals:
            for key, _ in self._selector.select():
                key.data()
            self._hear()  # or its descriptor would stay ready
        now = time.monotonic()
        self._heed_signals(now)
        if self._relay.error is not None:
            self._give_up_output(now)

    def _outcome(self) -> Outcome:
        return judge(self._ranks, self._decision, self._started, self._relay.tail)

    def _reap(self) -> None:
        for rank in self._ranks:
            rank.process.poll()
            self._unwatch(rank.pidfd)
            self._unwatch(rank.joined_pidfd)

    # Small things.

    def _watch_pidfd(self, pidfd: int | None, callback: Callable[[], None]) -> None:
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, callback)

    def _unwatch(self, pidfd: int | None) -> None:
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _tell(self, lines: Sequence[str]) -> None:
        self._relay.say("\n".join([f"{PREFIX}{lines[0]}", *lines[1:]]))

    def _say(self, text: str) -> None:
        if self._options.verbose:
            self._relay.say(f"pycoll-run: {text}")


def _nothing() -> None:
    """What to do when a descriptor only had to wake us."""
