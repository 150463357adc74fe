"""Functions called when a request is done: `Request.add_done_callback`.

Whoever finds a request done makes progress for others, and so only notes what is to be called.
Threads of this file call it. A callback may wait for another request, whose callback may wait for a
third: so each that runs has a thread of its own, and one more thread waits for the next.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll._requests.request import Request

_KEPT = 4
"""Threads that stay when they have nothing to do."""


class CallbackThreads:
    """Threads that call functions, each as soon as it is due."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: deque[Callable[[], None]] = deque()
        self._num_due = threading.Semaphore(0)
        self._num_free = 0

    def provide(self) -> None:
        """See to it that a thread waits, before it is needed."""
        with self._lock:
            if self._num_free > len(self._due):
                return
            self._num_free += 1
        thread = threading.Thread(target=self._live, name="pycoll callbacks", daemon=True)
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._num_free -= 1
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called; returns at once."""
        self._due.append(function)
        self._num_due.release()

    def _live(self) -> None:
        while True:
            self._num_due.acquire()
            function = self._due.popleft()
            with self._lock:
                self._num_free -= 1
            # Not by who makes progress. Where there are no more threads, the next one waits.
            with contextlib.suppress(RuntimeError):
                self.provide()
            function()
            del function
            with self._lock:
                if self._num_free >= _KEPT:
                    return
                self._num_free += 1


_threads = CallbackThreads()


def _forget() -> None:
    global _threads
    _threads = CallbackThreads()  # those that there were are the parent's


os.register_at_fork(after_in_child=_forget)


class Callbacks:
    """The callbacks of one request, called one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: deque[tuple[Callable[[Any], object], Request[Any]]] = deque()
        self._is_running = False

    def add(self, callback: Callable[[Any], object], request: Request[Any]) -> None:
        """Have `callback(request)` called when the request is done.

        Raises:
            Error: there is no more communication here.
            RuntimeError: there are no more threads.
        """
        _threads.provide()
        task = request._started()

        def due(_: object) -> None:
            self._note(callback, request)

        if not task.done:
            with request._group.engine.locked():
                if not task.done:
                    task.watchers[due] = None
                    return
        due(task)

    def _note(self, callback: Callable[[Any], object], request: Request[Any]) -> None:
        with self._lock:
            self._due.append((callback, request))
            if self._is_running:
                return
            self._is_running = True
        _threads.call(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._is_running = False
                    return
                callback, request = self._due.popleft()
            try:
                callback(request)
            except BaseException as exc:
                where = exc.__traceback__, threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(exc), exc, *where)))
                del where
            del callback, request
