"""What tells machines apart, whatever their names and addresses are."""

from __future__ import annotations

import os

_NAMESPACES = ("net", "pid", "uts")


def boot_id() -> str:
    """What tells running kernels apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def place() -> str:
    """What two processes have in common that can be ranks of one host, and no two others.

    That is: the kernel, its name, the namespaces (containers have their own), the root folder, the
    user.
    """
    spaces = []
    for name in _NAMESPACES:
        try:
            spaces.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            spaces.append("")
    root = os.stat("/")
    parts = [boot_id(), os.uname().nodename, *spaces, root.st_dev, root.st_ino, os.geteuid()]
    return " ".join(map(str, parts))
