"""Who drives: the lock of an engine, and the threads that wait in it.

One lock owns everything. A thread that waits drives: it lets the transports progress until its
operation is done, and sleeps in poll() between, without the lock. A second thread that must wait
sleeps until the driver finds its operation done or hands the driving over. While requests are
pending, or a transport is behind with what it has buffered, and nobody waits, a thread in the
background drives; it gives way to whoever comes. Else nothing runs when nobody waits.

A signal handler of the program may raise between any two calls made here, in the main thread, also
when a Python function begins. So the lock knows its thread, everything that is taken is given back
at two places, one around the other, and what a second signal in a row has left is put right when
the thread comes the next time.
"""

from __future__ import annotations

import contextlib
import math
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from types import FrameType
from typing import TYPE_CHECKING, Any

from pycoll.errors import Error
from pycoll.interrupts import Interrupts
from pycoll.launcher.rendezvous import Client as Control
from pycoll.seats import Alarm, Seat, Sleeper
from pycoll.task import Started
from pycoll.transports.base import Operation, Transport

if TYPE_CHECKING:
    from pycoll.transports._core import Host


_ENGINE = {f"pycoll.{name}" for name in ("communicator", "engine", "native", "request", "task")}
_ENGINE.add(__name__)


class Locked:
    """Holds the lock of a driver in a `with` statement, where there is no compiled core.

    A signal may come when `__exit__` begins. The core's `Guard` does the same without that gap.
    """

    __slots__ = ("_driver", "_inside")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._inside = self._driver.is_inside()
        try:
            self._driver.enter(self._inside)
        except BaseException:
            self._driver.undo(self._inside)
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            self._driver.leave()
        finally:
            self._driver.undo(self._inside)


try:
    from pycoll.transports._core import Guard
except ImportError:
    Guard = Locked  # type: ignore[assignment,misc]


