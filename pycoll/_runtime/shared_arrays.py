"""NumPy arrays in memory that all ranks of a host have mapped.

Ranks exchange such arrays by copying them themselves, without the kernel. The memory, an arena for
each rank, is a part of its host's memory file (transports/_core/host/arena.c); it comes to arrays
as NumPy's allocator (transports/_core/python/host/array_memory.c).
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import pycoll._transports._core as _core
from pycoll._arrays import conversion
from pycoll._selection.agreed import parse_bytes
from pycoll._support.checks import check_int, check_nbytes
from pycoll._support.public_edge import edge, passing_on, public
from pycoll._transports.shm import handed_on

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

    from pycoll._transports._core import MappedHost

MINIMUM = 65536
"""Bytes of the arrays that `share_arrays` puts there by default."""


class Use(NamedTuple):
    """What of this process lies in shared memory.

    Attributes:
        arrays, nbytes: how many arrays, and their bytes.
        kept_nbytes: memory of freed arrays that waits for the next ones.
        refused, refused_nbytes: arrays that found no place and lie in ordinary memory, ever.
    """

    arrays: int = 0
    nbytes: int = 0
    kept_nbytes: int = 0
    refused: int = 0
    refused_nbytes: int = 0


@passing_on
def empty(shape: Any, dtype: DTypeLike = float) -> np.ndarray[Any, Any]:
    """Return a new array that the other ranks of this host have mapped; see `numpy.empty`.

    It is an ordinary NumPy array, of this rank alone, in memory that its neighbours reach: so what
    they exchange of it with this rank is copied once, by the processes themselves. Its memory is
    freed with it. It takes whole pages (4 KiB), however short it is.

    Where no memory is shared (one rank, no launcher, `transport="tcp"`), or none is left, the array
    lies in ordinary memory. Everything works with it all the same.

    Args:
        shape: an int or a tuple of ints.
        dtype: anything that NumPy takes for a dtype.

    Raises:
        TypeError, ValueError: as `numpy.empty`.
        MemoryError: there is no memory at all.
    """
    with _shared():
        return np.empty(shape, dtype)


@passing_on
def zeros(shape: Any, dtype: DTypeLike = float) -> np.ndarray[Any, Any]:
    """Return a new array of zeros that the other ranks of this host have mapped; see `empty`.

    Args:
        shape: an int or a tuple of ints.
        dtype: anything that NumPy takes for a dtype.
    """
    with _shared():
        return np.zeros(shape, dtype)


@passing_on
def empty_like(prototype: ArrayLike, dtype: DTypeLike | None = None) -> np.ndarray[Any, Any]:
    """Return a new array of the shape and dtype of another one; see `empty` for where it lies.

    Args:
        prototype: an array; its values are not looked at.
        dtype: another dtype than the prototype's.
    """
    with _shared():
        return np.empty_like(prototype, dtype, subok=False)


@public
class share_arrays:  # noqa: N801 - it is called like a function
    """Have NumPy make its arrays where the other ranks of this host have mapped them.

        pycoll.share_arrays()            # from now on
        with pycoll.share_arrays():      # or in here
            x = numpy.ones(1_000_000)

    That holds for all that NumPy makes, in every thread, also for what pycoll returns; arrays that
    exist stay where they are. See `empty` for what such an array is, and where there is none.

    Called before `pycoll.init` in a process that another launcher than pycoll-run has started, it
    begins with `init`. Nested, the innermost one holds, and its end restores what was before.

    Args:
        minimum: bytes; shorter arrays stay in ordinary memory.

    Raises:
        TypeError, ValueError: `minimum` is no number of bytes.
    """

    @edge
    def __init__(self, minimum: int = MINIMUM) -> None:
        nbytes = check_int(check_nbytes(minimum, "minimum"), "minimum")
        self._is_possible = _open()
        self._before = _core.share_arrays(min(nbytes, sys.maxsize)) if self._is_possible else None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        if self._is_possible:
            _core.share_arrays(self._before)


def from_environment(text: str) -> None:
    """Do what PYCOLL_SHARE_ARRAYS says.

    Raises:
        ValueError: it makes no sense.
    """
    nbytes = parse_bytes(text, "PYCOLL_SHARE_ARRAYS", "1 for 64K, 0 for none")
    if nbytes > 0:
        share_arrays(MINIMUM if nbytes == 1 else nbytes)


def can_be_made() -> bool:
    """Return whether NumPy takes memory for its arrays from pycoll."""
    return _core.hook_numpy(_table())


def is_shared(array: np.ndarray[Any, Any]) -> bool:
    """Return whether the bytes of an array lie in this process's shared memory."""
    low, high = _bounds(array)
    return _core.is_shared(low, high - low)


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the addresses of an array's first byte, and behind its last one."""
    low = high = array.__array_interface__["data"][0]
    if array.size == 0:
        return low, high
    for dim, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (dim - 1) * stride
        else:
            high += (dim - 1) * stride
    return low, high + array.itemsize


