"""What a process is doing, as the kernel says."""

from __future__ import annotations

import contextlib
import os

_READ_CALL = {"x86_64": "0", "aarch64": "63"}.get(os.uname().machine, "")
"""The number of the system call `read`."""


def doing(pid: int) -> str:
    """Return "running", "stopped", "asleep", "blocked in the kernel" (and in what), or "ended".

    Or "reads standard input", if the main thread waits in that; or "running on without its main
    thread", if that has ended.
    """
    states = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            states[int(thread)] = _state(f"/proc/{pid}/task/{thread}/stat")
    main = states.get(pid, "")
    if main in ("", "Z", "X"):
        others = {state for state in states.values() if state not in ("", "Z", "X")}
        return "running on without its main thread" if others else "ended"
    if main in "Tt":
        return "stopped"
    if "R" in states.values():
        return "running"
    blocked = min((number for number, state in states.items() if state == "D"), default=None)
    if blocked is not None:
        return f"blocked in the kernel{_where(pid, blocked)}"
    if _read(f"/proc/{pid}/syscall").split()[:2] == [_READ_CALL, "0x0"]:
        return "reads standard input"
    return f"asleep{_where(pid, pid)}"


def _state(path: str) -> str:
    text = _read(path)
    return text.rpartition(") ")[2][:1]  # a program's name may have blanks and brackets


def _where(pid: int, thread: int) -> str:
    """In which of the kernel's functions it waits, if we may know: " (hrtimer_nanosleep)"."""
    name = _read(f"/proc/{pid}/task/{thread}/wchan")
    name = name.partition(".")[0]  # without what the compiler has added
    return f" ({name})" if name not in ("", "0") else ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
