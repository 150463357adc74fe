"""Ctrl-C while a call is under way: raised where the call waits, not in the middle of its work.

Python raises KeyboardInterrupt between any two instructions of the main thread. Inside an engine
that would tear a message of several frames apart, or end what is done there on behalf of another
thread's call, so that communicators would break which have nothing to do with the interrupted call.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Interrupts:
    """Holds KeyboardInterrupt back while the main thread is busy in an engine.

    A second one that comes before the first was raised is not held back: a reduction operator that
    never returns can be interrupted. A handler that the program sets itself is left alone. The
    engines of several worlds have one handler together.

    Args:
        wake: makes the main thread call `check` soon, wherever it waits; called by the handler.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._main = threading.main_thread().ident
        self._busy = False
        self._pending = False

    def install(self) -> None:
        """Take the place of Python's own handler, if that is the one in place."""
        _installed.append(self)
        if (
            threading.get_ident() == self._main
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, _handle)

    def uninstall(self) -> None:
        """Put Python's own handler back, if this was the last one."""
        _installed.remove(self)
        if (
            not _installed
            and threading.get_ident() == self._main
            and signal.getsignal(signal.SIGINT) is _handle
        ):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def hold(self) -> bool:
        """Begin to hold interrupts back; False (nothing to release) but in the main thread."""
        if self._busy or threading.get_ident() != self._main:
            return False
        self._busy = True
        return True

    def release(self) -> None:
        """Stop holding interrupts back, in the main thread; raises the one that came."""
        if threading.get_ident() == self._main:
            self._busy = False
            self.check()

    def release_later(self) -> None:
        """The same where nothing can be raised: Python raises the one that came soon after."""
        self._busy = False
        if self._pending:
            _thread.interrupt_main()

    def check(self) -> None:
        """Raise the interrupt that was held back; in the main thread only."""
        if self._pending and threading.get_ident() == self._main:
            self._pending = False
            raise KeyboardInterrupt


_installed: list[Interrupts] = []


def _handle(signum: int, frame: FrameType | None) -> None:
    # The newest: an operator that one world calls may be in a call of another.
    busy = next((one for one in reversed(_installed) if one._busy), None)
    holds_back = busy is not None and not busy._pending
    for one in _installed:
        one._pending = one is busy and holds_back
    if busy is None or not holds_back:
        signal.default_int_handler(signum, frame)
    else:
        busy._wake()
