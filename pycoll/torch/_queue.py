"""The collectives of one group, one after the other.

PyTorch's ``async_op`` is each rank's own choice, so it must make no difference to what is sent:
every call is a blocking one of pycoll's. One that its caller waits for runs at once, in the
caller's thread, if none is before it. The others run in a thread of the group's, in the order in
which they were made; who waits for one lends a hand.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycoll.torch._work import CallWork


class CallQueue:
    """Runs the calls of a group in order; `name` is that of its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[CallWork] = deque()
        self._turn = threading.Lock()  # of who runs a call
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sleeps = False  # the thread, until something is put into `_wakes`
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._has_ended = False

    def begin(self) -> bool:
        """Whether the caller may make a call itself, at once; then `done` follows."""
        return not self._waiting and self._turn.acquire(blocking=False)

    def done(self) -> None:
        """Give the turn to the next call."""
        self._turn.release()
        if self._waiting or self._has_ended:
            self._wake()

    def add(self, work: CallWork) -> None:
        """Have a call run when those before it are done."""
        with self._changing:
            if self._has_ended:
                raise RuntimeError("this process group was shut down")
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._wake()

    def help(self, work: CallWork) -> None:
        """Run calls until this one is done, or another thread runs one."""
        while not work.is_done and self._turn.acquire(blocking=False):
            try:
                self._run_first()
            finally:
                self.done()

    def end(self) -> None:
        """Take no more calls; return when all are done."""
        with self._changing:
            self._has_ended = True
        if self._thread is not None:
            self._wake()
            self._thread.join()

    def _run_first(self) -> None:
        if self._waiting:  # else another thread has run it
            try:
                self._waiting[0].run()
            finally:
                self._waiting.popleft()

    def _wake(self) -> None:
        if self._sleeps:
            self._sleeps = False
            self._wakes.put(None)

    def _serve(self) -> None:
        while self._waiting or not self._has_ended:
            if self._waiting and self._turn.acquire(blocking=False):
                self._run_first()
                self._turn.release()
                continue
            self._sleeps = True
            # Who adds a call, or gives the turn back, looks at that afterwards: none is missed.
            if self._turn.locked() if self._waiting else not self._has_ended:
                self._wakes.get()
            self._sleeps = False
