"""The collectives of torch.distributed on tensors, each by blocking calls of a communicator.

The last argument of each is its deadline in seconds. Whether a rank passes a list or one tensor,
lengths or none, makes no difference to what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pycoll import Communicator as Comm
from pycoll.torch._memory import TensorReduction, array, land, row, rows

Tensor = Any
Tensors = Sequence[Tensor]


@contextmanager
def _filled(tensors: Tensors) -> Iterator[list[Any]]:
    """Give arrays to fill for tensors, which have what was filled in at the end."""
    places = [row(tensor) for tensor in tensors]
    yield [array(place) for place in places]
    for tensor, place in zip(tensors, places, strict=True):
        land(tensor, place)


def _arrays(tensors: Tensors) -> list[Any]:
    return [array(row(tensor)) for tensor in tensors]


def all_reduce(comm: Comm, tensor: Tensor, by: TensorReduction, seconds: float) -> None:
    if tensor.is_sparse:
        _all_reduce_sparse(comm, tensor, by, seconds)
        return
    x = row(tensor)
    by.run(lambda x, op, out: comm.all_reduce(x, op, out, timeout=seconds), x, x)
    land(tensor, x)


def all_reduce_many(comm: Comm, tensors: Tensors, by: TensorReduction, seconds: float) -> None:
    """Reduce several: by one call, where pycoll has the operator for all of them."""
    if not all(map(by.is_plain, tensors)):
        for tensor in tensors:
            all_reduce(comm, tensor, by, seconds)
        return
    with _filled(tensors) as xs:
        comm.all_reduce_many(xs, by.name, xs, timeout=seconds)


def _all_reduce_sparse(comm: Comm, tensor: Tensor, by: TensorReduction, seconds: float) -> None:
    """Add up: the ranks' elements one after the other are a sparse tensor of the sum."""
    if by.name not in ("sum", "avg"):
        raise ValueError(f"sparse tensors are reduced by SUM and AVG, not by {by.name}")
    mine = tensor.data.coalesce()
    # A row for each element: ranks may have different numbers of them.
    parts = (mine.indices().t().contiguous(), mine.values().contiguous())
    gathered = [comm.all_gatherv(array(part), timeout=seconds) for part in parts]
    indices, values = (torch.cat([torch.as_tensor(each) for each in of]) for of in gathered)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total / comm.size if by.name == "avg" else total)


def reduce(comm: Comm, tensor: Tensor, by: TensorReduction, root: int, seconds: float) -> None:
    x = row(tensor)
    out = x if comm.rank == root else None
    by.run(lambda x, op, out: comm.reduce(x, op, root, out, timeout=seconds), x, out)
    if out is not None:
        land(tensor, x)


def reduce_scatter(
    comm: Comm, output: Tensor, tensors: Tensors, by: TensorReduction, seconds: float
) -> None:
    x, out = torch.cat([row(tensor) for tensor in tensors]), row(output)
    counts = [tensor.numel() for tensor in tensors]
    by.run(lambda x, *args: comm.reduce_scatterv(x, counts, *args, timeout=seconds), x, out)
    land(output, out)


def reduce_scatter_single(
    comm: Comm, output: Tensor, tensor: Tensor, by: TensorReduction, seconds: float
) -> None:
    x, out = rows(tensor, comm.size), row(output)
    by.run(lambda x, op, out: comm.reduce_scatter(x, op, out, timeout=seconds), x, out)
    land(output, out)


def broadcast(comm: Comm, tensor: Tensor, root: int, seconds: float) -> None:
    x = row(tensor)
    comm.broadcast(array(x), root, timeout=seconds)
    land(tensor, x)


def all_gather(comm: Comm, outputs: Tensors, tensor: Tensor, seconds: float) -> None:
    with _filled(outputs) as out:
        comm.all_gatherv(array(row(tensor)), out, timeout=seconds)


def all_gather_single(comm: Comm, output: Tensor, tensor: Tensor, seconds: float) -> None:
    out = rows(output, comm.size)
    comm.all_gather(array(row(tensor)), array(out), timeout=seconds)
    land(output, out)


def gather(comm: Comm, outputs: Tensors, tensor: Tensor, root: int, seconds: float) -> None:
    with _filled(outputs) as out:
        comm.gatherv(array(row(tensor)), root, out or None, timeout=seconds)


def scatter(comm: Comm, output: Tensor, tensors: Tensors, root: int, seconds: float) -> None:
    with _filled([output]) as (out,):
        xs = _arrays(tensors) if comm.rank == root else None
        comm.scatterv(xs, root, out, timeout=seconds)


def all_to_all(comm: Comm, outputs: Tensors, tensors: Tensors, seconds: float) -> None:
    with _filled(outputs) as out:
        comm.all_to_allv(_arrays(tensors), out, timeout=seconds)


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
    places = _parts(out, output, output_lengths, comm.size)
    comm.all_to_allv(_arrays(parts), [array(place) for place in places], timeout=seconds)
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
