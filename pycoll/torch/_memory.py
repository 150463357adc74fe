"""Tensors as pycoll takes them: rows of elements, in the tensor's own memory where that is one.

What is written to `tensor.data` is not counted for the tensor. So it is as with gloo and NCCL:
autograd does not take what it has kept for modified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp


def _dtypes(names: str) -> frozenset[Any]:
    """Those that this version of PyTorch has."""
    return frozenset(getattr(torch, name) for name in names.split() if hasattr(torch, name))


_FLOATS = _dtypes("float16 bfloat16 float32 float64 complex64 complex128")
_KNOWN = _FLOATS | _dtypes("bool uint8 uint16 uint32 uint64 int8 int16 int32 int64")
"""Dtypes that pycoll reduces; all others move as bytes."""

_FLOAT8 = _dtypes("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz")
"""They are reduced as float32."""

_OPERATORS = (
    *(("sum", ReduceOp.SUM), ("avg", ReduceOp.AVG), ("prod", ReduceOp.PRODUCT)),
    *(("min", ReduceOp.MIN), ("max", ReduceOp.MAX)),
    *(("band", ReduceOp.BAND), ("bor", ReduceOp.BOR), ("bxor", ReduceOp.BXOR)),
)


def row(tensor: Any) -> Any:
    """Return a tensor's elements one after the other: its own memory, or a copy (see `land`)."""
    x = tensor.data
    if x.is_neg() or x.is_conj():  # its memory holds other values than it shows
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.ndim == 1 else x.view(-1)


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


def movable(elements: Any) -> Any:
    """Return what pycoll takes for elements that only move."""
    return elements if elements.dtype in _KNOWN else elements.view(torch.uint8)


def bytes_of(elements: Any) -> Any:
    """Return what pycoll takes for a message: whoever receives it says what its bytes mean."""
    return elements.view(torch.uint8)


class TensorReduction:
    """A ReduceOp, and how so many ranks reduce by it.

    Attributes:
        name: of pycoll's operator.
        dtypes: of tensors that pycoll reduces so, without anything before or after it.
    """

    def __init__(self, op: Any, size: int) -> None:
        self._size, self._factor = size, None
        self.name: Any = next((name for name, other in _OPERATORS if op == other), "")
        self.dtypes = _FLOATS if self.name == "avg" else _KNOWN
        if not self.name:
            if op != ReduceOp.PREMUL_SUM:
                raise ValueError(f"pycoll does not know the operator {op}")
            self.name, self._factor, self.dtypes = "sum", op.factor, frozenset()

    def given(self, x: Any, out: Any) -> tuple[Any, Any, Any]:
        """Return what pycoll takes for x, for the operator, and for out.

        `out` may be x, or None on a rank that gets no result. `finish` follows.
        """
        if x.dtype in self.dtypes:
            return x, self.name, out
        source, result = x, out
        if x.dtype in _FLOAT8:
            source = x.float()
            if out is not None:
                result = source if out is x else torch.empty_like(out, dtype=source.dtype)
        if self._factor is not None:
            source = source * self._factor
        return source, "sum" if self.name == "avg" and _is_whole(x) else self.name, result

    def finish(self, result: Any, out: Any) -> None:
        """Bring the result to `out`."""
        if out is None or out.dtype in self.dtypes:
            return
        if result is not out:
            out.copy_(result)
        if self.name == "avg" and _is_whole(out):
            out.div_(self._size, rounding_mode="trunc")


def _is_whole(x: Any) -> bool:
    return not x.dtype.is_floating_point and not x.dtype.is_complex
