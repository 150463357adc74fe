"""Waiting until files can be read from, whatever numbers their descriptors have.

`select.select` takes none from 1024 on, and a program may have more files open.
"""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasDescriptor(Protocol):
    """A file or socket."""

    def fileno(self) -> int: ...


F = TypeVar("F", bound=HasDescriptor | int)

_MAX_S = 3600.0


def ready(files: Sequence[F], timeout: float, event: int = select.POLLIN) -> list[F]:
    """Return which of some files are ready, or at their end; [] when `timeout` has passed.

    Args:
        files: files, sockets or descriptors.
        timeout: seconds; at most an hour is waited.
        event: select.POLLIN, or POLLOUT: they can be written to.
    """
    poller = select.poll()
    for file in files:
        poller.register(file, event)
    found = {number for number, _ in poller.poll(math.ceil(1000 * min(max(timeout, 0.0), _MAX_S)))}
    return [file for file in files if (file if isinstance(file, int) else file.fileno()) in found]
