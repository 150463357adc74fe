#!/usr/bin/env bash
# gloo's all_reduce of elements that are all alike: are the sums alike?
#
# Guess: yes; every element is the sum of the same four numbers.
# Seen: no. The ring adds the numbers of each chunk beginning with another rank's, and rounds at
# each step, so the result depends on where in the tensor an element is. All ranks get the same.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BIG = {torch.float32: 2.0**24, torch.float16: 2048.0, torch.bfloat16: 256.0}

def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    for dtype, big in BIG.items():
        x = torch.full((400_000,), 1.0 if rank else big, dtype=dtype)
        dist.all_reduce(x)
        values, counts = torch.unique(x, return_counts=True)
        if rank == 0:
            print(dtype, values.tolist(), counts.tolist(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder + "/meeting",), 4)
PROGRAM
torch.float32 [16777216.0, 16777220.0] [200000, 200000]
torch.float16 [2048.0, 2052.0] [200000, 200000]
torch.bfloat16 [256.0, 260.0] [200000, 200000]
EXPECTED
