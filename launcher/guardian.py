"""Ends every process of a job: for the launcher at the end, and in its place if it was killed.

A process belongs to a job if its session is a rank's, or if it was started with the job's
PYCOLL_JOB in its environment (a daemonized grandchild has a session of its own, but keeps that).

The guardian is this file by itself, in a `python -I -S` that gets JOB PID SECONDS, so it may import
the standard library only. It reads lines from the launcher, or the agent of another host, on
standard input: `session NUMBER` for each rank, `file PATH` for a file to be removed, `alive` now
and then, and at the end `done`, or `sweep` if it could not. If its process ends without a word, or
says nothing for so many seconds (0: that is no matter), the guardian sweeps, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

JOB_VARIABLE, RANK_VARIABLE = "PYCOLL_JOB", "PYCOLL_RANK"
# An import, for the file to be compiled once and not for each job: that takes longer than the rest.
_PROGRAM = (
    "import sys; folder, _, name = sys.argv.pop(1)[:-3].rpartition('/');"
    " sys.path.append(folder); __import__(name).main()"
)
_LATE_S = 2.0  # for a launcher that is continued to say something
_SWEEP_S = 5.0  # longest time a sweep may take: a process in an uninterruptible call dies later
_PASS_S = 0.2  # longest wait for the processes killed in one pass
_END_S = 1.0  # longest time for the guardian itself to end when its work is done
_REPEAT_S = (
    0.05  # a rank between fork and exec does not carry the job's id yet: look again after this
)
_TAKE_OVER_S = 20.0  # longest time for the guardian to do the launcher's work: three sweeps
_MAX_HANDLES = 64  # pidfds open at a time: others find room for their descriptors, too

# Nobody can look at processes then: an empty answer would say that there are none.
_BLIND = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _stat(pid: int) -> tuple[bool, int, int]:
    """Whether a process is running (no zombie), its session, and its start time in ticks."""
    # The name, in parentheses, may hold anything: count the fields from the last parenthesis.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields[0] not in (b"Z", b"X"), int(fields[3]), int(fields[19])


@contextlib.contextmanager
def _may_have_ended() -> Iterator[None]:
    """Go on when a process has ended while it is looked at, or is another user's.

    Raises:
        OSError: it cannot be looked at, whatever it is.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _BLIND:
            raise
    except IndexError:
        pass


def members(sessions: set[int], job: str, rank: int | None = None) -> dict[int, int]:
    """The running processes of a job, this one left out: process number -> start time in ticks.

    Args:
        sessions: of its ranks.
        job: its id.
        rank: only those that this rank has started, and itself; then `sessions` is its own.

    Raises:
        OSError: /proc cannot be read; there are too many open files, say.
    """
    wanted = [(JOB_VARIABLE, job)] + ([(RANK_VARIABLE, str(rank))] if rank is not None else [])
    markers = [b"\0%s=%s\0" % (name.encode(), value.encode()) for name, value in wanted]
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with _may_have_ended():
            running, session, started = _stat(int(name))
            if not running:
                continue
            if session not in sessions:
                environment = b"\0%s\0" % _read(f"/proc/{name}/environ")
                if not all(marker in environment for marker in markers):
                    continue
            found[int(name)] = started
    return found


def _send(pid: int, started: int, signum: int, keep: bool = False) -> int | None:
    """Signal a process unless its number has passed to another.

    Returns None if it was not reached, else with `keep` a pidfd for the caller to close, or -1.
    """
    handle = -1
    try:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel, or a container that forbids it
                handle = os.pidfd_open(pid)
        with _may_have_ended():
            if _stat(pid)[2] == started:
                if handle >= 0:
                    signal.pidfd_send_signal(handle, signum)
                else:
                    os.kill(pid, signum)
                kept, handle = (handle, -1) if keep else (-1, handle)
                return kept
        return None
    finally:
        if handle >= 0:
            os.close(handle)


def signal_members(sessions: set[int], job: str, signum: int, rank: int | None = None) -> list[int]:
    """Send a signal to every process of a job, once; returns the numbers of those it reached.

    Args:
        sessions, job, rank: as of `members`.
        signum: the signal.

    Raises:
        OSError: the processes cannot be looked at. Those of the sessions' own groups were reached.
    """
    with _groups_at_least(sessions, signum):
        found = members(sessions, job, rank).items()
        return [pid for pid, started in found if _send(pid, started, signum) is not None]


@contextlib.contextmanager
def _groups_at_least(sessions: set[int], signum: int) -> Iterator[None]:
    """Signal each session's first process group, which takes no descriptor, if all else fails."""
    try:
        yield
    except OSError:
        for session in sessions:
            with contextlib.suppress(OSError):
                os.killpg(session, signum)
        raise


