"""The job's key leaves the environment of a rank that has joined."""

from __future__ import annotations

import contextlib
import os

_VARIABLE = "PYCOLL_KEY"
# Fields of /proc/self/stat, counted from what follows the name of the program.
_ENV_START, _ENV_END = 47, 48


def forget() -> None:
    """Take the key out of this process's environment.

    So what it starts does not inherit the key, and neither /proc nor what a crash reporter keeps of
    the environment shows it. The bytes that exec has put there are overwritten, which unsetting the
    variable does not do; where the kernel does not allow that, they stay.
    """
    if os.environ.pop(_VARIABLE, None) is not None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            _overwrite()


def _overwrite() -> None:
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        at = start
        for entry in memory.read(end - start).split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == _VARIABLE.encode():
                memory.seek(at + len(name) + 1)
                memory.write(b"-" * len(value))
            at += len(entry) + 1
