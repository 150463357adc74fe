"""Recursive doubling: partners exchange whole values, at distance 1, 2, 4 and so on."""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.schedule import Recv, Send, Step, recv_reduce


def all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Exchange with partners, the lower rank's operand left: rank order, same bits everywhere.

    If P is not a power of two, the first 2 (P - P') ranks fold in pairs, P' the largest power of
    two in P: the even one hands its value to the odd one, sits out, and gets the result.

        P = 6, P' = 4     fold 0->1 2->3     places 0 1 2 3 = ranks 1 3 4 5     unfold 1->0 3->2

    Cost: steps lg P, bytes lg P S a rank; with the fold lg P' + 2 and (lg P' + 1) S.
    Source: Thakur, Rabenseifner and Gropp, Optimization of collective
    communication operations in MPICH, 2005.
    """
    core = 1 << (size.bit_length() - 1)
    pairs = size - core
    folds = rank < 2 * pairs
    if folds and rank % 2 == 0:
        yield Send(rank + 1, 0)
        yield Recv(rank + 1, 0)
        return
    if folds:
        yield from recv_reduce(rank - 1, 0, incoming_first=True)
    place = rank // 2 if folds else rank - pairs
    for distance in (1 << bit for bit in range(core.bit_length() - 1)):
        other = place ^ distance
        partner = 2 * other + 1 if other < pairs else other + pairs
        yield Send(partner, 0)
        yield from recv_reduce(partner, 0, incoming_first=other < place)
    if folds:
        yield Send(rank - 1, 0)
