"""What `pycoll status` learns from a rank itself: the Python stacks of its threads.

A thread of its own answers the launcher, so that it does not matter what the others do: whether the
main thread computes, sleeps, waits in pycoll or has ended. It sleeps in the kernel until it is
asked. Only what holds Python's lock and does not let go of it keeps it from answering.

It is no `threading.Thread`: programs that look for their threads do not find it.
"""

from __future__ import annotations

import _socket
import _thread
import os
import signal
import stat
import sys
import threading
from types import FrameType

import msgpack

_MAX_THREADS, _MAX_FRAMES, _MAX_TEXT = 64, 100, 300
MAX_ANSWER_NBYTES = 128 << 10
"""Of the answer, which is one message of a Unix socket: the kernel takes about 200 KiB."""


_answered: set[str] = set()


def answer_launcher(variable: str) -> None:
    """Start the thread that answers, if the launcher wants that; once in a process.

    Args:
        variable: the value of PYCOLL_ASKED: the descriptor of a socket, and its inode.
    """
    if variable in _answered:
        return
    try:
        descriptor, inode = map(int, variable.split(":"))
        status = os.fstat(descriptor)
    except (ValueError, OverflowError, OSError):
        return  # a wrapper has closed it: the launcher says that this rank does not answer
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
        return
    _answered.add(variable)
    os.set_inheritable(descriptor, False)
    _thread.start_new_thread(_answer, (_socket.socket(fileno=descriptor),))


def _answer(socket: _socket.socket) -> None:
    """Answer until the launcher is gone; the whole life of a thread."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # they are the program's
    socket.setblocking(True)
    try:
        while socket.recv(64):
            socket.send(_packed(), _socket.MSG_NOSIGNAL)
    except OSError:
        pass
    socket.close()


def _packed() -> bytes:
    """Return what the threads do, with fewer frames if it would be too long."""
    most, packed = _MAX_FRAMES, b""
    while not packed or (len(packed) > MAX_ANSWER_NBYTES and most > 1):
        packed = msgpack.packb(described(most), unicode_errors="backslashreplace")
        most //= 2
    return packed


def described(most: int) -> dict[str, object]:
    """Return what the threads of this process do: "threads", and whether the main one has "ended".

    Args:
        most: how many frames of each are told, the innermost first.
    """
    me, main = _thread.get_ident(), threading.main_thread()
    # Not threading.enumerate(): it waits for a lock that a thread may hold which is stopped.
    known = dict(threading._active)  # type: ignore[attr-defined]
    threads = []
    for ident, frame in list(sys._current_frames().items())[: _MAX_THREADS + 1]:
        if ident != me:
            thread = known.get(ident)
            name = "main thread" if ident == main.ident else f"thread {getattr(thread, 'name', '')}"
            threads.append((name.rstrip(), _frames(frame, most)))
    threads.sort(key=lambda each: each[0] != "main thread")
    return {"threads": threads, "ended": not main.is_alive()}


def _frames(frame: FrameType | None, most: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        found.append((code.co_filename[-_MAX_TEXT:], frame.f_lineno, code.co_name[:_MAX_TEXT]))
        frame = frame.f_back
    return found
