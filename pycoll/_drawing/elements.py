"""What pictures are made of: colors of light and of dark pages, arrows, letters, the document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from pycoll._drawing.rounds import Delivery

# Okabe and Ito's colors, which all kinds of color vision tell apart, the yellow a little darker;
# then the same, lighter. Source: https://jfly.uni-koeln.de/color/
COLORS = (
    *("#e69f00", "#56b4e9", "#009e73", "#dccb00", "#2f86c8", "#d55e00", "#cc79a7", "#8a8a8a"),
    *("#f0c566", "#9ad2f2", "#66c5ab", "#e8dd5c", "#82b6de", "#e69e66", "#dfaec9", "#b8b8b8"),
)

_LIGHT = {
    "bg": "#ffffff", "fg": "#1f2328", "dim": "#57606a", "line": "#b4bcc6",
    "none": "#eef1f4", "host": "#f5f7fa", "bad": "#c40000",
}  # fmt: skip
_DARK = {
    "bg": "#14171c", "fg": "#e8ebef", "dim": "#9aa4b0", "line": "#56606c",
    "none": "#272d35", "host": "#1b2027", "bad": "#ff6b60",
}  # fmt: skip

FONT = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'


def style() -> str:
    """The rules that all drawings share: colors of ranks, of light and of dark pages."""

    def theme(colors: Mapping[str, str]) -> str:
        fills = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items())
        return fills + (
            f".q{{fill:none;stroke:{colors['fg']};stroke-width:1.6}}"
            f".x{{fill:none;stroke:{colors['bad']};stroke-width:2.4}}"
            f".o{{fill:none;stroke:{colors['line']}}}"
            f".plus{{stroke:{colors['bg']};stroke-width:1.8}}"
        )

    ranks = "".join(
        f".c{i}{{fill:{color}}}.s{i}{{stroke:{color};fill:none}}" for i, color in enumerate(COLORS)
    )
    return (
        f"{theme(_LIGHT)}{ranks}.lost{{stroke-dasharray:.06 .04}}.in{{fill:#000}}"
        f"@media screen and (prefers-color-scheme:dark){{{theme(_DARK)}}}"
    )


def arrow(
    begin: tuple[float, float],
    end: tuple[float, float],
    message: Delivery,
    wide: float,
    lost: bool = False,
) -> list[str]:
    """A message: a head if it replaces what is there, a plus if it is combined with that.

    One that never arrives is broken, and ends in a cross.
    """
    (x1, y1), (x2, y2) = begin, end
    color = message.sender % 16
    data = f'data-from="{message.sender}" data-to="{message.receiver}"'
    if lost:  # the half that waits
        middle = (x1 + x2) / 2, (y1 + y2) / 2
        (x1, y1), (x2, y2) = ((x1, y1), middle) if message.chunks else ((x2, y2), middle)
    bend = (y2 - y1) * 0.55
    path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2 - 6:g}"
    broken = " lost" if lost else ""
    look = f'class="s{color}{broken} a" pathLength="1" stroke-width="{wide:.1f}"'
    line = f'<path {look} {data} d="{path}"/>'
    if lost:
        return [line, f'<path class="x" d="M{x2 - 5:g} {y2 - 8:g}l10 10m0 -10l-10 10"/>']
    if message.combines:
        plus = f"M{x2 - 3.6:g} {y2 - 2:g}h7.2m-3.6 -3.6v7.2"
        return [
            line,
            f'<circle class="fg" cx="{x2:g}" cy="{y2 - 2:g}" r="6"/>'
            f'<path class="plus" d="{plus}"/>',
        ]
    return [line, f'<path class="fg" d="M{x2 - 6:g} {y2 - 8:g}h12l-6 10z"/>']


def straight(
    begin: tuple[float, float], end: tuple[float, float], name: str, wide: float
) -> list[str]:
    """A straight arrow between two circles."""
    (x1, y1), (x2, y2) = begin, end
    long = math.hypot(x2 - x1, y2 - y1)
    ux, uy = (x2 - x1) / long, (y2 - y1) / long
    x1, y1, x2, y2 = x1 + 13 * ux, y1 + 13 * uy, x2 - 15 * ux, y2 - 15 * uy
    left = f"{x2 - 9 * ux + 5 * uy:.1f} {y2 - 9 * uy - 5 * ux:.1f}"
    right = f"{x2 - 9 * ux - 5 * uy:.1f} {y2 - 9 * uy + 5 * ux:.1f}"
    return [
        f'<path class="{name}" stroke-width="{wide}" d="M{x1:.1f} {y1:.1f}'
        f'L{x2 - 6 * ux:.1f} {y2 - 6 * uy:.1f}"/>'
        f'<path class="fg" d="M{left}L{x2:.1f} {y2:.1f}L{right}z"/>'
    ]


def node(rank: int, x: float, y: float) -> str:
    return (
        f'<circle class="c{rank % 16}" cx="{x:.1f}" cy="{y:.1f}" r="13"/>'
        f'<text class="in" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="11" '
        f'font-weight="bold">{rank}</text>'
    )


def letters(places: object, top: float, high: float, words: str) -> str:
    size = min(10, high - 1)
    return (
        f'<text class="in" x="{places}" y="{top + high / 2 + size * 0.36:.1f}" '
        f'text-anchor="middle" font-size="{size:g}">{words}</text>'
    )


def document(
    width: float, high: float, drawn: Sequence[str], title: str, styled: bool = True
) -> str:
    rules = f"<style>{style()}</style>" if styled else ""
    back = f'<rect class="bg" width="{width:g}" height="{high:g}"/>' if styled else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{high:g}" '
            f'viewBox="0 0 {width:g} {high:g}" role="img" {FONT}>',
            f"<title>{escape(title)}</title>{rules}{back}",
            *drawn,
            "</svg>",
            "",
        ]
    )
