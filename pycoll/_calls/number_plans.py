"""The plans of reductions of Python's numbers: bool, int, float and complex. They need no NumPy.

The core reduces numbers itself where it can (`_core/python/arguments/memory.h`); these plans are
for what it leaves, and tell it how calls go by messages. A bool, float or complex travels as an
array of no dimensions, which it may be on another rank.

Ints are exact, or an OverflowError on every rank. An int travels as an int64 and a mark, which says
whether it fits. So every rank takes the same way whatever its own int is, and all learn that one
does not fit. Where a reduction of both, in few numbers, has all that is needed, it is an all_reduce
of these (`MARKS`). For the others (products, which have any length, exclusive or, which loses
marks, and scans, whose marks must reach the lower ranks, too) every rank gathers all ints, and
combines them as Python does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from operator import and_, or_, xor
from typing import TYPE_CHECKING, Any, Final

from pycoll import schedules
from pycoll._calls import collectives
from pycoll._calls.call_plan import CallPlan, ResultOf, Route
from pycoll._calls.group import Bound, Group, How
from pycoll._calls.packings import INT64, Packing, packing_of
from pycoll._runtime.binding import Binding, ChunkPlace
from pycoll._selection.select import Choice
from pycoll._transports._core import KINDS, OPS, PARTS, int_error_text

if TYPE_CHECKING:
    from pycoll._calls.arguments import Target
    from pycoll._calls.shared_memory import ShmComm
    from pycoll._cuda.late_copies import LateCopies

MARKS: Final = {
    **{"sum": (0, 1), "min": (0, -1), "max": (0, 1), "band": (-1, 0), "bor": (0, 1)},
    **{"land": (0, 0), "lor": (0, 0), "lxor": (0, 0)},
}
"""By operator, the mark of an int that fits, and of one that does not.

Combined by that operator, marks are all of the first kind or give something else. Those of ints
that fit are also in _core/python/arguments/memory.c.
"""

GATHERED_MARKS: Final = 0, 1

FOLDS: Final[dict[str, Callable[[Sequence[int]], int]]] = {
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
"""The operators that take ints."""

INT_NBYTES: Final = 24
"""An int takes at most so many."""

_LOGICAL: Final = ("land", "lor", "lxor")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class NumberPlan(CallPlan[Any]):
    """A reduction of numbers, as one collective on a small array that is packed of them.

    Args:
        group, text, route: as of `CallPlan`.
        runs: the collective: a reduction or all_gather.
        choice: its algorithm.
        packing: of the numbers.
        shape: of the array.
        source: the array's bytes on this rank.
        target: where the result of `runs` comes to; None: nowhere on this rank.
        op: what combines; None: it is an all_gather.
        result: as of `CallPlan`.
        root: of `runs`.
        salt: of the call in shared memory (see `shared_memory.part_of`).
    """

    def __init__(
        self,
        group: Group,
        text: str,
        route: Route,
        runs: str,
        choice: Choice,
        packing: Packing,
        shape: tuple[int, ...],
        source: bytes,
        target: bytearray | None,
        op: str | None,
        result: ResultOf,
        root: int = 0,
        salt: int = 0,
    ) -> None:
        super().__init__(group, text, route=route, result=result)
        self._runs, self._choice, self._packing, self._shape = runs, choice, packing, shape
        self._op, self._root, self._salt = op, root, salt
        self._source = memoryview(source)
        self._target = memoryview(target) if target is not None else None

    def bind(self) -> Bound:
        """Return the schedule, with its memory in this plan."""
        how: How = (self._runs, self._choice)
        if self._runs in schedules.ROOTED:
            how = (*how, self._root)
        places, source, target = self._places(), self._source, self._target
        binding = Binding(
            nbytes=[nbytes for nbytes, _, _ in places],
            source=[None if at < 0 else (source[at : at + n],) for n, at, _ in places],
            target=[
                None if at < 0 or target is None else target[at : at + n] for n, _, at in places
            ],
            combine=self._reduction(),
        )
        return Bound(how, binding, self._packing.itemsize, places)

    def _places(self) -> list[ChunkPlace]:
        """Return where chunks are; see `collectives` for the same of arrays."""
        nbytes, rank, size = len(self._source), self.group.rank, self.group.size
        if self._op is None:
            return [(nbytes, 0 if i == rank else -1, i * nbytes) for i in range(size)]
        if self._runs == "exscan":
            return [(nbytes, 0, -1), (nbytes, -1, 0 if rank else -1)]
        itemsize = self._packing.itemsize
        count = schedules.find(self._runs, self._choice.name).chunks(size)
        ends = collectives.piece_ends(nbytes // itemsize, itemsize, count)
        at_target = self._target is not None
        return [(end - begin, begin, begin if at_target else -1) for begin, end in pairwise(ends)]

    def _reduction(self) -> tuple[int, int, int] | None:
        if self._op is None:
            return None
        rank = self.group.rank
        count = {"scan": rank + 1, "exscan": rank}.get(self._runs, self.group.size)
        has_finish = self._op == "avg" or (count == 1 and self._op in _LOGICAL)
        return OPS.index(self._op), self._packing.code, count if has_finish else 0

    def in_shared_memory(self, shm: ShmComm) -> None:
        op = OPS.index(self._op) if self._op is not None else 0
        what = KINDS.index(self._runs), self._packing.code, op, self._root, self._shape, self._salt
        shm.core.run(*what, self._source, self._target, len(self._source))


def plain(
    group: Group,
    text: str,
    route: Route,
    collective: str,
    choice: Choice,
    x: Any,
    op: str,
    root: int = 0,
) -> NumberPlan:
    """Prepare a reduction of `x`, a bool, float or complex number; `root` is that of a reduce."""
    packing = packing_of(x)
    assert packing is not None
    parts = (x.real, x.imag) if isinstance(x, complex) else (x,)
    source = struct.pack(packing.layout, *parts)
    has_result = collective != "reduce" or group.rank == root
    target = bytearray(len(source)) if has_result else None

    def result(got: Any, late: LateCopies) -> Any:
        """Return the combined number; None where there is none."""
        if target is None or (collective == "exscan" and group.rank == 0):
            return None
        parts = struct.unpack(packing.layout, target)
        return parts[0] if len(parts) == 1 else complex(*parts)

    array = packing, (), source, target
    return NumberPlan(group, text, route, collective, choice, *array, op, result, root)


class GatheredInts:
    """Ints of all ranks, as many on each, which every rank gathers.

    Args:
        xs: this rank's.
        op: name of what will combine them.
        size: number of ranks.
        fold: combines several of them; None: as the operator of that name.

    Attributes:
        mine: what this rank sends, for each int two int64.
        rows: where all ranks' come to.
    """

    def __init__(
        self,
        xs: Sequence[int],
        op: str,
        size: int,
        fold: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self.mine = b"".join([struct.pack("2q", *_marked(x, op, GATHERED_MARKS)) for x in xs])
        self.rows = bytearray(size * len(self.mine))
        self._xs, self._fold = xs, fold or FOLDS[op]

    def check(self, text: str) -> None:
        """Check that all ranks' ints fit.

        Raises:
            OverflowError: one does not; names the call whose text this is.
        """
        if any(self._numbers()[1::2]):
            raise _too_large(text, self._xs)

    def combined(self, place: int = 0, count: int | None = None) -> int | None:
        """Return the combination of the first `count` ranks' int at a place; None of no ints."""
        xs = self._numbers()[2 * place :: 2 * len(self._xs)][:count]
        return self._fold(xs) if xs else None

    def _numbers(self) -> list[int]:
        return memoryview(self.rows).cast("q").tolist()

    def result(self, text: str, place: int, out: Target | None, late: LateCopies) -> Any:
        """Return the combination of all ranks' int at a place, in `out` if there is one."""
        return _placed(text, self.combined(place), out, late)


