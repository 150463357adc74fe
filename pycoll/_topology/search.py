"""Rings and trees over hosts whose narrowest link is as wide as can be.

Of rings that are alike in this the one of the least sum of latencies is taken, and of these the one
that comes first by number. The same links always give the same ring. Up to `EXACT` hosts it is the
best. Of more it may not be: to be sure of that can take time that doubles with each host. There a
search tries to come round over links of a width, visiting at most `MAX_VISITS` hosts for each width
that it tries, and then moves hosts while that shortens the ring. `HostRing.bound` is a width that
no ring exceeds: so much is lost at most. A tree is always the best: it needs no search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

EXACT = 12
"""Rings of so many hosts are the best of all; each host more doubles the time, 0.03 s here."""

MAX_VISITS = 20_000
"""Hosts that the search for a ring over links of one width visits, before it takes it for none."""

MAX_TRIED = 25_000_000
"""Moves of hosts that are tried at most, to shorten a ring: 2000 are made of 64 hosts."""

MOST_MOVED = 3
"""So many hosts that stand together are moved at a time."""

Matrix = Sequence[Sequence[int]]


class HostRing(NamedTuple):
    """Hosts in an order in which the last is followed by the first.

    Attributes:
        order: numbers of hosts, from host 0.
        width: of the narrowest link on the way.
        latency: sum over the way.
        bound: no ring has a narrowest link wider than that.
    """

    order: tuple[int, ...]
    width: int
    latency: int
    bound: int


class HostTree(NamedTuple):
    """Links between hosts, without a circle, that reach all; each is used in both directions.

    Attributes:
        links: pairs of hosts.
        width: of the narrowest link, in its narrower direction.
        latency: sum over the links, both directions.
    """

    links: tuple[tuple[int, int], ...]
    width: int
    latency: int


def best_ring(width: Matrix, latency: Matrix, exact: int = EXACT) -> HostRing:
    """Find a ring over all hosts.

    Args:
        width: how wide the link from one host (row) to another (column) is; the wider the better.
        latency: of it. Both in whole numbers, of any unit; that of a host to itself does not count.
        exact: of so many hosts it is the best.
    """
    count = len(width)
    widths = _widths(width)
    if count < 2:
        return HostRing(tuple(range(count)), 0, 0, 0)
    # Of these a search by halves finds the last at which there is a ring.
    bound = _last(widths, lambda wide: _is_connected(_linked(width, wide)))
    if count <= exact:
        bound = _last(
            [wide for wide in widths if wide <= bound],
            lambda wide: _can_come_round(_linked(width, wide)),
        )
        order = _shortest_exactly(_linked(width, bound), latency)
    else:
        order = tuple(range(count))
        widths = [wide for wide in widths if wide <= bound]
        low, high = 0, len(widths) - 1
        while low <= high:
            middle = (low + high) // 2
            found = _come_round(_linked(width, widths[middle]), latency)
            if found is None:
                high = middle - 1
            else:
                order, low = found, middle + 1
        narrowest = min(width[a][b] for a, b in _links_of(order))
        order = _shortened(order, _linked(width, narrowest), latency)
    links = list(_links_of(order))
    return HostRing(
        order, min(width[a][b] for a, b in links), sum(latency[a][b] for a, b in links), bound
    )


def best_tree(width: Matrix, latency: Matrix) -> HostTree:
    """Find a tree over all hosts; arguments as of `best_ring`.

    Of trees that are alike in width and latency the one whose links come first, the quickest first.
    """
    pairs = [(a, b) for a in range(len(width)) for b in range(a + 1, len(width))]
    both = {(a, b): min(width[a][b], width[b][a]) for a, b in pairs}
    times = {(a, b): latency[a][b] + latency[b][a] for a, b in pairs}
    widest = _spanning(len(width), sorted(pairs, key=lambda pair: -both[pair]))
    narrowest = min((both[pair] for pair in widest), default=0)
    able = [pair for pair in pairs if both[pair] >= narrowest]
    links = _spanning(len(width), sorted(able, key=lambda pair: (times[pair], pair)))
    return HostTree(tuple(sorted(links)), narrowest, sum(times[pair] for pair in links))


def _spanning(count: int, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of these pairs, taken in turn, that connect what was not connected."""
    part = list(range(count))
    links = []
    for a, b in pairs:
        if part[a] != part[b]:
            links.append((a, b))
            old = part[b]
            part = [part[a] if each == old else each for each in part]
    return links


# Sets of hosts are bits of an int.


def _widths(width: Matrix) -> list[int]:
    """Return the different widths of links, from the narrowest."""
    return sorted({wide for a, row in enumerate(width) for b, wide in enumerate(row) if a != b})


def _linked(width: Matrix, wide: int) -> list[int]:
    """Return by host the set of those to which its link is as wide as that."""
    return [
        sum(1 << b for b, other in enumerate(row) if b != a and other >= wide)
        for a, row in enumerate(width)
    ]


def _last(widths: Sequence[int], is_able: Callable[[int], bool]) -> int:
    """Return the widest at which something can be, as it can at the first."""
    low, high = 0, len(widths) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_able(widths[middle]) else (low, middle - 1)
    return widths[low]


def _members(hosts: int) -> Iterator[int]:
    """Give the numbers in a set."""
    while hosts:
        lowest = hosts & -hosts
        yield lowest.bit_length() - 1
        hosts ^= lowest


