"""A schedule as SVG: ranks are columns, time runs down, chunks fill with contributions.

A picture is the shape (trees, a ring) above a stack: what the ranks hold, the messages of a round
as arrows, what they hold then, and so on. `stack` draws all rounds, `frame` a single one.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from pycoll._drawing.elements import arrow, document, letters, node, straight
from pycoll._drawing.rounds import READABLE, Delivery, Replay, Value
from pycoll._drawing.shape import Ring, Tree, phases, shape
from pycoll._drawing.text import cost_line, flaws, headline, ranges

LEFT, RIGHT, TOP = 84, 34, 58
_LEGEND = "▸ is sent; ⊕ is combined with what is there; ▼ takes its place; □ has changed"


class Picture:
    """Draws one schedule; all places and sizes follow from its ranks and chunks."""

    def __init__(self, replay: Replay) -> None:
        program = replay.program
        self.replay = replay
        self.size = size = program.size
        self.phases = phases(replay)
        self.shape = shape(replay)
        self.cost = cost_line(replay)
        held = {chunk for holds in replay.states for chunks in holds for chunk in chunks}
        self.rows = sorted(held)
        most = len(self.rows)
        self.high = 20 if most <= 2 else 16 if most <= 4 else 13 if most <= 9 else 9
        if replay.reduces:
            self.slots = size
            self.slot = next(wide for up_to, wide in ((3, 14), (5, 11), (9, 9), (99999, 4))
                             if size <= up_to)  # fmt: skip
        else:
            self.slots = 1
            both = replay.collective == "all_to_all"
            self.slot = 40 if both and self.high > 9 else 26
        self.cell = self.slots * self.slot if self.rows else 14
        gap = 26 if size <= 8 else 18 if size <= READABLE else 10
        self.left: list[int] = []
        x = LEFT
        for rank, host in enumerate(program.hosts):
            x += 24 if rank and host != program.hosts[rank - 1] else 0
            self.left.append(x)
            x += max(self.cell, 46 if size <= 8 else 20) + gap
        self.edge = x - gap
        self.width = max(
            self.edge + RIGHT + 12, 24 + round(6.7 * max(len(self.cost), len(_LEGEND)))
        )
        self.lane = 44 + 2 * min(size, READABLE)
        self.tall = len(self.rows) * (self.high + 2) + 4 if self.rows else 8
        self.host_height = 14 if len(set(program.hosts)) > 1 else 0
        self.frame_height = 0.0

    def stack(self) -> str:
        """All rounds, one below the other."""
        drawn = [
            f'<text class="fg" x="12" y="24" font-size="16" font-weight="bold">'
            f"{escape(headline(self.replay))}</text>",
            f'<text class="dim" x="12" y="44" font-size="11">{escape(self.cost)}</text>',
        ]
        parts, high = self._shape(None)
        drawn += parts
        top = TOP + high + self.host_height
        y = top + 18
        body = self._state(0, y)
        y += self.tall
        begins: list[float] = []
        for number, messages in enumerate(self.replay.rounds, 1):
            begins.append(y)
            body += self._lane(messages, y, f"round {number}")
            body += self._state(number, y + self.lane)
            y += self.lane + self.tall
        if self.replay.stuck:
            body += self._lane(self.replay.stuck, y, "stuck")
            y += self.lane
        drawn += [*self._hosts(top, y), *self._names(top), *body]
        for (first, name), (following, _) in pairwise([*self.phases, (len(begins) + 1, "")]):
            drawn += self._bracket(begins[first - 1], [*begins, y][following - 1] - 4, name)
        drawn += [
            f'<text class="{name}" x="12" y="{y + 24 + 17 * i:g}" font-size="11">'
            f"{escape(line)}</text>"
            for i, (name, line) in enumerate(self._notes())
        ]
        return document(self.width, y + 36 + 17 * len(self._notes()), drawn, headline(self.replay))

    def frame(self, number: int) -> str:
        """Round `number`, with what was held before it; 0: the start alone."""
        parts, high = self._shape(number)
        drawn = [f'<g transform="translate(0 {4 - TOP})">', *parts, "</g>"] if parts else []
        top = 4 + high + self.host_height
        y = top + 18
        if number == 0:
            body = self._state(0, y, leaving=False)
        else:
            body = self._state(number - 1, y, marked=False)
            y += self.tall
            if number > len(self.replay.rounds):
                body += self._lane(self.replay.stuck, y, "stuck")
            else:
                body += self._lane(self.replay.rounds[number - 1], y, f"round {number}")
                body += self._state(number, y + self.lane, leaving=False)
        end = self.frame_height = top + 18 + 2 * self.tall + self.lane + 4
        drawn += [*self._hosts(top, end), *self._names(top), *body]
        return document(self.width, end + 6, drawn, f"round {number}", styled=False)

    # --- the parts of a picture ---------------------------------------------------------------

    def _names(self, y: float) -> list[str]:
        """The ranks' names above their columns, each with its color."""
        drawn = []
        for rank, x in enumerate(self.left):
            name = f"rank {rank}" if self.size <= 8 else str(rank)
            box = "" if self.size > READABLE else (
                f'<rect class="c{rank % 16}" x="{x}" y="{y + 3:g}" width="9" height="9" rx="2"/>'
            )  # fmt: skip
            at = x + (13 if box else 0)
            drawn.append(
                f'{box}<text class="fg" x="{at}" y="{y + 12:g}" font-size="10.5">{name}</text>'
            )
        return drawn

    def _hosts(self, top: float, end: float) -> list[str]:
        """A box around the columns of each host."""
        hosts = self.replay.program.hosts
        if len(set(hosts)) == 1:
            return []
        drawn = []
        first = 0
        for rank in range(1, self.size + 1):
            if rank == self.size or hosts[rank] != hosts[first]:
                x, right = self.left[first] - 11, self.left[rank - 1] + max(self.cell, 20) + 11
                drawn.append(
                    f'<rect class="host" x="{x}" y="{top - 13:g}" width="{right - x}" '
                    f'height="{end - top + 18:g}" rx="8"/>'
                    f'<rect class="o" x="{x}" y="{top - 13:g}" width="{right - x}" '
                    f'height="{end - top + 18:g}" rx="8"/>'
                    f'<text class="dim" x="{x + 8}" y="{top - 1:g}" font-size="10">'
                    f"host {hosts[first]}</text>"
                )
                first = rank
        return drawn

    def _state(self, number: int, y: float, leaving: bool = True, marked: bool = True) -> list[str]:
        """What all ranks hold after a round.

        `leaving`: what is sent next is marked; `marked`: so is what has changed, and what is wrong.
        """
        if not self.rows:  # where the ranks are
            boxes = "".join(f"M{x} {y:g}h14v5h-14z" for x in self.left)
            return [f'<path class="dim" d="{boxes}"/>']
        replay = self.replay
        following = [*replay.rounds, replay.stuck][number] if leaving else ()
        sent = {(each.sender, chunk) for each in following for chunk in each.chunks}
        changed = replay.changed(number) if marked else set()
        wrong = {
            (flaw.rank, flaw.chunk) for flaw in replay.flaws if flaw.round == number and marked
        }
        fills: dict[str, list[str]] = defaultdict(list)
        texts: list[str] = []
        names = replay.rows()
        for line, row in enumerate(self.rows):
            top = y + line * (self.high + 2)
            if len(self.rows) <= 16 or row % 4 == 0:
                texts.append(
                    f'<text class="dim" x="{LEFT - 14}" y="{top + self.high / 2 + 3.2:g}" '
                    f'text-anchor="end" font-size="9">{names[row]}</text>'
                )
            for rank, held in enumerate(replay.states[number]):
                x = self.left[rank]
                box = f"M{x} {top:g}h{self.cell}v{self.high}h-{self.cell}z"
                fills["none" if row in held else "o"].append(box)
                value = held.get(row, {})
                for name, slot in self._slots(value, x, top):
                    fills[name].append(slot)
                texts += self._letters(value, x, top)
                if (rank, row) in wrong:
                    fills["x"] += [box, *self._crosses(value, x, top, number)]
                elif (rank, row) in changed:
                    fills["q"].append(box)
                if (rank, row) in sent:
                    edge, middle = x + self.cell + 1, top + self.high / 2
                    fills["fg"].append(f"M{edge} {middle - 4:g}l5 4l-5 4z")
        # What marks a chunk lies above what is in it.
        above = ("fg", "q", "x")
        order = sorted(fills, key=lambda name: above.index(name) if name in above else -1)
        paths = [f'<path class="{name}" d="{"".join(fills[name])}"/>' for name in order]
        return [*paths, *texts]

    def _slots(self, value: Value, x: int, top: float) -> Iterator[tuple[str, str]]:
        """The parts that are in a chunk: class and path of each."""
        wide, high, replay = self.slot, self.high, self.replay
        for part in sorted(value):
            left = x + part[0] * wide if replay.reduces else x
            yield f"c{replay.owner(part) % 16}", f"M{left} {top:g}h{wide}v{high}h-{wide}z"

    def _crosses(self, value: Value, x: int, top: float, number: int) -> list[str]:
        """Crosses where a chunk lacks something at the end."""
        if number < len(self.replay.rounds):
            return []
        wide, high, there = self.slot, self.high, {rank for rank, _ in value}
        places = range(self.slots) if self.replay.reduces else range(not value)
        return [
            f"M{x + place * wide} {top:g}l{wide} {high}m0 -{high}l-{wide} {high}"
            for place in places
            if place not in there or not self.replay.reduces
        ]

    def _letters(self, value: Value, x: int, top: float) -> list[str]:
        """The numbers of the parts, as far as there is room for them."""
        replay, wide, parts = self.replay, self.slot, sorted(value)
        said: list[str] = []
        if max(value.values(), default=0) > 1 and replay.collective != "barrier":
            twice = ",".join(str(part[0]) for part in parts if value[part] > 1)
            said = [
                f'<text class="bad" x="{x + self.cell + 7}" y="{top + self.high / 2 + 3.5:g}" '
                f'font-size="9">2\u00d7{twice}</text>'
            ]
        if not parts or wide < 9:
            return said
        if replay.reduces:
            places = " ".join(f"{x + (rank + 0.5) * wide:g}" for rank, _ in parts)
            digits = "".join(str(rank) for rank, _ in parts)
            return [*said, letters(places, top, self.high, digits)]
        both = replay.collective == "all_to_all"
        names = [f"{part[0]}>{part[1]}" if both else str(replay.owner(part)) for part in parts]
        return [*said, letters(f"{x + wide / 2:g}", top, self.high, "+".join(names))]

    def _lane(self, messages: Sequence[Delivery], y: float, words: str) -> list[str]:
        """The messages of a round, as arrows from above to below."""
        drawn = [
            f'<text class="fg" x="12" y="{y + self.lane / 2:g}" font-size="11" '
            f'font-weight="bold">{words}</text>'
        ]
        lost = words == "stuck"
        drawn.append(f'<g class="round" data-round="{words.removeprefix("round ")}">')
        for message in messages:
            x1, x2 = self._middle(message.sender), self._middle(message.receiver)
            chunks = len(message.chunks or message.into)
            drawn += arrow(
                (x1, y - 1), (x2, y + self.lane - 7), message, 1.5 + 0.8 * math.log2(chunks), lost
            )
        return [*drawn, "</g>"]

    def _middle(self, rank: int) -> float:
        return self.left[rank] + self.cell / 2

    def _bracket(self, top: float, end: float, name: str) -> list[str]:
        x = self.edge + 20
        return [
            f'<path class="o" d="M{x - 5} {top + 4:g}h5V{end:g}h-5"/>'
            f'<text class="dim" transform="translate({x + 14} {(top + end) / 2:g}) rotate(-90)" '
            f'text-anchor="middle" font-size="12">{name}</text>'
        ]

    def _shape(self, number: int | None) -> tuple[list[str], float]:
        """Trees or a ring, and its height; the lines of round `number` are bold, None: numbered."""
        if isinstance(self.shape, Ring):
            return self._ring(self.shape)
        drawn: list[str] = []
        high = 0.0
        x = 30.0
        for tree in self.shape or []:
            parts, wide, tall = self._tree(tree, x, number)
            drawn += parts
            x += wide + 50
            high = max(high, tall)
        self.width = max(self.width, int(x))
        return drawn, high

    def _ring(self, ring: Ring) -> tuple[list[str], float]:
        radius = 34 + 5 * self.size
        x, y = 60 + radius, TOP + radius + 22
        places = {
            rank: (
                x + radius * math.sin(2 * math.pi * i / len(ring.ranks)),
                y - radius * math.cos(2 * math.pi * i / len(ring.ranks)),
            )
            for i, rank in enumerate(ring.ranks)
        }
        drawn = []
        for rank, after in zip(ring.ranks, (*ring.ranks[1:], ring.ranks[0]), strict=True):
            drawn += straight(places[rank], places[after], f"s{rank % 16}", 2.4)
        drawn += [node(rank, *place) for rank, place in places.items()]
        return drawn, 2 * radius + 62

    def _tree(self, tree: Tree, x: float, number: int | None) -> tuple[list[str], float, float]:
        places = tree.places()
        wide = (62.0 if self.size <= 8 else 72.0) if number is None else 40.0
        leaves = 1 + max(across for across, _ in places.values())
        at = {
            rank: (x + 14 + across * wide, TOP + 34 + level * 58)
            for rank, (across, level) in places.items()
        }
        lines: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, messages in enumerate(self.replay.rounds, 1):
            for message in messages:
                if not tree.chunks or set(message.chunks) & set(tree.chunks):
                    lines[message.sender, message.receiver].append(index)
        drawn = []
        for child, parent in tree.parents.items():
            (x1, y1), (x2, y2) = at[child], at[parent]
            drawn.append(f'<path class="o" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')
            ways = [((child, parent), "↑"), ((parent, child), "↓")]
            if number is None:
                words = " ".join(
                    f"{','.join(map(str, lines[pair]))}{sign}" for pair, sign in ways if lines[pair]
                )
                drawn.append(
                    f'<text class="dim" x="{x1 + 16:g}" y="{y1 + 4:g}" font-size="9">{words}</text>'
                )
            for pair, _ in ways:
                if number is not None and number in lines[pair]:
                    drawn += straight(at[pair[0]], at[pair[1]], f"s{pair[0] % 16}", 3.2)
        drawn += [node(rank, *place) for rank, place in at.items()]
        if tree.chunks and self.replay.program.chunks > 1:
            names = f"chunk{'s' if len(tree.chunks) > 1 else ''} {ranges(tree.chunks)}"
            drawn.append(
                f'<text class="dim" x="{x:g}" y="{TOP + 12}" font-size="11">{names}</text>'
            )
        depth = max(level for _, level in places.values())
        return drawn, leaves * wide, 34 + depth * 58 + 44

    def faults(self) -> list[str]:
        """What is wrong, and where that shows; nothing: the algorithm is right for this case."""
        fault = self.replay.fault
        return [] if fault is None else [*str(fault).splitlines(), *flaws(self.replay)]

    def _notes(self) -> list[tuple[str, str]]:
        """The lines below a picture: (class, text)."""
        if not self.rows:
            return [("dim", f"more than {READABLE} ranks: the messages only, not the chunks")]
        return [("dim", _LEGEND), *(("bad", line) for line in self._wrapped(self.faults()))]

    def _wrapped(self, lines: Sequence[str]) -> Iterator[str]:
        for line in lines:
            yield from textwrap.wrap(line, round(self.width - 24) // 7)
