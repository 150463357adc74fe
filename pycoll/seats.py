"""Where the threads of an engine sleep, and what wakes them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterable

from pycoll.transports.base import Operation

PATIENCE_NS = 100_000
"""Time that a caller who has started a request gets to come back and wait for it, before the
background thread is woken: two threads that take turns cost more than a small message."""


YIELDS_S = 50e-6
"""How long a thread that waits lets others run and looks again before it sleeps: what it waits for
is mostly about to come, and to be woken takes as long. 8 bytes by tcp took 97 us without, 55 with
this (2 ranks, half a round trip)."""


class Sleeper:
    """A thread that waits while another one drives; without an operation, for any doorbell."""

    __slots__ = ("event", "operation", "thread")

    def __init__(self, operation: Operation | None) -> None:
        self.operation = operation
        self.thread = threading.get_ident()
        self.event = threading.Event()


class Seat:
    """Where a thread that drives sleeps: on everything that can come, and a bell of its own.

    Args:
        descriptors: what can come makes one of them readable.
        yields: whether the thread looks again for a moment before it sleeps.

    Attributes:
        asleep: whether a thread sleeps here.
        sleeper: which one.
        operation: what it waits for, if it waits for one.
    """

    __slots__ = ("_yields", "asleep", "bell", "operation", "poller", "sleeper")

    def __init__(self, descriptors: Iterable[int], yields: bool) -> None:
        self._yields = yields
        self.asleep = False
        self.sleeper = 0
        self.operation: Operation | None = None
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller = select.poll()
        for descriptor in (self.bell, *descriptors):
            self.poller.register(descriptor, select.POLLIN)

    def ring(self) -> None:
        """Have the thread look again."""
        if self.bell >= 0:
            os.eventfd_write(self.bell, 1)

    def poll(self, timeout_ms: float | None) -> None:
        """Sleep until something comes."""
        ready = self._look_again() if self._yields and timeout_ms != 0 else None
        for descriptor, _ in ready or self.poller.poll(timeout_ms):
            if descriptor == self.bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.bell)

    def _look_again(self) -> list[tuple[int, int]]:
        ready = self.poller.poll(0)
        until = time.perf_counter() + YIELDS_S
        while not ready and time.perf_counter() < until:
            os.sched_yield()
            ready = self.poller.poll(0)
        return ready

    def close(self) -> None:
        """Give the bell back."""
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1


class Alarm:
    """What the background thread rests on while there is nothing for it to do.

    It rings a little later, and without waking any thread if it is set while it is set already.
    Without the compiled core it rings at once.

    Args:
        callers: descriptors that are readable while there is something to do for other ranks.

    Attributes:
        is_set: whether it will ring. Whoever has waited for it clears that.
    """

    def __init__(self, callers: Iterable[int] = ()) -> None:
        self.is_set = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._timer = -1
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        with contextlib.suppress(ImportError):
            from pycoll.transports._core import timer_open, timer_set

            self._timer, self._set_timer = timer_open(), timer_set
            self._poller.register(self._timer, select.POLLIN)
        for descriptor in callers:
            self._poller.register(descriptor, select.POLLIN)

    def set(self) -> None:
        """Ring soon."""
        if self.is_set:
            return
        self.is_set = True
        if self._timer >= 0:
            self._set_timer(self._timer, PATIENCE_NS)
        else:
            self.ring()

    def clear(self) -> None:
        """Do not ring, unless it does already: somebody else drives now."""
        if self.is_set and self._timer >= 0:
            self.is_set = False
            self._set_timer(self._timer, 0)

    def ring(self) -> None:
        """Ring now."""
        os.eventfd_write(self._bell, 1)

    def wait(self) -> None:
        """Sleep until it rings, or there is something to do for other ranks."""
        for descriptor, _ in self._poller.poll():
            if descriptor == self._timer:
                self._set_timer(self._timer, 0)
            elif descriptor == self._bell:
                os.eventfd_read(self._bell)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._bell)
        if self._timer >= 0:
            os.close(self._timer)
