"""Queues that share their members: whatever is first or is taken, nothing is searched for."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

LEFTOVERS = 8
"""Entries that the queues may have for each member; where members are in four queues, half of
these are leftovers."""

SPARE = 64
"""Leftovers that are always allowed: it takes longer to tidy up than to keep so few."""

NOBODY = sys.maxsize
"""The number that no thing has."""


FEW = 8
"""So many things are looked through: it takes longer to keep queues of so few."""


class Queues(Generic[T]):
    """Numbered things, each in one queue or in several; every queue is in the order of the numbers.

    There are queues only while there are more than a few things. A thing that is removed leaves
    its number in its queues: a leftover. These are dropped when they come to the front of a queue,
    or all at once when there are too many. So everything costs O(log n) on average, also to add a
    thing in the middle of a queue or to remove it from there.
    """

    def __init__(self) -> None:
        self._things: dict[int, tuple[T, tuple[Hashable, ...]]] = {}
        self._queues: dict[Hashable, list[int]] = {}  # heaps: an early number may come late
        self._entries = 0  # in all queues, and what was dropped at their fronts

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[T]:
        """Iterate over what is in the queues now."""
        return iter([thing for thing, _ in self._things.values()])

    def add(self, number: int, thing: T, *queues: Hashable) -> None:
        """Put a thing in its place in each of these queues; its number is no other's."""
        self._things[number] = thing, queues
        if self._queues:
            self._push(number, queues)
        elif len(self._things) > FEW:
            for each, (_, its_queues) in self._things.items():
                self._push(each, its_queues)

    def first(self, *queues: Hashable) -> T | None:
        """Return the thing of the lowest number in any of these queues."""
        lowest = NOBODY
        if self._queues:
            for queue in queues:
                if queue in self._queues:
                    lowest = min(lowest, self._front(queue))
        else:
            for number, (_, its_queues) in self._things.items():
                if number < lowest and not {*queues}.isdisjoint(its_queues):
                    lowest = number
        return self._things[lowest][0] if lowest != NOBODY else None

    def remove(self, number: int) -> bool:
        """Take a thing out of all its queues; False if it was in none."""
        if self._things.pop(number, None) is None:
            return False
        if not self._things:
            self._queues.clear()
            self._entries = 0
        elif self._entries > LEFTOVERS * len(self._things) + SPARE:
            self._tidy()
        return True

    def _push(self, number: int, queues: Sequence[Hashable]) -> None:
        for queue in queues:
            heapq.heappush(self._queues.setdefault(queue, []), number)
        self._entries += len(queues)

    def _front(self, queue: Hashable) -> int:
        numbers = self._queues[queue]
        while numbers[0] not in self._things:
            heapq.heappop(numbers)
            if not numbers:
                del self._queues[queue]
                return NOBODY
        return numbers[0]

    def _tidy(self) -> None:
        living = self._things.keys()
        kept = ((queue, sorted(living & numbers)) for queue, numbers in self._queues.items())
        self._queues = {queue: numbers for queue, numbers in kept if numbers}
        self._entries = sum(map(len, self._queues.values()))
