"""Every rank says who it is, and rank 0 adds up what all of them hold.

pycoll-run -n 4 examples/hello.py
"""

import os

import numpy as np

import pycoll

with pycoll.init() as comm:
    print(f"rank {comm.rank} of {comm.size} is process {os.getpid()}", flush=True)

    mine = np.arange(3) + 10 * comm.rank
    total = comm.all_reduce(mine)  # the same array on every rank

    if comm.rank == 0:
        print(f"the sum over all ranks is {total}")
