"""Draws the communicators of the programs of scripts/fuzz_programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from programs_steps import Make, MakeGrid, Mismatch, Step, Team

MAX_TEAMS = 14
"""Communicators open at once, about."""


class Teams:
    """Draws communicators (teams, in these programs); `Writer` draws all else.

    Attributes:
        steps: the program, as far as it was drawn.
    """

    def __init__(self, seed: tuple[int, ...], size: int, hosts: int, shared: bool) -> None:
        self.steps: list[Step] = []
        self._rng = np.random.default_rng(seed)
        self._size = size
        self._host_size = -(-size // hosts)
        self._shared = shared
        self._count = 0
        self._teams: list[Team] = []  # those that are used

    def _chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _below(self, limit: int) -> int:
        return int(self._rng.integers(limit))

    def _one_of(self, options: Any) -> Any:
        return options[self._below(len(options))]

    def _shuffled(self, items: Iterable[Any]) -> list[Any]:
        items = list(items)
        return [items[index] for index in self._rng.permutation(len(items))]

    def _add(self, kind: Callable[..., Any], team: Team, *args: Any, **named: Any) -> Any:
        step = kind(len(self.steps), team, *args, **named)
        self.steps.append(step)
        return step

    # --- communicators ---

    def _team(self, members: Iterable[int], grid: int | None = None) -> Team:
        members = tuple(map(int, members))
        one_host = len({rank // self._host_size for rank in members}) == 1
        shared = len(members) == 1 or (self._shared and one_host)
        self._count += 1
        return Team(self._count - 1, members, shared, self._chance(0.5), grid)

    def _parent(self) -> Team | None:
        """Draw a communicator to make others of, if there are not too many yet."""
        return self._one_of(self._teams) if len(self._teams) < MAX_TEAMS else None

    def _make(self, how: str, parent: Team, arguments: dict[int, Any], parts: list[Any]) -> None:
        teams = [self._team(part) for part in parts]
        self._add(Make, parent, how, arguments, teams)
        self._teams += teams

    def _split(self) -> None:
        if (parent := self._parent()) is None:
            return
        colors = [self._one_of((0, 0, 1, 1, 7, None)) for _ in parent.members]
        keys = [self._one_of((None, -3, 0, 2, 10)) for _ in parent.members]
        order = sorted(range(len(colors)), key=lambda r: (r if keys[r] is None else keys[r], r))
        parts = [
            [parent.members[rank] for rank in order if colors[rank] == color]
            for color in sorted({color for color in colors if color is not None})
        ]
        both = zip(colors, keys, strict=True)
        self._make("split", parent, dict(zip(parent.members, both, strict=True)), parts)

    def _dup(self) -> None:
        if (parent := self._parent()) is not None:
            self._make("dup", parent, {rank: () for rank in parent.members}, [parent.members])

    def _sub(self) -> None:
        if (parent := self._parent()) is None:
            return
        size = len(parent.members)
        ranks = self._shuffled(range(size))[: 1 + self._below(size)]
        members = [parent.members[rank] for rank in ranks]
        callers = parent.members if self._chance(0.3) else members
        self._make("sub", parent, {rank: (ranks,) for rank in callers}, [members])

    def _split_by_host(self) -> None:
        if (parent := self._parent()) is None:
            return
        hosts: dict[int, list[int]] = {}
        for rank in parent.members:
            hosts.setdefault(rank // self._host_size, []).append(rank)
        arguments: dict[int, Any] = {rank: () for rank in parent.members}
        self._make("split_by_host", parent, arguments, list(hosts.values()))

    def _mismatch(self) -> None:
        team = self._one_of(self._teams)
        if len(team.members) > 1:
            self._add(Mismatch, team, self._one_of(team.members))

    def _grid(self) -> None:
        if (parent := self._parent()) is None:
            return
        size, shape = len(parent.members), []
        for _ in range(self._below(3)):
            left = size // math.prod(shape)
            shape.append(self._one_of([n for n in range(1, left + 1) if left % n == 0]))
        shape.append(size // math.prod(shape))
        names = tuple("xyz"[: len(shape)]) if self._chance(0.5) else None
        made = self._team(parent.members)
        places = np.array(parent.members).reshape(shape)
        axes: dict[tuple[int, ...], list[Team]] = {}
        for _ in range(self._below(3)):
            chosen = tuple(axis for axis in range(len(shape)) if self._chance(0.5)) or (0,)
            if chosen not in axes:
                rest = [axis for axis in range(len(shape)) if axis not in chosen]
                lines = places.transpose(*rest, *chosen)
                lines = lines.reshape(-1, math.prod(shape[axis] for axis in chosen))
                axes[chosen] = [self._team(line, made.number) for line in lines]
        periodic = tuple(self._chance(0.5) for _ in shape)
        self._add(MakeGrid, parent, made, tuple(shape), names, periodic, axes)
        self._teams += [made, *itertools.chain(*axes.values())]
