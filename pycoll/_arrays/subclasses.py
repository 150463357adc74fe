"""Subclasses of NumPy's array: plain numbers, or numbers that mean more than they say.

A mask, a unit, a name: what such an array has beside its numbers would be lost if these alone were
sent, and numbers of different units would be added up. So it travels as an object, whole, and a
reduction by name refuses it.
"""

from __future__ import annotations

import copyreg
import functools
from typing import TYPE_CHECKING, Any, Final

from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from pycoll._dtypes import Array
else:  # who pickles objects alone needs no NumPy
    np = LazyModule("numpy")

_HOOKS: Final = (
    "__array_finalize__",
    "__array_function__",
    "__array_ufunc__",
    "__array_wrap__",
)
"""By these a class has a say in what becomes of its arrays; ndarray has them, too."""

_PICKLING: Final = ("__reduce__", "__reduce_ex__")

_NUMPYS_OWN: Final = frozenset(("_mmap", "filename", "mode", "offset", "_getitem"))
"""Attributes that np.memmap and np.matrix give their arrays."""


def means_more(x: Array) -> bool:
    """Return whether an array has more to it than its numbers.

    NumPy's own classes have not (memmap, matrix, recarray), but for masked arrays. Of others it
    counts what they are: a class that has a say in NumPy's operations, or has slots; an array that
    has attributes of its own.
    """
    kind: Any = type(x)
    if _is_of_numpy(kind):
        return False
    return _has_a_say(kind) or not _NUMPYS_OWN.issuperset(getattr(x, "__dict__", ()))


@functools.lru_cache(64)
def _has_a_say(kind: Any) -> bool:
    for base in kind.__mro__[: kind.__mro__.index(np.ndarray)]:
        own = vars(base)
        if not _is_of_numpy(base) and (own.get("__slots__") or any(name in own for name in _HOOKS)):
            return True
    return False


def _is_of_numpy(kind: type[Any]) -> bool:
    package, _, module = kind.__module__.partition(".")
    return package == "numpy" and module.partition(".")[0] != "ma"


def loses_attributes(kind: type[Any]) -> bool:
    """Return whether pickle takes the elements alone of such an array: its class is not prepared.

    Such are NumPy's own example of a subclass, and astropy's masked arrays,
    https://github.com/astropy/astropy/issues/19154.
    """
    its_own = [getattr(kind, name) is getattr(np.ndarray, name) for name in _PICKLING]
    return all(its_own) and kind not in copyreg.dispatch_table


def with_attributes(elements: Array, kind: type[Any], state: Any) -> Array:
    """Return an array of a subclass, with the attributes that `object.__getstate__` has found."""
    x: Array = np.ndarray.view(elements, kind)
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    if in_dict:
        vars(x).update(in_dict)
    for name, value in (in_slots or {}).items():
        setattr(x, name, value)
    return x
