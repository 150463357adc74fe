"""The collectives of torch.distributed on tensors, each by blocking calls of a communicator.

Arguments are PyTorch's own, which has many things in lists of one, and last a deadline in seconds.
Whether a rank passes a list or one tensor, lengths or none, makes no difference to what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycoll import Communicator
from pycoll.torch._memory import TensorReduction as By
from pycoll.torch._memory import land, movable, row, rows

Tensors = Sequence[Any]
Lists = Sequence[Tensors]


class TensorCollectives:
    """Those of one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._size = comm, comm.size

    def barrier(self, seconds: float) -> None:
        self._comm.barrier(timeout=seconds)

    def all_reduce(self, tensors: Any, by: By, seconds: float) -> None:
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, by, seconds)
            return
        x = row(tensor)
        source, op, result = by.given(x, x)
        self._comm.all_reduce(source, op, result, timeout=seconds)
        by.finish(result, x)
        land(tensor, x)

    def all_reduce_each(self, tensors: Tensors, by: By, seconds: float) -> None:
        for tensor in tensors:
            self.all_reduce(tensor, by, seconds)

    def _all_reduce_sparse(self, tensor: Any, by: By, seconds: float) -> None:
        """Add up: the ranks' elements one after the other are a sparse tensor of the sum."""
        if by.name not in ("sum", "avg"):
            raise ValueError(f"sparse tensors are reduced by SUM and AVG, not by {by.name}")
        mine, gather = tensor.data.coalesce(), self._comm.all_gatherv
        # A row for each element: ranks may have different numbers of them.
        parts = (mine.indices().t().contiguous(), mine.values().contiguous())
        indices, values = (torch.cat(gather(part, timeout=seconds)) for part in parts)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total / self._size if by.name == "avg" else total)

    def reduce(self, tensors: Tensors, by: By, root: int, seconds: float) -> None:
        x, call = tensors[0], self._comm.reduce
        out = x if self._comm.rank == root else None
        self._reduce(call, row(x), out, by, root=root, timeout=seconds)

    def reduce_scatter(self, outputs: Tensors, lists: Lists, by: By, seconds: float) -> None:
        counts, x = [*map(torch.numel, lists[0])], torch.cat([*map(row, lists[0])])
        if len({*counts}) == 1:
            self.reduce_scatter_single(outputs[0], x, by, seconds)
        else:
            call = self._comm.reduce_scatterv
            self._reduce(call, x, outputs[0], by, counts=counts, timeout=seconds)

    def reduce_scatter_single(self, output: Any, x: Any, by: By, seconds: float) -> None:
        xs = rows(x, self._size)
        self._reduce(self._comm.reduce_scatter, xs, output, by, timeout=seconds)

    def _reduce(self, call: Any, x: Any, output: Any, by: By, **more: Any) -> None:
        out = None if output is None else row(output)
        source, op, result = by.given(x, out)
        call(source, op=op, out=result, **more)
        by.finish(result, out)
        if output is not None:
            land(output, out)

    def reduce_scatter_each(self, outputs: Tensors, xs: Tensors, by: By, seconds: float) -> None:
        _each(lambda output, x: self.reduce_scatter_single(output, x, by, seconds), outputs, xs)

    def broadcast(self, tensors: Any, root: int, seconds: float) -> None:
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        x = row(tensor)
        self._comm.broadcast(movable(x), root, timeout=seconds)
        land(tensor, x)

    # Tensors of one length in a list go as one: that costs a copy, and less than a list of arrays.

    def all_gather(self, lists: Lists, xs: Tensors, seconds: float) -> None:
        if len({*map(torch.numel, lists[0])}) == 1:
            out = self._whole(lists[0])
            self.all_gather_single(out, xs[0], seconds)
        else:
            out = [*map(row, lists[0])]
            self._comm.all_gatherv(movable(row(xs[0])), [*map(movable, out)], timeout=seconds)
        _each(land, lists[0], out)

    def all_gather_lists(self, lists: Lists, xs: Tensors, seconds: float) -> None:
        for outputs, x in zip(zip(*lists, strict=True), xs, strict=True):
            self.all_gather([outputs], [x], seconds)

    def all_gather_single(self, output: Any, x: Any, seconds: float) -> None:
        out = rows(output, self._size)
        self._comm.all_gather(movable(row(x)), movable(out), timeout=seconds)
        land(output, out)

    def all_gather_each(self, outputs: Tensors, xs: Tensors, seconds: float) -> None:
        _each(lambda output, x: self.all_gather_single(output, x, seconds), outputs, xs)

    def gather(self, lists: Lists, xs: Tensors, root: int, seconds: float) -> None:
        out = self._whole(lists[0]) if self._comm.rank == root else None
        into = None if out is None else movable(out)
        self._comm.gather(movable(row(xs[0])), root, into, timeout=seconds)
        if out is not None:
            _each(land, lists[0], out)

    def scatter(self, outputs: Tensors, lists: Lists, root: int, seconds: float) -> None:
        out = row(outputs[0])
        x = torch.stack([movable(row(tensor)) for tensor in lists[0]]) if lists else None
        self._comm.scatter(x, root, movable(out), timeout=seconds)
        land(outputs[0], out)

    def _whole(self, tensors: Tensors) -> Any:
        """Return a new tensor with a row for each of several, one for each rank."""
        lengths = [*map(torch.numel, tensors)]
        if len(lengths) != self._size or len({*lengths}) != 1:
            raise ValueError(f"not {self._size} tensors of one length, but {lengths} elements")
        return tensors[0].data.new_empty((self._size, lengths[0]))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, seconds: float) -> None:
        xs, out = [movable(row(tensor)) for tensor in inputs], [*map(row, outputs)]
        self._comm.all_to_allv(xs, [*map(movable, out)], timeout=seconds)
        _each(land, outputs, out)

    def all_to_all_single(self, output: Any, x: Any, to: Any, of: Any, seconds: float) -> None:
        """Exchange parts of a tensor, by lengths in output and x; []: as many with each rank."""
        out = row(output)
        places, parts = self._parts(out, output, to), self._parts(row(x), x, of)
        self.all_to_all(places, parts, seconds)
        land(output, out)

    def _parts(self, x: Any, tensor: Any, lengths: Sequence[int]) -> Any:
        """Divide the row of a tensor by numbers of indices along its first axis."""
        if not lengths:
            return rows(x, self._size)
        if len(lengths) != self._size or sum(lengths) != len(tensor):
            raise ValueError(f"{lengths} do not divide {len(tensor)} rows among {self._size} ranks")
        return x.split([length * (len(x) // max(1, len(tensor))) for length in lengths])


def _each(call: Callable[..., None], *lists: Any) -> None:
    for items in zip(*lists, strict=True):
        call(*items)
