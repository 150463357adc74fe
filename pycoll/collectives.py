"""Collectives on arrays, as generators that the engine runs.

Each binds the chunks of a schedule to memory and runs it. The checks of the arguments are the
communicator's: everything here is the same on all ranks, or found out by the first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pycoll import arrays, ops, schedules
from pycoll.arrays import Value
from pycoll.dtypes import Array, DType
from pycoll.executor import Binding, Combine
from pycoll.group import Group
from pycoll.ops import Op
from pycoll.p2p import contiguous
from pycoll.task import CallSteps


class Reduction(NamedTuple):
    """An operator, and the algorithm that runs with it."""

    op: Op
    algorithm: str


def type_text(value: Value) -> str:
    """Return dtype and shape as a call's text shows them."""
    return f"{value.dtype}{list(value.array.shape)}"


def barrier(group: Group, call: bytes, algorithm: str) -> CallSteps:
    """Return when every rank has entered."""
    number = group.context.begin(call)
    nothing = memoryview(b"")
    binding = Binding(nbytes=[0], source=[(nothing,)], target=[None])
    schedule = group.schedule("barrier", algorithm)
    yield from group.run((number, 0), call, schedule, binding)
    group.context.end(number)


def all_reduce(
    group: Group, call: bytes, x: Value, reduction: Reduction, result: Array
) -> CallSteps:
    """Reduce into `result` (C-contiguous, x's shape) on every rank."""
    number = group.context.begin(call)
    count = schedules.find("all_reduce", reduction.algorithm).chunks(group.size)
    source, target = contiguous(x.array), result
    binding = Binding(
        nbytes=_lengths(pieces(target, count)),
        source=_sources(pieces(source, count)),
        target=list(pieces(target, count)),
        combine=combiner(reduction.op, x.dtype, x.array.shape),
    )
    schedule = group.schedule("all_reduce", reduction.algorithm)
    yield from group.run((number, 0), call, schedule, binding)
    group.context.end(number)
    ops.finish(reduction.op, x.dtype, result, group.size)


def reduce(
    group: Group, call: bytes, x: Value, reduction: Reduction, root: int, result: Array | None
) -> CallSteps:
    """Reduce into `result` (C-contiguous, x's shape) on the root; None elsewhere."""
    number = group.context.begin(call)
    count = schedules.find("reduce", reduction.algorithm).chunks(group.size)
    source = pieces(contiguous(x.array), count)
    binding = Binding(
        nbytes=_lengths(source),
        source=_sources(source),
        target=list(pieces(result, count)) if result is not None else [None] * count,
        combine=combiner(reduction.op, x.dtype, x.array.shape),
    )
    schedule = group.schedule("reduce", reduction.algorithm, root)
    yield from group.run((number, 0), call, schedule, binding)
    group.context.end(number)
    if result is not None:
        ops.finish(reduction.op, x.dtype, result, group.size)


def reduce_scatter(
    group: Group, call: bytes, x: Value, reduction: Reduction, result: Array
) -> CallSteps:
    """Reduce row r of all ranks' x (size, ...) into rank r's `result` (C-contiguous)."""
    number = group.context.begin(call)
    source = rows(contiguous(x.array))
    target: list[memoryview | None] = [None] * group.size
    target[group.rank] = arrays.as_bytes(result)
    binding = Binding(
        nbytes=_lengths(source),
        source=_sources(source),
        target=target,
        combine=combiner(reduction.op, x.dtype, x.array.shape[1:]),
    )
    schedule = group.schedule("reduce_scatter", reduction.algorithm)
    yield from group.run((number, 0), call, schedule, binding)
    group.context.end(number)
    ops.finish(reduction.op, x.dtype, result, group.size)


def gather(
    group: Group, call: bytes, x: Value, algorithm: str, root: int, result: Array | None
) -> CallSteps:
    """Gather into `result` (size, ...) on the root; None elsewhere."""
    yield from _gather_blocks(group, "gather", call, algorithm, root, x, result)


def all_gather(group: Group, call: bytes, x: Value, algorithm: str, result: Array) -> CallSteps:
    """Gather into `result` (size, ...) on every rank."""
    yield from _gather_blocks(group, "all_gather", call, algorithm, 0, x, result)


def _gather_blocks(
    group: Group,
    collective: str,
    call: bytes,
    algorithm: str,
    root: int,
    x: Value,
    result: Array | None,
) -> CallSteps:
    number = group.context.begin(call)
    own = arrays.as_bytes(contiguous(x.array))
    source: list[Any] = [None] * group.size
    source[group.rank] = (own,)
    binding = Binding(
        nbytes=[len(own)] * group.size,
        source=source,
        target=list(rows(result)) if result is not None else [None] * group.size,
    )
    schedule = group.schedule(collective, algorithm, root)
    yield from group.run((number, 0), call, schedule, binding)
    group.context.end(number)


def prefix(group: Group, call: bytes, x: Value, op: Op, count: int, result: Array) -> CallSteps:
    """Combine the x of the first `count` ranks into `result` (C-contiguous, x's shape)."""
    everything = np.empty((group.size, *x.array.shape), x.dtype.storage)
    algorithm = group.choose("all_gather", x.array.nbytes, None, native=False)
    yield from all_gather(group, call, x, algorithm, everything)
    if count:
        result[...] = everything[0, ...]
        for rank in range(1, count):
            ops.combine(op, x.dtype, result, everything[rank, ...], result)
        ops.finish(op, x.dtype, result, count)


def all_to_all(group: Group, call: bytes, x: Value, algorithm: str, result: Array) -> CallSteps:
    """Put row `rank` of rank i's x into row i of `result` (size, ...)."""
    number = group.context.begin(call)
    source, target = rows(contiguous(x.array)), rows(result)
    nothing: list[Any] = [None] * group.size
    binding = Binding(
        nbytes=_lengths([*source, *target]),
        source=[*_sources(source), *nothing],
        target=[*nothing, *target],
    )
    schedule = group.schedule("all_to_all", algorithm)
    yield from group.run((number, 0), call, schedule, binding)
    group.context.end(number)


def combiner(op: Op, dtype: DType, shape: tuple[int, ...]) -> Combine:
    """Return the reduction of byte views; whole arrays of `shape` if `op` is not elementwise."""
    storage = dtype.storage

    def combine(left: memoryview, right: memoryview, out: memoryview) -> None:
        operands = [np.frombuffer(view, storage) for view in (left, right, out)]
        if not op.elementwise:
            operands = [operand.reshape(shape) for operand in operands]
        ops.combine(op, dtype, *operands)

    return combine


def pieces(array: Array, count: int) -> list[memoryview]:
    """Cut a C-contiguous array into `count` byte views of nearly equal numbers of elements."""
    view = arrays.as_bytes(array)
    short, long = divmod(array.size, count)
    ends = [(i * short + min(i, long)) * array.itemsize for i in range(count + 1)]
    return [view[begin:end] for begin, end in pairwise(ends)]


def rows(array: Array) -> list[memoryview]:
    """Return byte views of the rows of a C-contiguous array."""
    view = arrays.as_bytes(array)
    nbytes = len(view) // len(array) if len(array) else 0
    return [view[i * nbytes : (i + 1) * nbytes] for i in range(len(array))]


def _lengths(views: Sequence[memoryview]) -> list[int | None]:
    return [len(view) for view in views]


def _sources(views: Sequence[memoryview]) -> list[Any]:
    return [(view,) for view in views]
