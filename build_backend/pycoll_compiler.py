"""Which C compiler builds the core, and what to say where none can.

The first of these that is there: $CC; the compiler that Python was built with; cc, gcc, clang; zig,
which comes from PyPI as the package ziglang. Needs nothing but Python, so that tests can import it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sysconfig
from pathlib import Path

ZIGLANG = "ziglang>=0.13"
ZIG_MACHINES = ("x86_64", "aarch64")
"""Machines for which the build asks PyPI for zig."""
ZIG_GLIBC = (2, 28)
"""zig links for the machine's glibc, or for this one where the machine's is newer."""


def refuse_free_threading() -> None:
    """End the build on free-threaded CPython.

    Raises:
        SystemExit: this Python has no global interpreter lock.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise SystemExit(
            "pycoll: free-threaded CPython is not supported: install pycoll in a Python that has"
            " the GIL (python3.13, not python3.13t)"
        )


def refuse_to_build(reason: str) -> None:
    """End the build: without the core there is nothing to install.

    Args:
        reason: why the core cannot be built, and what to do.

    Raises:
        SystemExit: always.
    """
    raise SystemExit(f"pycoll: the compiled core cannot be built: {reason}")


def own_compiler() -> str | None:
    """Return the command that setuptools runs if nobody interferes, or None: it is not there."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or ""
    return command if _is_there(command) else None


def other_compiler() -> str | None:
    """Return the name of another compiler on the PATH, or None."""
    return next((name for name in ("cc", "gcc", "clang") if _is_there(name)), None)


def requirements() -> list[str]:
    """Return what the build needs from PyPI: zig, where there is no compiler."""
    if own_compiler() or other_compiler() or platform.machine() not in ZIG_MACHINES:
        return []
    return [ZIGLANG]


def zig() -> list[str] | None:
    """Return the command of zig's C compiler, or None: it is not installed."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        return None
    # A target of its own: zig would otherwise compile for exactly the processor of this machine.
    target = f"{platform.machine()}-linux-musl"
    libc, version = platform.libc_ver()
    if libc == "glibc":
        oldest = min(tuple(int(part) for part in version.split(".")[:2]), ZIG_GLIBC)
        target = f"{platform.machine()}-linux-gnu.{'.'.join(map(str, oldest))}"
    return [str(Path(found.origin).with_name("zig")), "cc", "-target", target]


def command() -> list[str] | None:
    """Return the compiler that stands in for setuptools' own, or None: there is none."""
    name = other_compiler()
    return [name] if name else zig()


def what_is_missing() -> str | None:
    """Return what the build of the core lacks and how to get it, or None if it can be built."""
    if own_compiler() is None and command() is None:
        return (
            "there is no C compiler: apt install gcc (Debian, Ubuntu) or dnf install gcc (Fedora,"
            " RHEL), or pip install ziglang"
        )
    folders = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    if not any(os.path.exists(os.path.join(folder, "Python.h")) for folder in folders):
        return (
            "Python.h is missing: apt install python3-dev (Debian, Ubuntu) or dnf install"
            " python3-devel (Fedora, RHEL)"
        )
    return None


def _is_there(command: str) -> bool:
    words = shlex.split(command)
    return bool(words) and shutil.which(words[0]) is not None
