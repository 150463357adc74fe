"""Trees of /sys, unpacked from short texts (tests/topology/*.sysfs).

A line is ``path: content`` or ``path -> target`` of a symbolic link. ``for i in 0-3:`` repeats the
lines below it that are indented, and in these ``{...}`` is an expression of Python's in i.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def unpack(file: Path, folder: Path) -> Path:
    """Make the tree of a file in a folder; returns the folder."""
    for line in _lines(file.read_text().splitlines()):
        path, sign, value = re.split(r"(: | -> )", line, maxsplit=1)
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if sign == " -> ":
            place.symlink_to(value)
        else:
            place.write_text(f"{value}\n")
    return folder


def _lines(lines: list[str]) -> Iterator[str]:
    numbers: range | None = None
    for line in lines:
        if found := re.fullmatch(r"for i in (\d+)-(\d+):", line):
            numbers = range(int(found[1]), int(found[2]) + 1)
        elif line.startswith("    ") and numbers is not None:
            for i in numbers:
                yield re.sub(r"\{(.*?)\}", lambda m, i=i: str(eval(m[1], {"i": i})), line.strip())
        elif line and not line.startswith("#"):
            yield line
