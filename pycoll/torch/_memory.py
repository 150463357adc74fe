"""Tensors as pycoll takes them: rows of elements, in the tensor's own memory where that is one.

What is written to `tensor.data` is not counted for the tensor. So it is as with gloo and NCCL:
autograd does not take what it has kept for modified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp


def _dtypes(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch, name) for name in names.split())


_FLOATS = _dtypes("float16 bfloat16 float32 float64 complex64 complex128")
_WHOLE = _dtypes("bool uint8 uint16 uint32 uint64 int8 int16 int32 int64")
_KNOWN = _FLOATS | _WHOLE  # to pycoll; all others move as bytes
# These are reduced as float32.
_FLOAT8 = _dtypes("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz")


def row(tensor: Any) -> Any:
    """Return a tensor's elements one after the other: its own memory, or a copy (see `land`)."""
    x = tensor.data
    if not x.is_contiguous() or x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg().contiguous()  # its memory holds what it shows
    return x if x.ndim == 1 else x.view(-1)


def tensors_of(filled: Any) -> list[Any]:
    """Return the tensors in a list, or in lists, or one that is passed bare."""
    if isinstance(filled, torch.Tensor):
        return [filled]
    return [tensor for each in filled for tensor in tensors_of(each)]


def rows(tensor: Any, count: int) -> Any:
    """Return the same in so many rows of one length."""
    x = row(tensor)
    if len(x) % count:
        raise ValueError(f"{len(x)} elements cannot be divided evenly among {count} ranks")
    return x.view(count, len(x) // count)


def land(tensor: Any, filled: Any) -> None:
    """Bring elements to a tensor, if they were filled in a copy of it."""
    if filled.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(filled.view(tensor.shape))


def movable(elements: Any) -> Any:
    """Return what pycoll takes for elements that only move."""
    return elements if elements.dtype in _KNOWN else elements.view(torch.uint8)


class TensorReduction:
    """How so many ranks reduce by a ReduceOp: pycoll's operator `name`, for `dtypes` no more."""

    def __init__(self, op: Any, size: int) -> None:
        known = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
        names = [name for name in known if op == getattr(ReduceOp, name)]
        if not names and op != ReduceOp.PREMUL_SUM:
            raise ValueError(f"pycoll does not know the operator {op}")
        self.name: Any = names[0].lower().replace("product", "prod") if names else "sum"
        self.dtypes = (_FLOATS if self.name == "avg" else _KNOWN) if names else frozenset()
        self._size, self._factor = size, None if names else op.factor

    def given(self, x: Any, out: Any) -> tuple[Any, Any, Any]:
        """Return what pycoll takes for x, operator, out (x, or None: no result); then `finish`."""
        if x.dtype in self.dtypes:
            return x, self.name, out
        source, result = x, out
        if x.dtype in _FLOAT8:
            source = x.float()
            result = None if out is None else torch.empty_like(out, dtype=torch.float32)
        if self._factor is not None:
            source = source * self._factor
        return source, "sum" if self.name == "avg" and x.dtype in _WHOLE else self.name, result

    def finish(self, result: Any, out: Any) -> None:
        """Bring the result to `out`."""
        if out is None or out.dtype in self.dtypes:
            return
        if result is not out:
            out.copy_(result)
        if self.name == "avg" and out.dtype in _WHOLE:
            out.div_(self._size, rounding_mode="trunc")
