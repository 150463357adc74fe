"""What a rank of a pool runs: one task after the other, each with a communicator of its own.

Between this process and its parent (`ranks`) is a socket that keeps messages apart. The parent
sends `RUN` with two descriptors, of the task and for the report, which are parcels (`call`), and
closes the socket at the end. A rank answers when it has closed all communicators of that run:

    raised, victim      whether it has raised; because another rank had
    at                  when, by time.monotonic()
    told, told_all      its last calls; whether these are of all communicators of the run
    renewable           whether there can be another run

If the ranks tell different last calls,
the parent sends to each those of all, by rank, and is answered once more.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pycoll._functions import call
from pycoll._world.renewal import MAX_TOLD, RenewedWorld
from pycoll.errors import BootstrapError, PeerFailed

RUN = b"run"
MAX_NBYTES = 1 << 17
"""Of a message. The last calls on 16 communicators of all ranks have room in it."""


class PoolTask:
    """A task, and this rank's part in it.

    Args:
        parcel: what is to be done.
        report: descriptor for the report.
        renewed: the communicators of this run.
        ask: answers the parent; returns what it says to that, "" if that is nothing.

    Attributes:
        parcel, report: as given.
        comm: the communicator of all ranks, for this run.
    """

    def __init__(
        self,
        parcel: call.Parcel,
        report: int,
        renewed: RenewedWorld,
        ask: Callable[[dict[str, Any]], bytes],
    ) -> None:
        self.parcel, self.report = parcel, report
        self.comm = renewed.comm
        self._renewed, self._ask = renewed, ask
        self._error: BaseException | None = None
        self._at = 0.0

    def raised(self, error: BaseException) -> None:
        """Note the exception that has ended the run here, and let the others hear of it."""
        self._error, self._at = error, time.monotonic()
        self._renewed.give_up(error)

    def end(self, report: Callable[[BaseException], object]) -> None:
        """Close the communicators, answer the parent, and hear what the others have called last.

        Args:
            report: called with how their calls differ, if the run has not raised here.
        """
        self._found(self._renewed.close(), report)
        told = self._ask(self._answer())
        if told:
            self._found(self._renewed.hear(marshal.loads(told)), report)
            self._ask(self._answer())

    def _found(
        self, error: BaseException | None, report: Callable[[BaseException], object]
    ) -> None:
        if error is not None and self._error is None:
            self.raised(error)
            report(error.with_traceback(None))

    def _answer(self) -> dict[str, Any]:
        told = self._renewed.told()
        return {
            "raised": self._error is not None,
            "victim": isinstance(self._error, PeerFailed | BootstrapError),
            "at": self._at,
            "told": [list(last) for last in told],
            "told_all": len(told) < MAX_TOLD,
            "renewable": self._renewed.is_renewable,
        }


class Worker:
    """A rank's end of the socket. The rank joins the job when it has the first task.

    Args:
        fd: of the socket, which is this object's from now on.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._world: Any = None
        _block_interrupts()  # they are for what runs; threads that are started now block them, too

    def tasks(self) -> Iterator[PoolTask]:
        """Give the tasks, as they come; each is ended before the next."""
        number = 0
        while True:
            _block_interrupts()
            message, fds, _, _ = socket.recv_fds(self._socket, MAX_NBYTES, 2)
            if not message:
                return
            number += 1
            parcel = call.read_parcel(fds[0])
            assert parcel is not None
            os.close(fds[0])
            if self._world is None:
                self._join(fds[1])
            yield PoolTask(parcel, fds[1], RenewedWorld(self._world, number), self._ask)
            os.close(fds[1])

    def _join(self, report: int) -> None:
        try:
            self._world, _ = call.join()
        except Exception as exc:
            call.report_error(report, exc.with_traceback(call.outside(exc.__traceback__)))
            sys.exit(1)
        call.refuse_debuggers()

    def _ask(self, answer: dict[str, Any]) -> bytes:
        with contextlib.suppress(OSError):  # the parent has gone, or is ending this job
            self._socket.send(marshal.dumps(answer))
            if self._socket.recv(len(RUN), socket.MSG_PEEK) not in (b"", RUN):
                return self._socket.recv(MAX_NBYTES)
        return b""


def _block_interrupts() -> None:
    """Have interrupts wait, in this thread."""
    caught = None
    while True:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            break
        except KeyboardInterrupt as exc:
            caught = exc
    if caught is not None:
        raise caught


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C at the parent raise KeyboardInterrupt here; not one that came earlier."""
    while signal.sigtimedwait({signal.SIGINT}, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        _block_interrupts()


def serve(fd: int) -> None:
    """Call the functions that come; `fd` is that of the socket."""
    path = None
    for task in Worker(fd).tasks():
        if task.parcel.head["path"] != path:  # what a rank adds stays until its parent adds more
            path = task.parcel.head["path"]
            sys.path[:] = path
        _call(task)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        task.end(lambda error: call.report_error(task.report, error))  # noqa: B023


def _call(task: PoolTask) -> None:
    try:
        with interruptible():
            fn, args = call.load_call(task.parcel)
            call.report_value(task.report, call.value_of(fn, task.comm, args, task.report))
        return
    except SystemExit:
        raise
    except call.UnpicklableError as exc:
        error: BaseException = TypeError(str(exc))
    except BaseException as exc:
        error = exc.with_traceback(call.outside(exc.__traceback__))
    call.report_error(task.report, error)
    task.raised(error)


if __name__ == "__main__":
    _, *sys.argv, _ticket = sys.argv
    serve(call.own_report(_ticket))