def _wait_for_ends(handles: list[int], limit_s: float) -> None:
    """Wait until the processes of these pidfds have ended, at most `limit_s`; closes them."""
    poller = select.poll()
    waiting = {handle for handle in handles if handle >= 0}
    for handle in waiting:
        poller.register(handle, select.POLLIN)
    deadline = time.monotonic() + limit_s
    while waiting and (ready := poller.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for handle, _ in ready:
            poller.unregister(handle)
            os.close(handle)
            waiting.discard(handle)
    for handle in waiting:
        os.close(handle)
    if -1 in handles:  # no pidfd to wait on
        time.sleep(limit_s / 10)


def sweep(sessions: set[int], job: str) -> set[int]:
    """Kill every process of a job, in passes until none is left (at most 5 s); returns whom.

    Raises:
        OSError: the processes cannot be looked at. Those of the sessions' own groups were killed.
    """
    deadline = time.monotonic() + _SWEEP_S
    killed: set[int] = set()
    with _groups_at_least(sessions, signal.SIGKILL):
        while True:
            handles: list[int] = []
            for pid, started in members(sessions, job).items():
                keep = len(handles) < _MAX_HANDLES
                handle = _send(pid, started, signal.SIGKILL, keep)
                if handle is not None:
                    killed.add(pid)
                    handles.append(handle)
            _wait_for_ends(handles, _PASS_S)
            if not handles or time.monotonic() > deadline:
                return killed


class Guardian:
    """The launcher's line to its guardian."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.is_done = False

    def add_session(self, number: int) -> None:
        """Tell it of a rank's session."""
        self._tell(b"session %d\n" % number)

    def add_file(self, path: str) -> None:
        """Tell it of a file that is to be removed if this process cannot; its path is one line."""
        self._tell(b"file %s\n" % os.fsencode(path))

    def alive(self) -> None:
        """Tell it that this process goes on."""
        self._tell(b"alive\n")

    def done(self) -> None:
        """Tell it that nothing of the job is left."""
        self.is_done = True
        self._tell(b"done\n")

    def close(self) -> None:
        """Tell it to do what was not done; the last call."""
        if not self.is_done:
            self._tell(b"sweep\n")
        os.close(self._pipe)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed: the job can go on without
            os.write(self._pipe, line)


@contextlib.contextmanager
def guarded(job: str, silent_s: float = 0.0) -> Iterator[Guardian]:
    """Start a guardian for a job of this process; on the way out it has ended.

    Unless it has heard `done` by then, it sweeps; also when it hears nothing for `silent_s`, if
    that is not 0.
    """
    import subprocess  # not at the top: the guardian itself starts more quickly without

    end, pipe = os.pipe()
    # It inherits this mask: a signal to all processes must not end it before its work is done.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # It must hold nothing of ours: no output that somebody reads to its end, no folder, and not
        # the id of an outer job, with which it would be swept before it has done its work.
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _PROGRAM,
                __file__,
                job,
                str(os.getpid()),
                str(silent_s),
            ],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != JOB_VARIABLE},
            start_new_session=True,
        )
    except BaseException:
        os.close(pipe)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(end)
    guardian = Guardian(pipe)
    try:
        yield guardian
    finally:
        guardian.close()
        limit_s = _END_S if guardian.is_done else _TAKE_OVER_S
        with contextlib.suppress(AttributeError, OSError):  # there are no pidfds: then in steps
            _wait_for_ends([os.pidfd_open(process.pid)], limit_s)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:  # it is stopped
            process.kill()
            process.wait()


def _guard(launcher: int, silent_s: float) -> tuple[set[int], list[bytes]] | None:
    """Listen until the launcher is done (None), or cannot do it: its ranks' sessions, and files."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # A process forked by the launcher's (a notebook, say) may hold the pipe open after its death.
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            poller.register(os.pidfd_open(launcher), select.POLLIN)
    os.set_blocking(0, False)
    received, silent = b"", False
    while True:
        dead = os.getppid() != launcher  # asked first, so that all it has said is read after that
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(0, 65536):
                received += chunk
            dead = True  # the end of the pipe was reached, not only what is there by now
        received = received.replace(b"alive\n", b"")
        if b"done\n" in received:
            return None
        if dead or silent or b"sweep\n" in received:
            whole = received[: received.rfind(b"\n") + 1].splitlines()
            files = [line[len(b"file ") :] for line in whole if line.startswith(b"file ")]
            return {int(line.split()[1]) for line in whole if line.startswith(b"session")}, files
        silent = not poller.poll(1000 * silent_s if silent_s else None)
        # Whoever suspends a job stops this process, too, and may continue it first.
        silent = silent and not poller.poll(1000 * _LATE_S)


def main() -> None:
    """Guard the job named by the first argument for the process named by the second."""
    job, launcher, silent_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    found = _guard(launcher, silent_s)
    if found is None:
        return
    sessions, files = found
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
        with contextlib.suppress(OSError):  # others may have files there
            os.rmdir(os.path.dirname(file))
    for _ in range(3):
        with contextlib.suppress(OSError):  # the system is out of descriptors or memory
            sweep(sessions, job)
        time.sleep(_REPEAT_S)
