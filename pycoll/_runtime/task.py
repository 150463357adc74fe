"""A call under way: a generator that is resumed when what it waits for is done.

The same code so serves a blocking call, which is start and wait, and one that goes on while its
caller computes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from pycoll._runtime.context import Context
from pycoll._transports._core import float_control, set_made_at, with_floats
from pycoll._transports.base import Operation

CallSteps = Generator[Operation, None, Any]
"""A call: yields what it waits for, returns its result."""


class Call(NamedTuple):
    """What the user called, for messages: a text, its number (-1: point to point), its context."""

    text: str
    number: int
    context: Context

    def __str__(self) -> str:
        return f"{self.text}{self._place()}"

    @property
    def numbered(self) -> str:
        """Its text and number, without its communicator."""
        return f"{self.text}{self._number()}"

    @property
    def short(self) -> str:
        """Its name and number, without its arguments."""
        return f"{self.text.partition('(')[0]}{self._place()}"

    def _number(self) -> str:
        return f" #{self.number}" if self.number >= 0 else ""

    def _place(self) -> str:
        on = f" on {self.context.name}" if self.context.name != "world" else ""
        return f"{self._number()}{on}"


def several_call(what: str, count: int, first: Call) -> Call:
    """Return what waits for so many requests, of which `first` is one, as a call."""
    requests = f"{count} request{'s' * (count > 1)}"
    return Call(f"{what} of {requests}, first {first.numbered}", -1, first.context)


class Task(Operation):
    """A call under way.

    Any thread may resume it: its caller's, another one that waits, the core's. So that a function
    of the user's computes as its caller does, the call goes on in the floating-point environment
    in which it was made.

    Attributes:
        result: what the call returned.
    """

    __slots__ = ("_current", "_floats", "_interruption", "_running", "_steps", "result")

    def __init__(self, steps: CallSteps) -> None:
        super().__init__()
        self._steps = steps
        self._floats = float_control()
        self._current: Operation | None = None
        self._running = False
        self._interruption: BaseException | None = None
        self.result: Any = None

    @property
    def committed(self) -> bool:
        return self._current is not None and self._current.committed

    def awaited(self) -> Collection[int]:
        return self._current.awaited() if self._current is not None else ()

    def start(self) -> None:
        """Run up to the first operation that is not done yet."""
        self._advance(None)

    def abort(self, error: BaseException) -> None:
        """Raise `error` inside the call, where it waits, and be done with it."""
        if self.done:
            return
        if self._running:  # the call itself has found out: raised when it next waits
            self._interruption = error
            return
        current, self._current = self._current, None
        if current is not None:
            current.then(_ignore)  # a copy may be found to have ended by this: too late
        self._resume(error)
        if not self.done:
            self._steps.close()
            self.finish(error)

    def _advance(self, operation: Operation | None) -> None:
        if operation is not self._current:
            return  # the call was given up
        error = operation.error if operation is not None else None
        while not self.done:
            current = self._resume(error)
            if current is None:
                return
            error, self._interruption = self._interruption, None
            if error is None:
                if not current.done:
                    self._current = current
                    current.then(self._advance)
                    return
                error = current.error

    def _resume(self, error: BaseException | None) -> Operation | None:
        """Run the call up to its next operation; None: it has ended."""
        self._running = True
        try:
            try:
                if error:
                    return with_floats(self._floats, self._steps.throw, error)
                return with_floats(self._floats, next, self._steps)
            except StopIteration as stop:
                self.result = stop.value
            except BaseException as exc:
                self.finish(exc)
                return None
            self.finish()
            return None
        finally:
            self._running = False


class Started(Task):
    """A call that goes on while its caller computes.

    Args:
        steps: the call.
        conclude: gives, of what the call has returned, what its caller gets, and what must be done
            before.
        call: what it is.
        ended: told when it is done.

    Attributes:
        watchers: called when it is done, by whoever drives, under the engine's lock.
        unfit: why the caller cannot have the result, though the call has not failed.
    """

    __slots__ = ("_conclude", "_ended", "_late", "call", "unfit", "watchers")

    def __init__(
        self,
        steps: CallSteps,
        conclude: Callable[[Any], tuple[Any, Sequence[Operation]]],
        call: Call,
        ended: Callable[[Started], None],
    ) -> None:
        super().__init__(steps)
        self.call = call
        self.unfit: Exception | None = None
        self.watchers: dict[Callable[[Started], None], None] = {}
        self._conclude: Callable[[Any], tuple[Any, Sequence[Operation]]] | None = conclude
        self._ended = ended
        self._late: Sequence[Operation] = ()

    @property
    def waits_for(self) -> Operation | None:
        """What it waits for now."""
        return self._current

    def finish(self, error: BaseException | None = None) -> None:
        if self.done:
            return
        if error is None and self._conclude is not None:
            conclude, self._conclude = self._conclude, None
            try:
                self.result, self._late = with_floats(self._floats, conclude, self.result)
            except Exception as exc:
                self.unfit = exc
        for operation in self._late:
            if error is not None:
                operation.cancel()
            elif not operation.done:
                self._current = operation
                operation.then(lambda operation: self.finish(operation.error))
                return
            else:
                error = operation.error
        super().finish(error)
        self._ended(self)
        watchers, self.watchers = self.watchers, {}
        for watcher in list(watchers):
            watcher(self)


class Several(Operation):
    """Done when so many of some calls are done, or one has failed.

    Args:
        tasks: the calls, all different, none of them done.
        needed: how many.

    Attributes:
        tasks: the calls.
        needed: how many of them must still be done.
    """

    def __init__(self, tasks: Sequence[Started], needed: int) -> None:
        super().__init__()
        self.tasks = tasks
        self.needed = needed
        for task in tasks:
            task.watchers[self._tell] = None

    def _tell(self, task: Started) -> None:
        self.needed -= 1
        if self.needed == 0 or task.error is not None:
            self.finish()

    def calls(self) -> list[tuple[Call, Collection[int]]]:
        """Return those that are not done, each with the ranks that it waits for."""
        return [(task.call, task.awaited()) for task in self.tasks if not task.done]

    def forget(self) -> None:
        """Watch no more."""
        for task in self.tasks:
            task.watchers.pop(self._tell, None)


def _ignore(operation: Operation) -> None:
    pass


NOT_THE_PROGRAM = ("pycoll.", "torch.")
"""How the names of modules begin between a program and its call: torch.distributed calls, too."""

_elsewhere = threading.local()


@contextlib.contextmanager
def made_at(place: tuple[str, int]) -> Iterator[None]:
    """Have this thread's calls say that they were made there, for the caller they are made for."""
    _elsewhere.place = place
    set_made_at(_shown(*place))
    try:
        yield
    finally:
        _elsewhere.place = None
        set_made_at("")


