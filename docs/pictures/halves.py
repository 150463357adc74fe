"""An all_reduce that is wrong on more than two ranks, for the picture in docs/show.md."""

import pycoll
from pycoll.schedule import Recv, Send, recv_reduce


@pycoll.register_algorithm("all_reduce", "halves", chunks=2)
def halves(rank, size):
    """Each rank of a pair combines one chunk; who combines the pairs?"""
    lower = rank - rank % 2
    if lower + 1 < size:
        other = rank ^ 1
        mine, theirs = rank % 2, other % 2
        yield Send(other, theirs)
        yield from recv_reduce(other, mine, incoming_first=other < rank)
        yield Send(other, mine)
        yield Recv(other, theirs)
