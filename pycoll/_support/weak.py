"""Callbacks that do not keep alive what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of an object, and does not keep the object alive.

    Who has the function is a part of that object: what a closed world or communicator has goes at
    once, not when the garbage collector comes. When the object has gone it returns None.
    """
    weak = WeakMethod(method)

    def call(*args: Any) -> Any:
        living = weak()
        return living(*args) if living is not None else None

    return call
