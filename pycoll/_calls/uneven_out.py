"""Where the blocks of gatherv, all_gatherv, scatterv and all_to_allv go: the caller's `out`.

Nobody knows the shapes of the others' blocks before these have come. So what is wrong with `out` by
itself is found before the call, and what does not fit a block after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from pycoll._arrays import conversion
from pycoll._arrays.value import Value
from pycoll._calls import arguments, blocks
from pycoll._calls.blocks import Head
from pycoll._cuda.late_copies import LateCopies
from pycoll._dtypes import DType


class Shape(NamedTuple):
    """Dtype and shape of a block."""

    dtype: DType
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class BlockTargets:
    """The places of the blocks that a rank receives, by their index.

    Args:
        out: None: the blocks get new memory; a list of arrays, or of None; or one array, in which
            they stand one after the other along its leading axis.
        count: how many blocks there are.
        dtype: of all of them; None: that is not known yet.
        known: the blocks that are known already, by index.
        sent: what is read meanwhile, so that `out` must not overlap it.

    Raises:
        TypeError: `out`, or an item of it, is no array.
        ValueError: it has another length; an item is read-only, of another dtype, overlaps what is
            sent, or has another shape than the block that is known.
    """

    def __init__(
        self,
        out: Any,
        count: int,
        dtype: DType | None,
        known: Mapping[int, Value],
        sent: Sequence[Value],
    ) -> None:
        self._gpu = conversion.here()
        self._out = out
        self._whole: Value | None = None
        self._items: list[Value | None] = [None] * count
        self._places: list[Value | None] = [None] * count
        if out is None:
            return
        if isinstance(out, list | tuple):
            if len(out) != count:
                raise ValueError(
                    f"out is a list of {count} arrays, one for each rank; it has {len(out)}"
                )
            self._items = [self._check(item, dtype, sent) for item in out]
            for index, value in known.items():
                self._compare(index, _shape(value))
            return
        self._whole = whole = self._check(out, dtype, sent)
        assert whole is not None
        if whole.array.ndim == 0:
            raise ValueError(
                "out has no axes. Pass one array in which the blocks stand one after the other, or "
                "a list of arrays."
            )
        for value in known.values():
            self._compare_rows(_shape(value))
            if len(value.array) > len(whole.array):
                raise ValueError(
                    f"out has {len(whole.array)} rows, but this rank's block alone has "
                    f"{len(value.array)}. Pass an array with as many as all blocks together."
                )

    def copied(self, index: int, x: Value) -> Value:
        """Return a block of this rank's own as its caller gets it: never the memory passed in."""
        place = self._places[index] or self._item_for(index, _shape(x))
        if place is None:
            return blocks.copied(x)
        place.array[...] = x.array
        return place

    def places(self, heads: Sequence[Head]) -> list[Value | None]:
        """Return host memory for each of the blocks: that of `out` where they can come there."""
        if self._whole is None:
            self._places = [self._item_for(i, _shape(head)) for i, head in enumerate(heads)]
        elif self._whole.stage is None and self._whole.array.flags.c_contiguous:
            with contextlib.suppress(ValueError):  # `finish` raises it, after the call
                self._places = list(self._cut(self._whole, list(map(_shape, heads))))
        return self._places

    def finish(self, values: Sequence[Value], late: LateCopies) -> list[Any]:
        """Return what the caller gets, of the blocks that have come; `late` gets its copies.

        Raises:
            ValueError: `out` does not fit them.
        """
        if self._out is None:
            return [self._unwrapped(value, late) for value in values]
        shapes = list(map(_shape, values))
        if self._whole is None:
            for index, shape in enumerate(shapes):
                self._compare(index, shape)
            return [
                self._unwrapped(value, late) if item is None else _filled(item, value, late)
                for item, value in zip(self._items, values, strict=True)
            ]
        for place, value in zip(self._cut(self._whole, shapes), values, strict=True):
            if not _is_same_memory(place, value):
                place.array[...] = value.array
        conversion.unwrap(self._whole, late)  # on its GPU, if it is there
        return [self._out[a:b] for a, b in pairwise(_ends(shapes))]

    def _check(self, item: Any, dtype: DType | None, sent: Sequence[Value]) -> Value | None:
        if item is None:
            return None
        value = arguments.fillable_out(item)
        assert value is not None
        if dtype is not None:
            conversion.check_fits(value, dtype, value.array.shape)
        if any(conversion.overlap(value.place, x.place) for x in sent):
            raise ValueError("out overlaps x, which is being sent. Pass arrays of their own.")
        return value

    def _compare(self, index: int, shape: Shape) -> None:
        item = self._items[index]
        if item is not None and _shape(item) != shape:
            raise ValueError(
                f"{self._name(index)} is {_shape(item)}, but the block is {shape}. Pass an array "
                "of that dtype and shape, or None to get a new one."
            )

    def _name(self, index: int) -> str:
        return f"out[{index}]"

    def _compare_rows(self, shape: Shape) -> None:
        assert self._whole is not None
        dtype, (_, *rest) = _shape(self._whole)
        if shape.dtype != dtype or not shape.shape or list(shape.shape[1:]) != rest:
            raise ValueError(
                f"out is {_shape(self._whole)}, and a block is {shape}: blocks are put one after "
                "the other into rows of one shape. Pass a list of arrays for other blocks."
            )

    def _item_for(self, index: int, shape: Shape) -> Value | None:
        """Return the item that a block can come to directly."""
        item = self._items[index]
        if item is None or item.stage is not None or _shape(item) != shape:
            return None
        return item if item.array.flags.c_contiguous else None

    def _cut(self, whole: Value, shapes: Sequence[Shape]) -> Sequence[Value]:
        """Return the rows of `out` of each block."""
        for shape in shapes:
            self._compare_rows(shape)
        ends = _ends(shapes)
        if ends[-1] != len(whole.array):
            raise ValueError(
                f"out has {len(whole.array)} rows, but the blocks have {ends[-1]} together. Pass "
                "an array with exactly as many."
            )
        return [Value(whole.array[a:b], whole.dtype, whole.kind) for a, b in pairwise(ends)]

    def _unwrapped(self, value: Value, late: LateCopies) -> Any:
        value.gpu = self._gpu if value.gpu is None else value.gpu
        return conversion.unwrap(value, late)


class BlockTarget(BlockTargets):
    """The place of the one block that a rank receives: `out` is an array of its shape, or None."""

    def __init__(
        self, out: Any, dtype: DType | None, known: Value | None, sent: Sequence[Value]
    ) -> None:
        items = [out] if out is not None else None
        super().__init__(items, 1, dtype, {0: known} if known is not None else {}, sent)

    def _name(self, index: int) -> str:
        return "out"


def _shape(value: Value | Head) -> Shape:
    return Shape(value.dtype, value.array.shape if isinstance(value, Value) else value.shape)


def _ends(shapes: Sequence[Shape]) -> list[int]:
    return list(accumulate((shape.shape[0] for shape in shapes), initial=0))


def _is_same_memory(place: Value, value: Value) -> bool:
    return place.array is value.array or (
        place.array.__array_interface__["data"] == value.array.__array_interface__["data"]
        and place.array.strides == value.array.strides
    )


def _filled(item: Value, value: Value, late: LateCopies) -> Any:
    if item is not value:
        item.array[...] = value.array
    return conversion.unwrap(item, late)
