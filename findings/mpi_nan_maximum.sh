#!/usr/bin/env bash
# MPICH, four ranks, one of which has a NaN: what is the maximum?
#
# Guess: NaN or the largest number, the same on all ranks; MPI 4.1, 6.9.1 advises that.
# Seen: MAX of one number is NaN on one rank and 3 on the others, and so is MAXLOC. Of 100,000 equal
# elements some are NaN and some are 3; that array is the same on all ranks.
. "$(dirname "$0")/compare.bash"
install mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
compare "$folder/venv/bin/mpiexec" -n 4 "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
value = [1.0, float("nan"), 2.0, 3.0][comm.rank]
pair = np.array([(value, comm.rank)], [("value", "f8"), ("index", "i4")])
located, one, many = np.zeros_like(pair), np.zeros(1), np.zeros(100_000)
comm.Allreduce([pair, 1, MPI.DOUBLE_INT], [located, 1, MPI.DOUBLE_INT], MPI.MAXLOC)
comm.Allreduce(np.full(1, value), one, MPI.MAX)
comm.Allreduce(np.full(100_000, value), many, MPI.MAX)
found = {"MAXLOC": located[0].item(), "MAX": one.item(), "MAX of many": sorted({*map(str, many)})}
everywhere = comm.gather(found)
if comm.rank == 0:
    for what in found:
        print(what, [of_rank[what] for of_rank in everywhere])
PROGRAM
MAXLOC [(3.0, 3), (nan, 1), (3.0, 3), (3.0, 3)]
MAX [3.0, 3.0, nan, 3.0]
MAX of many [['3.0', 'nan'], ['3.0', 'nan'], ['3.0', 'nan'], ['3.0', 'nan']]
EXPECTED
