"""The launcher's standard input, for a rank 0 on another host: read here, passed on in pieces.

It is shared with others, such as the shell: it stays blocking, and of a terminal nothing is read
while another job of the shell has it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable

from pycoll._launcher.line import Line

WINDOW_NBYTES = 256 << 10
"""Bytes that may be on the way, so that a rank which does not read stops whoever writes."""

_READ_NBYTES = 64 << 10
_LOOK_S = 0.5  # between looks at who has the terminal


class Input:
    """The launcher's end.

    Args:
        fd: what is read; it stays the caller's.
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        line: to the agent of the rank's host: "input" with bytes, at the end with none.
    """

    def __init__(self, fd: int, selector: selectors.BaseSelector, line: Line) -> None:
        self._fd, self._selector, self._line = fd, selector, line
        self._window = WINDOW_NBYTES
        self._is_watched = False
        self._is_file = False  # which is always ready, and no selector takes it
        self._is_over = False

    def update(self, now: float) -> float:
        """Do what is due; returns when to call this again."""
        if self._is_over or self._window <= 0:
            self._unwatch()
            return float("inf")
        if not self._is_ours():
            self._unwatch()
            return now + _LOOK_S
        if not self._is_watched and not self._is_file:
            try:
                self._selector.register(self._fd, selectors.EVENT_READ, self._read)
                self._is_watched = True
            except PermissionError:
                self._is_file = True
            except (OSError, ValueError):  # there is none
                self._end()
        if self._is_file:
            self._read()
            return now
        return now + _LOOK_S if os.isatty(self._fd) else float("inf")

    def taken(self, nbytes: int) -> None:
        """Called when the rank has got so much of it; -1: it wants no more."""
        if nbytes < 0:
            self._is_over = True
        self._window += nbytes

    def close(self) -> None:
        """Leave it to others; may be called again."""
        self._is_over = True
        self._unwatch()

    def _is_ours(self) -> bool:
        """Whether reading would not stop this process, as a job in the background."""
        try:
            return not os.isatty(self._fd) or os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return True

    def _read(self) -> None:
        try:
            data = os.read(self._fd, min(_READ_NBYTES, self._window))
        except OSError:
            data = b""
        self._window -= len(data)
        if data:
            self._line.send("input", data)
        else:
            self._end()
        if self._window <= 0:
            self._unwatch()

    def _end(self) -> None:
        self._line.send("input", b"")
        self.close()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._fd)


class Feed:
    """The agent's end: a pipe, whose reading end is the standard input of rank 0.

    Args:
        selector: the owner's loop; the data of a key is a function to call when it is ready.
        taken: called with how many bytes the rank has got; with -1 when it wants no more.

    Attributes:
        reading: the rank's end, which the owner closes when the rank has it.
    """

    def __init__(self, selector: selectors.BaseSelector, taken: Callable[[int], None]) -> None:
        self._selector, self._taken = selector, taken
        self.reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._data = bytearray()
        self._is_last = self._is_watched = self._is_closed = False

    def put(self, data: bytes) -> None:
        """Pass bytes on, when the rank reads; none: they were the last."""
        self._data += data
        self._is_last = self._is_last or not data
        self._write()

    def close(self) -> None:
        """Let the rank see the end; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._watch(False)
            os.close(self._writing)

    def _write(self) -> None:
        if self._is_closed:
            return
        try:
            while self._data:
                count = os.write(self._writing, self._data)
                del self._data[:count]
                self._taken(count)
        except BlockingIOError:
            return self._watch(True)
        except OSError:  # the rank has closed it, or ended
            self._data.clear()
            self._taken(-1)
            return self.close()
        self._watch(False)
        if self._is_last:
            self.close()

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._is_watched:
            self._selector.register(self._writing, selectors.EVENT_WRITE, self._write)
        elif not wanted and self._is_watched:
            self._selector.unregister(self._writing)
        self._is_watched = wanted
