"""PyTorch's tensors travel as they are: what goes in as a tensor comes out as a tensor.

pip install torch && pycoll-run -n 4 examples/torch_tensors.py

Nothing is to be converted: not bfloat16, which NumPy does not have, nor a column, whose elements do
not lie side by side, nor a tensor on a GPU. A tensor that requires a gradient is read without its
graph: nothing flows backward from one rank to another.
"""

import torch

import pycoll

device = "cuda" if torch.cuda.is_available() else "cpu"

with pycoll.init() as comm:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    # Broadcast: rank 0's values fill the tensors of the others.
    weights = torch.zeros(3, dtype=torch.bfloat16, device=device)
    if comm.rank == 0:
        weights += torch.tensor([0.5, -1.5, 2.5], device=device)
    comm.broadcast(weights, root=0)

    # Send and receive: a column goes to the right, and the left neighbor's comes as a new tensor.
    table = 10 * comm.rank + torch.arange(6, device=device).reshape(2, 3)
    comm.send(table[:, 1], dest=right)
    column = comm.recv(source=left)

    # All-reduce in place: each rank fills one row of a table, and gets the whole of it.
    rows = torch.zeros(comm.size, 3, device=device)
    rows[comm.rank] = (comm.rank + 1) * weights
    comm.all_reduce(rows, out=rows)

    # A parameter, and the gradient that this rank has found for it.
    parameter = torch.full((3,), comm.rank + 1.0, device=device, requires_grad=True)
    (rows[comm.rank] * parameter).sum().backward()
    comm.all_reduce(parameter.grad, op="avg", out=parameter.grad)
    mean = comm.all_reduce(parameter, op="avg")  # a new tensor, on the same device

    if comm.rank == 0:
        print(f"weights: {weights.tolist()}, {weights.dtype}")
        print(f"the column of rank {left}: {column.tolist()}")
        print(f"the last row of the table: {rows[-1].tolist()}")
        print(f"the mean gradient: {parameter.grad.tolist()}")
        print(f"the mean parameter: {mean.tolist()}, requires a gradient: {mean.requires_grad}")
        print(f"tensors on {device}, the result on {mean.device.type}")
