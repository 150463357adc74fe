"""The collectives of torch.distributed on tensors, each by blocking calls of a communicator.

The last argument of each is its deadline in seconds. Whether a rank passes a list or one tensor,
lengths or none, makes no difference to what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycoll import Communicator as Comm
from pycoll.torch._memory import TensorReduction, land, movable, row, rows

Tensor = Any
Tensors = Sequence[Tensor]


def all_reduce(comm: Comm, tensor: Tensor, by: TensorReduction, seconds: float) -> None:
    if tensor.is_sparse:
        _all_reduce_sparse(comm, tensor, by, seconds)
        return
    x = row(tensor)
    source, op, result = by.given(x, x)
    comm.all_reduce(source, op, result, timeout=seconds)
    by.finish(result, x)
    land(tensor, x)


def all_reduce_many(comm: Comm, tensors: Tensors, by: TensorReduction, seconds: float) -> None:
    """Reduce several: by one call, where pycoll has the operator for all of them."""
    if any(tensor.is_sparse or tensor.dtype not in by.dtypes for tensor in tensors):
        for tensor in tensors:
            all_reduce(comm, tensor, by, seconds)
        return
    xs = [row(tensor) for tensor in tensors]
    comm.all_reduce_many(xs, by.name, xs, timeout=seconds)
    _land_each(tensors, xs)


def _all_reduce_sparse(comm: Comm, tensor: Tensor, by: TensorReduction, seconds: float) -> None:
    """Add up: the ranks' elements one after the other are a sparse tensor of the sum."""
    if by.name not in ("sum", "avg"):
        raise ValueError(f"sparse tensors are reduced by SUM and AVG, not by {by.name}")
    mine = tensor.data.coalesce()
    # A row for each element: ranks may have different numbers of them.
    parts = (mine.indices().t().contiguous(), mine.values().contiguous())
    indices, values = (torch.cat(comm.all_gatherv(part, timeout=seconds)) for part in parts)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total / comm.size if by.name == "avg" else total)


def reduce(comm: Comm, tensor: Tensor, by: TensorReduction, root: int, seconds: float) -> None:
    x = row(tensor)
    out = x if comm.rank == root else None
    source, op, result = by.given(x, out)
    comm.reduce(source, op, root, result, timeout=seconds)
    by.finish(result, out)
    if out is not None:
        land(tensor, out)


def reduce_scatter(
    comm: Comm, output: Tensor, tensors: Tensors, by: TensorReduction, seconds: float
) -> None:
    lengths, x = [tensor.numel() for tensor in tensors], torch.cat([*map(row, tensors)])
    if len({*lengths}) == 1 and len(lengths) == comm.size:
        reduce_scatter_single(comm, output, x, by, seconds)
        return
    out = row(output)
    source, op, result = by.given(x, out)
    comm.reduce_scatterv(source, lengths, op, result, timeout=seconds)
    by.finish(result, out)
    land(output, out)


def reduce_scatter_single(
    comm: Comm, output: Tensor, tensor: Tensor, by: TensorReduction, seconds: float
) -> None:
    out = row(output)
    source, op, result = by.given(rows(tensor, comm.size), out)
    comm.reduce_scatter(source, op, result, timeout=seconds)
    by.finish(result, out)
    land(output, out)


def broadcast(comm: Comm, tensor: Tensor, root: int, seconds: float) -> None:
    x = row(tensor)
    comm.broadcast(movable(x), root, timeout=seconds)
    land(tensor, x)


# Lists of tensors of one length go as one array, which costs a copy, and less than pycoll's lists.


def all_gather(comm: Comm, outputs: Tensors, tensor: Tensor, seconds: float) -> None:
    if len({output.numel() for output in outputs}) == 1:
        out = _whole(outputs, comm.size)
        all_gather_single(comm, out, tensor, seconds)
    else:
        out = [row(output) for output in outputs]
        comm.all_gatherv(movable(row(tensor)), [*map(movable, out)], timeout=seconds)
    _land_each(outputs, out)


def all_gather_single(comm: Comm, output: Tensor, tensor: Tensor, seconds: float) -> None:
    out = rows(output, comm.size)
    comm.all_gather(movable(row(tensor)), movable(out), timeout=seconds)
    land(output, out)


def gather(comm: Comm, outputs: Tensors, tensor: Tensor, root: int, seconds: float) -> None:
    out = _whole(outputs, comm.size) if comm.rank == root else None
    into = None if out is None else movable(out)
    comm.gather(movable(row(tensor)), root, into, timeout=seconds)
    if out is not None:
        _land_each(outputs, out)


def scatter(comm: Comm, output: Tensor, tensors: Tensors, root: int, seconds: float) -> None:
    x, out = None, row(output)
    if comm.rank == root:
        _check_alike(tensors, comm.size)
        x = torch.stack([movable(row(tensor)) for tensor in tensors])
    comm.scatter(x, root, movable(out), timeout=seconds)
    land(output, out)


def _whole(tensors: Tensors, size: int) -> Tensor:
    """Return a new tensor with a row for each of so many tensors of one length."""
    _check_alike(tensors, size)
    return tensors[0].data.new_empty((size, tensors[0].numel()))


def _check_alike(tensors: Tensors, size: int) -> None:
    lengths = [tensor.numel() for tensor in tensors]
    if len(lengths) != size or len({*lengths}) != 1:
        raise ValueError(f"{size} tensors of one length are needed; these have {lengths} elements")


def _land_each(tensors: Tensors, filled: Tensors) -> None:
    for tensor, elements in zip(tensors, filled, strict=True):
        land(tensor, elements)


def all_to_all(comm: Comm, outputs: Tensors, tensors: Tensors, seconds: float) -> None:
    out = [row(output) for output in outputs]
    xs = [movable(row(tensor)) for tensor in tensors]
    comm.all_to_allv(xs, [*map(movable, out)], timeout=seconds)
    _land_each(outputs, out)


def all_to_all_single(
    comm: Comm,
    output: Tensor,
    tensor: Tensor,
    output_lengths: Sequence[int],
    input_lengths: Sequence[int],
    seconds: float,
) -> None:
    """Exchange parts of a tensor: so many of its rows with each rank; []: as many with each."""
    out = row(output)
    parts = _parts(row(tensor), tensor, input_lengths, comm.size)
    all_to_all(comm, _parts(out, output, output_lengths, comm.size), parts, seconds)
    land(output, out)


def _parts(flat: Any, tensor: Tensor, lengths: Sequence[int], size: int) -> Sequence[Any]:
    """Divide the row of a tensor by numbers of indices along its first axis."""
    if not lengths:
        return list(rows(flat, size))
    if len(lengths) != size or sum(lengths) != len(tensor):
        raise ValueError(f"{lengths} do not divide {len(tensor)} rows among {size} ranks")
    of_one = flat.numel() // max(1, len(tensor))
    parts: Sequence[Any] = flat.split([length * of_one for length in lengths])
    return parts


def each(comm: Comm, call: Callable[..., None], outs: Tensors, xs: Tensors, *args: Any) -> None:
    """Make a call for each of several outputs and inputs."""
    for out, x in zip(outs, xs, strict=True):
        call(comm, out, x, *args)
