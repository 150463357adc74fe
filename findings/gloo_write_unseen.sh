#!/usr/bin/env bash
# torch.distributed's all_reduce writes to a tensor that autograd has kept: does backward() notice?
#
# Guess: yes, as for `w.mul_(2)`: "one of the variables needed for gradient computation has been
# modified by an inplace operation"; and a leaf that requires gradients is refused.
# Seen: neither. The tensor's version stays 0, and the gradient, 2 before, is computed with the new
# values: 4.
. "$(dirname "$0")/compare.bash"
install torch==2.13.0 numpy==2.4.6
compare "$python" program.py 3<<'PROGRAM' <<'EXPECTED'
import tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def gradient(write):
    w = torch.ones(2, requires_grad=True)
    loss = (w * w).sum()
    try:
        write(w)
        loss.backward()
    except RuntimeError as error:
        return str(error)[:50]
    return f"version {w._version}, gradient {w.grad.tolist()}"

def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    without = torch.no_grad()
    said = {
        "mul_, no_grad": gradient(without(lambda w: w.mul_(2))),
        "all_reduce, no_grad": gradient(without(dist.all_reduce)),
        "mul_": gradient(lambda w: w.mul_(2)),
        "all_reduce": gradient(dist.all_reduce),
    }
    if rank == 0:
        for what, result in said.items():
            print(f"{what}: {result}")
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder + "/meeting",), 2)
PROGRAM
mul_, no_grad: one of the variables needed for gradient computati
all_reduce, no_grad: version 0, gradient [4.0, 4.0]
mul_: a leaf Variable that requires grad is being used i
all_reduce: version 0, gradient [4.0, 4.0]
EXPECTED
