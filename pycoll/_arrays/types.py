"""The types in public signatures, for editors and type checkers; no program imports them.

An array comes back as the kind of array that was passed in, a number as a number of its type, and
gathered objects as a list.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np

from pycoll._arrays.operators import Op


class _DLPack(Protocol):
    """An array of any library that lends its memory: of NumPy, PyTorch, CuPy or JAX."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


T = TypeVar("T")
"""Any value."""

A = TypeVar("A", bound="_DLPack | memoryview | array.array[Any]")
"""An array."""

D = TypeVar("D", bound=np.dtype[Any])
"""The dtype of a NumPy array, whose type has its number of axes, too."""

MaybeNone: TypeAlias = Any
"""None on some ranks: those that know on which need not ask."""


class How(TypedDict, total=False):
    """What every collective may be told beside its values."""

    algorithm: str | None
    timeout: float | None


Operator: TypeAlias = Literal[
    "sum",
    "prod",
    "min",
    "max",
    "avg",
    "band",
    "bor",
    "bxor",
    "land",
    "lor",
    "lxor",
    "minloc",
    "maxloc",
]

Reducer: TypeAlias = Operator | Op | Callable[[Any, Any], Any]
