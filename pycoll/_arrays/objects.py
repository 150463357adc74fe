"""Python objects -> bytes and back: pickle protocol 5 with large buffers out of band.

    header    number of buffers, bytes of the pickle, bytes of each buffer (8 each, little-endian)
    pickle
    buffers   each begins at a multiple of 64 bytes from the start of the header

Arrays inside an object are sent from where they lie, and those of the loaded object lie in the
received bytes: aligned, writable, and not copied. What pickle cannot send, because no module has it
under its name (a lambda, a class of a notebook), cloudpickle sends with its code. Only load what
an authenticated rank has sent: pickle runs code.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from pycoll._arrays.subclasses import loses_attributes, means_more, with_attributes
from pycoll._support import foreign_calls
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:  # for arrays inside an object, and when something may be wrong
    np = LazyModule("numpy")

_ALIGNMENT: Final = 64

_ZEROS: Final = bytes(_ALIGNMENT)

_ALONE: Final = struct.Struct("<QQ")
"""The header of a pickle without buffers."""

# Smaller parts are joined, so that a list of a million small arrays is not two million messages.
_SMALL: Final = 32 * 1024


def _reduce_array(obj: Any) -> Any:
    if "numpy" not in sys.modules:
        return NotImplemented
    if (
        type(obj) is np.ndarray
        and not obj.dtype.hasobject
        and not (obj.flags.writeable and obj.flags.forc)
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

    reducer_override = staticmethod(_reduce_array)


@functools.cache
def _pickler_by_value() -> Callable[..., Any]:
    """Return the same for functions and classes that other ranks cannot import."""
    # Not sooner: few programs need cloudpickle, and it takes as long as the interpreter.
    from pycoll._support import pickling

    class Pickler(pickling.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if _has_a_name(obj):
                return NotImplemented  # cloudpickle would copy whatever a script defines
            reduced = _reduce_array(obj)
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
    if type(obj) is list and 1 < len(obj) < 5 and hasattr(obj[0], "dtype"):
        why = foreign_calls.of_buffer_form(obj)
        if why:
            raise TypeError(why)
    try:
        try:
            pickled, views = _pickled(obj, _ArrayPickler)
        except _REFUSALS:
            pickled, views = _pickled(obj, _pickler_by_value())
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
    if not views and len(pickled) < _SMALL:
        return [memoryview(_ALONE.pack(0, len(pickled)) + pickled)]
    parts = _stream(pickled, views)
    if len(pickled) < _SMALL and sum([view.nbytes for view in views]) < _SMALL:
        return [memoryview(b"".join(parts))]
    return list(_joined(map(memoryview, parts)))


def _pickled(obj: object, pickler: Callable[..., Any]) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def load(buffer: memoryview) -> Any:
    """Return the object whose parts, one after the other, are in `buffer`.

    Args:
        buffer: writable bytes. Arrays inside the object are views into it and keep it alive.

    Raises:
        ValueError: the bytes are truncated or inconsistent.
    """
    buffer = buffer.cast("B")
    pickled_nbytes, lengths = _read_header(buffer)
    if not lengths and _ALONE.size + pickled_nbytes == buffer.nbytes:
        return _loaded(buffer[_ALONE.size :], iter(()))
    spans, end = _layout(pickled_nbytes, lengths)
    if end != buffer.nbytes:
        raise ValueError(f"an object of {end} bytes came in {buffer.nbytes} bytes")
    (start, stop), *rest = spans
    unused = iter([buffer[begin:after] for begin, after in rest])
    obj = _loaded(buffer[start:stop], unused)
    if next(unused, None) is not None:
        raise ValueError("the bytes of an object are damaged: more buffers than it has arrays")
    return obj


def _loaded(pickled: memoryview, buffers: Iterator[memoryview]) -> Any:
    try:
        return pickle.loads(pickled, buffers=buffers)
    except (pickle.UnpicklingError, EOFError) as exc:
        raise ValueError(f"the bytes of an object are damaged: {exc}") from exc
    except (ImportError, AttributeError) as exc:
        exc.add_note(
            "An object came from another rank, and its class or function is not found here. "
            "Define it in a module that every rank can import."
        )
        raise


def _layout(pickled_nbytes: int, lengths: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return where the pickle and each buffer begin and end, and where all of it ends."""
    end = 16 + 8 * len(lengths)
    spans = [(end, end + pickled_nbytes)]
    end += pickled_nbytes
    for length in lengths:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + length
        spans.append((begin, end))
    return spans, end


def _header(pickled_nbytes: int, lengths: Sequence[int]) -> bytes:
    return struct.pack(f"<{2 + len(lengths)}Q", len(lengths), pickled_nbytes, *lengths)


def _read_header(buffer: memoryview) -> tuple[int, tuple[int, ...]]:
    if buffer.nbytes < 16:
        raise ValueError(f"an object cannot be in {buffer.nbytes} bytes: its header has 16")
    count, pickled_nbytes = struct.unpack_from("<QQ", buffer)
    if count > (buffer.nbytes - 16) // 8:
        raise ValueError(f"an object with {count} buffers cannot be in {buffer.nbytes} bytes")
    return pickled_nbytes, struct.unpack_from(f"<{count}Q", buffer, 16)


def _stream(pickled: bytes, views: Sequence[memoryview]) -> list[bytes | memoryview]:
    lengths = [view.nbytes for view in views]
    header = _header(len(pickled), lengths)
    parts: list[bytes | memoryview] = [header, pickled]
    end = len(header) + len(pickled)
    for view, length in zip(views, lengths, strict=True):
        gap = -end % _ALIGNMENT
        parts += (_ZEROS[:gap], view)
        end += gap + length
    return parts


def _joined(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Copy runs of small parts together; drop empty ones."""
    run = bytearray()
    for part in parts:
        if part.nbytes < _SMALL:
            run += part
            continue
        if run:
            yield memoryview(run)
            run = bytearray()
        yield part
    if run:
        yield memoryview(run)


def _type_name(obj: object) -> str:
    module, name = type(obj).__module__, type(obj).__qualname__
    return name if module == "builtins" else f"{module}.{name}"
