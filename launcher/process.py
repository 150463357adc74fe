"""What a process is doing, as the kernel says."""

from __future__ import annotations

import contextlib
import os

_READ_CALL = {"x86_64": "0", "aarch64": "63"}.get(os.uname().machine, "")
"""The number of the system call `read`."""


_MEANINGS = (
    ("nanosleep", "a pause"),
    ("futex", "for a lock, or another thread"),
    ("poll", "for files or sockets"),
    ("do_select", "for files or sockets"),
    ("pipe_read", "reads a pipe"),
    ("pipe_write", "writes to a pipe"),
    ("wait_for_partner", "opens a named pipe"),
    ("do_wait", "for another process to end"),
    ("accept", "for a connection"),
    ("sk_wait_data", "reads a socket"),
    ("skb_wait_for_more", "reads a socket"),
    ("stream_read", "reads a socket"),
    ("tty_read", "reads a terminal"),
    ("lock_inode_wait", "for a lock of a file"),
)
"""Of a part of the name of a function of the kernel: what a process waits for there."""


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
    """In which of the kernel's functions it waits, if we may know, and what that means."""
    name = _read(f"/proc/{pid}/task/{thread}/wchan")
    name = name.partition(".")[0]  # without what the compiler has added
    if name in ("", "0"):
        return ""
    meaning = next((meaning for part, meaning in _MEANINGS if part in name), "")
    return f" ({name}{f': {meaning}' if meaning else ''})"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
