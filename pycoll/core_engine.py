"""The engine of one rank over the compiled core's message engine.

Matching, links and waiting are the core's; calls, failures and what is sent piece by piece are as
in `Engine`. A thread that waits, waits in the core, which drives, and says when there is something
for Python to do. So every thread has a seat of its own, and nobody drives for the others here.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll.context import Context
from pycoll.core_context import CoreContext
from pycoll.engine import Engine
from pycoll.launcher.rendezvous import Client as Control
from pycoll.seats import Seat
from pycoll.transports._core import Seat as CoreSeat
from pycoll.transports._core import timer_open, timer_set
from pycoll.transports.base import Elsewhere, Operation, Reach, Transport
from pycoll.transports.core import CoreTransport

if TYPE_CHECKING:
    from pycoll.memory import SharedMemory


class _Waiter:
    """A thread that waits; without an operation, for anything that comes."""

    __slots__ = ("operation", "seat", "thread")

    def __init__(self, seat: Any, operation: Operation | None) -> None:
        self.seat = seat
        self.operation = operation
        self.thread = threading.get_ident()


class CoreEngine(Engine):
    """Everything one rank needs to communicate, over the core's engine.

    Args:
        rank: world rank of this process.
        transport: the core's engine.
        size: number of ranks.
        control, op_timeout, shared_memory: as of `Engine`.
    """

    is_core = True

    def __init__(
        self,
        rank: int,
        transport: CoreTransport,
        size: int,
        control: Control | None,
        op_timeout: float = math.inf,
        shared_memory: SharedMemory | str = "there is one rank",
    ) -> None:
        self._new_seat: Callable[[], Any] = lambda: CoreSeat(transport.core)
        self._waiting: dict[_Waiter, None] = {}
        self._is_told_pending = False
        self._timer_fd = -1
        self.transport = transport
        self._core = transport.core
        transports: list[Transport] = [transport] * size
        super().__init__(rank, transports, control, op_timeout, shared_memory)
        self._door = transport.core
        transport.hear_work = self.hear
        transport.hold = self._hold
        if control is not None:
            transport.core.watch(control.fileno())

    def reach(self, peer: int, part: memoryview, elsewhere: Elsewhere) -> Reach | None:
        return self.transport.reach_to(peer, part, elsewhere)

    def new_context(self, ident: int, members: tuple[int, ...]) -> Context:
        return CoreContext(ident, members, self.rank, self.transport)

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

    def leave(self) -> None:
        self._wake_sleepers()
        is_pending = bool(self._requests)
        if is_pending != self._is_told_pending:
            self._is_told_pending = is_pending
            self._core.pending(1 if is_pending else -1)
        self._let_go()

    def _is_asleep(self, thread: int) -> bool:
        return bool(self._waiting) and any(each.thread == thread for each in list(self._waiting))

    def _recover(self, me: int) -> None:
        self._retake()
        self._waiting = {each: None for each in self._waiting if each.thread != me}
        super()._recover(me)

    def _interrupted(self) -> None:
        for waiter in list(self._waiting):
            waiter.seat.ring()

    # --- waiting ---------------------------------------------------------------------------

    def _seat(self, yields: bool) -> Seat:
        return Seat((), yields)  # nobody sleeps there

    def _drive(self, operation: Operation, until: float) -> None:
        waiter = _Waiter(self._new_seat(), operation)
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
        with self.locked():
            self._progress()
            until = look()
            if until is None:
                return None
            rings: int = self._core.rings
            if seen is not None and seen != rings:
                return rings
            waiter = _Waiter(self._new_seat(), None)
            try:
                self._waiting[waiter] = None
                self._rest(waiter, until, seen)
                self._progress()
            finally:
                self._waiting.pop(waiter, None)
            return int(self._core.rings)

    def _rest(self, waiter: _Waiter, limit: float, seen: int | None = None) -> None:
        """Wait in the core until it has something for Python, or the seat is rung."""
        if not waiter.seat.begin(seen):
            return
        try:
            self._let_go()
            left = limit - time.monotonic() if limit != math.inf else math.inf
            waiter.seat.wait(max(0.0, left))
        finally:
            self._retake()
        self.interrupts.check()

    def _progress(self) -> bool:
        worked = super()._progress()
        if self._core.has_fired:
            self._set_timer_fd()
            self._core.watch_again()
        return worked

    def _wake_sleepers(self) -> None:
        for waiter in self._waiting:
            if waiter.operation is not None and waiter.operation.done:
                waiter.seat.ring()

    def _wake_napper(self) -> None:
        for waiter in self._waiting:
            if waiter.operation is None:
                waiter.seat.ring()

    def _is_pending(self) -> bool:
        return False  # the core knows

    def after(self, seconds: float, action: Callable[[], None]) -> None:
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

    # --- the end ---------------------------------------------------------------------------

    def _close_seats(self) -> None:
        super()._close_seats()
        for waiter in self._waiting:
            waiter.seat.ring()

    def _end_background(self, timeout_s: float) -> None:
        super()._end_background(timeout_s)
        self.transport.end()
        if self._timer_fd >= 0:
            os.close(self._timer_fd)
            self._timer_fd = -1
