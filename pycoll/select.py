"""Which algorithm runs: a pure function of what is the same on all ranks.

The thresholds are for the tcp transport. A message takes about a = 55 us and b = 0.165 us per KiB
(ZeroMQ PAIR over loopback on a 2-core machine: 54 us for 1 KiB, 225 us for 1 MiB); combining takes
about c = 0.13 us per KiB (there a copy pass takes 0.087, and combining reads one operand more). The
rows are where the textbook costs cross with these numbers, rounded. They are no measurement of
pycoll itself.

    all_reduce   recursive doubling, lg P (a + n b + n c) and the fold, meets ring, 2 (P - 1) a +
                 (P - 1) / P (2 n b + n c), at n = 0.12 MiB for P = 3, 0.3 for 5, 0.5 for 6, 0.9
                 for 4, 1.2 for 8, 1.9 for 16. On networks of a few us others switch earlier: UCC
                 at 4 KiB, Open MPI at 10 KiB.
    broadcast    the root of a tree sends ceil(lg P) n, a rank of a chain n, but the last rank of
                 the chain waits P - 2 segments more. With segments of 1 MiB they meet at
                 (P - 2) / (lg P - 1) MiB: 2 for P = 4, 3 for 8, 4.7 for 16, 7.5 for 32.
    reduce_scatter, all_gather
                 as schedules all have the same messages. In one step is quicker until so much is
                 under way that ranks wait in line: 32 KiB a block, where MPICH's all_to_all goes
                 from posting all at once to one partner at a time.
    gather, scatter
                 always linear: in a tree each block is a message of its own on each level, which
                 makes more messages and saves the root none.
    all_to_all   always pairwise: linear is the same messages in an order that crowds rank 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pycoll.schedules import REDUCING, TABLE, Algorithm, find, names

KiB = 1024
MiB = 1024 * KiB


class Rule(NamedTuple):
    """Use `name` up to these limits, inclusive.

    Attributes:
        name: of the algorithm.
        max_nbytes: of one rank's value, or of one block.
        max_size: number of ranks.
    """

    name: str
    max_nbytes: float = math.inf
    max_size: float = math.inf


# The first rule that fits and can serve is taken; the last of each row can always serve.
TCP: dict[str, tuple[Rule, ...]] = {
    "broadcast": (
        Rule("tree", max_nbytes=4 * MiB),
        Rule("chain", max_size=16),
        Rule("tree", max_nbytes=8 * MiB),
        Rule("chain"),
    ),
    "reduce": (Rule("tree"), Rule("linear")),
    "all_reduce": (
        Rule("recursive_doubling", max_nbytes=512 * KiB),
        Rule("ring"),
        Rule("recursive_doubling"),
    ),
    "gather": (Rule("linear"),),
    "scatter": (Rule("linear"),),
    "all_gather": (Rule("linear", max_nbytes=32 * KiB), Rule("ring")),
    "reduce_scatter": (
        Rule("pairwise", max_nbytes=32 * KiB),
        Rule("ring"),
        Rule("linear"),
    ),
    "all_to_all": (Rule("pairwise"),),
    "barrier": (Rule("dissemination"),),
}


def choose(
    collective: str, nbytes: int, size: int, *, rank_order: bool = False, whole: bool = False
) -> str:
    """Choose an algorithm for the tcp transport.

    Args:
        collective: for example ``"all_reduce"``.
        nbytes: bytes of one rank's value in broadcast, reduce and all_reduce, of one block (what
            one rank has for one other, or all others) elsewhere.
        size: number of ranks.
        rank_order: the operator is not commutative.
        whole: the operator takes the whole value only, no pieces of it.

    Raises:
        ValueError: there is no such collective.
    """
    names(collective)
    for rule in TCP[collective]:
        fits = nbytes <= rule.max_nbytes and size <= rule.max_size
        if fits and usable(collective, rule.name, rank_order=rank_order, whole=whole) is None:
            return rule.name
    raise AssertionError(f"no rule for {collective} of {nbytes} bytes on {size} ranks")


def usable(
    collective: str, name: str, *, rank_order: bool = False, whole: bool = False
) -> str | None:
    """Say why an algorithm cannot serve an operator; None if it can.

    Raises:
        ValueError: there is no such collective or algorithm.
    """
    algorithm = find(collective, name)
    if collective not in REDUCING:
        return None
    able = [a.name for a in TABLE[collective].values() if _serves(a, rank_order, whole)]
    if name in able:
        return None
    if rank_order and not algorithm.rank_order:
        why = "does not combine in rank order, which an operator that is not commutative needs"
    else:
        why = "cuts the value in pieces, which an operator that is not elementwise does not allow"
    return f"{collective} {name} {why}; use {' or '.join(able)}"


def _serves(algorithm: Algorithm, rank_order: bool, whole: bool) -> bool:
    # The chunks of reduce_scatter are the blocks x[r] that the operator is for: always whole.
    in_one = algorithm.collective == "reduce_scatter" or algorithm.chunks(2) == 1
    return (algorithm.rank_order or not rank_order) and (in_one or not whole)
