#!/usr/bin/env bash
# torch.distributed.all_gather of tensors of different lengths, with gloo.
#
# Guess: it works, for the documentation of all_gather says that such tensors are supported, and
# names no backend.
# Seen: gloo refuses them on every rank, comparing them with each other; the group goes on.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    lengths = [1, 2]
    gathered = [torch.zeros(length) for length in lengths]
    try:
        dist.all_gather(gathered, torch.ones(lengths[rank]))
        said = str(gathered)
    except RuntimeError as error:
        said = str(error)
    x = torch.ones(1)
    dist.all_reduce(x)
    for turn in range(2):
        if turn == rank:
            print(f"rank {rank}: {said}; all_reduce after it: {x.tolist()}", flush=True)
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    print("documented:", "uneven sized tensors are supported" in dist.all_gather.__doc__)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder + "/meeting",), 2)
PROGRAM
documented: True
rank 0: ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected (1), got (2)); all_reduce after it: [2.0]
rank 1: ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (2), got (1)); all_reduce after it: [2.0]
EXPECTED
