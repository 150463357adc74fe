"""A small library of GPU arrays over cuda-bindings, as PyTorch or CuPy look to pycoll.

What it does it only enqueues, on the current stream of the array's device: also the upload of
array(). What is enqueued on an array waits for what this library has enqueued on it before, on any
stream; what others do to its memory is theirs to order. No context stays current.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import fake_cuda
import numpy as np
from cuda.bindings import driver

CUDA = 2  # DLPack's device type
LEGACY = 1  # the legacy default stream, as DLPack and the CUDA array interface call it
READ_ONLY, IS_COPIED = 1, 2  # flags of DLPack

_FLOATS = {
    "bfloat16": 4,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}

_contexts: dict[int, Any] = {}
_current: dict[int, int] = {}  # streams, by device


def _checked(result: Any) -> Any:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else values


@contextlib.contextmanager
def context(device: int) -> Iterator[None]:
    """The device's primary context is current."""
    if device not in _contexts:
        _checked(driver.cuInit(0))
        _contexts[device] = _checked(driver.cuDevicePrimaryCtxRetain(device))
    _checked(driver.cuCtxPushCurrent(_contexts[device]))
    try:
        yield
    finally:
        _checked(driver.cuCtxPopCurrent())


def new_stream(device: int = 0) -> int:
    """A stream that waits for no other."""
    with context(device):
        return int(_checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def current_stream(device: int = 0) -> int:
    """The stream on which this library works: the legacy default one, or that of use_stream()."""
    return _current.get(device, LEGACY)


def use_stream(stream: int, device: int = 0) -> int:
    """Work on this stream from now on; return the one before."""
    before = current_stream(device)
    _current[device] = stream
    return before


@contextlib.contextmanager
def held_stream(device: int = 0) -> Iterator[tuple[int, Callable[[], None]]]:
    """Work on a stream that a kernel holds up; gives it, and the function that ends the kernel."""
    stream = new_stream(device)
    with context(device):
        number = fake_cuda.hold(stream)
    released: list[bool] = []

    def release() -> None:
        if not released:
            released.append(True)
            fake_cuda.release(number)

    before = use_stream(stream, device)
    try:
        yield stream, release
    finally:
        use_stream(before, device)
        release()


class Memory:
    """Device memory, and what this library has enqueued on it: given back when it dies."""

    def __init__(self, device: int, pointer: int) -> None:
        self.device = device
        self.pointer = pointer
        self.stream = current_stream(device)  # on which it was last written
        self.sources: list[object] = []  # host memory that an upload may still read
        self._uses: dict[tuple[int, int], Any] = {}  # an event by device and stream
        self._pid = os.getpid()

    def wait(self, device: int, stream: int) -> None:
        """Let the stream wait for all that is enqueued on this memory."""
        for place, event in self._uses.items():
            if place != (device, stream):
                _checked(driver.cuStreamWaitEvent(stream, event, 0))

    def used(self, device: int, stream: int) -> None:
        """Remember that something was enqueued on this memory; the stream's context is current."""
        if (device, stream) not in self._uses:
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._uses[device, stream] = _checked(driver.cuEventCreate(flags))
        _checked(driver.cuEventRecord(self._uses[device, stream], stream))

    def give_back(self) -> None:
        _checked(driver.cuMemFree(self.pointer))

    def __del__(self, getpid: Any = os.getpid, is_finalizing: Any = sys.is_finalizing) -> None:
        if self._pid != getpid() or is_finalizing():
            return
        # A call that shall fail may be one of these: no reason to keep the memory.
        for _ in range(2):
            with contextlib.suppress(RuntimeError), context(self.device):
                while self._uses:
                    _, event = self._uses.popitem()
                    for _ in range(2):  # unless it was waited for, the memory is still used
                        with contextlib.suppress(RuntimeError):
                            _checked(driver.cuEventSynchronize(event))
                            break
                    with contextlib.suppress(RuntimeError):
                        _checked(driver.cuEventDestroy(event))
                self.give_back()
                return


class Borrowed(Memory):
    """Memory of another library, which its deleter gives back."""

    def __init__(self, device: int, pointer: int, address: int, deleter: Any) -> None:
        super().__init__(device, pointer)
        self._address = address
        self._deleter = deleter

    def give_back(self) -> None:
        if self._deleter:
            self._deleter(self._address)


class _Layout:
    """Lets NumPy compute views of memory that it cannot touch."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: Any, itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }


class Array:
    """Elements in device memory; views share `memory`.

    Attributes:
        pointer: address of the first element.
        shape, strides: elements along each axis, and bytes from one to the next.
        dtype: of NumPy or ml_dtypes.
        readonly: what DLPack and the array interface say of it; it binds others.
    """

    def __init__(self, memory: Memory, dtype: Any, layout: np.ndarray[Any, Any]) -> None:
        self.memory = memory
        self.dtype = np.dtype(dtype)
        self.pointer: int = layout.__array_interface__["data"][0]
        self.shape = layout.shape
        self.strides = layout.strides
        self.readonly = False

    @property
    def device(self) -> int:
        return self.memory.device

    @property
    def stream(self) -> int:
        """The stream on which this library has last written the memory."""
        return self.memory.stream

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return self._layout().flags.c_contiguous

    def _layout(self) -> np.ndarray[Any, Any]:
        return np.asarray(_Layout(self.pointer, self.shape, self.strides, self.dtype.itemsize))

    def _view(self, layout: np.ndarray[Any, Any]) -> Array:
        view = Array(self.memory, self.dtype, layout)
        view.readonly = self.readonly
        return view

    def __getitem__(self, index: Any) -> Array:
        """A view: integers, slices, None and Ellipsis; never a scalar."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(part, int | slice | None | type(...)) for part in parts):
            raise TypeError("only integers, slices, None and ...")
        # The ellipsis at the end makes NumPy give an array also where it would read an element.
        return self._view(self._layout()[parts if ... in parts else (*parts, ...)])

    def transpose(self, *axes: int) -> Array:
        return self._view(self._layout().transpose(*axes))

    @property
    def T(self) -> Array:  # noqa: N802 - as everywhere
        return self.transpose()

    def broadcast_to(self, shape: tuple[int, ...]) -> Array:
        """A read-only view with strides of 0."""
        view = self._view(np.broadcast_to(self._layout(), shape))
        view.readonly = True
        return view

    def _pointers(self) -> Iterator[int]:
        for index in np.ndindex(self.shape):
            yield self.pointer + sum(i * step for i, step in zip(index, self.strides, strict=True))

    def get(self) -> np.ndarray[Any, Any]:
        """The elements, when all is done that was enqueued on the array's stream."""
        with context(self.device):
            _checked(driver.cuStreamSynchronize(self.stream))
        if not self.size:
            return np.empty(self.shape, self.dtype)
        spans = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        before = -sum(span for span in spans if span < 0)
        after = sum(span for span in spans if span > 0)
        data = fake_cuda.peek(self.pointer - before, before + after + self.dtype.itemsize)
        return np.ndarray(self.shape, self.dtype, data, before, self.strides).copy()

    def fill(self, byte: int) -> None:
        """A kernel on the current stream: every byte of the elements becomes `byte`."""
        with self._written() as stream:
            if self.contiguous and self.pointer % 4 == self.nbytes % 4 == 0:
                words = byte * 0x01010101
                _checked(driver.cuMemsetD32Async(self.pointer, words, self.nbytes // 4, stream))
                return
            for pointer in self._pointers():
                _checked(driver.cuMemsetD8Async(pointer, byte, self.dtype.itemsize, stream))

    def copy_from(self, other: Array) -> None:
        """Copy, on the current stream of this array's device, an array of this shape and dtype."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            raise ValueError(f"{other.dtype}{other.shape} into {self.dtype}{self.shape}")
        with self._written() as stream:
            other.memory.wait(self.device, stream)
            if self.contiguous and other.contiguous:
                pairs, nbytes = iter([(self.pointer, other.pointer)]), self.nbytes
            else:
                pairs = zip(self._pointers(), other._pointers(), strict=True)
                nbytes = self.dtype.itemsize
            for to, origin in pairs:
                _checked(driver.cuMemcpyDtoDAsync(to, origin, nbytes, stream))
            other.memory.used(self.device, stream)

    @contextlib.contextmanager
    def _written(self) -> Iterator[int]:
        stream = current_stream(self.device)
        with context(self.device):
            self.memory.wait(self.device, stream)
            try:
                yield stream
            finally:
                self.memory.stream = stream
                self.memory.used(self.device, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if stream == 0:
            raise ValueError("stream 0 is ambiguous: 1 is the legacy default, 2 the thread's")
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"it is on {self.__dlpack_device__()}, not on {dl_device}")
        array = self
        if copy:
            array = empty(self.shape, self.dtype, self.device)
            array.copy_from(self)
        if stream != -1:
            with context(self.device):
                array.memory.wait(self.device, LEGACY if stream is None else stream)
        versioned = max_version is not None and max_version[0] >= 1
        if array.readonly and not versioned:
            raise BufferError("DLPack before version 1 cannot say that it is read-only")
        return _lend(array, versioned, READ_ONLY * array.readonly + IS_COPIED * bool(copy))


def empty(shape: tuple[int, ...], dtype: Any = np.float32, device: int = 0) -> Array:
    """An array whose elements nobody has written."""
    dtype = np.dtype(dtype)
    with context(device):  # also without elements it has an address
        pointer = int(_checked(driver.cuMemAlloc(max(1, math.prod(shape) * dtype.itemsize))))
    layout = np.asarray(_Layout(pointer, tuple(shape), None, dtype.itemsize))
    return Array(Memory(device, pointer), dtype, layout)


def array(values: Any, device: int = 0) -> Array:
    """An array with a copy of `values` to come: its upload is enqueued on the current stream."""
    source = np.array(values, order="C")
    made = empty(source.shape, source.dtype, device)
    made.memory.sources.append(source)
    with made._written() as stream:
        _checked(driver.cuMemcpyHtoDAsync(made.pointer, source.ctypes.data, made.nbytes, stream))
    return made


class InterfaceArray:
    """An array with nothing but the CUDA array interface."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.array.dtype.name in _FLOATS:
            raise AttributeError(f"the CUDA array interface has no {self.array.dtype}")
        return {
            "version": 3,
            "shape": self.array.shape,
            "typestr": self.array.dtype.str,
            "data": (self.array.pointer, self.array.readonly),
            "strides": None if self.array.contiguous else self.array.strides,
            "stream": self.array.stream,
        }


# DLPack. Not pycoll's own: one of them would not notice what is wrong with both.


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Unversioned(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", c_void_p), ("deleter", c_void_p))
    name, used = b"dltensor", b"used_dltensor"


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )
    name, used = b"dltensor_versioned", b"used_dltensor_versioned"


def _of_capsules(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _of_capsules("PyCapsule_New", ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p)
_is_valid = _of_capsules("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_address_in = _of_capsules("PyCapsule_GetPointer", c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _of_capsules("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# A dying capsule cannot be given to Python code as an object.
_dying_is_valid = _of_capsules("PyCapsule_IsValid", ctypes.c_int, c_void_p, ctypes.c_char_p)
_dying_address = _of_capsules("PyCapsule_GetPointer", c_void_p, c_void_p, ctypes.c_char_p)

exported: dict[int, tuple[Any, ...]] = {}
"""What this library has exported and not got back, by the address of its struct."""


@ctypes.CFUNCTYPE(None, c_void_p)
def _take_back(address: int) -> None:
    del exported[address]  # a second time is a KeyError, which pytest reports


@ctypes.PYFUNCTYPE(None, c_void_p)
def _drop_capsule(capsule: int) -> None:
    for layout in (_Versioned, _Unversioned):
        if _dying_is_valid(capsule, layout.name):  # nobody has taken it
            _take_back(_dying_address(capsule, layout.name))


def _lend(array: Array, versioned: bool, flags: int) -> object:
    itemsize, ndim = array.dtype.itemsize, len(array.shape)
    shape = (c_int64 * ndim)(*array.shape)
    strides = (c_int64 * ndim)(*[step // itemsize for step in array.strides])
    managed = _Versioned(1, 1, flags=flags) if versioned else _Unversioned()
    managed.deleter = ctypes.cast(_take_back, c_void_p)
    code = _FLOATS.get(array.dtype.name)
    managed.tensor = _Tensor(
        array.pointer,
        CUDA,
        array.device,
        ndim,
        _KINDS[array.dtype.kind] if code is None else code,
        itemsize * 8,
        1,
        shape,
        strides,
    )
    address = ctypes.addressof(managed)
    exported[address] = (managed, shape, strides, array)
    return _new(address, managed.name, ctypes.cast(_drop_capsule, c_void_p))


def _numpy_dtype(code: int, bits: int) -> np.dtype[Any]:
    for name, number in _FLOATS.items():
        if code == number:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, name))
    kind = next(kind for kind, number in _KINDS.items() if number == code)
    return np.dtype("?" if kind == "b" else f"{kind}{bits // 8}")


def from_dlpack(x: Any) -> Array:
    """The elements of another library's array, which stays alive as long as the views of it.

    Raises:
        BufferError: it is not on a CUDA device.
    """
    kind, device = x.__dlpack_device__()
    if kind != CUDA:
        raise BufferError(f"it is on a device of type {kind}")
    try:
        capsule = x.__dlpack__(stream=current_stream(device), max_version=(1, 1))
    except TypeError:
        capsule = x.__dlpack__(stream=current_stream(device))
    layout = _Versioned if _is_valid(capsule, _Versioned.name) else _Unversioned
    address = _address_in(capsule, layout.name)
    managed = layout.from_address(address)
    _rename(capsule, layout.used)
    tensor = managed.tensor
    pointer = (tensor.data or 0) + tensor.byte_offset
    deleter = ctypes.PYFUNCTYPE(None, c_void_p)(managed.deleter) if managed.deleter else None
    memory = Borrowed(device, pointer, address, deleter)
    dtype = _numpy_dtype(tensor.code, tensor.bits)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = None
    if tensor.ndim and tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    made = Array(memory, dtype, np.asarray(_Layout(pointer, shape, strides, dtype.itemsize)))
    made.readonly = layout is _Versioned and bool(managed.flags & READ_ONLY)
    return made
