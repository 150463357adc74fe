"""What the algorithms take, by number of ranks: what their docstrings say, as numbers.

`pycoll check` compares each with what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pycoll.schedules import ring_2d
from pycoll.schedules.folding import fold_of
from pycoll.schedules.powers import ceil_lg, distances, floor_lg, power_below
from pycoll.schedules.trees import binomial_branch, binomial_parent


class Cost(NamedTuple):
    """What an algorithm takes at one size.

    Attributes:
        steps: messages in the longest chain of which each waits for the one before.
        path: chunks in the heaviest such chain.
        messages: of all ranks together.
        volume: chunks that move, of all ranks together.
        load: the most chunks that one rank sends, or receives if that is more.
    """

    steps: int
    path: int
    messages: int
    volume: int
    load: int


def _singly(steps: int, messages: int, load: int) -> Cost:
    """Cost of an algorithm whose messages are of one chunk each."""
    return Cost(steps, steps, messages, messages, load)


def star(size: int) -> Cost:
    """One rank with each other."""
    return _singly(min(1, size - 1), size - 1, size - 1)


def star_twice(size: int) -> Cost:
    """To rank 0 and back."""
    return _singly(2 * min(1, size - 1), 2 * (size - 1), size - 1)


def everyone(size: int) -> Cost:
    """Each rank with each other."""
    return _singly(min(1, size - 1), size * (size - 1), size - 1)


def everyone_twice(size: int) -> Cost:
    """Each rank with each other, and again."""
    return _singly(2 * min(1, size - 1), 2 * size * (size - 1), 2 * (size - 1))


def central_all_gather(size: int) -> Cost:
    """One block to rank 0 each, all others back."""
    others = size - 1
    path = size if size > 2 else others
    return Cost(min(2, others), path, 2 * others, others * size, others**2)


def central_reduce_scatter(size: int) -> Cost:
    """All chunks to rank 0, one back to each."""
    others = size - 1
    path = (size + 1) * min(1, others)
    return Cost(2 * min(1, others), path, 2 * others, others * (size + 1), others * size)


def chain(size: int) -> Cost:
    """From one end to the other."""
    return _singly(size - 1, size - 1, min(1, size - 1))


def chain_twice(size: int) -> Cost:
    """From one end to the other and back."""
    return _singly(2 * (size - 1), 2 * (size - 1), min(2, size - 1))


def chain_exscan(size: int) -> Cost:
    """Everything one rank on, then a chain of all but the first."""
    return _singly(size - 1, max(0, 2 * size - 3), min(2, size - 1))


def tree(size: int) -> Cost:
    """Up or down the binomial tree."""
    return _singly(floor_lg(size), size - 1, ceil_lg(size))


def tree_twice(size: int) -> Cost:
    """Up and down the binomial tree."""
    return _singly(2 * floor_lg(size), 2 * (size - 1), ceil_lg(size))


def tree_blocks(size: int) -> Cost:
    """Up or down the binomial tree, the blocks of a branch together."""
    path = [0] * size
    for place in range(1, size):
        path[place] = path[binomial_parent(place)] + len(binomial_branch(place, size))
    return Cost(floor_lg(size), max(path), size - 1, _tree_hops(size), size - 1)


def _tree_hops(size: int) -> int:
    """How far all positions of the binomial tree are from its root, together."""
    return sum(place.bit_count() for place in range(size))


def scatter_ring(size: int) -> Cost:
    """Down the binomial tree, then around the ring what is not there already."""
    skipped = size + _tree_hops(size)
    around = size * size - skipped
    return Cost(size - 1, size - 1, size - 1 + around, _tree_hops(size) + around, 2 * (size - 1))


def binary(size: int) -> Cost:
    """Up or down the complete binary tree."""
    return _singly(floor_lg(size), size - 1, min(2, size - 1))


def binary_twice(size: int) -> Cost:
    """Up and down the complete binary tree."""
    return _singly(2 * floor_lg(size), 2 * (size - 1), 3 if size > 4 else min(2, size - 1))


def double_tree(size: int) -> Cost:
    """Up or down both trees of all ranks but the root."""
    if size == 1:
        return _singly(0, 0, 0)
    return _singly(ceil_lg(size - 1) + 1, 2 * (size - 1), 2)


def double_tree_twice(size: int) -> Cost:
    """Up and down both trees of all ranks."""
    return _singly(2 * ceil_lg(size), 4 * (size - 1), min(4, size) if size > 1 else 0)


def ring(size: int) -> Cost:
    """Once around."""
    return _singly(size - 1, size * (size - 1), size - 1)


def ring_twice(size: int) -> Cost:
    """Twice around."""
    return _singly(2 * (size - 1), 2 * size * (size - 1), 2 * (size - 1))


def ring_rows(size: int) -> Cost:
    """Once around each row and each column."""
    steps = sum(ring_2d.shape(size)) - 2
    return Cost(steps, size - 1, size * steps, size * (size - 1), size - 1)


def ring_rows_twice(size: int) -> Cost:
    """Twice around each row and each column."""
    return Cost(*(2 * figure for figure in ring_rows(size)))


def doubling(size: int) -> Cost:
    """Whole values with a partner at each distance, folded."""
    lg, core = floor_lg(size), power_below(size)
    pairs = size - core
    fold = int(pairs > 0)
    return _singly(lg + 2 * fold, core * lg + 2 * pairs, lg + fold)


def doubling_blocks(size: int) -> Cost:
    """All blocks so far with a partner at each distance, folded."""
    fold = fold_of(size)
    lg, core, pairs = floor_lg(size), fold.core, fold.pairs
    paired = [place < pairs for place in range(core)]
    held = [1 + pair for pair in paired]
    sent = [0] * core
    received: list[list[int]] = []
    for distance in distances(core):
        sent = [before + now for before, now in zip(sent, held, strict=True)]
        received.append([held[place ^ distance] for place in range(core)])
        held = [now + more for now, more in zip(held, received[-1], strict=True)]
    # What a rank that sat out gets does not wait for what it gave.
    steps = _exchanged(paired, [[1] * core] * lg)
    path = _exchanged(paired, received)
    return Cost(
        steps=max(map(sum, zip(steps, paired, strict=True))),
        path=max(path[p] + (size - 1) * paired[p] for p in range(core)),
        messages=core * lg + 2 * pairs,
        volume=core * size - size + pairs * size,
        load=max(sent[p] + (size - 1) * paired[p] for p in range(core)),
    )


def _exchanged(first: Sequence[int], received: Sequence[Sequence[int]]) -> list[int]:
    """By place: the heaviest chain of messages up to what it gets from partners.

    Args:
        first: weight of what a place has got before.
        received: for each distance, the weights of what places get.
    """
    chains = [0] * len(first)
    for distance, weights in zip(distances(len(first)), received, strict=True):
        sent = [max(chain, before) for chain, before in zip(chains, first, strict=True)]
        chains = [
            max(chain, sent[place ^ distance] + weights[place])
            for place, chain in enumerate(chains)
        ]
    return chains


def halving(size: int) -> Cost:
    """Half the value with a partner, a quarter with the next, ..., and back again; folded."""
    lg, core = floor_lg(size), power_below(size)
    pairs = size - core
    fold = int(pairs > 0)
    return Cost(
        steps=2 * lg + 2 * fold,
        path=2 * (core - 1) + 2 * fold * core,
        messages=2 * core * lg + 2 * pairs,
        volume=2 * core * (core - 1) + 2 * pairs * core,
        load=2 * (core - 1) + fold * core,
    )


def halving_to_root(size: int) -> Cost:
    """Half the value with a partner, a quarter with the next, ...; back to the root; folded."""
    lg, core = floor_lg(size), power_below(size)
    pairs = size - core
    fold = int(pairs > 0)
    return Cost(
        steps=2 * lg + fold,
        path=2 * (core - 1) + fold * core,
        messages=core * lg + core - 1 + pairs,
        volume=core * (core - 1) + core // 2 * lg + pairs * core,
        load=2 * (core - 1) + fold * core,
    )


def halving_blocks(size: int) -> Cost:
    """Half the chunks with a partner, a quarter with the next, ...; folded."""
    fold = fold_of(size)
    lg, core, pairs = floor_lg(size), fold.core, fold.pairs
    paired = [place < pairs for place in range(core)]
    # What a place keeps: the chunks of all ranks whose place has the same lowest bits.
    kept = [
        [sum(1 + paired[other] for other in range(p % d, core, d)) for p in range(core)]
        for d in (2 * distance for distance in distances(core))
    ]
    whole = [size * pair for pair in paired]
    steps = _exchanged(paired, [[1] * core] * lg)
    path = _exchanged(whole, kept)
    return Cost(
        steps=max(max(steps[p], paired[p]) + paired[p] for p in range(core)),
        path=max(max(path[p], whole[p]) + paired[p] for p in range(core)),
        messages=core * lg + 2 * pairs,
        volume=core * size - size + pairs * (size + 1),
        load=whole[0] + sum(of_place[0] for of_place in kept),
    )


def dissemination(size: int) -> Cost:
    """One message to the rank at each distance."""
    return _singly(ceil_lg(size), size * ceil_lg(size), ceil_lg(size))


def bruck_blocks(size: int) -> Cost:
    """As many blocks as the distance, the last time what is left."""
    return _at_distances(size, lambda distance: min(distance, size - distance))


def bruck_all_to_all(size: int) -> Cost:
    """All blocks in whose way to go the distance is a bit."""
    return _at_distances(size, lambda d: sum(1 for offset in range(size) if offset & d))


def pat_blocks(size: int) -> Cost:
    """All blocks whose way so far is a multiple of twice the distance."""
    return _at_distances(size, lambda d: len(range(0, size - d, 2 * d)))


def scan_doubling(size: int) -> Cost:
    """The value so far to the rank at each distance."""
    messages = sum(size - distance for distance in distances(size))
    return _at_distances(size, lambda distance: 1)._replace(messages=messages, volume=messages)


def exscan_doubling(size: int) -> Cost:
    """Everything one rank on, then the scan of all but the first."""
    if size == 1:
        return _singly(0, 0, 0)
    scan = scan_doubling(size - 1)
    return _singly(scan.steps + 1, scan.messages + size - 1, scan.load + 1)


def _at_distances(size: int, chunks: Callable[[int], int]) -> Cost:
    """Cost of a message of so many chunks to the rank at distance 1, 2, 4, ...

    The messages of two distances wait for each other only if some block needs both: always, but
    for the largest and those with which it adds up to P or more.
    """
    if size == 1:
        return _singly(0, 0, 0)
    *lower, top = distances(size)
    beside = [distance for distance in lower if top + distance < size]
    load = sum(map(chunks, (*lower, top)))
    return Cost(
        steps=max(len(lower), 1 + len(beside)),
        path=max(sum(map(chunks, lower)), chunks(top) + sum(map(chunks, beside))),
        messages=size * (len(lower) + 1),
        volume=size * load,
        load=load,
    )
