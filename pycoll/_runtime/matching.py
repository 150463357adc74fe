"""What a receive is matched with, as Python sees it: messages found, held, and parked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pycoll._runtime.envelope import (
    ANY,
    Incoming,
    Key,
    Wanted,
)
from pycoll._transports._core import STATUS_REFUSED
from pycoll._transports.base import Arrival, Operation, Transfer

if TYPE_CHECKING:
    from pycoll._runtime.context import Context
    from pycoll._runtime.inbox import Inbox
    from pycoll._transports._core import Receive


class Found(Arrival):
    """What a probe has found, or a receive has refused: its length."""

    __slots__ = ()

    def accept(self, into: memoryview) -> Transfer:
        raise AssertionError("it was only looked at")

    def release(self) -> None:
        raise AssertionError("it was only looked at")


class Match(Operation):
    """A receive or a probe that waits in the core."""

    __slots__ = ("context", "handle", "message", "number", "peek", "source", "tag")

    def __init__(self, context: Inbox, handle: Receive, source: int, tag: int, peek: bool) -> None:
        super().__init__()
        self.context = context
        self.handle = handle
        self.number = handle.number
        self.source = source
        self.tag = tag
        self.peek = peek
        self.message: Incoming | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the message does not fit, and stays in the queue for the next receive."""
        return bool(self.handle.status == STATUS_REFUSED)

    def awaited(self) -> Collection[int]:
        if self.source != ANY:
            return (self.source,)
        return [rank for rank in self.context.members if rank != self.context.me]

    def held(self) -> None:
        """Called when its message has come."""
        if not self.done:
            self.context.settle(self)

    def ended(self, status: int) -> None:
        """Called when it has ended."""
        if not self.done:
            self.context.settle(self)

    def cancel(self) -> None:
        super().cancel()
        self.context.matches.pop(self.number, None)
        self.context.transport.disown(self.handle)
        if not self.handle.give_up():
            self.handle.drop()


class Collecting:
    """A collective's message that is waited for in the core."""

    __slots__ = ("context", "handle", "key", "wanted")

    def __init__(self, context: Context, key: Key, wanted: Wanted) -> None:
        self.context = context
        self.key = key
        self.wanted = wanted
        self.handle: Receive = context.core.collect(*key)

    def held(self) -> None:
        """Called when it has come."""
        self.context.collected(self)

    def ended(self, status: int) -> None:
        """Called when it will not come."""
        self.context.collected(self)


class ParkedArrival(Arrival):
    """A message whose receive was given up half-way: the rest goes on into memory of ours."""

    __slots__ = ("_spare", "_transfer")

    def __init__(self, arrival: Arrival, transfer: Transfer, spare: memoryview) -> None:
        super().__init__(arrival.peer, arrival.header, arrival.nbytes, None)
        transfer.redirect(spare)
        self._transfer = transfer
        self._spare = spare

    def accept(self, into: memoryview) -> Transfer:
        if self._transfer.done:
            if self._transfer.error is None:
                into[: self.nbytes] = self._spare[: self.nbytes]
        else:
            self._transfer.redirect(into)
        return self._transfer

    def release(self) -> None:
        self._transfer.cancel()
