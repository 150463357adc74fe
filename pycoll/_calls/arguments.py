"""Checking what a user passes in, before anything is sent.

Every message says what is wrong and what to pass instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._arrays import conversion, operators, refusals
from pycoll._cuda.late_copies import LateCopies
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, MAX_TAG, PROC_NULL, Status
from pycoll._support import foreign_names
from pycoll._support.checks import check_int as check_int
from pycoll._support.wording import a_kind, with_article

if TYPE_CHECKING:
    from pycoll._arrays.types import Reducer
    from pycoll._arrays.value import Value
    from pycoll._dtypes import Array


class Target:
    """Where a result goes: the caller's `out`, or new memory of x's kind.

    Attributes:
        array: the result, as the caller will see it.
        memory: the same, C-contiguous and aligned: what a call writes to.
        value: both, as a Value.
    """

    def __init__(self, out: Any, x: Value, shape: tuple[int, ...]) -> None:
        self._out = out
        self.value = (
            conversion.fresh(x.dtype, x.kind, shape, x.gpu)
            if out is None
            else conversion.check_out(out, x.dtype, shape)
        )
        self.array = self.value.array
        self.memory = conversion.operand(self.array)

    def check_overlap(self, x: Value, in_place: tuple[Array, Array] | None = None) -> None:
        """Refuse an `out` that overlaps x, unless two places `in_place` are the same memory."""
        if self._out is None or not conversion.overlap(self.value.place, x.place):
            return
        if in_place is None or not same_memory(*in_place):
            forms = (
                ", or one of the in-place forms: out=x if the shapes agree, x=out[rank] for "
                "all_gather, out=x[rank] (or this rank's rows) for reduce_scatter (reduce_scatterv)"
            )
            raise ValueError(
                f"out overlaps x. Pass an array of its own{forms if in_place is not None else ''}."
            )

    def result(self, late: LateCopies) -> Any:
        """Return what the caller gets, when the copies are done that `late` gets."""
        if self.memory is not self.array:
            self.array[...] = self.memory
        return conversion.unwrap(self.value, late)


def check_root(root: int, size: int) -> int:
    root = check_int(root, "root")
    if not 0 <= root < size:
        raise ValueError(f"root is {root}, but the ranks are 0 to {size - 1}")
    return root


def check_peer(rank: int, what: str, size: int) -> int:
    """Check a rank to send to or receive from; PROC_NULL is one."""
    rank = check_int(rank, what)
    if rank != PROC_NULL and not 0 <= rank < size:
        raise ValueError(f"{what} is {rank}, but the ranks are 0 to {size - 1}")
    return rank


def check_source(source: int, size: int) -> int:
    """Check a rank to receive from; ANY_SOURCE is one."""
    source = check_int(source, "source")
    return ANY_SOURCE if source == ANY_SOURCE else check_peer(source, "source", size)


def check_status(status: object) -> None:
    """Check what a receive shall fill in."""
    if status is not None and not isinstance(status, Status):
        raise TypeError(
            f"status is a pycoll.Status, not {with_article(conversion.type_name(status))}"
        )


def check_apart(x: Any, out: Value | None) -> None:
    """Refuse an `out` that overlaps what is sent at the same time."""
    value = conversion.wrap(x) if out is not None else None
    if value is not None and out is not None and conversion.overlap(value.place, out.place):
        raise ValueError("out overlaps x, which is being sent. Pass an array of its own.")


def check_objects(what: str, x: Any, size: int) -> None:
    """Check a list of one object a rank."""
    if not isinstance(x, list | tuple):
        raise TypeError(refusals.of_blocks(what, x, size))
    if len(x) != size:
        hint = refusals.TO_SPLIT if what == "scatter" and len(x) > size else ""
        raise ValueError(
            f"{what} takes a list of {size} objects, one for each rank; this one has {len(x)}{hint}"
        )


def split_value(what: str, x: Any, size: int) -> Value:
    """Return an array whose leading axis is the rank axis."""
    value = conversion.wrap(x)
    if value is None:
        raise TypeError(refusals.of_split(f"{what} takes an array (size, ...)", x))
    if value.array.ndim == 0 or len(value.array) != size:
        blocks = f". Blocks of any length: {foreign_names.OF_UNEVEN_BLOCKS[what]}"
        raise ValueError(
            f"{what}: the leading axis is the rank axis, so x has the shape "
            f"({size}, ...); this one has {value.array.shape}{blocks if value.array.ndim else ''}"
        )
    return value


def check_timeout(timeout: float, what: str) -> float:
    """Check a number of seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or NaN.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"{what} is a number of seconds, not {a_kind(timeout)}")
    if not timeout >= 0:
        raise ValueError(f"{what} is a number of seconds from 0 up, not {timeout}")
    return float(timeout)


def check_tag(tag: int, wildcard: bool = False) -> int:
    """Check a tag; ANY_TAG is one where a message is received."""
    tag = check_int(tag, "tag")
    if wildcard and tag == ANY_TAG:
        return tag
    if not 0 <= tag <= MAX_TAG:
        raise ValueError(f"tag is {tag}, but tags are 0 to {MAX_TAG}")
    return tag


def same_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays are the same elements at the same place."""
    return bool(
        a.shape == b.shape
        and a.dtype == b.dtype
        and (a.strides == b.strides or a.size <= 1)
        and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
    )


def reduces_objects(x: Any, op: Reducer) -> bool:
    """Whether a Python function combines `x` as it is, not as an array."""
    return not isinstance(op, str) and not _is_builtin(op) and conversion.wrap(x) is None


def _is_builtin(op: object) -> bool:
    return isinstance(op, operators.Op) and not callable(op.fn)


def no_out(out: Any) -> None:
    """Refuse `out` where the result is made of Python objects."""
    if out is not None:
        raise ValueError("out cannot be filled with Python objects; leave it out")


def fillable(x: Any) -> Value | None:
    """Return the array that a broadcast fills off root."""
    if x is None:
        return None
    value = conversion.wrap(x, writing=True)
    if value is None or value.kind in ("jax", "cuda:jax") or not value.place.flags.writeable:
        return None
    return conversion.wrap_target(x, "x")


def fillable_out(out: Any) -> Value | None:
    """Check as much of `out` as can be before its message has come."""
    return None if out is None else conversion.wrap_target(out)
