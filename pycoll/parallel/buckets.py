"""Buckets: many arrays in few flat ones, so that few large messages carry them.

The flat arrays own the memory; each of the many arrays is a view of its part. Who writes gradients
into the views has packed them, without a copy.

Source: S. Li et al., PyTorch Distributed, VLDB 2020, section 3.2.2 (gradient bucketing).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pycoll._support.checks import check_nbytes
from pycoll._support.public_edge import edge
from pycoll._support.wording import a_kind


class Buckets:
    """Flat arrays, and in them a view for each of many arrays.

    Arrays of one dtype (and device) that follow each other share a bucket, until it would have
    more than `nbytes` bytes. A bucket has one array at least; so with ``nbytes=0`` each array has
    its own. The memory is new, and zero: nothing is copied from `arrays`.

    Args:
        arrays: NumPy arrays or PyTorch tensors, such as a network's parameters. Give the last
            layer's first, as gradients are computed: then the first bucket can travel meanwhile.
        nbytes: limit in bytes; the default is that of PyTorch's DistributedDataParallel.

    Attributes:
        flats: the buckets, each a contiguous array of one axis, NumPy's or PyTorch's as `arrays`.
        views: for each of `arrays`, in their order, a view of its part of a bucket, in its shape.
        bucket_of: for each of `arrays` the number of its bucket.
    """

    @edge
    def __init__(self, arrays: Iterable[Any], nbytes: float = 25 * 2**20) -> None:
        check_nbytes(nbytes)
        if not isinstance(arrays, Iterable):
            raise TypeError(f"Buckets takes several arrays, not {a_kind(arrays)}")
        groups: list[list[Any]] = []
        self.bucket_of: list[int] = []
        last, room = None, 0.0
        for array in arrays:
            kind = _kind(array)
            if kind != last or _size(array) * array.dtype.itemsize > room:
                groups.append([])
                last, room = kind, nbytes
            groups[-1].append(array)
            room -= _size(array) * array.dtype.itemsize
            self.bucket_of.append(len(groups) - 1)
        self.flats = [_zeros(group[0], sum(map(_size, group))) for group in groups]
        self.views: list[Any] = []
        for flat, group in zip(self.flats, groups, strict=True):
            start = 0
            for array in group:
                stop = start + _size(array)
                self.views.append(flat[start:stop].reshape(tuple(array.shape)))
                start = stop


def _kind(array: Any) -> tuple[Any, ...]:
    is_numpy = isinstance(array, np.ndarray)
    if not (is_numpy or hasattr(array, "new_zeros")):
        raise TypeError(f"Buckets takes NumPy arrays and PyTorch tensors, not {a_kind(array)}")
    return is_numpy, array.dtype, str(getattr(array, "device", "cpu"))


def _size(array: Any) -> int:
    return math.prod(array.shape)


def _zeros(like: Any, size: int) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(size, like.dtype)
    return like.detach().new_zeros(size)