class Driver(ABC):
    """The waiting half of an engine.

    Args:
        transports: those that are driven, some of them more than once.
        control: the connection to the launcher, driven too; or None.
        host: the memory of this host, which must know when a thread is in here; or None.

    Attributes:
        closed: why nothing can be done any more, or None.
        interrupts: what holds back Ctrl-C meanwhile.
    """

    def __init__(
        self, transports: list[Transport], control: Control | None, host: Host | None
    ) -> None:
        self.control = control
        self.closed: str | None = None
        self.interrupts = Interrupts(self._interrupted)
        self._gate = threading.Lock()
        self._state = threading.RLock()
        self._is_mine: Callable[[], bool] = self._state._is_owned  # type: ignore[attr-defined]
        self._door: Any = host if host is not None else self
        self.engaged = False
        self._wanted = False
        self._driver = 0  # the thread that drives
        self._sleepers: list[Sleeper] = []
        self._awakenings = 0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._requests: set[Started] = set()
        self._background: threading.Thread | None = None
        self._backing = False
        self._alarm: Alarm | None = None
        self._distinct = list(dict.fromkeys(transports))
        self._may_lag = [t for t in self._distinct if type(t).is_behind is not Transport.is_behind]
        self._control_poller = select.poll()
        if control is not None:
            self._control_poller.register(control.fileno(), select.POLLIN)
        self._front, self._back = self._seat(yields=True), self._seat(yields=False)

    @abstractmethod
    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in what the launcher says."""

    @abstractmethod
    def _fail_all(self, error: BaseException) -> None:
        """End everything that is under way."""

    def _seat(self, yields: bool) -> Seat:
        descriptors = [transport.fileno() for transport in self._distinct]
        if self.control is not None:
            descriptors.append(self.control.fileno())
        return Seat(descriptors, yields)

    # --- the lock --------------------------------------------------------------------------

    def locked(self) -> Guard:
        """Hold the engine; a thread that drives lets go of it at once."""
        return Guard(self)

    def is_inside(self) -> bool:
        """Whether this thread is in the middle of an operation.

        If it only was, because a signal handler has torn it out, that is put right here.
        """
        me = threading.get_ident()
        if not (self._is_mine() or self._driver == me or self._is_asleep(me)):
            return False
        if _is_called_by_itself():
            return True
        self._recover(me)
        return False

    def is_held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._is_mine()

    def _is_asleep(self, thread: int) -> bool:
        asleep = [sleeper.thread for sleeper in self._sleepers] if self._sleepers else ()
        return self._front.sleeper == thread or thread in asleep

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
        if self._front.asleep or self._is_pending():
            self._wake_driver()
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
        for seat in (self._front, self._back):
            if seat.sleeper == me:
                seat.asleep, seat.sleeper = False, 0
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper.thread != me]
        if self._driver == me:
            self._driver = 0
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
        self._door.engaged = True  # the core's short way is closed

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
            if self._sleepers and not self._driver:
                self._sleepers[0].event.set()  # to drive
            self._door.engaged = False
            while self._is_mine():
                self._state.release()

    def _make_room(self) -> None:
        """Let the thread in that wants the lock: it holds the gate until it has it."""
        try:
            self.leave()
            with self._gate:
                self._state.acquire()
        finally:
            self._retake()

    def _interrupted(self) -> None:
        """Wake the main thread, which has an interrupt to raise: whether it drives or sleeps."""
        self._front.ring()
        for sleeper in self._sleepers:
            sleeper.event.set()

    # --- driving ---------------------------------------------------------------------------

    def _drive(self, operation: Operation, until: float) -> None:
        try:
            self._take_over()
            self._front.operation = operation
            while not operation.done:
                if self._wanted:
                    self._make_room()
                elif self._progress():
                    self._wake_sleepers()
                elif time.monotonic() >= until:
                    return
                else:
                    self._poll(self._front, until)
        finally:
            self._driver, self._front.operation = 0, None

    @property
    def _driving(self) -> bool:
        return self._driver != 0

    def _take_over(self) -> None:
        """Drive instead of the background thread."""
        self._driver = threading.get_ident()
        if self._alarm is not None:
            self._alarm.clear()

    def _sleep(self, operation: Operation | None, until: float) -> None:
        sleeper = Sleeper(operation)
        try:
            self._sleepers.append(sleeper)
            self.leave()
            sleeper.event.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        finally:
            try:
                self._retake()
            finally:
                self._sleepers.remove(sleeper)

    def nap(self, look: Callable[[], float | None], seen: int | None = None) -> int | None:
        """Sleep once, until anything comes.

        Args:
            look: called first, under the lock; returns until when to sleep, or None not to.
            seen: for who waits for a flag in shared memory: what this returned last, in the same
                wait; -1 at first. When a doorbell has rung since, for whatever thread, this does
                not sleep: the flag may have been set.

        Returns None if `look` did.
        """
        with self.locked():
            self._progress()
            until = look()
            if until is None:
                return None
            if seen is not None and seen != self._awakenings:
                return self._awakenings
            if self._driving:
                self._sleep(None, until)
                return self._awakenings
            try:
                self._take_over()
                self._poll(self._front, until)
                self._progress()
            finally:
                self._driver = 0
            return self._awakenings

    def _poll(self, seat: Seat, limit: float) -> None:
        """Sleep until something comes, or until `limit`; without the lock."""
        asleep: list[Transport] = []
        try:
            for transport in self._distinct:
                asleep.append(transport)
                if not transport.sleep():
                    return
            limit = min([limit, *(due for due, _ in self._timers)])
            timeout_ms: float | None = None
            if limit != math.inf:
                timeout_ms = max(0, math.ceil((limit - time.monotonic()) * 1e3))
            try:
                seat.asleep, seat.sleeper = True, threading.get_ident()
                self._let_go()
                seat.poll(timeout_ms)
            finally:
                self._retake()
                seat.asleep, seat.sleeper = False, 0
                if self.closed is not None:
                    seat.close()
        finally:
            seat.asleep, seat.sleeper = False, 0
            for transport in asleep:
                transport.awake()
            # A doorbell that rang, whoever it was for, does not ring any more.
            self._awakenings += 1
            for sleeper in self._sleepers:
                if sleeper.operation is None:
                    sleeper.event.set()
            if seat is not self._front and self._front.asleep:
                self._front.ring()
        self.interrupts.check()

    def _progress(self) -> bool:
        """Do what can be done without waiting; True if that was something."""
        worked = False
        for transport in self._distinct:
            worked |= transport.progress()
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
        return worked

    def _wake_napper(self) -> None:
        if self._front.asleep and self._front.operation is None:
            self._front.ring()  # it naps, and what it waits for we do not know

    def watch(self, operation: Operation) -> None:
        """See that who waits for an operation hears of its end, though nobody asks to be told."""
        with self.locked():
            operation.then(lambda _: None)

    def finish(self, operation: Operation, error: BaseException | None) -> None:
        """End an operation that something else than a transport has done; from any thread."""
        with self.locked():
            operation.finish(error)
            self._wake_napper()

    def _is_pending(self) -> bool:
        """Whether there is something to drive for, though nobody may wait for it."""
        return bool(self._requests) or any([transport.is_behind for transport in self._may_lag])

    def _is_idle(self) -> bool:
        return all(transport.is_idle() for transport in self._distinct)

    def _wake_sleepers(self) -> None:
        for sleeper in self._sleepers:
            if sleeper.operation is not None and sleeper.operation.done:
                sleeper.event.set()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` called, under the lock, when some time has passed."""
        self._timers.append((time.monotonic() + seconds, action))
        for seat in (self._front, self._back):
            if seat.asleep:
                seat.ring()  # to sleep no longer than that

    # --- in the background -----------------------------------------------------------------

    def _wake_driver(self) -> None:
        """See that somebody drives who knows what there is to do."""
        if not self._driving and not self._backing:
            if self._is_pending() and not self._sleepers and self.closed is None:
                self._call_background()
            return
        seat = self._front if self._driving else self._back
        if seat.asleep:
            operation = seat.operation
            if (operation is not None and operation.done) or not self._is_idle():
                seat.ring()

    def _call_background(self) -> None:
        """Have the background thread drive soon, unless a caller comes to wait before that."""
        if self._alarm is None:
            self._start_background(())
        if self._alarm is not None:
            self._alarm.set()

    def _start_background(self, callers: Collection[int]) -> None:
        try:
            self._alarm = Alarm(callers)
        except OSError:  # no descriptors any more: then who waits drives
            return
        self._background = threading.Thread(target=self._work, name="pycoll", daemon=True)
        with contextlib.suppress(RuntimeError):  # no threads any more: then who waits drives
            self._background.start()

    def admit(self) -> None:
        """From now on, let other ranks make their links while no thread here is in a call."""
        callers = [transport.callers_fileno() for transport in self._distinct]
        callers = [descriptor for descriptor in callers if descriptor >= 0]
        if callers:
            self._start_background(callers)

    def _work(self) -> None:
        """Drive while something is pending and nobody waits; the whole life of a thread.

        Links that other ranks want are made whoever drives.
        """
        assert self._alarm is not None
        while self.closed is None:
            self._alarm.wait()
            self._take()
            self._alarm.is_set = False
            self._backing = True
            try:
                if self.closed is None:
                    self._progress()
                while self._is_pending() and not self._driving and self.closed is None:
                    if self._wanted:
                        self._make_room()
                    elif self._progress():
                        self._wake_sleepers()
                    else:
                        self._poll(self._back, math.inf)
            except BaseException as exc:
                self._fail_all(exc)  # nobody shall wait for what will not come
                raise
            finally:
                self._backing = False
                self.leave()

    # --- the end ---------------------------------------------------------------------------

    def _close_seats(self) -> None:
        """Wake who still sleeps; with the lock, when this is closed."""
        for seat in (self._front, self._back):
            if seat.asleep:
                seat.ring()  # who sleeps there closes it
            else:
                seat.close()

    def _end_background(self, timeout_s: float) -> None:
        """End the background thread; without the lock."""
        if self._alarm is not None and self._background is not None:
            self._alarm.ring()
            if self._background.is_alive():
                self._background.join(timeout_s)
            # On a machine so busy that the thread has not come so far, it may still read from it.
            if not self._background.is_alive():
                self._alarm.close()


def _is_called_by_itself() -> bool:
    """Whether the program was called from the middle of an operation, and so calls this."""
    frame: FrameType | None = sys._getframe(1)
    is_program = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_program and name in _ENGINE:
            return True
        is_program = is_program or not name.startswith("pycoll.")
        frame = frame.f_back
    return False
