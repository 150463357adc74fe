"""A user's array as a `Value`: a NumPy array over the same memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from pycoll._cuda.staging import Stage
    from pycoll._dtypes import Array, DType
else:  # for arrays
    np = LazyModule("numpy")

ON_GPU = "cuda:"


class Value:
    """A user's array, seen as a NumPy array.

    Attributes:
        array: the elements, any strides, of dtype `dtype.storage`; the user's own memory.
        dtype: the element type.
        kind: what `unwrap` makes of it (see the module).
        original: the user's object if `unwrap` shall return that very object, else None. It
            also keeps the memory alive.
        stage: of an array on a GPU, whose staging buffer `array` is.
        gpu: number of the GPU on which it is, or where a result of it shall be.
        is_target: the user wants it written to, and its library is told when that is done.
    """

    # No dataclass: the import of dataclasses takes a rank without NumPy 5 ms.
    __slots__ = ("array", "dtype", "gpu", "is_target", "kind", "original", "stage")

    def __init__(
        self,
        array: Array,
        dtype: DType,
        kind: str,
        original: object = None,
        stage: Stage | None = None,
        gpu: int | None = None,
        is_target: bool = False,
    ) -> None:
        self.array = array
        self.dtype = dtype
        self.kind = kind
        self.original = original
        self.stage = stage
        self.gpu = gpu
        self.is_target = is_target

    def follow(self, x: Value) -> None:
        """Write to it, on a GPU, only what comes after all of `x`, of the same memory, was read."""
        if self.stage is not None and x.stage is not None:
            self.stage.follow(x.stage)

    @property
    def place(self) -> Array:
        """The addresses of the elements where the user has them; only to be compared."""
        return self.array if self.stage is None else self.stage.place


def type_name(x: object) -> str:
    """Return what messages call the type of a value."""
    if "numpy" in sys.modules and isinstance(x, np.ndarray) and x.dtype.hasobject:
        return "numpy.ndarray of Python objects"
    module, name = type(x).__module__, type(x).__qualname__
    return name if module == "builtins" else f"{module}.{name}"
