#!/usr/bin/env bash
# torch.distributed.reduce to rank 0 with gloo: what do the other ranks' tensors hold afterwards?
#
# Guess: what they held before: only rank 0 gets a result.
# Seen: sums of some of the ranks, other ones in each part of the tensor. Whoever uses the gradient
# or the loss again after reporting it by `reduce` goes on with those.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    x = torch.full((4,), 10.0**rank)
    dist.reduce(x, dst=0)
    for turn in range(3):
        if turn == rank:
            print(f"rank {rank}, which had {10**rank}: {x.tolist()}", flush=True)
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder + "/meeting",), 3)
PROGRAM
rank 0, which had 1: [111.0, 111.0, 111.0, 111.0]
rank 1, which had 10: [110.0, 110.0, 111.0, 111.0]
rank 2, which had 100: [100.0, 100.0, 101.0, 101.0]
EXPECTED
