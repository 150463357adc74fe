"""The algorithms: pure functions (rank, size) or (rank, size, root) -> steps, one family a file.

What the number of a chunk means, and which rank has it when:

    broadcast       k pieces of the value: at the root first, everywhere at the end
    reduce          k pieces: every rank contributes to each; combined at the root
    all_reduce      k pieces: every rank contributes to each; combined everywhere
    gather          chunk r is rank r's block: at rank r first, all at the root
    all_gather      chunk r is rank r's block: at rank r first, all everywhere
    scatter         chunk r is the block for rank r: all at the root first, r at rank r
    reduce_scatter  chunk r: every rank contributes; combined at rank r
    all_to_all      2 P chunks: j < P is my block for rank j, P + i is the block from rank i
    barrier         1 chunk of no bytes, reduced: at the end each rank has heard of every rank

k is `Algorithm.chunks(size)`. The pieces of a value differ in length, so a message goes into the
chunk of the same number (all_to_all apart). A chunk that holds what the caller passed in is never
written where nothing is reduced. A rank may keep others' blocks in their chunks on their way.

The costs in docstrings: P ranks; S the bytes of one rank's value, or of all blocks together;
*steps* the longest chain of messages of which each waits for the one before; *bytes* what the
busiest rank sends, or receives if that is more. `pycoll check` compares them with what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pycoll.schedule import Schedule, Step, compile_schedule
from pycoll.schedules import (
    binomial,
    chain,
    dissemination,
    linear,
    pairwise,
    recursive_doubling,
    ring,
)

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
REDUCING = frozenset({"reduce", "all_reduce", "reduce_scatter"})


class Cost(NamedTuple):
    """What an algorithm takes at one size, in messages of one chunk each.

    Attributes:
        steps: the longest chain of messages of which each waits for the one before.
        messages: of all ranks together; as many chunks move.
        load: the most messages that one rank sends, or receives if that is more.
    """

    steps: int
    messages: int
    load: int


class Algorithm(NamedTuple):
    """One way to run one collective.

    Attributes:
        collective: the name of the collective, for example ``"all_reduce"``.
        name: the name of the algorithm, for example ``"ring"``.
        steps: (rank, size), or (rank, size, root) if the collective is in `ROOTED`, -> steps.
        chunks: size -> number of chunks.
        cost: size -> what it takes, for every root.
        rank_order: operands combine in rank order for every size and root, as operators that are
            not commutative need.
    """

    collective: str
    name: str
    steps: Callable[..., Iterable[Step]]
    chunks: Callable[[int], int]
    cost: Callable[[int], Cost]
    rank_order: bool = False


def _one(size: int) -> int:
    return 1


def _each(size: int) -> int:
    return size


def _two_each(size: int) -> int:
    return 2 * size


def _floor_lg(size: int) -> int:
    return size.bit_length() - 1


def _ceil_lg(size: int) -> int:
    return (size - 1).bit_length()


def _tree(size: int) -> Cost:
    return Cost(_floor_lg(size), size - 1, _ceil_lg(size))


def _tree_twice(size: int) -> Cost:
    return Cost(2 * _floor_lg(size), 2 * (size - 1), _ceil_lg(size))


def _tree_blocks(size: int) -> Cost:
    hops = sum(place.bit_count() for place in range(size))
    return Cost(_floor_lg(size), hops, size - 1)


def _star(size: int) -> Cost:
    return Cost(min(1, size - 1), size - 1, size - 1)


def _star_twice(size: int) -> Cost:
    return Cost(2 * min(1, size - 1), 2 * (size - 1), size - 1)


def _chain(size: int) -> Cost:
    return Cost(size - 1, size - 1, min(1, size - 1))


def _ring(size: int) -> Cost:
    return Cost(size - 1, size * (size - 1), size - 1)


def _ring_twice(size: int) -> Cost:
    return Cost(2 * (size - 1), 2 * size * (size - 1), 2 * (size - 1))


def _everyone(size: int) -> Cost:
    return Cost(min(1, size - 1), size * (size - 1), size - 1)


def _doubling(size: int) -> Cost:
    lg = _floor_lg(size)
    pairs = size - (1 << lg)
    fold = int(pairs > 0)
    return Cost(lg + 2 * fold, (1 << lg) * lg + 2 * pairs, lg + fold)


def _dissemination(size: int) -> Cost:
    return Cost(_ceil_lg(size), size * _ceil_lg(size), _ceil_lg(size))


# A barrier is an all_reduce of no bytes, so the same functions serve.
_ROWS = (
    Algorithm("broadcast", "tree", binomial.broadcast, _one, _tree),
    Algorithm("broadcast", "linear", linear.broadcast, _one, _star),
    Algorithm("broadcast", "chain", chain.broadcast, _one, _chain),
    Algorithm("reduce", "tree", binomial.reduce, _one, _tree),
    Algorithm("reduce", "linear", linear.reduce, _one, _star, rank_order=True),
    Algorithm("all_reduce", "ring", ring.all_reduce, _each, _ring_twice),
    Algorithm(
        "all_reduce",
        "recursive_doubling",
        recursive_doubling.all_reduce,
        _one,
        _doubling,
        rank_order=True,
    ),
    Algorithm("all_reduce", "tree", binomial.all_reduce, _one, _tree_twice, rank_order=True),
    Algorithm("all_reduce", "linear", linear.all_reduce, _one, _star_twice, rank_order=True),
    Algorithm("gather", "tree", binomial.gather, _each, _tree_blocks),
    Algorithm("gather", "linear", linear.gather, _each, _star),
    Algorithm("scatter", "tree", binomial.scatter, _each, _tree_blocks),
    Algorithm("scatter", "linear", linear.scatter, _each, _star),
    Algorithm("all_gather", "ring", ring.all_gather, _each, _ring),
    Algorithm("all_gather", "linear", linear.all_gather, _each, _everyone),
    Algorithm("reduce_scatter", "ring", ring.reduce_scatter, _each, _ring),
    Algorithm("reduce_scatter", "pairwise", pairwise.reduce_scatter, _each, _everyone),
    Algorithm("reduce_scatter", "linear", linear.reduce_scatter, _each, _everyone, rank_order=True),
    Algorithm("all_to_all", "pairwise", pairwise.all_to_all, _two_each, _everyone),
    Algorithm("all_to_all", "linear", linear.all_to_all, _two_each, _everyone),
    Algorithm("barrier", "dissemination", dissemination.barrier, _one, _dissemination),
    Algorithm("barrier", "tree", binomial.all_reduce, _one, _tree_twice),
    Algorithm("barrier", "linear", linear.all_reduce, _one, _star_twice),
)


def _table() -> dict[str, dict[str, Algorithm]]:
    table: dict[str, dict[str, Algorithm]] = {}
    for algorithm in _ROWS:
        table.setdefault(algorithm.collective, {})[algorithm.name] = algorithm
    return table


TABLE: dict[str, dict[str, Algorithm]] = _table()


def names(collective: str) -> list[str]:
    """List the algorithms of a collective.

    Raises:
        ValueError: there is no such collective; the message names those there are.
    """
    if collective not in TABLE:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(TABLE)}")
    return list(TABLE[collective])


def find(collective: str, name: str) -> Algorithm:
    """Look an algorithm up.

    Raises:
        ValueError: there is no such collective or algorithm; the message names those there are.
    """
    if name not in names(collective):
        existing = ", ".join(TABLE[collective])
        raise ValueError(f"{collective} has no algorithm {name!r}; it has {existing}")
    return TABLE[collective][name]


def schedule(collective: str, name: str, rank: int, size: int, root: int = 0) -> Schedule:
    """Compile the schedule of one rank; `root` matters only to the collectives in `ROOTED`.

    Raises:
        ValueError: there is no such collective or algorithm.
    """
    return compile_schedule(steps_of(find(collective, name), rank, size, root))


def steps_of(algorithm: Algorithm, rank: int, size: int, root: int = 0) -> Iterable[Step]:
    """Give the steps of one rank, as the author wrote them."""
    if algorithm.collective in ROOTED:
        return algorithm.steps(rank, size, root)
    return algorithm.steps(rank, size)