_STARTERS = ("/threading.py", "/concurrent/futures/thread.py")
"""Files of Python's that call what a thread is given to do: that may be a method of ours."""


def caller() -> str:
    """Return file:line of `place_of_call`."""
    return _shown(*place_of_call())


def caller_or_thread() -> str:
    """Return the same, or the name of the thread of which the call is all that it does."""
    path, line = place_of_call()
    if path.endswith(_STARTERS):
        return f"the start of thread {threading.current_thread().name}"
    return _shown(path, line)


def _shown(path: str, line: int) -> str:
    return f"{os.path.basename(path)}:{line}" if line else "?"


def place_of_call() -> tuple[str, int]:
    """Return path and line where a program made the call; "?", 0: nobody knows.

    That is the innermost frame that is neither pycoll's nor PyTorch's, unless `made_at` says so.
    """
    if (place := made_elsewhere()) is not None:
        return place
    frame = users_frame(sys._getframe(1))
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("?", 0)


def made_elsewhere() -> tuple[str, int] | None:
    """Return where this thread's calls are said to be made (`made_at`); None: nothing is said."""
    place: tuple[str, int] | None = getattr(_elsewhere, "place", None)
    return place


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from this one on, of the program itself; None: there is none."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(NOT_THE_PROGRAM):
        frame = frame.f_back
    return frame
