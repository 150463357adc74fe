"""The algorithm `shared_memory` on arrays whose arguments were checked."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll import schedules
from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import on_gpus
from pycoll._calls.shared_memory import BY_MESSAGES, ShmComm
from pycoll._support.lazy_import import LazyModule
from pycoll._transports._core import KINDS, OPS

if TYPE_CHECKING:
    from pycoll import _dtypes as dtypes
    from pycoll._arrays.operators import Op
    from pycoll._calls.scheduled import ArrayPlan
    from pycoll._cuda.copies import GpuCopy, Push
    from pycoll._dtypes import Array, DType
else:  # who broadcasts objects alone needs no NumPy
    dtypes = LazyModule("pycoll._dtypes")

PIECES_AHEAD = 4
"""Pieces of an all_reduce that are on their way from the GPU at a time."""


def serves(op: Op, dtype: DType) -> bool:
    """Whether the core has this operator for this dtype."""
    return op.name in OPS and not callable(op.fn) and dtype.code > 0


def type_salt(dtype: DType) -> int:
    """Return what tells dtypes apart that have no code of their own; 0 for the others."""
    return zlib.crc32(dtypes.encode(dtype)) if dtype.code == 0 else 0


def run(shm: ShmComm, plan: ArrayPlan) -> Any:
    """Run a collective on arrays. Returns None, or BY_MESSAGES if all ranks would rather offer."""
    if plan.op is None:
        return move(shm, plan.collective, plan.x, plan.memory, plan.root, plan.offers)
    if plan.may_use_gpus:
        if _reduce(shm, plan, wants=plan.reduction is not None):
            assert plan.reduction is not None, "it has voted for that"
            if not on_gpus.in_shared_memory(shm, plan.group, plan.reduction):
                _reduce(shm, plan, None)
    elif plan.in_pieces:
        _reduce(shm, plan, None)
    else:
        combine(shm, plan.collective, plan.x, plan.memory, plan.op, plan.root)
    return None


def _reduce(shm: ShmComm, plan: ArrayPlan, wants: bool | None) -> bool:
    """Reduce in this memory what the core has; with `wants` the ranks ask each other before.

    An all_reduce of which an array is on a GPU goes piece by piece (`PieceHook`), unless it is
    short. Another array on a GPU whose rank `wants` is not in host memory yet; it comes if need be.

    Returns whether all ranks want it elsewhere; nothing is done then.
    """
    assert plan.op is not None
    x, op = plan.x, OPS.index(plan.op.name)
    hook: PieceHook | None = None
    if plan.in_pieces:
        assert plan.target is not None, "an all_reduce"
        hook = PieceHook(shm, x, plan.target.value)
    elif plan.reduction is not None and wants is None:
        _await_pull(shm, x, 0)
    bring = functools.partial(_await_pull, shm, x) if wants else None
    try:
        return _run(
            *(shm, plan.collective, x, plan.memory, op, plan.root),
            hook=hook or bring,
            wants=wants,
        )
    except BaseException:
        if hook is not None:
            hook.settle()
        raise


class PieceHook:
    """What an all_reduce of arrays on a GPU does between its pieces; called by the core.

    While a piece is reduced, those after it come from the GPU, and those before it go there.
    """

    def __init__(self, shm: ShmComm, x: Value, result: Value) -> None:
        self._native = shm
        self._pushed = 0
        self._pushes: list[GpuCopy | Push] = []
        self._source, self._target = x.stage, result.stage
        self._nbytes, self._piece = x.array.nbytes, shm.core.piece_nbytes

    def __call__(self, offset: int) -> None:
        engine = self._native.engine
        if self._target is not None and offset > self._pushed:
            self._pushes.append(self._target.push(engine, self._pushed, offset))
            self._pushed = offset
        if self._source is None:
            return
        ahead = range(offset, min(self._nbytes, offset + PIECES_AHEAD * self._piece), self._piece)
        from pycoll._cuda.copies import all_of

        copies = all_of(
            self._source.pull(engine, begin, min(self._nbytes, begin + self._piece))
            for begin in ahead
        )
        self._native.wait(copies[0])

    def settle(self) -> None:
        """Wait for copies under way: nothing is written later."""
        for push in self._pushes:
            push.settle()


def combine(
    shm: ShmComm, collective: str, x: Value, result: Array | None, op: Op, root: int = 0
) -> None:
    """Reduce `x`, which `op` serves, into the C-contiguous `result` (None: not on this rank)."""
    _run(shm, collective, x, result, OPS.index(op.name), root)


def move(
    shm: ShmComm,
    collective: str,
    x: Value,
    result: Array | None,
    root: int = 0,
    offers: bool = False,
    salt: int = 0,
) -> Any:
    """Run a collective that only moves data; `salt` as of `part_of`.

    With `offers`, x on a GPU is not in host memory yet, and this rank would rather offer it, by
    messages; returns BY_MESSAGES if all ranks would.
    """
    hook = functools.partial(_await_pull, shm, x) if offers else None
    return BY_MESSAGES if _run(shm, collective, x, result, 0, root, salt, hook) else None


def _await_pull(shm: ShmComm, x: Value, piece: int) -> None:
    """Not all ranks offer theirs: have `x` in host memory, whatever piece of it is wanted first."""
    assert x.stage is not None
    shm.wait(x.stage.pull(shm.engine))


def _run(
    shm: ShmComm,
    collective: str,
    x: Value,
    result: Array | None,
    op: int,
    root: int,
    salt: int = 0,
    hook: Callable[[int], None] | None = None,
    wants: bool | None = None,
) -> bool:
    array = (
        conversion.operand(x.array)
        if collective in schedules.REDUCING
        else conversion.contiguous(x.array)
    )
    split = collective in ("reduce_scatter", "all_to_all") and len(array)
    by_messages: bool = shm.core.run(
        KINDS.index(collective),
        x.dtype.code,
        op,
        root,
        array.shape,
        type_salt(x.dtype) + salt,
        conversion.as_bytes(array),
        conversion.as_bytes(result) if result is not None else None,
        array.nbytes // len(array) if split else array.nbytes,
        hook,
        wants,
    )
    return by_messages
