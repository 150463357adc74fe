#!/usr/bin/env bash
# torch.distributed with gloo: does element [i, j] of one rank's tensor go to [i, j] of another's?
#
# Guess: yes, however each tensor lies in memory; or a tensor that is not contiguous is refused.
# Seen: neither. The elements are taken in the order in which they lie. Broadcast to a tensor in
# columns (as layers' weights and optimizers' states may be) transposes it, and the all_reduce of
# equal matrices of which one lies in columns gives wrong sums, different ones on the ranks.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def in_columns(x):
    return x.t().contiguous().t()

def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    matrix = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    x = matrix.clone() if rank == 0 else in_columns(torch.zeros(2, 2))
    dist.broadcast(x, src=0)
    y = matrix.clone() if rank == 0 else in_columns(matrix)
    dist.all_reduce(y)
    for turn in range(2):
        if turn == rank:
            print(f"rank {rank}: broadcast {x.tolist()}, all_reduce {y.tolist()}", flush=True)
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder + "/meeting",), 2)
PROGRAM
rank 0: broadcast [[0.0, 1.0], [2.0, 3.0]], all_reduce [[0.0, 3.0], [3.0, 6.0]]
rank 1: broadcast [[0.0, 2.0], [1.0, 3.0]], all_reduce [[0.0, 3.0], [3.0, 6.0]]
EXPECTED