def _links_of(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(order, (*order[1:], order[0]), strict=True)


def _turned(linked: Sequence[int]) -> list[int]:
    """Return by host the set of those with a link to it."""
    return [
        sum(1 << a for a, there in enumerate(linked) if there >> b & 1) for b in range(len(linked))
    ]


def _reached(linked: Sequence[int], start: int, allowed: int) -> int:
    """Return the hosts that can be reached from one over others that are allowed."""
    reached = new = 1 << start
    while new:
        there = 0
        for host in _members(new):
            there |= linked[host]
        new = there & allowed & ~reached
        reached |= new
    return reached


def _is_connected(linked: Sequence[int]) -> bool:
    """Whether host 0 reaches all and all reach it: without that there is no ring."""
    everyone = (1 << len(linked)) - 1
    return all(_reached(way, 0, everyone) == everyone for way in (linked, _turned(linked)))


def _can_come_round(linked: Sequence[int]) -> bool:
    """Whether there is a ring, of few hosts."""
    # By set of hosts that were visited, 0 among them: those where the way from 0 can have ended.
    back = _turned(linked)
    ends = [0] * (1 << len(linked))
    ends[1] = 1
    for visited in range(3, len(ends), 2):
        for host in _members(visited & ~1):
            if ends[visited ^ 1 << host] & back[host]:
                ends[visited] |= 1 << host
    return bool(ends[-1] & back[0])


def _shortest_exactly(linked: Sequence[int], latency: Matrix) -> tuple[int, ...]:
    """Return the ring of the least latency, of few hosts; there is one."""
    count = len(linked)
    everyone = (1 << count) - 1
    never = 1 + count * max(map(max, latency))
    # By set of hosts that were visited and the last of them: what the way back to 0 still takes.
    left = [[never] * count for _ in range(1 << count)]
    for host in range(count):
        if linked[host] & 1:
            left[everyone][host] = latency[host][0]
    for visited in range(everyone - 2, 0, -2):
        for last in _members(visited):
            left[visited][last] = min(
                (
                    latency[last][host] + left[visited | 1 << host][host]
                    for host in _members(linked[last] & ~visited)
                ),
                default=never,
            )
    order, visited = [0], 1
    while visited != everyone:
        last = order[-1]
        host = next(
            host
            for host in _members(linked[last] & ~visited)
            if latency[last][host] + left[visited | 1 << host][host] == left[visited][last]
        )
        order.append(host)
        visited |= 1 << host
    return tuple(order)


def _come_round(linked: Sequence[int], latency: Matrix) -> tuple[int, ...] | None:
    """Look for a ring, going first where few ways lead on; None: none found in time."""
    count, back = len(linked), _turned(linked)
    everyone = (1 << count) - 1
    visits = 0

    def onward(last: int, unvisited: int) -> list[int]:
        """Return where to go next, the best place last."""
        free = unvisited | 1  # host 0 is where it ends
        for host in _members(unvisited):
            if not linked[host] & free or not back[host] & (unvisited | 1 << last):
                return []
        if unvisited & ~(_reached(linked, last, unvisited) & _reached(back, 0, unvisited)):
            return []
        return sorted(
            _members(linked[last] & unvisited),
            key=lambda host: ((linked[host] & unvisited).bit_count(), latency[last][host], host),
            reverse=True,
        )

    order, unvisited = [0], everyone & ~1
    choices = [onward(0, unvisited)]
    while choices:
        if not choices[-1]:
            choices.pop()
            unvisited |= 1 << order.pop()
            continue
        visits += 1
        if visits > MAX_VISITS:
            return None
        host = choices[-1].pop()
        order.append(host)
        unvisited &= ~(1 << host)
        if not unvisited and linked[host] & 1:
            return tuple(order)
        choices.append(onward(host, unvisited) if unvisited else [])
    return None


def _shortened(order: Sequence[int], linked: Sequence[int], latency: Matrix) -> tuple[int, ...]:
    """Move hosts to where the ring becomes shorter, until no move does so or there were many."""
    ring = list(order)
    for _ in range(MAX_TRIED // (MOST_MOVED * len(ring) ** 2)):
        move = _best_move(ring, linked, latency)
        if move is None:
            break
        ring = move
    start = ring.index(0)
    return tuple(ring[start:] + ring[:start])


def _best_move(ring: list[int], linked: Sequence[int], latency: Matrix) -> list[int] | None:
    """Return the ring after the move of a few hosts that shortens it most; None: none does."""
    count, best, found = len(ring), 0, None
    for length in range(1, min(MOST_MOVED, count - 2) + 1):
        for start in range(count):
            turned = ring[start:] + ring[:start]
            moved, rest = turned[:length], turned[length:]
            first, last, before, after = moved[0], moved[-1], rest[-1], rest[0]
            if not linked[before] >> after & 1:
                continue
            gain = latency[before][first] + latency[last][after] - latency[before][after]
            for place in range(len(rest) - 1):
                a, b = rest[place], rest[place + 1]
                gained = gain + latency[a][b] - latency[a][first] - latency[last][b]
                if gained > best and linked[a] >> first & 1 and linked[last] >> b & 1:
                    best, found = gained, rest[: place + 1] + moved + rest[place + 1 :]
    return found
