"""Python objects -> bytes and back: pickle protocol 5 with large buffers out of band.

    header    number of buffers, bytes of the pickle, bytes of each buffer (8 each, little-endian)
    pickle
    buffers   each begins at a multiple of 64 bytes from the start of the header

Small trees of plain values (dict, list, tuple, str, bytes, numbers, None) are pickled without a
pickler of ours, which would make the same bytes. Arrays inside an object are sent from where they
lie, and those of the loaded object lie in the received bytes: aligned, writable, and not copied.
What pickle cannot send, because no module has it under its name (a lambda, a class of a notebook),
cloudpickle sends with its code. Only load what an authenticated rank has sent: pickle runs code.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from pycoll._arrays.subclasses import loses_attributes, means_more, with_attributes
from pycoll._support import foreign_calls
from pycoll._support.lazy_import import LazyModule
from pycoll._transports._core import (
    load_object,
    object_parts,
    plain_object,
    reduce_object,
    use_reducer,
)

if TYPE_CHECKING:
    import numpy as np
else:  # for arrays inside an object, and when something may be wrong
    np = LazyModule("numpy")


_WRITEABLE, _WRITEABLE_OR_WARNS = 0x400, 0x80000400
"""Flags of NumPy's; of an array that warns when it is written to `writeable` would warn, too."""


def _reduce_other(obj: Any) -> Any:
    """Reduce what the core does not know as an array, or as none."""
    if "numpy" not in sys.modules:
        return NotImplemented
    if type(obj) is np.ndarray and "pycoll._arrays.libraries" not in sys.modules:
        importlib.import_module("pycoll._arrays.libraries")  # makes them known to the core
        return reduce_object(obj)
    if type(obj) in copyreg.dispatch_table:
        return NotImplemented
    if (
        type(obj) is np.ndarray
        and not obj.dtype.hasobject
        and not (obj.flags.num & _WRITEABLE_OR_WARNS == _WRITEABLE and obj.flags.forc)
    ):
        # pickle would mark the buffer of a read-only array read-only, and copy the elements
        # of a strided one twice; a contiguous copy goes out of band.
        return obj.copy(order="C").__reduce_ex__(5)
    if isinstance(obj, np.ndarray) and loses_attributes(type(obj)) and means_more(obj):
        return with_attributes, (np.asarray(obj), type(obj), object.__getstate__(obj))
    return NotImplemented


class _ArrayPickler(pickle.Pickler):
    """Sends every plain NumPy array so that it arrives writable and without a detour.

    Of arrays that mean more it sends all, also where their class has forgotten to say how.
    """

    reducer_override = staticmethod(reduce_object)


use_reducer(_reduce_other)


@functools.cache
def _pickler_by_value() -> Callable[..., Any]:
    """Return the same for functions and classes that other ranks cannot import."""
    # Not sooner: few programs need cloudpickle, and it takes as long as the interpreter.
    from pycoll._support import pickling

    class Pickler(pickling.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if _has_a_name(obj):
                return NotImplemented  # cloudpickle would copy whatever a script defines
            reduced = reduce_object(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return Pickler


def _has_a_name(obj: Any) -> bool:
    """Whether the script has this class or function under its name, as on the other ranks."""
    if not isinstance(obj, type | FunctionType) or obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, type | ModuleType) else None
    return found is obj


_REFUSALS = (pickle.PicklingError, TypeError, AttributeError)
"""What picklers raise when they cannot pickle something."""


def dump(obj: object) -> list[memoryview]:
    """Return the bytes of `obj` as parts to send one after the other.

    The parts are views into the arrays inside `obj`: it must not change until they are sent.

    Raises:
        TypeError: `obj`, or something inside it, cannot be pickled; or it is the list with which
            mpi4py describes a buffer.
        ValueError: `obj` is nested too deeply.
    """
    plain = plain_object(obj)
    if plain is not None:
        return [memoryview(plain)]
    if type(obj) is list and 1 < len(obj) < 5 and hasattr(obj[0], "dtype"):
        why = foreign_calls.of_buffer_form(obj)
        if why:
            raise TypeError(why)
    try:
        try:
            return _parts(obj, _ArrayPickler)
        except _REFUSALS:
            return _parts(obj, _pickler_by_value())
    except RecursionError as exc:
        raise ValueError(
            f"a value of type {_type_name(obj)} is nested too deeply to be sent. "
            "Send its parts in a flat list."
        ) from exc
    except (*_REFUSALS, BufferError) as exc:
        instead = "list(x)" if isinstance(obj, Iterator) else "the plain data inside it"
        raise TypeError(
            f"a value of type {_type_name(obj)} cannot be sent: {exc}. Send {instead}."
        ) from exc


def _parts(obj: object, pickler: Callable[..., Any]) -> list[memoryview]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return object_parts(stream.getvalue(), buffers)


def load(buffer: memoryview) -> Any:
    """Return the object whose parts, one after the other, are in `buffer`.

    Args:
        buffer: writable bytes. Arrays inside the object are views into it and keep it alive.

    Raises:
        ValueError: the bytes are truncated or inconsistent.
    """
    return load_object(buffer)


def _type_name(obj: object) -> str:
    module, name = type(obj).__module__, type(obj).__qualname__
    return name if module == "builtins" else f"{module}.{name}"
