"""The algorithms: pure functions (rank, size) or (rank, size, root) -> steps, one family a file.

What the number of a chunk means, and which rank has it when:

    broadcast       k pieces of the value: at the root first, everywhere at the end
    reduce          k pieces: every rank contributes to each; combined at the root
    all_reduce      k pieces: every rank contributes to each; combined everywhere
    gather          chunk r is rank r's block: at rank r first, all at the root
    all_gather      chunk r is rank r's block: at rank r first, all everywhere
    scatter         chunk r is the block for rank r: all at the root first, r at rank r
    reduce_scatter  chunk r: every rank contributes; combined at rank r
    all_to_all      2 P chunks: j < P is my block for rank j, P + i is the block from rank i;
                    chunks after them, if any, are for blocks on their way
    scan            k pieces: every rank contributes to each; those of ranks 0 to r at rank r
    exscan          2 chunks: 0 is this rank's value, 1 at the end those of the ranks before it
    barrier         k pieces of no bytes: every rank contributes to each; at the end each rank has
                    heard of every rank, in one piece or in all together

k is `Algorithm.chunks(size)`. The pieces of a value differ in length, so a message goes into the
chunks of the same numbers (all_to_all and exscan apart). Where nothing is reduced, a chunk that
holds what the caller passed in is never written. A rank may keep others' blocks in their chunks on
their way.

The costs in docstrings: P ranks; S the bytes of one rank's value, or of all blocks together;
*steps* the longest chain of messages of which each waits for the one before; *bytes* what the
busiest rank sends, or receives if that is more. `pycoll check` compares them with what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pycoll._support import foreign_names
from pycoll._support.checks import check_int, check_name
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind, did_you_mean
from pycoll.schedule import Copy, Recv, Schedule, Send, Step, compile_schedule
from pycoll.schedules import (
    binary_tree,
    binomial,
    bruck,
    central,
    chain,
    costs,
    dissemination,
    double_tree,
    hierarchical,
    linear,
    pairwise,
    pat,
    recursive_doubling,
    recursive_halving,
    ring,
    ring_2d,
    scatter_all_gather,
)
from pycoll.schedules.costs import Cost as Cost
from pycoll.schedules.powers import power_below

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
REDUCING = frozenset({"reduce", "all_reduce", "reduce_scatter", "scan", "exscan"})


class Algorithm(NamedTuple):
    """One way to run one collective.

    Attributes:
        collective: the name of the collective, for example ``"all_reduce"``.
        name: the name of the algorithm, for example ``"ring"``.
        steps: (rank, size), or (rank, size, root) if the collective is in `ROOTED`, -> steps.
        chunks: size -> number of chunks.
        cost: size -> what it takes, for every root; None: not stated, so the proof compares nothing
            and the algorithm is only taken when it is asked for.
        rank_order: operands combine in rank order for every size and root, as operators that are
            not commutative need.
        hosts: `steps` is also told where the ranks are: one more argument, by rank the number of
            the host. So is `cost`: (size, hosts), or (size, hosts, root) if the collective is in
            `ROOTED`, as the root's host may matter.
        combines_all: of an all_reduce: all that a rank receives is combined, as no results are
            sent. `cost` does not tell that.
    """

    collective: str
    name: str
    steps: Callable[..., Iterable[Step]]
    chunks: Callable[[int], int]
    cost: Callable[..., Cost] | None
    rank_order: bool = False
    hosts: bool = False
    combines_all: bool = False


def _one(size: int) -> int:
    return 1


def _two(size: int) -> int:
    return 2


def _each(size: int) -> int:
    return size


def _two_each(size: int) -> int:
    return 2 * size


def _three_each(size: int) -> int:
    return 3 * size


_HIERARCHICAL = tuple(
    Algorithm(collective, "hierarchical", steps, chunks, cost, hosts=True)
    for collective, steps, chunks, cost in (
        ("broadcast", hierarchical.broadcast, _each, hierarchical.broadcast_cost),
        ("reduce", hierarchical.reduce, _each, hierarchical.broadcast_cost),
        ("all_reduce", hierarchical.all_reduce, _each, hierarchical.all_reduce_cost),
        ("all_gather", hierarchical.all_gather, _each, hierarchical.all_gather_cost),
        ("reduce_scatter", hierarchical.reduce_scatter, _each, hierarchical.all_gather_cost),
        ("barrier", hierarchical.barrier, _one, hierarchical.barrier_cost),
    )
)

# A barrier is an all_reduce or an all_gather of no bytes, so the same functions serve.
_ROWS = (
    Algorithm("broadcast", "tree", binomial.broadcast, _one, costs.tree),
    Algorithm("broadcast", "linear", linear.broadcast, _one, costs.star),
    Algorithm("broadcast", "chain", chain.broadcast, _one, costs.chain),
    Algorithm("broadcast", "binary_tree", binary_tree.broadcast, _one, costs.binary),
    Algorithm("broadcast", "double_tree", double_tree.broadcast, _two, costs.double_tree),
    Algorithm(
        "broadcast", "scatter_all_gather", scatter_all_gather.broadcast, _each, costs.scatter_ring
    ),
    Algorithm("reduce", "tree", binomial.reduce, _one, costs.tree),
    Algorithm("reduce", "linear", linear.reduce, _one, costs.star, rank_order=True),
    Algorithm("reduce", "chain", chain.reduce, _one, costs.chain),
    Algorithm("reduce", "binary_tree", binary_tree.reduce, _one, costs.binary),
    Algorithm("reduce", "double_tree", double_tree.reduce, _two, costs.double_tree),
    Algorithm(
        "reduce",
        "recursive_halving",
        recursive_halving.reduce,
        power_below,
        costs.halving_to_root,
        rank_order=True,
    ),
    Algorithm("all_reduce", "ring", ring.all_reduce, _each, costs.ring_twice),
    Algorithm(
        "all_reduce",
        "recursive_doubling",
        recursive_doubling.all_reduce,
        _one,
        costs.doubling,
        rank_order=True,
        combines_all=True,
    ),
    Algorithm(
        "all_reduce",
        "recursive_halving",
        recursive_halving.all_reduce,
        power_below,
        costs.halving,
        rank_order=True,
    ),
    Algorithm("all_reduce", "tree", binomial.all_reduce, _one, costs.tree_twice, rank_order=True),
    Algorithm(
        "all_reduce",
        "linear",
        linear.all_reduce,
        _each,
        costs.everyone_twice,
        rank_order=True,
        combines_all=True,
    ),
    Algorithm("all_reduce", "central", central.all_reduce, _one, costs.star_twice, rank_order=True),
    Algorithm("all_reduce", "ring_2d", ring_2d.all_reduce, _each, costs.ring_rows_twice),
    Algorithm("all_reduce", "binary_tree", binary_tree.all_reduce, _one, costs.binary_twice),
    Algorithm("all_reduce", "chain", chain.all_reduce, _one, costs.chain_twice, rank_order=True),
    Algorithm("all_reduce", "double_tree", double_tree.all_reduce, _two, costs.double_tree_twice),
    Algorithm("gather", "tree", binomial.gather, _each, costs.tree_blocks),
    Algorithm("gather", "linear", linear.gather, _each, costs.star),
    Algorithm("scatter", "tree", binomial.scatter, _each, costs.tree_blocks),
    Algorithm("scatter", "linear", linear.scatter, _each, costs.star),
    Algorithm("all_gather", "ring", ring.all_gather, _each, costs.ring),
    Algorithm("all_gather", "linear", linear.all_gather, _each, costs.everyone),
    Algorithm(
        "all_gather",
        "recursive_doubling",
        recursive_doubling.all_gather,
        _each,
        costs.doubling_blocks,
    ),
    Algorithm("all_gather", "bruck", bruck.all_gather, _each, costs.bruck_blocks),
    Algorithm("all_gather", "pat", pat.all_gather, _each, costs.pat_blocks),
    Algorithm("all_gather", "ring_2d", ring_2d.all_gather, _each, costs.ring_rows),
    Algorithm("all_gather", "central", central.all_gather, _each, costs.central_all_gather),
    Algorithm("reduce_scatter", "ring", ring.reduce_scatter, _each, costs.ring),
    Algorithm("reduce_scatter", "pairwise", pairwise.reduce_scatter, _each, costs.everyone),
    Algorithm(
        "reduce_scatter", "linear", linear.reduce_scatter, _each, costs.everyone, rank_order=True
    ),
    Algorithm(
        "reduce_scatter",
        "recursive_halving",
        recursive_halving.reduce_scatter,
        _each,
        costs.halving_blocks,
        rank_order=True,
    ),
    Algorithm("reduce_scatter", "pat", pat.reduce_scatter, _each, costs.pat_blocks),
    Algorithm("reduce_scatter", "ring_2d", ring_2d.reduce_scatter, _each, costs.ring_rows),
    Algorithm(
        "reduce_scatter",
        "central",
        central.reduce_scatter,
        _each,
        costs.central_reduce_scatter,
        rank_order=True,
    ),
    Algorithm("all_to_all", "pairwise", pairwise.all_to_all, _two_each, costs.everyone),
    Algorithm("all_to_all", "linear", linear.all_to_all, _two_each, costs.everyone),
    Algorithm("all_to_all", "bruck", bruck.all_to_all, _three_each, costs.bruck_all_to_all),
    Algorithm("scan", "linear", chain.scan, _one, costs.chain, rank_order=True),
    Algorithm(
        "scan",
        "recursive_doubling",
        recursive_doubling.scan,
        _one,
        costs.scan_doubling,
        rank_order=True,
    ),
    Algorithm("exscan", "linear", chain.exscan, _two, costs.chain_exscan, rank_order=True),
    Algorithm(
        "exscan",
        "recursive_doubling",
        recursive_doubling.exscan,
        _two,
        costs.exscan_doubling,
        rank_order=True,
    ),
    Algorithm("barrier", "dissemination", dissemination.barrier, _one, costs.dissemination),
    Algorithm("barrier", "tree", binomial.all_reduce, _one, costs.tree_twice),
    Algorithm("barrier", "linear", linear.all_gather, _each, costs.everyone),
    Algorithm("barrier", "central", central.all_reduce, _one, costs.star_twice),
    *_HIERARCHICAL,
)


def _table() -> dict[str, dict[str, Algorithm]]:
    table: dict[str, dict[str, Algorithm]] = {}
    for algorithm in _ROWS:
        table.setdefault(algorithm.collective, {})[algorithm.name] = algorithm
    return table


TABLE: dict[str, dict[str, Algorithm]] = _table()
_OWN = frozenset((algorithm.collective, algorithm.name) for algorithm in _ROWS)
_generation = 0
on_change: list[Callable[[], object]] = []
"""Called when `register` has changed the table."""


def register(algorithm: Algorithm) -> None:
    """Put a user's algorithm into the table, in place of an earlier one of that name.

    Raises:
        ValueError: there is no such collective, or the name is that of an algorithm of pycoll's.
    """
    global _generation
    known = names(algorithm.collective)
    if (algorithm.collective, algorithm.name) in _OWN:
        raise ValueError(
            f"{algorithm.collective} has an algorithm {algorithm.name!r} of pycoll's own; "
            f"choose a name that is none of {', '.join(known)}"
        )
    TABLE[algorithm.collective][algorithm.name] = algorithm
    _generation += 1
    for call in on_change:
        call()


def generation() -> int:
    """Say how often `register` has changed the table; what was found in it before may be stale."""
    return _generation


@edge
def names(collective: str) -> list[str]:
    """List the algorithms of a collective.

    Raises:
        ValueError: there is no such collective; the message names those there are.
    """
    if check_name(collective, "a collective", "all_reduce") not in TABLE:
        meant = foreign_names.of_collective(collective, TABLE)
        listed = f"there are {', '.join(TABLE)}{did_you_mean(collective, TABLE)}"
        instead = f"write {meant}" if meant else listed
        raise ValueError(f"no collective {collective!r}; {instead}")
    return list(TABLE[collective])


@edge
def find(collective: str, name: str) -> Algorithm:
    """Look an algorithm up.

    Raises:
        ValueError: there is no such collective or algorithm; the message names those there are.
    """
    if check_name(name, "an algorithm", "ring") not in names(collective):
        existing = ", ".join(TABLE[collective])
        near = did_you_mean(name, TABLE[collective])
        raise ValueError(f"{collective} has no algorithm {name!r}; it has {existing}{near}")
    return TABLE[collective][name]


@edge
def schedule(
    collective: str, name: str, rank: int, size: int, root: int = 0, hosts: Sequence[int] = ()
) -> Schedule:
    """Compile the schedule of one rank.

    `root` matters only to the collectives in `ROOTED`, `hosts` only to algorithms that ask for it.

    Raises:
        ValueError: there is no such collective or algorithm, or one of its steps makes no sense:
            the message says which.
    """
    return compiled(find(collective, name), rank, size, root, hosts)


def compiled(
    algorithm: Algorithm, rank: int, size: int, root: int = 0, hosts: Sequence[int] = ()
) -> Schedule:
    """Compile an algorithm's schedule, as `schedule`."""
    _check_ranks(size, rank=rank, root=root)
    try:
        made = compile_schedule(steps_of(algorithm, rank, size, root, hosts))
        _check_ranges(made, rank, size, algorithm.chunks(size))
    except ValueError as exc:
        what = f"{algorithm.collective} {algorithm.name}, size {size}, rank {rank}"
        raise ValueError(f"{what}: {exc}") from exc
    return made


