"""A machine as a tree for a terminal, and as a drawing of boxes in boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from pycoll._drawing.elements import document
from pycoll._topology.machine import MachineDevice, Part, list_text

WIDE, PAD, LINE = 1080.0, 8.0, 18.0
"""Of the whole drawing, around what is in a box, and of a line of text; in pixels."""

CORE, PITCH = 14.0, 18.0
"""A core's side, and how far apart two begin."""

_FILLS = {"socket": "host", "NUMA node": "none"}  # the others are as the page
_COLORS = {"core": "c1", "GPU": "c2", "network": "c0"}


def text(machine: Part) -> str:
    """Return a line for each part and device, below what it is in."""
    return "\n".join([summary(machine), *_lines(machine, "")])


def summary(machine: Part) -> str:
    """Return in a line how much there is."""
    counts = [
        _count(number, word)
        for kind, word in (
            *(("socket", "socket"), ("NUMA node", "NUMA node"), ("core", "core"), ("CPU", "CPU")),
            *(("GPU", "GPU"), ("network", "network device")),
        )
        if (number := machine.count(kind))
    ]
    return ", ".join(counts)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _lines(part: Part, indent: str) -> Iterator[str]:
    rows: list[str | Part] = [*part.parts, *map(device_text, part.devices)]
    if part.cores and part.parts:  # else they are in the line of the part itself
        rows.insert(0, _cores_text(part))
    for row in rows:
        is_last = row is rows[-1]
        words = part_text(row) if isinstance(row, Part) else row
        yield f"{indent}{'└─ ' if is_last else '├─ '}{words}"
        if isinstance(row, Part):
            yield from _lines(row, f"{indent}{'   ' if is_last else '│  '}")


def part_text(part: Part) -> str:
    """Return a part in words, with its cores if they are in nothing smaller."""
    words = part.kind if part.number is None else f"{part.kind} {part.number}"
    if part.nbytes:
        words += f"{'' if part.number is None else ','} {size_text(part.nbytes)}"
    if part.cores and not part.parts:
        words += f": {_cores_text(part)}"
    return words


def _cores_text(part: Part) -> str:
    cpus = list_text(sorted(cpu for core in part.cores for cpu in core))
    return f"{_count(len(part.cores), 'core')}, CPU{'s' * (len(cpus) > 1)} {cpus}"


def device_text(device: MachineDevice) -> str:
    """Return a device in words."""
    speed = f"{device.gigabits:g} Gbit/s" if device.gigabits else ""
    kind = "GPU " if device.kind == "GPU" else ""
    return ", ".join(filter(None, (f"{kind}{device.name}", device.text, speed)))


def size_text(nbytes: int) -> str:
    """Return bytes with a unit."""
    units = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))
    power, unit = next((each for each in units if nbytes >> each[0]), units[-1])
    size = nbytes / (1 << power)
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.2g} {unit}"


# --- the drawing -----------------------------------------------------------------------------


class _Box(NamedTuple):
    """A drawing of a part: how wide and high, and its elements, from its upper left corner."""

    wide: float
    high: float
    drawn: Sequence[str]


def svg(machine: Part) -> str:
    """Return a drawing: each part a box in the box that it is in, cores and devices in color."""
    box = _drawn(machine, WIDE, summary(machine))
    return document(box.wide + 2, box.high + 2, _moved(box, 1, 1), summary(machine))


def _drawn(part: Part, wide: float, title: str) -> _Box:
    drawn, y = [_words(PAD, LINE - 4, title, "fg")], LINE + 4
    inner = wide - 2 * PAD
    for index in range(len(part.cores)):
        a_row = int(inner // PITCH)
        x = PAD + index % a_row * PITCH
        drawn.append(_rectangle(x, y + index // a_row * PITCH, CORE, CORE, _COLORS["core"]))
    if part.cores:
        y += -(-len(part.cores) // a_row) * PITCH + 4
    columns = _columns(part, inner)
    each = (inner - PAD * (columns - 1)) / columns
    for first in range(0, len(part.parts), columns):
        row = [_drawn(p, each, _title(p)) for p in part.parts[first : first + columns]]
        for column, box in enumerate(row):
            drawn += _moved(box, PAD + column * (each + PAD), y)
        y += max(box.high for box in row) + PAD
    for device in part.devices:
        drawn.append(_rectangle(PAD, y, 10, 10, _COLORS[device.kind]))
        drawn.append(_words(PAD + 16, y + 9, device_text(device), "fg"))
        y += LINE
    return _Box(
        wide, y + 2, [_rectangle(0, 0, wide, y + 2, _FILLS.get(part.kind, "bg"), True), *drawn]
    )


def _title(part: Part) -> str:
    return part_text(part._replace(cores=()))


def _columns(part: Part, wide: float) -> int:
    """Return how many parts stand side by side: so many that their words find room."""
    has_devices = any(inner.count("GPU") + inner.count("network") for inner in part.parts)
    most = 2 if any(inner.parts for inner in part.parts) else 4
    return max(1, min(len(part.parts), most, int(wide // (380 if has_devices else 110))))


def _moved(box: _Box, x: float, y: float) -> list[str]:
    return [f'<g transform="translate({x:g} {y:g})">', *box.drawn, "</g>"]


def _rectangle(
    x: float, y: float, wide: float, high: float, name: str, is_framed: bool = False
) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="3"'
    frame = f'<rect class="o" {place}/>' if is_framed else ""
    return f'<rect class="{name}" {place}/>{frame}'


def _words(x: float, y: float, words: str, name: str) -> str:
    return f'<text class="{name}" x="{x:g}" y="{y:g}" font-size="11">{escape(words)}</text>'
