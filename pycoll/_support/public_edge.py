"""The public edge: a wrong argument is an error of the line that passed it.

What pycoll raises on purpose shows no frame of pycoll: the traceback ends at the caller's line. An
exception that arises unintended is a fault of pycoll's own, and keeps its frames.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pycoll._support.lazy_import import LazyModule
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._support import foreign_names
else:  # needed when something is wrong
    foreign_names = LazyModule("pycoll._support.foreign_names")

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def edge(function: F) -> F:
    """Return `function` with its errors about arguments raised at its caller's line."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest shows `function`
        try:
            return function(*args, **kwargs)
        except Error as exc:
            if _is_on_purpose(exc.__traceback__):
                hide(exc)
            raise
        except (TypeError, ValueError) as exc:
            text = foreign_names.of_arguments(exc, call)
            if text:
                exc.args = (text,)
            if text or _is_on_purpose(exc.__traceback__):
                hide(exc)
            raise  # unlike `raise exc` this adds no frame
        except Exception as exc:  # what a rank has raised, say
            if _is_on_purpose(exc.__traceback__):
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


def _is_on_purpose(traceback: TracebackType | None) -> bool:
    """Whether a `raise` statement of pycoll has raised it."""
    from opcode import opmap

    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code.co_code
    return _is_ours(traceback) and code[traceback.tb_lasti] == int(opmap["RAISE_VARARGS"])


def _is_ours(traceback: TracebackType) -> bool:
    name: str = traceback.tb_frame.f_globals.get("__name__", "")
    return name.startswith("pycoll.")
