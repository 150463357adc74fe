"""Draw the pictures of docs/collectives.md: what each rank has before and after a call.

    python docs/draw_collectives.py            # writes docs/collectives/*.svg
    python docs/draw_collectives.py --check    # fails if one of them is not up to date

The pictures are made from what runs. Four ranks make every call with arrays whose elements say
where they come from, and the values that come back are drawn. An element is a power of two, of
its own for each rank and place, so that a sum still tells what was added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pycoll

SIZE = 4
PICTURES = Path(__file__).with_name("collectives")

COLORS = ("#a6cee3", "#fdd49e", "#b8e0a8", "#f4b6d2")
"""One for each rank whose element it is; the letters say the same."""

UNIT, HEIGHT, ROW, GAP, EMPTY = 28, 26, 38, 10, 8
LABEL, ARROW = 66, 56
FONT = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12"'
MIDDLE = 'text-anchor="middle"'


class Picture(NamedTuple):
    """One call: how it is written, what each rank passes, and the call itself.

    A rank passes nothing where `passes` returns None; `numbered`: labels tell an element's place.
    """

    text: str
    passes: Callable[[int], Any]
    call: Callable[[pycoll.Communicator, Any], Any]
    numbered: bool = False


def element(rank: int, place: int = 0) -> int:
    """The number that stands for an element of a rank."""
    return 1 << (SIZE * place + rank)


def array(rank: int, *places: int) -> np.ndarray:
    """An array of elements of one rank."""
    return np.array([element(rank, place) for place in places], np.int64)


def one(rank: int) -> np.ndarray:
    """An array of one element."""
    return array(rank, 0)


def scalar(rank: int) -> np.ndarray:
    """The same without an axis, so that stacked ones form a row."""
    return np.array(element(rank))


def row(rank: int) -> np.ndarray:
    """An array of one element for each rank."""
    return array(rank, *range(SIZE))


def at_root(passes: Callable[[int], Any]) -> Callable[[int], Any]:
    """Only rank 0 passes something."""
    return lambda rank: passes(rank) if rank == 0 else None


def blocks(*counts: int) -> Callable[[int], list[np.ndarray]]:
    """An array for each rank, of so many elements."""
    return lambda rank: [array(rank, *[to] * count) for to, count in enumerate(counts)]


def turned(rank: int) -> list[np.ndarray]:
    """An array for each rank, on every rank of other lengths."""
    return [array(rank, *[to] * ((rank + to) % 3)) for to in range(SIZE)]


CALLS = {
    "broadcast": Picture(
        "y = comm.broadcast(x, root=0)", at_root(one), lambda comm, x: comm.broadcast(x)
    ),
    "scatter": Picture(
        "y = comm.scatter(x, root=0)", at_root(row), lambda comm, x: comm.scatter(x), True
    ),
    "gather": Picture("y = comm.gather(x, root=0)", scalar, lambda comm, x: comm.gather(x)),
    "all_gather": Picture("y = comm.all_gather(x)", scalar, lambda comm, x: comm.all_gather(x)),
    "reduce": Picture("y = comm.reduce(x, root=0)", one, lambda comm, x: comm.reduce(x)),
    "all_reduce": Picture("y = comm.all_reduce(x)", one, lambda comm, x: comm.all_reduce(x)),
    "reduce_scatter": Picture(
        "y = comm.reduce_scatter(x)", row, lambda comm, x: comm.reduce_scatter(x), True
    ),
    "all_to_all": Picture("y = comm.all_to_all(x)", row, lambda comm, x: comm.all_to_all(x), True),
    "scan": Picture("y = comm.scan(x)", one, lambda comm, x: comm.scan(x)),
    "exscan": Picture("y = comm.exscan(x)", one, lambda comm, x: comm.exscan(x)),
    "sendrecv": Picture(
        "y = comm.sendrecv(x, dest=right, source=left)",
        one,
        lambda comm, x: comm.sendrecv(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size),
    ),
    "all_gatherv": Picture(
        "y = comm.all_gatherv(x)",
        lambda rank: array(rank, *[0] * (1, 2, 3, 0)[rank]),
        lambda comm, x: comm.all_gatherv(x),
    ),
    "scatterv": Picture(
        "y = comm.scatterv(x, root=0)",
        at_root(blocks(1, 2, 3, 0)),
        lambda comm, x: comm.scatterv(x),
        True,
    ),
    "all_to_allv": Picture(
        "y = comm.all_to_allv(x)", turned, lambda comm, x: comm.all_to_allv(x), True
    ),
    "reduce_scatterv": Picture(
        "y = comm.reduce_scatterv(x, counts=[2, 1, 1, 0])",
        row,
        lambda comm, x: comm.reduce_scatterv(x, [2, 1, 1, 0]),
        True,
    ),
}


def program(comm: pycoll.Communicator) -> dict[str, tuple[Any, Any]]:
    """Make every call on one rank: what it passed, as it is afterwards, and what it got."""
    seen = {}
    for name, picture in CALLS.items():
        x = picture.passes(comm.rank)
        seen[name] = (x, picture.call(comm, x))
    return seen


def origins(number: int) -> list[tuple[int, int]]:
    """The rank and the place of each element that was added up to this number."""
    return [(bit % SIZE, bit // SIZE) for bit in range(number.bit_length()) if number >> bit & 1]


def arrays(value: Any) -> list[np.ndarray]:
    """The arrays that a value consists of."""
    return [np.atleast_1d(part) for part in (value if isinstance(value, list) else [value])]


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Some words."""
    return f'<text x="{x}" y="{y}" {more}>{words}</text>'