def of_int(
    group: Group,
    text: str,
    route: Route,
    collective: str,
    choice: Choice,
    x: int,
    op: str,
    gathers: bool,
    out: Target | None,
    root: int = 0,
) -> NumberPlan:
    """Prepare a reduction of Python ints.

    Args:
        group, text, route, choice: as of `CallPlan`.
        collective: what the user has called.
        x: this rank's int.
        op: what combines.
        gathers: all ranks gather the ints; else it is an all_reduce.
        out: where the result goes; None: it is returned.
        root: of a reduce.
    """
    ints = GatheredInts([x], op, group.size) if gathers else None
    if ints is not None:
        runs, source, target = "all_gather", ints.mine, ints.rows
        shape: tuple[int, ...] = (1, 2)
    else:
        source = packed_int(x, op)
        runs, shape, target = "all_reduce", (len(source) // 8,), bytearray(len(source))

    def result(got: Any, late: LateCopies) -> Any:
        """Return the combined int.

        Raises:
            OverflowError: an int of any rank does not fit, or the result does not fit into `out`.
        """
        if ints is not None:
            ints.check(text)
            count = {"scan": group.rank + 1, "exscan": group.rank}.get(collective, group.size)
            total = ints.combined(count=count)
        else:
            *numbers, mark = memoryview(target).cast("q").tolist()
            if mark != MARKS[op][0]:
                raise _too_large(text, [x])
            total = numbers[0] if op != "sum" else numbers[0] + (numbers[1] << 32)
        if collective == "reduce" and group.rank != root:
            return None
        return _placed(text, total, out, late)

    # so also in _core/python/exchange/shared_methods.c
    called = KINDS.index(collective) << 24 | OPS.index(op) << 16 | root
    return NumberPlan(
        *(group, text, route, runs, choice, INT64, shape, source, target),
        *(None if gathers else op, result),
        salt=PARTS.index("ints") << 32 | called,
    )


def packed_int(x: int, op: str) -> bytes:
    """Return what is reduced for `x` by an operator of `MARKS`: the number and its mark.

    Of a sum there are two numbers, which cannot overflow: the lower 32 bits, and the others with
    the sign.
    """
    number, mark = _marked(x, op, MARKS[op])
    if op == "sum":
        return struct.pack("3q", number & 0xFFFFFFFF, number >> 32, mark)
    return struct.pack("2q", number, mark)


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
    """The error of a call of which some int does not fit; `mine`: this rank's."""
    wrong = [x for x in mine if not _LEAST <= x <= _MOST]
    which = f"the int {_shown(wrong[0])} of this rank" if wrong else None
    return OverflowError(int_error_text(text, which))


def _marked(x: int, op: str, marks: tuple[int, int]) -> tuple[int, int]:
    """Return what travels of an int, and its mark. Of a logical operator's it is its truth."""
    number = int(bool(x)) if op in _LOGICAL else int(x)
    return (number, marks[0]) if _LEAST <= number <= _MOST else (0, marks[1])


def _shown(x: int) -> str:
    return str(x) if x.bit_length() < 200 else f"of {x.bit_length()} bits"
