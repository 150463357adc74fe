"""Pi as the area under 4 / (1 + x^2) from 0 to 1; each rank adds up its share of thin strips.

pycoll-run -n 4 examples/pi.py
"""

import math

import numpy as np

import pycoll

STRIPS = 1_000_000

with pycoll.init() as comm:
    # Rank r takes strips r, r + size, r + 2 size, ...: an even share for any number of ranks.
    middles = (np.arange(comm.rank, STRIPS, comm.size) + 0.5) / STRIPS
    mine = float(np.sum(4.0 / (1.0 + middles**2))) / STRIPS

    # Numbers reduce as arrays do. Only the root gets the result, the others get None.
    pi = comm.reduce(mine, op="sum", root=0)

    if comm.rank == 0:
        print(f"pi is about {pi:.12f}, off by {abs(pi - math.pi):.1e}")
