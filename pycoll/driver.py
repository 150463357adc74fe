"""Who drives: the lock of an engine, and the threads that wait in it.

One lock owns everything. A thread that waits drives: it lets the transports progress until its
operation is done, and sleeps in poll() between, without the lock. A second thread that must wait
sleeps until the driver finds its operation done or hands the driving over. While requests are
pending, or a transport is behind with what it has buffered, and nobody waits, a thread in the
background drives; it gives way to whoever comes. Else nothing runs when nobody waits.
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pycoll.errors import Error
from pycoll.interrupts import Interrupts
from pycoll.launcher.rendezvous import Client as Control
from pycoll.seats import Alarm, Seat, Sleeper
from pycoll.task import Started
from pycoll.transports.base import Operation, Transport

if TYPE_CHECKING:
    from pycoll.transports._core import Host


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
        self._state = threading.Lock()
        self._owner = 0
        self._door: Any = host if host is not None else self
        self.engaged = False
        self._wanted = False
        self._driving = False
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
        self._front, self._back = self._seat(), self._seat()

    @abstractmethod
    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in what the launcher says."""

    @abstractmethod
    def _fail_all(self, error: BaseException) -> None:
        """End everything that is under way."""

    def _seat(self) -> Seat:
        descriptors = [transport.fileno() for transport in self._distinct]
        if self.control is not None:
            descriptors.append(self.control.fileno())
        return Seat(descriptors)

    # --- the lock --------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the engine; a thread that drives lets go of it at once."""
        held = self.interrupts.hold()
        try:
            self._enter()
            try:
                yield
            finally:
                self._leave()
        finally:
            if held:
                self.interrupts.release()

    def _enter(self) -> None:
        if self.closed is not None:
            raise Error(self.closed)
        me = threading.get_ident()
        if me in (self._owner, self._front.sleeper):
            raise Error(
                "a reduction operator or a signal handler must not communicate: "
                "it runs in the middle of an operation"
            )
        self._take()

    def _take(self) -> None:
        """Get the lock, from a thread that drives soon: it is told that it is wanted."""
        if not self._state.acquire(blocking=False):
            with self._gate:
                self._wanted = True
                self._state.acquire()
                self._wanted = False
        self._own()

    def _own(self) -> None:
        self._owner = threading.get_ident()
        self._door.engaged = True  # the core's short way is closed

    def _leave(self) -> None:
        self._wake_sleepers()
        if self._front.asleep or self._is_pending():
            self._wake_driver()
        self._let_go()

    def _let_go(self) -> None:
        self._owner = 0
        self._door.engaged = False
        self._state.release()

    def _make_room(self) -> None:
        """Let the thread in that wants the lock: it holds the gate until it has it."""
        self._leave()
        with self._gate:
            self._state.acquire()
        self._own()

    def _interrupted(self) -> None:
        """Wake the main thread, which has an interrupt to raise: whether it drives or sleeps."""
        self._front.ring()
        for sleeper in self._sleepers:
            sleeper.event.set()

    # --- driving ---------------------------------------------------------------------------

    def _drive(self, operation: Operation, until: float) -> None:
        self._take_over()
        self._front.operation = operation
        try:
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
            self._front.operation = None
            self._hand_over()

    def _take_over(self) -> None:
        """Drive instead of the background thread."""
        self._driving = True
        if self._alarm is not None:
            self._alarm.clear()

    def _hand_over(self) -> None:
        self._driving = False
        if self._sleepers:
            self._sleepers[0].event.set()

    def _sleep(self, operation: Operation | None, until: float) -> None:
        sleeper = Sleeper(operation)
        self._sleepers.append(sleeper)
        self._leave()
        try:
            sleeper.event.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        finally:
            self._take()
            self._sleepers.remove(sleeper)
            # Woken to drive, but done (or out of time): the next one has to.
            if not self._driving and self._sleepers:
                self._sleepers[0].event.set()

    def nap(self, look: Callable[[], float | None], seen: int | None = None) -> int | None:
        """Sleep once, until anything comes.

        Args:
            look: called first, under the lock; returns until when to sleep, or None not to.
            seen: for who waits for a flag in shared memory: what this returned last, in the same
                wait; -1 at first. When a doorbell has rung since, for whatever thread, this does
                not sleep: the flag may have been set.

        Returns None if `look` did.
        """
        held = self.interrupts.hold()
        try:
            self._enter()
            try:
                self._progress()
                until = look()
                if until is None:
                    return None
                if seen is not None and seen != self._awakenings:
                    return self._awakenings
                if self._driving:
                    self._sleep(None, until)
                    return self._awakenings
                self._take_over()
                try:
                    self._poll(self._front, until)
                    self._progress()
                finally:
                    self._hand_over()
                return self._awakenings
            finally:
                self._leave()
        finally:
            if held:
                self.interrupts.release()

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
            seat.asleep, seat.sleeper = True, threading.get_ident()
            self._let_go()
            try:
                seat.poll(timeout_ms)
            finally:
                self._take()
                seat.asleep, seat.sleeper = False, 0
                if self.closed is not None:
                    seat.close()
        finally:
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
            self._alarm = Alarm()
            self._background = threading.Thread(target=self._work, name="pycoll", daemon=True)
            with contextlib.suppress(RuntimeError):  # no threads any more: then who waits drives
                self._background.start()
        self._alarm.set()

    def _work(self) -> None:
        """Drive while something is pending and nobody waits; the whole life of a thread."""
        assert self._alarm is not None
        while self.closed is None:
            self._alarm.wait()
            self._take()
            self._alarm.is_set = False
            self._backing = True
            try:
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
                self._leave()

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
            self._alarm.close()
