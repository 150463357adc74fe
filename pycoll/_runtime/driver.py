"""The lock of an engine, and the threads that wait in it.

Matching, links and waiting are the core's (`transports._core`). A thread that waits here waits in
the core, which drives, and says when there is something for Python to do: so every thread has a
parker of its own. If nobody waits, the core's own thread calls `hear`.

A signal handler of the program may raise between any two calls made here, in the main thread, also
when a Python function begins. So the lock knows its thread, everything that is taken is given back
at two places, one around the other, and what a second signal in a row has left is put right when
the thread comes the next time.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any

from pycoll._rendezvous.client import Client as Control
from pycoll._runtime.task import Started
from pycoll._support.interrupts import Interrupts
from pycoll._support.weak import weakly
from pycoll._transports._core import Guard, Parker, timer_open, timer_set
from pycoll._transports.base import Operation
from pycoll._transports.core import CoreTransport
from pycoll.errors import Error

_CALLERS = tuple(f"pycoll.{name}." for name in ("_communicator", "_requests", "_calls", "_runtime"))
"""Packages that call the program in the middle of an operation: operators, signal handlers."""


class _Waiter:
    """A thread that waits; without an operation, for anything that comes."""

    __slots__ = ("operation", "parker", "thread")

    def __init__(self, core: Any, operation: Operation | None) -> None:
        self.parker = Parker(core)
        self.operation = operation
        self.thread = threading.get_ident()


class Driver(ABC):
    """The waiting half of an engine.

    Args:
        transport: the core's engine.
        control: the connection to the launcher, driven too; or None.

    Attributes:
        closed: why nothing can be done any more, or None.
        interrupts: what holds back Ctrl-C meanwhile.
    """

    def __init__(self, transport: CoreTransport, control: Control | None) -> None:
        self.transport = transport
        self.control = control
        self.closed: str | None = None
        self.interrupts = Interrupts(weakly(self._interrupted))
        self._core = transport.core
        self._dropped = self._core.dropped
        self._gate = threading.Lock()
        self._state = threading.RLock()
        self._is_mine: Callable[[], bool] = self._state._is_owned  # type: ignore[attr-defined]
        self._wanted = False
        self._waiting: dict[_Waiter, None] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._timer_fd = -1
        self._requests: set[Started] = set()
        self._is_told_pending = False
        self._porter: threading.Thread | None = None
        self._porter_bell = -1
        self._control_poller = select.poll()
        if control is not None:
            self._control_poller.register(control.fileno(), select.POLLIN)
            self._core.watch(control.fileno())
        transport.hear_work = weakly(self.hear)
        transport.hold = weakly(self._hold)

    @abstractmethod
    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        """Handle what the launcher has sent."""

    @abstractmethod
    def _fail_all(self, error: BaseException) -> None:
        """End everything that is under way."""

    @abstractmethod
    def _close_dropped(self) -> None:
        """Close the communicators that nobody can use any more."""

    def hear(self) -> None:
        """Take in what the core has found for Python; called by the core, in any thread."""
        if self.closed is None and not self.is_inside():
            with self.locked():
                while self.closed is None:
                    worked = self._progress()
                    if not (worked and self._core.has_work):  # one event may leave another
                        return

    def _hold(self, action: Callable[[], object]) -> bool:
        """Call a function under the lock; False: this thread is in the middle of an operation."""
        if self.is_held():
            action()
            return True
        if self.is_inside():
            return False
        holds = self.interrupts.hold()
        try:
            self._take()
            try:
                action()
            finally:
                self.leave()
        finally:
            if holds:
                self.interrupts.release_later()
        return True

    # --- the lock --------------------------------------------------------------------------

    def locked(self) -> Guard:
        """Hold the engine; a thread that drives lets go of it at once."""
        return Guard(self)

    def is_inside(self) -> bool:
        """Whether this thread is in the middle of an operation.

        If it only was, because a signal handler has torn it out, that is put right here.
        """
        me = threading.get_ident()
        if not (self._is_mine() or self._is_asleep(me)):
            return False
        if _is_called_by_itself():
            return True
        self._recover(me)
        return False

    def is_held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._is_mine()

    def _is_asleep(self, thread: int) -> bool:
        return bool(self._waiting) and any(each.thread == thread for each in list(self._waiting))

    def enter(self, inside: bool) -> None:
        """Get the lock, and hold interrupts back; then `leave` and `undo` must be called.

        Args:
            inside: what `is_inside` has returned.

        Raises:
            Error: this has ended, or this thread is in the middle of an operation.
        """
        if self.closed is not None:
            raise Error(self.closed)
        if inside:
            raise Error(
                "a reduction operator or a signal handler must not communicate: "
                "it runs in the middle of an operation"
            )
        self.interrupts.hold()
        self._take()

    def leave(self) -> None:
        """Let others in, and wake who has something to do."""
        self._wake_sleepers()
        is_pending = bool(self._requests)
        if is_pending != self._is_told_pending:
            self._is_told_pending = is_pending
            self._core.pending(1 if is_pending else -1)
        self._let_go()

    def undo(self, inside: bool) -> None:
        """End what `enter` has begun: `leave` once more, if it was torn apart."""
        if not inside:
            if self._is_mine():
                self.leave()
            self.interrupts.release()

    def _recover(self, me: int) -> None:
        """Put right what a thread has left behind: a signal handler has torn it out of here."""
        self._retake()
        self._waiting = {each: None for each in self._waiting if each.thread != me}
        self.leave()

    def _take(self) -> None:
        """Get the lock, from a thread that drives soon: it is told that it is wanted."""
        if not self._state.acquire(blocking=False):
            with self._gate:
                try:
                    self._wanted = True
                    self._state.acquire()
                finally:
                    self._wanted = False
        self._core.python_busy = True  # the core does no call without Python

    def _retake(self) -> None:
        """Get the lock back, and only then raise what a signal handler has raised meanwhile."""
        raised: BaseException | None = None
        while True:
            try:
                self._take()
                break
            except BaseException as exc:
                raised = exc
        if raised is not None:
            raise raised

    def _let_go(self) -> None:
        """Release the lock, if this thread has it: more than once, if it was torn out before."""
        if self._is_mine():
            self._core.python_busy = False
            while self._is_mine():
                self._state.release()

    def _make_room(self) -> None:
        """Let the thread in that wants the lock: it holds `_gate` until it has it."""
        try:
            self.leave()
            with self._gate:
                self._state.acquire()
        finally:
            self._retake()

    def _interrupted(self) -> None:
        """Wake the main thread, which has an interrupt to raise."""
        for waiter in list(self._waiting):
            waiter.parker.wake()

    # --- waiting ---------------------------------------------------------------------------

    def _drive(self, operation: Operation, until: float) -> None:
        waiter = _Waiter(self._core, operation)
        try:
            self._waiting[waiter] = None
            while not operation.done:
                if self._wanted:
                    self._make_room()
                elif self._progress():
                    self._wake_sleepers()
                elif time.monotonic() >= until:
                    return
                else:
                    self._rest(waiter, until)
        finally:
            self._waiting.pop(waiter, None)

    def nap(self, look: Callable[[], float | None], seen: int | None = None) -> int | None:
        """Sleep once, until anything comes.

        Args:
            look: called first, under the lock; returns until when to sleep, or None not to.
            seen: given by a wait for a flag in shared memory: what this returned last in the same
                wait, at first -1. When a doorbell has rung since, this does not sleep, because
                the flag may have been set.

        Returns None if `look` did.
        """
        with self.locked():
            self._progress()
            until = look()
            if until is None:
                return None
            rings: int = self._core.rings
            if seen is not None and seen != rings:
                return rings
            waiter = _Waiter(self._core, None)
            try:
                self._waiting[waiter] = None
                self._rest(waiter, until, seen)
                self._progress()
            finally:
                self._waiting.pop(waiter, None)
            return int(self._core.rings)

    def _rest(self, waiter: _Waiter, limit: float, seen: int | None = None) -> None:
        """Wait in the core until it has something for Python, or `wake` is called."""
        if not waiter.parker.begin(seen):
            return
        try:
            self._let_go()
            left = limit - time.monotonic() if limit != math.inf else math.inf
            waiter.parker.wait(max(0.0, left))
        finally:
            self._retake()
        self.interrupts.check()

    def _progress(self) -> bool:
        """Do what can be done without waiting; True if that was something."""
        worked = self.transport.progress()
        # Asked first: the kernel says no sooner than the connection does.
        if self.control is not None and self._control_poller.poll(0):
            for event in self.control.progress():
                worked = True
                self._event(event.kind, event.fields)
        if self._timers:
            now = time.monotonic()
            for timer in [timer for timer in self._timers if timer[0] <= now]:
                worked = True
                self._timers.remove(timer)
                timer[1]()
        if worked:
            self._wake_napper()
        if self._dropped:
            self._close_dropped()
        if self._core.has_fired:
            self._set_timer_fd()
            self._core.watch_again()
        return worked

    def _wake_sleepers(self) -> None:
        for waiter in self._waiting:
            if waiter.operation is not None and waiter.operation.done:
                waiter.parker.wake()

    def _wake_napper(self) -> None:
        for waiter in self._waiting:
            if waiter.operation is None:
                waiter.parker.wake()

    def watch(self, operation: Operation) -> None:
        """See that who waits for an operation hears of its end, though nobody asks to be told."""
        with self.locked():
            operation.then(lambda _: None)

    def finish(self, operation: Operation, error: BaseException | None) -> None:
        """End an operation that something else than a transport has done; from any thread."""
        with self.locked():
            operation.finish(error)
            self._wake_napper()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called, under the lock, when some time has passed."""
        self._timers.append((time.monotonic() + seconds, action))
        if self._timer_fd < 0:
            self._timer_fd = timer_open()
            self._core.watch(self._timer_fd)
        self._set_timer_fd()

    def _set_timer_fd(self) -> None:
        """Have a thread come here when the next timer is due, whoever waits for whatever."""
        if self._timer_fd >= 0:
            left = min((due for due, _ in self._timers), default=math.inf) - time.monotonic()
            timer_set(self._timer_fd, 0 if left == math.inf else max(1, int(left * 1e9)))

    # --- callers ---------------------------------------------------------------------------

    def admit(self) -> None:
        """From now on, let other ranks make their links while no thread here is in a call."""
        callers = self.transport.callers_fileno()
        if callers < 0:
            return
        with contextlib.suppress(OSError, RuntimeError):  # else they wait for the next call
            self._porter_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            porter = threading.Thread(
                target=self._let_in, args=(callers,), name="pycoll", daemon=True
            )
            porter.start()
            self._porter = porter

    def _let_in(self, callers: int) -> None:
        """Answer those who call; the whole life of a thread."""
        poller = select.poll()
        poller.register(callers, select.POLLIN)
        poller.register(self._porter_bell, select.POLLIN)
        while self.closed is None:
            poller.poll()
            try:
                self.hear()
            except BaseException as exc:
                if self.closed is None:
                    with self.locked():
                        self._fail_all(exc)  # nobody shall wait for what will not come
                raise

    # --- the end ---------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """Wake who still waits; with the lock, when this is closed."""
        for waiter in self._waiting:
            waiter.parker.wake()

    def _end_driving(self, timeout_s: float) -> None:
        """End the core, and the thread of ours; without the lock."""
        if self._porter is not None:
            os.eventfd_write(self._porter_bell, 1)
            self._porter.join(timeout_s)
        # On a machine so busy that the thread has not come so far, it may still read from it.
        if self._porter_bell >= 0 and (self._porter is None or not self._porter.is_alive()):
            os.close(self._porter_bell)
            self._porter_bell = -1
        self.transport.end()
        if self._timer_fd >= 0:
            os.close(self._timer_fd)
            self._timer_fd = -1


def _is_called_by_itself() -> bool:
    """Whether the program was called from the middle of an operation, and so calls this."""
    frame: FrameType | None = sys._getframe(1)
    is_program = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_program and name.startswith(_CALLERS):
            return True
        is_program = is_program or not name.startswith("pycoll.")
        frame = frame.f_back
    return False
