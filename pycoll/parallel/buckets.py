"""Buckets: many arrays in few flat ones, so that few large messages carry them.

A collective costs a latency for each call, and a network has six layers, or six hundred. The flat
arrays here own the memory; each of the many arrays is a view of its part. Who writes gradients into
the views has packed them, without a copy.

Source: S. Li et al., PyTorch Distributed, VLDB 2020, section 3.2.2 (gradient bucketing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pycoll._support.public_edge import edge, edges


@edges
class Buckets:
    """Flat arrays, and in them a view for each of many arrays.

    Arrays of one dtype (and device) that follow each other share a bucket, until it would have
    more than `nbytes` bytes. A bucket has one array at least; so with ``nbytes=0`` each array has
    its own. The memory is new, and zero: nothing is copied from `arrays`.

    Attributes:
        flats: the buckets, each a contiguous array of one axis, NumPy's or PyTorch's as `arrays`.
        views: for each of `arrays`, in their order, a view of its part of a bucket, in its shape.
        bucket_of: for each of `arrays` the number of its bucket.
    """

    @edge
    def __init__(self, arrays: Iterable[Any], nbytes: int = 25 * 2**20) -> None:
        """Make buckets for arrays such as these.

        Args:
            arrays: NumPy arrays or PyTorch tensors, such as a network's parameters. Give them in
                the order in which their gradients are computed, the last layer's first: then the
                first bucket can travel while the rest is still computed.
            nbytes: limit of a bucket in bytes; the default is that of PyTorch's
                DistributedDataParallel.

        Raises:
            TypeError: `arrays` has something else.
            ValueError: `nbytes` is negative.
        """
        shaped = list(arrays)
        for array in shaped:
            if not (isinstance(array, np.ndarray) or hasattr(array, "new_zeros")):
                raise TypeError(
                    f"Buckets takes NumPy arrays and PyTorch tensors, not {type(array).__name__}"
                )
        if nbytes < 0:
            raise ValueError(f"Buckets(nbytes={nbytes}): a limit in bytes is at least 0")
        self.flats: list[Any] = []
        self.views: list[Any] = []
        self.bucket_of: list[int] = []
        for group in _groups(shaped, nbytes):
            flat = _zeros(group[0], sum(_count(array) for array in group))
            start = 0
            for array in group:
                stop = start + _count(array)
                self.views.append(flat[start:stop].reshape(tuple(array.shape)))
                self.bucket_of.append(len(self.flats))
                start = stop
            self.flats.append(flat)

    def pack(self, arrays: Sequence[Any]) -> None:
        """Copy `arrays` into the buckets: one copy; none of those that are the views themselves.

        Args:
            arrays: as many, of the same shapes, as the buckets were made for.

        Raises:
            ValueError: other shapes, or another number of them.
        """
        self._check(arrays)
        for view, array in zip(self.views, arrays, strict=True):
            if array is not view:
                view[...] = array

    def unpack(self, arrays: Sequence[Any]) -> None:
        """Copy what is in the buckets into `arrays`; see `pack`.

        Args:
            arrays: filled; as for `pack`.

        Raises:
            ValueError: other shapes, or another number of them.
        """
        self._check(arrays)
        for view, array in zip(self.views, arrays, strict=True):
            if array is not view:
                array[...] = view

    def _check(self, arrays: Sequence[Any]) -> None:
        """Before anything is copied."""
        wanted = [tuple(view.shape) for view in self.views]
        given = [tuple(array.shape) for array in arrays]
        if len(given) != len(wanted):
            raise ValueError(f"{len(given)} arrays for buckets of {len(wanted)}")
        for i, (one, other) in enumerate(zip(given, wanted, strict=True)):
            if one != other:
                raise ValueError(f"array {i} has the shape {one}, that of the bucket {other}")


def _groups(arrays: Sequence[Any], nbytes: int) -> list[list[Any]]:
    """The arrays of each bucket."""
    groups: list[list[Any]] = []
    room = 0
    for array in arrays:
        size = _count(array) * array.dtype.itemsize
        if not groups or _kind(groups[-1][0]) != _kind(array) or size > room:
            groups.append([])
            room = nbytes
        groups[-1].append(array)
        room -= size
    return groups


def _kind(array: Any) -> tuple[Any, ...]:
    return isinstance(array, np.ndarray), array.dtype, str(getattr(array, "device", "cpu"))


def _count(array: Any) -> int:
    """The number of elements: `size` is a method in PyTorch."""
    return int(np.prod(tuple(array.shape), dtype=np.int64))


def _zeros(like: Any, count: int) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(count, like.dtype)
    return like.detach().new_zeros(count)
