"""Ranks that stay: a job on this machine that does one task after the other.

Nothing runs here between two tasks. While a task runs, the thread that asked for it is in the
launcher's loop (`LastingJob`), and there writes what the ranks print. The other end of the sockets
is `serving`.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from pycoll._functions import call, serving
from pycoll._functions.function import OF_RANKS, Ended, WriteTask, memfd, raise_ended
from pycoll._launcher.job_spec import Options
from pycoll._launcher.lasting import LastingJob
from pycoll._launcher.outcome import DEADLOCKED, Outcome

_TELL_S = 0.5  # from an answer to when those that have none yet hear of it
_ENDED = {False: "returned", True: "raised"}
CLOSE_S = 5.0  # for ranks that have nothing to do to end


class Ranks:
    """Ranks that stay.

    Args:
        options: how their job runs; `timeout_s` does not count. A deadlock ends the job, and so the
            ranks, with `ends_deadlocks`; else a run, by an interrupt.
        write_start: writes what they do, for `call.main`.

    Attributes:
        size: how many there are.
        is_over: whether they have ended.

    Raises:
        Error: the ranks could not be started.
        KeyboardInterrupt: by Ctrl-C.
    """

    def __init__(self, options: Options, write_start: WriteTask) -> None:
        self.size, self._grace_s = options.size, options.grace_s
        self.is_over = False
        self._pid = os.getpid()
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as theirs:
            self._sockets: list[socket.socket] = []
            inherited = []
            for _ in range(self.size):
                ours, their = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sockets.append(stack.enter_context(ours))
                inherited.append(theirs.enter_context(their).fileno())
            start = theirs.enter_context(memfd()).fileno()
            ticket = call.InheritedDescriptors(start, inherited)
            write_start(start, ticket)
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            self._job = LastingJob(
                [sys.executable, *flags, call.__file__, str(ticket)],
                options._replace(timeout_s=None),
                pass_fds=[start, *inherited],
                stdin=subprocess.DEVNULL,
            )
            self._job.open(stack)
            with self._job.catching():
                refused = self._job.start()
            if refused is not None:
                raise_ended(refused)
            self._stack = stack.pop_all()

    def run(self, write_task: WriteTask, timeout_s: float | None) -> Ended:
        """Have a task done.

        Ranks that are lost, or have to be ended, end the job: then `is_over`.

        Args:
            write_task: writes it; its ticket says nothing.
            timeout_s: seconds; None: no limit.

        Raises:
            Error: the ranks' output cannot be written.
            KeyboardInterrupt: by Ctrl-C. The ranks had `Options.grace_s` to end what they did, and
                are there if they have done so. Other signals end the job and take their course.
        """
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(memfd()) for _ in range(self.size + 1)]
            write_task(files[0].fileno(), call.InheritedDescriptors(0, []))
            run = _Run(self._job, self._sockets, timeout_s, self._grace_s)
            try:
                with self._job.catching():
                    self._job.write_to(None, None)
                    run.begin(files[0].fileno(), [file.fileno() for file in files[1:]])
                    outcome = self._job.watch(run.step)
                    run.forget()
            except BaseException:
                self._end()
                raise
            if outcome is not None:
                self._end()
            reports = []
            for file in files[1:]:
                reports.append(call.read_parcel(file.fileno()))
                file.close()  # a large one is not kept twice
        if not self.is_over and not run.is_renewable:
            self.close()
        if run.interrupted is not None:
            raise_ended(Outcome(128 + signal.SIGINT, None, "", table=run.interrupted))
        return Ended(run.judge(outcome), reports)

    def close(self, limit_s: float = CLOSE_S) -> Outcome | None:
        """End the ranks; may be called again. A child that was forked from this process cannot.

        Args:
            limit_s: seconds; ranks that have not ended by themselves until then are ended.

        Returns:
            How their job ended, if it was this that ended them.
        """
        if self.is_over or os.getpid() != self._pid:
            return None
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_WR)
        ends_at = time.monotonic() + limit_s

        def until(now: float) -> float:
            nonlocal ends_at
            if now >= ends_at:
                ends_at = math.inf
                self._job.stop()
            return ends_at

        try:
            with self._job.catching():
                self._job.write_to(None, None)
                return self._job.watch(until)
        finally:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self._stack.close()


class _Run:
    """One run, from the launcher's loop.

    Args:
        job: the ranks.
        sockets: to each.
        timeout_s: seconds; None: no limit.
        grace_s: from a failure to the interrupt of the others, and from that to their end.

    Attributes:
        interrupted: by Ctrl-C: what each rank was doing; or None.
    """

    def __init__(
        self,
        job: LastingJob,
        sockets: Sequence[socket.socket],
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        self._job, self._sockets, self._grace_s = job, sockets, grace_s
        self._limit_s = math.inf if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self._limit_s
        self._answers: dict[int, dict[str, Any]] = {}
        self._is_compared = False
        self._tell_at: dict[int, float] = {}  # when the others hear of an answer
        self._call_off_at = math.inf  # when the others are interrupted, or else ended
        self._are_called_off = self._is_stopped = False
        self.interrupted: tuple[str, ...] | None = None
        self._deadlock: Sequence[str] = ()  # the launcher's lines, if this has ended one

    def begin(self, task: int, reports: Sequence[int]) -> None:
        self._job.deadlock = ()
        for rank, (each, report) in enumerate(zip(self._sockets, reports, strict=True)):
            self._job.listen(each.fileno(), partial(self._hear, rank))
            with contextlib.suppress(OSError):  # it has ended, which its process will tell
                socket.send_fds(each, [serving.RUN], [task, report])

    def forget(self) -> None:
        """Hear no more."""
        for each in self._sockets:
            if each.fileno() >= 0:
                self._job.unlisten(each.fileno())
        self._job.note_ended({}, {})

    def _hear(self, rank: int) -> None:
        try:
            said = self._sockets[rank].recv(serving.MAX_NBYTES)
        except OSError:
            said = b""
        if not said:  # its process ends, or has closed what it should not
            self._job.unlisten(self._sockets[rank].fileno())
            return
        self._answers[rank] = marshal.loads(said)
        self._tell_at[rank] = time.monotonic() + _TELL_S
        self._note_ended()

    def _note_ended(self) -> None:
        """Tell who has come to an end; who needs one that has returned waits in vain."""
        self._job.note_ended(
            {
                rank: f"fn has {_ENDED[answer['raised']]}; waits for the next run"
                for rank, answer in self._answers.items()
            },
            {
                rank: {context: num_calls for context, num_calls, *_ in answer["told"]}
                for rank, answer in self._answers.items()
                if answer["told_all"] and not answer["raised"]
            },
        )

    def step(self, now: float) -> float | None:
        """Do what is due; see `Job.watch`."""
        if self._job.signals[:1] == [signal.SIGINT] and not self._are_called_off:
            self._job.signals.pop(0)
            if self.interrupted is None:
                self.interrupted = self._job.table()
                self._call_off_at = now
            else:
                self._are_called_off, self._call_off_at = True, now
        if self._job.is_ending:
            self._leave()
            return math.inf
        if len(self._answers) == len(self._sockets):
            if self._compare():
                return math.inf
            return None if self._job.has_written() else math.inf
        for rank in [rank for rank, due in self._tell_at.items() if now >= due]:
            del self._tell_at[rank]
            calls = self._answers[rank]["told"]
            self._job.server.push_others(rank, "returned", {"rank": rank, "calls": calls})
        if now >= self._deadline:
            self._deadline = math.inf
            self._job.time_out(self._limit_s)
            return math.inf
        if self._call_off_at == math.inf and self._first_failed() is not None:
            self._call_off_at = now + self._grace_s
        if self._call_off_at == math.inf and self._job.deadlock and not self._are_called_off:
            self._deadlock, self._call_off_at = self._job.deadlock, now
        if now >= self._call_off_at:
            self._call_off(now)
        return min(self._deadline, self._call_off_at, *self._tell_at.values())

    def _compare(self) -> bool:
        """Have the ranks compare their last calls, if these differ and no rank has raised."""
        told = {rank: answer["told"] for rank, answer in self._answers.items()}
        if self._is_compared or self._first_failed() is not None:
            return False
        self._is_compared = True
        if all(each == told[0] for each in told.values()):
            return False
        for rank, each in enumerate(self._sockets):
            with contextlib.suppress(OSError):
                each.send(marshal.dumps({r: calls for r, calls in told.items() if r != rank}))
        self._answers.clear()
        self._tell_at.clear()
        return True

    def _call_off(self, now: float) -> None:
        """Interrupt the ranks that have not come to an end, and the next time end all."""
        if self._are_called_off:
            self._call_off_at = math.inf
            self._leave()
            self._is_stopped = True
            self._job.stop()
            return
        self._are_called_off, self._call_off_at = True, now + self._grace_s
        for rank in set(range(len(self._sockets))) - self._answers.keys():
            pid = self._job.server.state(rank)[1]
            if pid:  # a child of ours: its number is its own until the job is over
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def _leave(self) -> None:
        """Let ranks that have come to an end leave."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def _first_failed(self) -> int | None:
        """The rank that was the cause, of those that have raised."""
        raised = [rank for rank, answer in self._answers.items() if answer["raised"]]
        return min(
            raised, key=lambda r: (self._answers[r]["victim"], self._answers[r]["at"]), default=None
        )

    @property
    def is_renewable(self) -> bool:
        """Whether the ranks can have another run."""
        return all(answer["renewable"] for answer in self._answers.values())

    def judge(self, outcome: Outcome | None) -> Outcome:
        """Return how the run ended; `outcome`: of the job, if that is over.

        Raises:
            Error: something else than its ranks has ended the job.
        """
        if self._deadlock:
            heading, *table = self._deadlock
            return Outcome(DEADLOCKED, None, heading, table=tuple(table))
        failed, over = self._first_failed(), outcome is not None and outcome.culprit is None
        by_itself = over and not self._is_stopped
        if outcome is not None and by_itself and outcome.status not in OF_RANKS:
            raise_ended(outcome)
        if failed is not None and (outcome is None or over or not self._answers[failed]["victim"]):
            return Outcome(1, failed, "", "it raised an exception")
        return outcome or Outcome(0, None, "")
