"""The plans of reductions of Python ints: exact, or an OverflowError on every rank.

An int travels as an int64 and a mark, which says whether it fits. So every rank takes the same way
whatever its own int is, and all learn that one does not fit. Where a reduction of both, in few
numbers, has all that is needed, it is an all_reduce of these (`MARKS`). For the others (products,
which have any length, exclusive or, which loses marks, and scans, whose marks must reach the lower
ranks, too) every rank gathers all ints, and combines them as Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import and_, or_, xor
from typing import Any, Final

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import user_operators
from pycoll._arrays.operators import Op
from pycoll._arrays.value import Value
from pycoll._calls import shared_memory_calls
from pycoll._calls.arguments import Target
from pycoll._calls.call_plan import Route
from pycoll._calls.group import Group
from pycoll._calls.scheduled import ArrayPlan
from pycoll._calls.shared_memory import ShmComm, part_of
from pycoll._cuda.late_copies import LateCopies
from pycoll._selection.select import Choice

MARKS: Final = {
    **{"sum": (0, 1), "min": (0, -1), "max": (0, 1), "band": (-1, 0), "bor": (0, 1)},
    **{"land": (0, 0), "lor": (0, 0), "lxor": (0, 0)},
}
"""By operator, the mark of an int that fits, and of one that does not.

Combined by that operator, marks are all of the first kind or give something else.
"""

GATHERED_MARKS: Final = 0, 1

_LOGICAL: Final = ("land", "lor", "lxor")

_FOLDS: Final[dict[str, Callable[[Sequence[int]], int]]] = {
    "sum": sum,
    "prod": math.prod,
    "min": min,
    "max": max,
    "band": partial(reduce, and_),
    "bor": partial(reduce, or_),
    "bxor": partial(reduce, xor),
    "land": min,  # of truths
    "lor": max,
    "lxor": partial(reduce, xor),
}

NBYTES: Final = 24
"""An int takes at most so many."""

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1

LIKE: Final = Value(np.zeros((), np.int64), dtypes.INT64, "int")
"""What an `out` for an int must look like."""


def is_int(x: object) -> bool:
    """Whether `x` is a Python int, and no bool."""
    return isinstance(x, int) and not isinstance(x, bool)


def packed(x: int, op: Op) -> Value:
    """Return what is reduced for `x` by an operator of `MARKS`.

    It has the number and its mark. Of a sum there are two numbers, which cannot overflow: the lower
    32 bits, and the others with the sign.
    """
    number, mark = _marked(x, op, MARKS[op.name])
    whole = [number & 0xFFFFFFFF, number >> 32, mark] if op.name == "sum" else [number, mark]
    return Value(np.array(whole, np.int64), dtypes.INT64, "numpy")


def unpacked(row: Sequence[int], op: Op) -> tuple[int, bool]:
    """Return the result of a reduction of packed ints, and whether all of these have fitted."""
    fits = row[-1] == MARKS[op.name][0]
    return (row[0] + (row[1] << 32) if op.name == "sum" else row[0]), fits


class GatheredInts:
    """Ints of all ranks, as many on each, which every rank gathers.

    Args:
        xs: this rank's.
        op: what will combine them.
        size: number of ranks.

    Attributes:
        mine: what this rank sends.
        rows: where all ranks' come to.
    """

    def __init__(self, xs: Sequence[int], op: Op, size: int) -> None:
        marked = [_marked(x, op, GATHERED_MARKS) for x in xs]
        self.mine = Value(np.array(marked, np.int64), dtypes.INT64, "numpy")
        self.rows = Target(None, self.mine, (size, *self.mine.array.shape))
        self._xs, self._op = xs, op

    def check(self, text: str) -> None:
        """Check that all ranks' ints fit.

        Raises:
            OverflowError: one does not; names the call whose text this is.
        """
        if self.rows.memory[..., 1].any():
            raise _too_large(text, self._xs)

    def combined(self, place: int = 0, count: int | None = None) -> int | None:
        """Return the combination of the first `count` ranks' int at a place; None of no ints."""
        xs = self.rows.memory[:count, place, 0].tolist()
        if not xs:
            return None
        op = self._op
        if callable(op.fn):
            total: int = reduce(partial(user_operators.call, op.fn, op.name), xs)
            return total
        return _FOLDS[op.name](xs)

    def result(self, text: str, place: int, out: Target | None, late: LateCopies) -> Any:
        """Return the combination of all ranks' int at a place, in `out` if there is one."""
        return _placed(text, self.combined(place), out, late)


class IntPlan(ArrayPlan):
    """A reduction of Python ints.

    Args:
        group, text, route, choice: as of `ArrayPlan`.
        x: this rank's int.
        op: what combines.
        ints: what is gathered; None: it is an all_reduce.
        out: where the result goes; None: it is returned.
        count: ranks whose ints are combined; None: this one gets no result.
    """

    __slots__ = ("_combined_by", "_count", "_int", "_ints", "_out")

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        choice: Choice,
        x: int,
        op: Op,
        ints: GatheredInts | None,
        out: Target | None,
        count: int | None,
    ) -> None:
        if ints is None:
            value = packed(x, op)
            target = Target(None, value, value.array.shape)
            super().__init__(group, text, route, "all_reduce", choice, value, target, op)
        else:
            super().__init__(group, text, route, "all_gather", choice, ints.mine, ints.rows)
        self._combined_by, self._count, self._int, self._ints, self._out = op, count, x, ints, out

    def in_shared_memory(self, shm: ShmComm) -> None:
        """Exchange them; other calls of the same exchange are told apart."""
        shared_memory_calls.exchange(shm, self, part_of("ints", self.text))

    def result(self, got: Any, late: LateCopies) -> Any:
        """Return the combined int.

        Raises:
            OverflowError: an int of any rank does not fit, or the result does not fit into `out`.
        """
        total: int | None
        if self._ints is not None:
            self._ints.check(self.text)
            total = self._ints.combined(count=self._count)
        else:
            assert self.target is not None
            total, fits = unpacked(self.target.memory.tolist(), self._combined_by)
            if not fits:
                raise _too_large(self.text, [self._int])
        return None if self._count is None else _placed(self.text, total, self._out, late)


def _placed(text: str, total: int | None, out: Target | None, late: LateCopies) -> Any:
    """Return a result, in `out` if there is one.

    Raises:
        OverflowError: it does not fit there.
    """
    if out is None or total is None:
        return total
    if not _LEAST <= total <= _MOST:
        raise OverflowError(
            f"{text}: the result {_shown(total)} does not fit into out, which is int64. "
            "Leave out away: the result that is returned may be any int."
        )
    out.memory[...] = total
    return out.result(late)


def _too_large(text: str, mine: Sequence[int]) -> OverflowError:
    """Return the error of a call of which some int does not fit; `mine`: this rank's."""
    wrong = [x for x in mine if not _LEAST <= x <= _MOST]
    which = f"the int {_shown(wrong[0])} of this rank" if wrong else "an int of another rank"
    return OverflowError(
        f"{text}: {which} does not fit into 64 bits, -2**63 to 2**63 - 1. Pass floats, or "
        "write all_reduce(x, lambda a, b: a + b): functions get ints of any size."
    )


def _marked(x: int, op: Op, marks: tuple[int, int]) -> tuple[int, int]:
    """Return what travels of an int, and its mark. Of a logical operator's it is its truth."""
    number = int(bool(x)) if op.name in _LOGICAL else int(x)
    return (number, marks[0]) if _LEAST <= number <= _MOST else (0, marks[1])


def _shown(x: int) -> str:
    return str(x) if x.bit_length() < 200 else f"of {x.bit_length()} bits"
