"""Tensors as pycoll takes them: rows of elements, in the tensor's own memory where that is one.

What is written to `tensor.data` is not counted for the tensor. So it is as with gloo and NCCL:
autograd does not take what it has kept for modified.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp


def _dtypes(names: str) -> frozenset[Any]:
    """Those that this version of PyTorch has."""
    return frozenset(getattr(torch, name) for name in names.split() if hasattr(torch, name))


_FLOAT8 = _dtypes("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz")
"""They move, and are reduced as float32."""

_NUMPY = {
    getattr(torch, name): np.dtype(name).str
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Dtypes that NumPy has, too, and what it calls them."""

_OPERATORS = (
    *(("sum", ReduceOp.SUM), ("avg", ReduceOp.AVG), ("prod", ReduceOp.PRODUCT)),
    *(("min", ReduceOp.MIN), ("max", ReduceOp.MAX)),
    *(("band", ReduceOp.BAND), ("bor", ReduceOp.BOR), ("bxor", ReduceOp.BXOR)),
)


def row(tensor: Any) -> Any:
    """Return a tensor's elements one after the other: its own memory, or a copy (see `land`)."""
    return tensor.data.contiguous().view(-1)


def rows(tensor: Any, count: int) -> Any:
    """Return the same in so many rows of one length."""
    flat = row(tensor)
    length, rest = divmod(flat.numel(), count)
    if rest:
        raise ValueError(
            f"a tensor of {flat.numel()} elements cannot be divided evenly among {count} ranks"
        )
    return flat.view(count, length)


def land(tensor: Any, filled: Any) -> None:
    """Bring elements to a tensor, if they were filled in a copy of it."""
    if filled.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(filled.view(tensor.shape))


def array(elements: Any) -> Any:
    """Return what pycoll takes for elements that are moved or reduced."""
    name = _NUMPY.get(elements.dtype)
    if name is None and elements.dtype != torch.bfloat16:
        return array(elements.view(torch.uint8))
    if name is None or elements.is_cuda or not elements.numel():
        return elements
    return np.asarray(TensorMemory(elements, name))


class TensorMemory:
    """The memory of a contiguous tensor, for NumPy; what is made of it keeps the tensor.

    After `Tensor.numpy` a storage cannot be resized any more, as FSDP does.
    """

    def __init__(self, tensor: Any, dtype: str) -> None:
        self.tensor = tensor
        place = (tensor.data_ptr(), False)
        self.__array_interface__ = {
            "version": 3, "data": place, "shape": tuple(tensor.shape), "typestr": dtype
        }  # fmt: skip


def bytes_of(elements: Any) -> Any:
    """Return what pycoll takes for a message: whoever receives it says what its bytes mean."""
    return elements.view(torch.uint8)


class TensorReduction:
    """A ReduceOp, and how so many ranks reduce by it: pycoll's operator `name`, and more."""

    def __init__(self, op: Any, size: int) -> None:
        self._size = size
        self._factor = None
        self.name: Any = next((name for name, other in _OPERATORS if op == other), "")
        if not self.name:
            if op != ReduceOp.PREMUL_SUM:
                raise ValueError(f"pycoll does not know the operator {op}")
            self.name, self._factor = "sum", op.factor

    def is_plain(self, tensor: Any) -> bool:
        """Whether pycoll's operator is all."""
        is_averaged = self.name == "avg" or self._factor is not None
        return not (is_averaged or tensor.is_sparse or tensor.dtype in _FLOAT8)

    def run(self, call: Any, x: Any, out: Any) -> None:
        """Reduce x into out, which may be x, or None on a rank that gets no result.

        `call` takes an array, the name of an operator of pycoll's, and an array for the result.
        """
        name, dtype = self.name, x.dtype
        is_whole = not dtype.is_floating_point and not dtype.is_complex
        if is_whole and name == "avg":  # pycoll has averages of floats
            name = "sum"
        source = x if self._factor is None else x * self._factor
        result = out
        if dtype in _FLOAT8:
            source = source.float()
            if out is not None:
                result = source if out is x else torch.empty_like(out, dtype=source.dtype)
        given = array(source)
        call(given, name, given if result is source else None if result is None else array(result))
        if result is not out:
            out.copy_(result)
        if is_whole and self.name == "avg" and out is not None:
            out.div_(self._size, rounding_mode="trunc")
