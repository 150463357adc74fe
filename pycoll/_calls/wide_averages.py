"""Averages of 16-bit floats by messages: added up as float32, which travels, and rounded once.

A sum of float16 leaves their range at 65504, where the average need not; and each sum of two would
be rounded to 11 bits, or to 8 of bfloat16. Dividing first would spoil small numbers: of a float16
below 2**-14, which has no more than the bits of its magnitude, each division by 2 loses one. Shared
memory adds all ranks in float32, too, so both ways differ in the order of additions alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pycoll._arrays import conversion, operators
from pycoll._arrays.operators import Op
from pycoll._arrays.value import Value
from pycoll._calls.group import Bound, Group, Numbered
from pycoll._calls.message_steps import pulled
from pycoll._dtypes import FLOAT32, Array, DType
from pycoll._runtime.task import CallSteps
from pycoll._transports._core import convert


def applies(op: Op | None, dtype: DType) -> bool:
    """Whether a reduction is such an average."""
    return op is operators.resolve("avg") and dtype.itemsize == 2


def memory(shape: tuple[int, ...]) -> Value:
    """Return new float32 of a shape."""
    return Value(np.empty(shape, np.float32), FLOAT32, "numpy")


def widen(dtype: DType, array: Array, into: Array) -> None:
    """Write 16-bit floats to float32, of the same shape and C-contiguous."""
    if array.size:
        convert(False, dtype.code, into, conversion.operand(array))


def narrow(dtype: DType, wide: Array, into: Array) -> None:
    """Round float32 to 16-bit floats, of the same shape and C-contiguous, both."""
    if wide.size:
        convert(True, dtype.code, into, wide)


def run(
    group: Group,
    call: Numbered,
    subcall: int,
    x: Value,
    result: Array | None,
    bind: Callable[[Value, Array | None], Bound],
) -> CallSteps:
    """Run a reduction as a part of a call.

    Args:
        group: the communicator's ranks.
        call: that it is a part of, from `subcall` on.
        x: this rank's value.
        result: gets the result; None: this rank has none.
        bind: returns the schedule, with its memory in the two that it gets for x and `result`.
    """
    yield from pulled(group, x)
    wide = memory(x.array.shape)
    widen(x.dtype, x.array, wide.array)
    total = memory(result.shape).array if result is not None else None
    bound = bind(wide, total)
    yield from bound.run(group, call, subcall)
    has_result = bound.how[0] != "exscan" or group.rank > 0
    if total is not None and result is not None and has_result:
        narrow(x.dtype, total, result)