def _check_algorithm(algorithm: object) -> None:
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"an algorithm is what pycoll.schedules.find returns, as find('all_reduce', 'ring'), "
            f"not {a_kind(algorithm)}"
        )


def _check_ranks(size: int, **ranks: int) -> None:
    if check_int(size, "size") < 1:
        raise ValueError(f"size is {size}; there is at least 1 rank")
    for what, rank in ranks.items():
        if not 0 <= check_int(rank, what) < size:
            raise ValueError(f"{what} is {rank}, but the ranks are 0 to {size - 1}")


def _check_ranges(compiled: Schedule, rank: int, size: int, chunks: int) -> None:
    """Raise ValueError if a step names a chunk or a peer that there is not."""
    for position, (step, named) in enumerate(zip(compiled.steps, compiled.chunks, strict=True)):
        used = (*named, step.source) if isinstance(step, Copy) else named
        if min(used) < 0 or max(used) >= chunks:
            raise ValueError(f"step {position}, {step}: there are only chunks 0 to {chunks - 1}")
        if isinstance(step, Send | Recv):
            if not 0 <= step.peer < size:
                raise ValueError(f"step {position}, {step}: there are only ranks 0 to {size - 1}")
            if step.peer == rank:
                raise ValueError(f"step {position}, {step}: the peer is the rank itself")


@edge
def steps_of(
    algorithm: Algorithm, rank: int, size: int, root: int = 0, hosts: Sequence[int] = ()
) -> Iterable[Step]:
    """Give the steps of one rank, as the author wrote them.

    `hosts`: by rank the number of the host that it is on; empty: all are on one.
    """
    _check_algorithm(algorithm)
    _check_ranks(size, rank=rank, root=root)
    arguments: list[Any] = [rank, size]
    if algorithm.collective in ROOTED:
        arguments.append(root)
    if algorithm.hosts:
        arguments.append(hosts or (0,) * size)
    return algorithm.steps(*arguments)


@edge
def cost_of(
    algorithm: Algorithm, size: int, root: int = 0, hosts: Sequence[int] = ()
) -> Cost | None:
    """Return what an algorithm takes, arguments as in `steps_of`; None if it does not state it."""
    _check_algorithm(algorithm)
    _check_ranks(size, root=root)
    if algorithm.cost is None:
        return None
    arguments: list[Any] = [size]
    if algorithm.hosts:
        arguments.append(hosts or (0,) * size)
        if algorithm.collective in ROOTED:
            arguments.append(root)
    return algorithm.cost(*arguments)