def extent(value: Any) -> int:
    """How wide a value is drawn."""
    if value is None:
        return UNIT + 14
    parts = arrays(value)
    cells = sum(max(UNIT * sum(int(n).bit_count() for n in part), EMPTY) for part in parts)
    return cells + GAP * (len(parts) - 1)


def drawn(value: Any, x: int, y: int, numbered: bool) -> list[str]:
    """A value: the elements of an array side by side in one frame, the arrays of a list apart."""
    if value is None:
        return [text(x, y + 17, "None", 'fill="#888"')]
    lines = []
    for part in arrays(value):
        start = x
        for number in map(int, part):
            border = x
            for index, (rank, place) in enumerate(origins(number)):
                lines.append(
                    f'<rect x="{x}" y="{y}" width="{UNIT}" height="{HEIGHT}" '
                    f'fill="{COLORS[rank]}"/>'
                )
                label = "ABCD"[rank] + (str(place) if numbered else "")
                lines.append(text(x + UNIT // 2, y + 17, label, MIDDLE))
                if index:
                    lines.append(text(x, y + 17, "+", MIDDLE))
                x += UNIT
            if border > start:
                lines.append(f'<path d="M{border} {y}v{HEIGHT}" stroke="#333" stroke-width="0.8"/>')
        x = max(x, start + EMPTY)
        lines.append(
            f'<rect x="{start}" y="{y}" width="{x - start}" height="{HEIGHT}" '
            'fill="none" stroke="#333" stroke-width="1.4"/>'
        )
        x += GAP
    return lines


def draw(picture: Picture, before: list[Any], after: list[Any]) -> str:
    """The picture of a call, as SVG."""
    left = max(map(extent, before))
    result = LABEL + left + ARROW
    wide = max(result + max(map(extent, after)) + 14, 8 * len(picture.text) + 24)
    high = 52 + ROW * SIZE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" {FONT}>',
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        text(12, 20, picture.text, 'font-weight="bold" font-size="13"'),
        text(LABEL, 42, "x", 'fill="#555"'),
        text(result, 42, "y", 'fill="#555"'),
    ]
    for rank in range(SIZE):
        y = 50 + ROW * rank
        lines.append(text(12, y + 17, f"rank {rank}", 'fill="#555"'))
        lines += drawn(before[rank], LABEL, y, picture.numbered)
        arrow = LABEL + left + 14
        lines.append(
            f'<path d="M{arrow} {y + 13}h24m-6 -5l6 5l-6 5" fill="none" stroke="#888"/>',
        )
        lines += drawn(after[rank], result, y, picture.numbered)
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Run the calls; write the pictures, or compare them with those that are there."""
    ranks = pycoll.run(program, SIZE, timeout=60)
    stale = []
    PICTURES.mkdir(exist_ok=True)
    for name, picture in CALLS.items():
        before, after = zip(*(seen[name] for seen in ranks), strict=True)
        made, file = draw(picture, list(before), list(after)), PICTURES / f"{name}.svg"
        if not file.exists() or file.read_text(encoding="utf-8") != made:
            stale.append(file.name)
            if "--check" not in sys.argv:
                file.write_text(made, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"not up to date: {', '.join(stale)}; run {Path(__file__).name}")


if __name__ == "__main__":
    main()
