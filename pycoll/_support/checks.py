"""Checks of arguments that need nothing of pycoll: whole numbers, numbers of bytes, names."""

from __future__ import annotations

import operator
import os
from numbers import Real
from typing import Any

from pycoll._support.wording import a_kind


def check_int(value: Any, what: str) -> int:
    """Check a whole number (an int, or what counts as one, but a bool)."""
    if isinstance(value, bool):
        raise TypeError(f"{what} is an int, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an int, not {a_kind(value)}") from None


def check_at_least(least: int, value: Any, what: str) -> int:
    """Check a whole number that is `least` or more."""
    number = check_int(value, what)
    if number < least:
        raise ValueError(f"{what} is {number}: at least {least}")
    return number


def check_comm(value: Any) -> None:
    if not hasattr(value, "iall_gather"):
        raise TypeError(
            f"comm is a communicator, such as pycoll.init() returns, not {a_kind(value)}"
        )


def check_nbytes(value: Any, what: str = "nbytes") -> float:
    """Check a number of bytes, 0 or more; fractions of a byte are allowed."""
    if isinstance(value, str):
        raise TypeError(f"{what} is a number of bytes, not a str: 1 MiB is 1 << 20")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} is a number of bytes, not {a_kind(value)}")
    if not float(value) >= 0:
        raise ValueError(f"{what} is {value}; it cannot be below 0")
    return value  # type: ignore[return-value]


def check_name(value: Any, what: str, example: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is a name, for example {example!r}, not {a_kind(value)}")
    return value


def check_ending(path: Any, option: str, *endings: str) -> None:
    """Check that a file to be written is not named as if it had another format."""
    ending = os.path.splitext(path)[1].lower()
    if ending and ending not in endings:
        format_name = endings[0].removeprefix(".").upper()
        raise ValueError(f"{option} {path}: it writes {format_name}; name it {endings[0]}")
