"""Ends every process of a job: for the launcher at the end, and in its place if it was killed.

A process belongs to a job if its session is a rank's, or if it was started with the job's
PYCOLL_JOB in its environment (a daemonized grandchild has a session of its own, but keeps that).

The guardian is this file run by itself, `python -I -S guardian.py JOB PID`, so it may import the
standard library only. It reads lines from the launcher on standard input: `session NUMBER` for each
rank, `done` at the end. If the launcher's process ends without `done`, the guardian sweeps.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

JOB_VARIABLE = "PYCOLL_JOB"
_SWEEP_S = 5.0  # longest time a sweep may take: a process in an uninterruptible call dies later
_PASS_S = 0.2  # longest wait for the processes killed in one pass
_END_S = 1.0  # longest time for the guardian itself to end when its work is done
_REPEAT_S = (
    0.05  # a rank between fork and exec does not carry the job's id yet: look again after this
)


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _stat(pid: int) -> tuple[bool, int, int]:
    """Whether a process is running (no zombie), its session, and its start time in ticks."""
    # The name, in parentheses, may hold anything: count the fields from the last parenthesis.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields[0] not in (b"Z", b"X"), int(fields[3]), int(fields[19])


def members(sessions: set[int], job: str) -> dict[int, int]:
    """The running processes of a job, this one left out: process number -> start time in ticks."""
    marker = b"\0%s=%s\0" % (JOB_VARIABLE.encode(), job.encode())
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # It may end while it is looked at, and another user's environment is not ours to read.
        with contextlib.suppress(OSError, IndexError):
            running, session, started = _stat(int(name))
            if not running:
                continue
            if session in sessions or marker in b"\0%s\0" % _read(f"/proc/{name}/environ"):
                found[int(name)] = started
    return found


def _send(pid: int, started: int, signum: int) -> int | None:
    """Signal a process unless its number has passed to another.

    Returns a pidfd (-1 where there is none) for the caller to close, None if it was not reached.
    """
    handle = -1
    try:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # an old kernel, or a container that forbids it
                handle = os.pidfd_open(pid)
        if _stat(pid)[2] != started:
            raise ProcessLookupError
        if handle >= 0:
            signal.pidfd_send_signal(handle, signum)
        else:
            os.kill(pid, signum)
    except (OSError, IndexError):
        if handle >= 0:
            os.close(handle)
        return None
    return handle


def signal_members(sessions: set[int], job: str, signum: int) -> list[int]:
    """Send a signal to every process of a job, once; returns the numbers of those it reached."""
    reached = []
    for pid, started in members(sessions, job).items():
        handle = _send(pid, started, signum)
        if handle is not None:
            reached.append(pid)
            if handle >= 0:
                os.close(handle)
    return reached


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
    """Kill every process of a job, in passes until none is left (at most 5 s); returns whom."""
    deadline = time.monotonic() + _SWEEP_S
    killed: set[int] = set()
    while True:
        handles = {
            pid: handle
            for pid, started in members(sessions, job).items()
            if (handle := _send(pid, started, signal.SIGKILL)) is not None
        }
        killed.update(handles)
        _wait_for_ends(list(handles.values()), _PASS_S)
        if not handles or time.monotonic() > deadline:
            return killed


@contextlib.contextmanager
def guarded(job: str) -> Iterator[int]:
    """Start a guardian for a job of this process; the descriptor is where it hears of sessions."""
    import subprocess  # not at the top: the guardian itself starts more quickly without

    end, ours = os.pipe()
    # It inherits this mask: a signal to all processes must not end it before its work is done.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # It must hold nothing of ours: no output that somebody reads to its end, no folder, and not
        # the id of an outer job, with which it would be swept before it has done its work.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, job, str(os.getpid())],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != JOB_VARIABLE},
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(end)
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):  # it was killed
            os.write(ours, b"done\n")
        os.close(ours)
        with contextlib.suppress(AttributeError, OSError):  # there are no pidfds: then in steps
            _wait_for_ends([os.pidfd_open(process.pid)], _END_S)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it is stopped
            process.kill()
            process.wait()


def _guard(launcher: int) -> set[int] | None:
    """Listen until the launcher is done (None) or dead (the sessions of its ranks)."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # A process forked by the launcher's (a notebook, say) may hold the pipe open after its death.
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            poller.register(os.pidfd_open(launcher), select.POLLIN)
    os.set_blocking(0, False)
    told = b""
    while True:
        dead = os.getppid() != launcher  # asked first, so that all it has said is read after that
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(0, 65536):
                told += chunk
            dead = True  # the end of the pipe was reached, not only what is there by now
        if b"done\n" in told:
            return None
        if dead:
            return {int(line.split()[1]) for line in told.splitlines(True) if line.endswith(b"\n")}
        poller.poll()


def main() -> None:
    """Guard the job named by the first argument for the process named by the second."""
    job, launcher = sys.argv[1], int(sys.argv[2])
    sessions = _guard(launcher)
    if sessions is None:
        return
    for _ in range(3):
        sweep(sessions, job)
        time.sleep(_REPEAT_S)


if __name__ == "__main__":
    main()
