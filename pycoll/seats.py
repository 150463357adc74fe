"""Where the threads of an engine sleep, and what wakes them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterable

from pycoll.transports.base import Operation

PATIENCE_NS = 100_000
"""Time that a caller who has started a request gets to come back and wait for it, before the
background thread is woken: two threads that take turns cost more than a small message."""


class Sleeper:
    """A thread that waits while another one drives; without an operation, for any doorbell."""

    __slots__ = ("event", "operation", "thread")

    def __init__(self, operation: Operation | None) -> None:
        self.operation = operation
        self.thread = threading.get_ident()
        self.event = threading.Event()


class Seat:
    """Where a thread that drives sleeps: on everything that can come, and a bell of its own.

    Attributes:
        asleep: whether a thread sleeps here.
        sleeper: which one.
        operation: what it waits for, if it waits for one.
    """

    __slots__ = ("asleep", "bell", "operation", "poller", "sleeper")

    def __init__(self, descriptors: Iterable[int]) -> None:
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
        for descriptor, _ in self.poller.poll(timeout_ms):
            if descriptor == self.bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.bell)

    def close(self) -> None:
        """Give the bell back."""
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1


class Alarm:
    """What the background thread rests on while there is nothing for it to do.

    It rings a little later, and without waking any thread if it is set while it is set already.
    Without the compiled core it rings at once.

    Attributes:
        is_set: whether it will ring. Whoever has waited for it clears that.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._timer = -1
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        with contextlib.suppress(ImportError):
            from pycoll.transports._core import timer_open, timer_set

            self._timer, self._set_timer = timer_open(), timer_set
            self._poller.register(self._timer, select.POLLIN)

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
        """Sleep until it rings."""
        for descriptor, _ in self._poller.poll():
            if descriptor == self._timer:
                self._set_timer(self._timer, 0)
            else:
                os.eventfd_read(self._bell)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._bell)
        if self._timer >= 0:
            os.close(self._timer)