def use() -> Use:
    """Return what of this process lies in shared memory."""
    return Use(*_core.shared_use())


# --- arrays of other ranks -----------------------------------------------------------------


class Exposed(NamedTuple):
    """An array of this rank that others may hold.

    Attributes:
        array: what they hold; it is kept as long.
        held: by rank of the communicator, 1 if that one holds it. It lies in shared memory; who
            gives the array back clears its own.
    """

    array: np.ndarray[Any, Any]
    held: np.ndarray[Any, Any]


class Said(NamedTuple):
    """What a rank tells the others of an array that it shares.

    Attributes:
        refused: why it cannot; "": it can.
        address, nbytes: from its first byte in memory to its last.
        offset: bytes from there to its first element.
        shape, strides, dtype, writeable: as NumPy has them.
        held: address of `Exposed.held`.
    """

    refused: str
    address: int = 0
    nbytes: int = 0
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    writeable: bool = False
    held: int = 0


_exposed: list[Exposed] = []


@cache
def _retire_at_exit() -> None:
    """Others may hold arrays of this process when it has ended."""
    atexit.register(_core.retire_arrays)


def expose(
    x: Any, rank: int, size: int, host: MappedHost | None
) -> tuple[np.ndarray[Any, Any] | None, Said]:
    """Prepare an array to be shared with the other ranks of a communicator.

    Args:
        x: the array.
        rank, size: this rank in the communicator, and how many it has.
        host: the memory that they share.

    Returns:
        The array as NumPy's, and what the others are to be told.
    """
    _exposed[:] = [one for one in _exposed if one.held.any()]
    value = conversion.wrap(x)
    if value is None or value.stage is not None:
        kind = "an array on a GPU" if value is not None else f"a {type(x).__name__}"
        return None, Said(f"share() takes an array in the memory of this host, not {kind}")
    array = value.array
    if size == 1:
        return array, Said("")
    if array.dtype.hasobject:
        return None, Said("share() takes no array of Python objects")
    held = zeros(size, np.uint8)
    if not (is_shared(array) and is_shared(held)):
        return None, Said(
            "share() takes arrays that lie in shared memory: make them with pycoll.empty() or "
            "zeros(), or after pycoll.share_arrays()"
        )
    if host is None or not host.has_arena():
        return None, Said(
            "share(): the arrays of this process lie in the memory of another world, the first "
            "one in which it had shared arrays"
        )
    held[:] = 1
    held[rank] = 0
    _retire_at_exit()
    _exposed.append(Exposed(array, held))
    low, high = _bounds(array)
    data = array.__array_interface__["data"][0]
    return array, Said(
        "",
        address=low,
        nbytes=high - low,
        offset=data - low,
        shape=array.shape,
        strides=array.strides,
        dtype=array.dtype,
        writeable=array.flags.writeable,
        held=held.__array_interface__["data"][0],
    )


def take_back(array: np.ndarray[Any, Any] | None) -> None:
    """Forget an array that was prepared last, and that nobody got."""
    if _exposed and _exposed[-1].array is array:
        _exposed.pop()


def borrow(host: MappedHost, local: int, said: Said, rank: int, size: int) -> np.ndarray[Any, Any]:
    """Return another rank's array as one of this process.

    Args:
        local: that rank's number on the host.
        rank, size: this one's in the communicator.

    Raises:
        ValueError: the memory does not lie where that rank may share any.
    """
    memory = host.window(local, said.address, said.nbytes)
    flags = host.window(local, said.held, size)
    if memory is None or flags is None:
        raise ValueError("the array of another rank cannot be reached from this one")
    array = np.ndarray(said.shape, said.dtype, memory, said.offset, said.strides)
    array.flags.writeable = said.writeable
    held = np.frombuffer(flags, np.uint8)
    weakref.finalize(array, _give_back, held, rank).atexit = False
    return array


def _give_back(held: np.ndarray[Any, Any], rank: int) -> None:
    held[rank] = 0


# --- opening -------------------------------------------------------------------------------


_state = {"tried": False}


def _open() -> bool:
    """Have NumPy ask the core for memory; returns whether that is possible."""
    if not can_be_made():
        return False
    if not _state["tried"]:
        _state["tried"] = True
        memory = handed_on(os.environ)
        try:
            if memory is None:
                _core.open_arena()
            elif memory.size > 1:
                _core.open_arena(memory.descriptor, memory.rank, memory.size)
        except OSError:
            pass  # then arrays lie in ordinary memory
    return True


def _table() -> Any:
    """NumPy's table of functions for C."""
    core = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
    return importlib.import_module(f"{core}._multiarray_umath")._ARRAY_API


@contextmanager
def _shared() -> Iterator[None]:
    if not _open():
        yield
        return
    _core.share_next(True)
    try:
        yield
    finally:
        _core.share_next(False)
