"""Write an algorithm of your own, have it proved, and run it.

pycoll-run -n 4 examples/my_algorithm.py

An algorithm is a function that gives the steps of one rank: what it sends to whom, what it receives
and combines. It names chunks, the pieces of the array, and nothing else; pycoll finds out what must
wait for what. This one is a ring in both directions at once: half of the chunks travel to the right
while the other half travels to the left. docs/algorithms.md explains the steps.
"""

import numpy as np

import pycoll
from pycoll.schedule import Recv, Send, recv_reduce


@pycoll.register_algorithm("all_reduce", "two_way_ring", chunks=lambda size: 2 * size)
def two_way_ring(rank, size):
    """Add up going round once, then pass the sums round; chunks from `size` on go to the left."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(size - 1):
        yield Send(right, (rank - i) % size)
        yield Send(left, size + (rank + i) % size)
        yield from recv_reduce(left, (rank - i - 1) % size)
        yield from recv_reduce(right, size + (rank + i + 1) % size)
    for i in range(size - 1):
        yield Send(right, (rank - i + 1) % size)
        yield Send(left, size + (rank + i - 1) % size)
        yield Recv(left, (rank - i) % size)
        yield Recv(right, size + (rank + i) % size)


@pycoll.register_algorithm("all_reduce", "once_to_the_right")
def once_to_the_right(rank, size):
    """Give the whole array to the right neighbor: enough for two ranks, wrong for more."""
    if size > 1:
        yield Send((rank + 1) % size, 0)
        yield from recv_reduce((rank - 1) % size, 0, incoming_first=rank > 0)


def main():
    """Prove both, run the one that is right."""
    with pycoll.init() as comm:
        if comm.rank == 0:  # a proof sends nothing: one rank is enough
            print(pycoll.prove("all_reduce", "two_way_ring"))
            try:
                pycoll.prove("all_reduce", "once_to_the_right")
            except pycoll.ProofError as error:
                print(f"wrong: {error}")

        x = np.random.default_rng(comm.rank).normal(size=100_000)
        mine = comm.all_reduce(x, algorithm="two_way_ring")
        ring = comm.all_reduce(x, algorithm="ring")
        # Both add up the same numbers, but not in the same order.
        same = comm.all_reduce(np.allclose(mine, ring), op="land")
        if comm.rank == 0:
            print(f"on {comm.size} ranks the result is that of pycoll's ring: {same}")
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
