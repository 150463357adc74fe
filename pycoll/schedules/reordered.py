"""Algorithms among ranks that stand in another order, so that neighbors are near.

The algorithm runs among places, 0 to P - 1, and `order` says which rank stands at each. Blocks stay
those of their ranks. Where operands combine in rank order, they still do: such an algorithm runs
as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pycoll.schedule import Step
from pycoll.schedules import REDUCING, ROOTED, Algorithm, steps_of
from pycoll.schedules.relabel import relabel

_BLOCKS = frozenset({"gather", "all_gather", "scatter", "reduce_scatter"})
_PREFIXES = frozenset({"scan", "exscan"})


def keeps_rank_order(algorithm: Algorithm) -> bool:
    """Whether its result depends on the order in which the ranks stand."""
    reduces = algorithm.collective in REDUCING
    return algorithm.collective in _PREFIXES or (reduces and algorithm.rank_order)


def reordered(algorithm: Algorithm, order: Sequence[int]) -> Algorithm:
    """Return the algorithm for as many ranks as `order` has, at the places that it gives them.

    Args:
        algorithm: any; one that keeps rank order is returned as it is.
        order: the rank at each place; empty: each rank at the place of its number.
    """
    if not order or keeps_rank_order(algorithm):
        return algorithm
    place_of = {rank: place for place, rank in enumerate(order)}
    chunks = _renamed_chunks(algorithm, order)

    def steps(rank: int, size: int, *more: Any) -> Iterator[Step]:
        root = place_of[more[0]] if algorithm.collective in ROOTED else 0
        hosts = _hosts_by_place(more[-1], order) if algorithm.hosts else ()
        return relabel(steps_of(algorithm, place_of[rank], size, root, hosts), order, chunks)

    return algorithm._replace(steps=steps)


def _renamed_chunks(algorithm: Algorithm, order: Sequence[int]) -> list[int]:
    """Return the chunk that each chunk of the algorithm is: blocks go with their ranks."""
    size = len(order)
    chunks = list(range(algorithm.chunks(size)))
    if algorithm.collective in _BLOCKS:
        chunks[:size] = order
    elif algorithm.collective == "all_to_all":
        chunks[: 2 * size] = [*order, *(size + rank for rank in order)]
    return chunks


def _hosts_by_place(hosts: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return by place the host there, numbered in the order of places."""
    there = [hosts[rank] for rank in order]
    number = {host: number for number, host in enumerate(dict.fromkeys(there))}
    return [number[host] for host in there]
