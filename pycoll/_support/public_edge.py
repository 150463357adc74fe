"""The public edge: a wrong argument is an error of the line that passed it.

What pycoll raises on purpose, and KeyboardInterrupt, show no frame of pycoll: the traceback ends at
the caller's line. After that line comes a signal handler of the user's, if that has raised. An
exception that arises unintended is a fault of pycoll's own, and keeps its frames.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

from pycoll._support import foreign_calls
from pycoll.errors import Error

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def edge(function: F) -> F:
    """Return `function` with its errors about arguments raised at its caller's line."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest shows `function`
        try:
            return function(*args, **kwargs)
        except BaseException as exc:
            if _is_frame_of_ours(sys._getframe(1)):
                raise  # of a call inside pycoll: the outermost edge sees where it was raised
            if is_users(exc) or isinstance(exc, KeyboardInterrupt):
                _leave_users(exc)
                raise
            if _leave_handler(exc) or not isinstance(exc, Exception):
                raise
            text = ""
            if isinstance(exc, TypeError | ValueError):
                text = foreign_calls.of_arguments(exc, call, args, kwargs)
            if text:
                exc.args = (text,)
            if text or isinstance(exc, Error) or _is_on_purpose(exc):
                hide(exc)
            raise  # unlike `raise exc` this adds no frame

    return cast("F", call)


def passing_on(function: F) -> F:
    """Put on the edge a function that hands its arguments to another library.

    What that says of them is raised at the caller's line, too.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, MemoryError) as exc:
            text = foreign_calls.of_arguments(exc, call) if isinstance(exc, TypeError) else ""
            if text:
                exc.args = (text,)
            hide(exc)
            raise

    return cast("F", call)


def edges(cls: C) -> C:
    """Put the public methods of a class that take arguments on the edge."""
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") and isinstance(method, FunctionType):
            code = method.__code__
            if code.co_argcount + code.co_kwonlyargcount > 1 or code.co_flags & 0x0C:
                setattr(cls, name, edge(method))
    return cls


def part_of(name: str) -> Callable[[C], C]:
    """Put the methods of a part of the public class `name` on the edge; messages name the whole."""

    def decorate(cls: C) -> C:
        for method in vars(cls).values():
            if isinstance(method, FunctionType):
                method.__qualname__ = f"{name}.{method.__name__}"
        return edges(cls)

    return decorate


def public(cls: C) -> C:
    """Show a class as users import it: `pycoll.NAME`."""
    cls.__module__ = "pycoll"  # in the body of the class it would mislead inspect.getsource
    return cls


def hide(exc: BaseException) -> None:
    """Take the frames of pycoll out of an exception that its outermost function handles.

    Bare `raise` then raises it as if it came out of C: the next frame shown is the caller's.
    """
    exc.__traceback__ = None
    cause = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    while cause is not None:
        while cause.__traceback__ is not None and _is_ours(cause.__traceback__):
            cause.__traceback__ = cause.__traceback__.tb_next
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


class UsersNote(str):
    """A note of an exception that a function of the user's has raised, which pycoll has called."""

    __slots__ = ()


def mark_users(exc: BaseException, note: str) -> None:
    """Note on an exception of a user's function where that was called; once."""
    if not is_users(exc):
        exc.add_note(UsersNote(note))


def is_users(exc: BaseException) -> bool:
    """Whether a user's function has raised it."""
    return any(isinstance(note, UsersNote) for note in getattr(exc, "__notes__", ()))


def _leave_users(exc: BaseException) -> None:
    """Take the frames of pycoll out of an exception of a user's function, or of Ctrl-C."""
    kept, frame = [], exc.__traceback__
    while frame is not None:
        if not _is_ours(frame):
            kept.append(frame)
        frame = frame.tb_next
    for this, following in zip(kept, [*kept[1:], None], strict=False):
        this.tb_next = following
    exc.__traceback__ = kept[0] if kept else None


def _leave_handler(exc: BaseException) -> bool:
    """Take the frames of pycoll out of what a signal handler has raised; returns whether one has.

    A handler has the frame that the signal has interrupted as an argument, and nobody else has.
    """
    entries, entry = [], exc.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    ours = next((place for place, entry in enumerate(entries) if _is_ours(entry)), len(entries))
    for place in range(ours + 1, len(entries)):
        interrupted = entries[place - 1].tb_frame
        arguments = entries[place].tb_frame.f_locals.values()
        each = [one for a in arguments for one in (a if isinstance(a, tuple) else (a,))]
        if any(one is interrupted for one in each):
            if ours:
                entries[ours - 1].tb_next = entries[place]
            else:
                exc.__traceback__ = entries[place]
            return True
    return False


def _is_on_purpose(exc: Exception) -> bool:
    """Whether a `raise` statement of pycoll has raised it: also what a rank of `run` has raised."""
    from opcode import opmap

    traceback = exc.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code.co_code
    return _is_ours(traceback) and code[traceback.tb_lasti] == int(opmap["RAISE_VARARGS"])


def _is_ours(traceback: TracebackType) -> bool:
    return _is_frame_of_ours(traceback.tb_frame)


def _is_frame_of_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("pycoll.")
