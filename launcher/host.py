"""The ranks of one host: started, watched, signalled, and ended with all they leave behind.

It runs in its owner's loop: the launcher's for its own host, an agent's for another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from pycoll._launcher import guardian, process
from pycoll._launcher.asked_rank import AskedRank
from pycoll._launcher.host_memory import Tally, memory_by_rank
from pycoll._launcher.outcome import signal_name
from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._launcher.signals import PASSED_ON
from pycoll._support.environment import HostPlacement, cpus_of_cores, rank_environment, usable_cores
from pycoll._support.ready import ready

if TYPE_CHECKING:
    from pycoll._launcher.awaited import WaitSums
    from pycoll._launcher.kept_calls import HostCalls
    from pycoll._launcher.tracing import TraceMemory

_POLL_S = 0.05  # between looks at the ranks where there are no pidfds
# Of a rank: process, joined process, two pipes, log file, two connections, eventfd, records; its
# host, which may be its alone: the memory, and the mapping, for which Python keeps it open once
# more.
_DESCRIPTORS_OF_A_RANK = 11
_DESCRIPTORS = 64  # what else a job opens: about 25, most of it libzmq's
_SPARE = 16  # kept for the end: to look at processes takes two or three
_EXIT_STATUS = os.WEXITED | os.WNOHANG | os.WNOWAIT


class NamedHost(NamedTuple):
    """A host of a job.

    Attributes:
        name: as the user calls it.
        command: starts its agent (`host_choice`); (): it is this host, or its agent calls.
        calls: somebody else starts its agent, which then calls (`agent_listener`).
    """

    name: str
    command: Sequence[str] = ()
    calls: bool = False


class RankProgram(NamedTuple):
    """What every rank of a host runs.

    Attributes:
        argv: the program and its arguments.
        environment: what the environments of all ranks have in common.
        pass_fds: descriptors every rank inherits under the same numbers; they stay the caller's.
        bind: keep each rank on a core of its own.
        stdin: standard input of rank 0 (None: this process's); the other ranks have none.
        trace_records: how many calls of each rank are recorded; 0: none.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    pass_fds: Sequence[int] = ()
    bind: bool = False
    stdin: int | IO[Any] | None = None
    trace_records: int = 0


class Events(Protocol):
    """What a host tells its owner, which is in a call of it or in its own loop then."""

    def ended(self, rank: int, status: int) -> None:
        """Called when the process of a rank has ended: its exit status, or minus the signal."""

    def lost(self, rank: int) -> None:
        """Called when the process that joined as a rank has ended; it was not started here."""

    def say(self, text: str) -> None:
        """Hear what happens, for who wants to know."""


class Host(Protocol):
    """What the launcher wants of a host."""

    def start(self, program: RankProgram) -> None:
        """Start all ranks there."""

    def watch_joined(self, rank: int, pid: int) -> None:
        """Watch the process that has joined as a rank, if it is not the one started here."""

    def doing(self, rank: int) -> str:
        """Return the call in shared memory that a rank waits in, and for how long; "" for none."""

    def state(self, rank: int, pid: int) -> str:
        """Return what a rank's process is doing, as `process.doing`."""

    def ask(self, rank: int, heard: Callable[[int, bytes], object]) -> None:
        """Ask a rank what its threads do; `heard` is called with the rank and `inspected`'s answer.

        Only the latest question counts; a rank that cannot answer never does.
        """

    def tally(self, rank: int) -> Tally | None:
        """Return what a rank has done since it joined; None: that is not known."""

    def read_calls(self, heard: Callable[[list[HostCalls]], object]) -> None:
        """Have `heard` called with what the ranks have called last, of each host that this is."""

    def read_waits(
        self, size: int, most: int, heard: Callable[[Mapping[int, WaitSums]], object]
    ) -> None:
        """Have `heard` called with for whom the ranks there have waited; `awaited.of_notes`."""

    def tell_failure(self) -> None:
        """Wake the ranks that wait natively: one has failed."""

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the job on this host; of `PASSED_ON` to ranks alone."""

    def signal_rank(self, rank: int, signum: int) -> None:
        """Send a signal to the process of a rank, and to those that it has started."""

    def sweep(self) -> None:
        """Kill whatever is left of the job on this host; only the first call counts."""


class OwnHost(Host):
    """The host that its owner is on, as far as its memory tells of its ranks.

    Args:
        places: where its ranks are, by rank; emulated hosts are several, of this one.
        selector: the owner's; the data of a key is a function to call when it is ready.
        events: hears what happens.
        stack: what is opened is undone by it.
    """

    def __init__(
        self,
        places: Mapping[int, HostPlacement],
        selector: selectors.BaseSelector,
        events: Events,
        stack: contextlib.ExitStack,
    ) -> None:
        self._places, self._selector, self._events = places, selector, events
        self._memory = memory_by_rank(places, usable_cores())
        self._memories = list(dict.fromkeys(self._memory.values()))
        for memory in self._memories:
            stack.callback(memory.close)

    def poll(self) -> float:
        """Do what is due; returns after how many seconds to come again."""
        return float("inf")

    def doing(self, rank: int) -> str:
        return self._memory[rank].doing(rank)

    def tally(self, rank: int) -> Tally | None:
        return self._memory[rank].tally(rank)

    def read_calls(self, heard: Callable[[list[HostCalls]], object]) -> None:
        heard([calls for each in self._memories if (calls := each.calls()) is not None])

    def read_waits(
        self, size: int, most: int, heard: Callable[[Mapping[int, WaitSums]], object]
    ) -> None:
        """See `Host`."""
        waits = (each.waits(size, most) for each in self._memories)
        heard({rank: sums for of_host in waits for rank, sums in of_host.items()})

    def tell_failure(self) -> None:
        for memory in self._memories:
            memory.tell_failure()

    def _unwatch(self, pidfd: int | None) -> None:
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)


class _Process:
    """A rank's process.

    It stays a zombie until the job is over, so that its number, which is its session's too, cannot
    pass to another.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.pidfd = _pidfd(popen.pid)
        self.joined_pidfd: int | None = None
        self.has_ended = False


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel, or a container that forbids it
        return None


def reserve_descriptors(ranks: int) -> None:
    """Make sure that this process may open what so many ranks need.

    Libzmq hangs where it may not.

    Raises:
        OSError: more are needed than are allowed.
    """
    needed = len(os.listdir("/proc/self/fd")) + _DESCRIPTORS_OF_A_RANK * ranks
    needed += _DESCRIPTORS + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE, f"that takes {needed} open files, {hard} are allowed (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class LocalHost(OwnHost):
    """The ranks of the host that this process is on, which it starts and ends.

    Args:
        job: the job's id, which every process of it carries in PYCOLL_JOB.
        places, selector, events, stack: see `OwnHost`.
        open_link: makes a link for a rank; returns the descriptor that it inherits.
        relay: is given the read ends of what a rank writes: rank, standard output, standard error.
        silent_s: the ranks are ended if this process does not call `poll` for so long; 0: it may.

    Attributes:
        ranks: those that it has.
        trace: what they have recorded; None: they do not.

    Raises:
        OSError: something cannot be opened.
    """

    def __init__(
        self,
        job: str,
        places: Mapping[int, HostPlacement],
        selector: selectors.BaseSelector,
        events: Events,
        open_link: Callable[[], int],
        relay: Callable[[int, int, int], None],
        stack: contextlib.ExitStack,
        silent_s: float = 0.0,
    ) -> None:
        super().__init__(places, selector, events, stack)
        self.ranks = list(places)
        self._job = job
        self._open_link, self._relay = open_link, relay
        self._processes: dict[int, _Process] = {}
        self._asked: dict[int, AskedRank] = {}
        self._is_swept = False
        # Descriptors for the end.
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE)]
        stack.callback(self.free_descriptors)
        stack.callback(self._reap)  # not before the guardian has ended, which knows them by number
        self._stack = stack
        self.trace: TraceMemory | None = None
        self._silent_s = silent_s
        self._guardian = stack.enter_context(guardian.guarded(job, silent_s))
        stack.callback(self.sweep)

    def start(self, program: RankProgram) -> None:
        """Start all ranks.

        Raises:
            OSError: one could not be started.
        """
        environment = dict(program.environment)
        if len(self.ranks) > 1:  # else the threads of each rank's libraries would want all cores
            share = max(1, usable_cores() // len(self.ranks))
            environment.setdefault("OMP_NUM_THREADS", str(share))
        program = program._replace(environment=environment)
        if program.trace_records:
            from pycoll._launcher.tracing import TraceMemory  # not sooner: few jobs are traced

            self.trace = TraceMemory(self.ranks, program.trace_records)
            self._stack.callback(self.trace.close)
        cores = cpus_of_cores() if program.bind else []
        allowed = os.sched_getaffinity(0)
        try:
            for index, rank in enumerate(self.ranks):
                cpus = cores[index % len(cores)] if cores else None
                if cpus:  # a child inherits the affinity of the thread that starts it
                    os.sched_setaffinity(0, cpus)
                self._start_rank(rank, program, cpus)
        finally:
            if cores:
                os.sched_setaffinity(0, allowed)

    def _start_rank(self, rank: int, program: RankProgram, cpus: Collection[int] | None) -> None:
        memory = self._memory[rank]
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for _ in range(2):
                end, their_end = os.pipe()
                ours.append(end)
                theirs.append(their_end)
            theirs.append(self._open_link())
            own = rank_environment(rank, self._places)
            own["PYCOLL_LINK"] = link_variable(theirs[2])
            own["PYCOLL_SHM"] = memory.variable
            asked = self._asked[rank] = AskedRank(rank, self._selector)
            self._stack.callback(asked.close)
            theirs.append(asked.take_end())
            own["PYCOLL_ASKED"] = link_variable(theirs[3])
            records = []
            if self.trace is not None:
                records.append(self.trace.descriptors[rank])
                own["PYCOLL_TRACE"] = link_variable(records[0])
            popen = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL if rank else program.stdin,
                stdout=theirs[0],
                stderr=theirs[1],
                env={**program.environment, **own},
                pass_fds=(*program.pass_fds, *memory.descriptors, *theirs[2:], *records),
                start_new_session=True,
            )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        started = self._processes[rank] = _Process(popen)
        self._guardian.add_session(started.pid)
        self._relay(rank, *ours)
        self._watch(started.pidfd, lambda: self._see_end(rank))
        bound = f" on CPUs {sorted(cpus)}" if cpus else ""
        self._events.say(f"rank {rank}: process {started.pid}{bound}")

    def poll(self) -> float:
        """Look at the ranks that nothing wakes us for; returns after how long to look again."""
        if self._silent_s:
            self._guardian.alive()
        polled = [
            rank for rank, each in self._processes.items() if not each.has_ended and not each.pidfd
        ]
        for rank in polled:
            self._see_end(rank)
        return _POLL_S if polled else self._silent_s / 4 or float("inf")

    def watch_joined(self, rank: int, pid: int) -> None:
        started = self._processes[rank]
        if pid == started.pid or started.joined_pidfd is not None:
            return
        try:
            started.joined_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return self._events.lost(rank)
        except (AttributeError, OSError):  # it cannot be watched; its parent is
            return
        self._watch(started.joined_pidfd, lambda: self._see_lost(rank))

    def state(self, rank: int, pid: int) -> str:
        return process.doing(pid or self._processes[rank].pid)

    def ask(self, rank: int, heard: Callable[[int, bytes], object]) -> None:
        if rank in self._asked:
            self._asked[rank].ask(heard)

    def unfinished(self, rank: int) -> str:
        """Return what of a rank's calls is under way that it may not wait for; "": nothing."""
        from pycoll._launcher.kept_calls import unfinished  # not sooner: few jobs need it

        notes = self._memory[rank].notes(rank)
        return unfinished(notes) if notes else ""

    def guard_file(self, path: str) -> None:
        """Have a file removed that this process makes, if it is killed; "": there is none."""
        if path:
            self._guardian.add_file(path)

    def signal(self, signum: int) -> None:
        if signum in PASSED_ON:
            return self._pass_on(signum)
        self.free_descriptors()
        try:
            reached = guardian.signal_members(self._sessions(), self._job, signum)
        except OSError as exc:  # who is in the ranks' process groups was reached
            name = signal_name(signum)
            self._events.say(f"{name} to the ranks: cannot look for others: {exc.strerror}")
        else:
            self._events.say(f"{signal_name(signum)} to {len(reached)} processes")

    def signal_rank(self, rank: int, signum: int) -> None:
        with contextlib.suppress(OSError):  # who is in the rank's process group was reached
            guardian.signal_members({self._processes[rank].pid}, self._job, signum, rank)

    def _pass_on(self, signum: int) -> None:
        """Signal no process but ranks: that which has joined, else that which was started here.

        What else runs there, workers that load data for example, has no handler, and would end.
        """
        for each in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                if each.joined_pidfd is not None:
                    signal.pidfd_send_signal(each.joined_pidfd, signum)
                elif not each.has_ended:
                    os.kill(each.pid, signum)
        self._events.say(f"{signal_name(signum)} to the ranks")

    def sweep(self) -> None:
        """See `Host`. Where this process cannot, the guardian does."""
        if self._is_swept:
            return
        self._is_swept = True
        self.free_descriptors()
        if self._processes:
            try:
                killed = guardian.sweep(self._sessions(), self._job)
            except OSError as exc:
                self._events.say(f"a second process kills what is left: {exc.strerror}")
                return
            if killed:
                self._events.say(f"SIGKILL to {len(killed)} processes that were left")
        self._guardian.done()

    def free_descriptors(self) -> None:
        """Give up those that were kept for the end; may be called again."""
        while self._spare:
            os.close(self._spare.pop())

    def _see_end(self, rank: int) -> None:
        """Find out whether and how a rank ended (that it was stopped is no end)."""
        started = self._processes[rank]
        try:
            result = os.waitid(os.P_PID, started.pid, _EXIT_STATUS)
        except ChildProcessError:  # the program that runs us has taken its status
            status = started.popen.poll() or 0
        else:
            if result is None:
                return
            status = result.si_status * (1 if result.si_code == os.CLD_EXITED else -1)
        self._unwatch(started.pidfd)
        started.pidfd = None
        started.has_ended = True
        if started.joined_pidfd is None:
            self._memory[rank].note_end(rank)
        elif ready([started.joined_pidfd], 0):
            self._see_lost(rank)  # it ended first
        self._events.ended(rank, status)

    def _see_lost(self, rank: int) -> None:
        """The process that joined as a rank has ended, and is not the one started here."""
        started = self._processes[rank]
        if started.joined_pidfd is not None:  # else it was seen when that one ended
            self._unwatch(started.joined_pidfd)
            started.joined_pidfd = None
            self._memory[rank].note_end(rank)
            self._events.lost(rank)

    def _sessions(self) -> set[int]:
        return {each.pid for each in self._processes.values()}

    def _reap(self) -> None:
        for each in self._processes.values():
            each.popen.poll()
            self._unwatch(each.pidfd)
            self._unwatch(each.joined_pidfd)

    def _watch(self, pidfd: int | None, callback: Callable[[], None]) -> None:
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, callback)
