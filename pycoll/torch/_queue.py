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
        self._turn = threading.Lock()  # of who takes the first call, and runs it
        self._changing = threading.Lock()
        self._added: SimpleQueue[bool] = SimpleQueue()  # for the thread; False is its end
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def run(self, work: CallWork) -> None:
        """Run a call and all that are before it."""
        if not self._waiting and self._turn.acquire(blocking=False):
            try:
                if not self._waiting:
                    work.run()
                    return
            finally:
                self._turn.release()
        self.add(work)
        work.wait_until_done(None)

    def add(self, work: CallWork) -> None:
        """Have a call run when those before it are done."""
        with self._changing:
            if self._has_ended:
                raise RuntimeError("this process group was shut down")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._waiting.append(work)
        self._added.put(True)

    def help(self, work: CallWork) -> None:
        """Run calls until this one is done, or another thread runs one."""
        while not work.is_completed() and self._turn.acquire(blocking=False):
            try:
                self._run_first()
            finally:
                self._turn.release()

    def end(self) -> None:
        """Take no more calls; return when all are done."""
        with self._changing:
            self._has_ended = True
        if self._thread is not None:
            self._added.put(False)
            self._thread.join()

    def _run_first(self) -> None:
        if self._waiting:  # else another thread has run it
            self._waiting.popleft().run()

    def _serve(self) -> None:
        while self._added.get():
            with self._turn:
                self._run_first()
