"""DLPack: how arrays of all libraries lend each other their memory.

    take(export(x))      the memory of x, to be read without a copy
    Exported(array, dtype)   memory that another library's from_dlpack() can read

A library lends memory in a capsule: an object with the address of a struct, which says where the
elements are, and has a function that gives the memory back, the deleter. Whoever takes the memory
renames the capsule and calls the deleter, once. There are two such structs, told apart by the
capsule's name; the older has no flags. NumPy's own from_dlpack() knows no bfloat16 and no float8.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._dtypes import Array, DType

HOST_DEVICES: Final = (1, 3, 11)
"""Device types whose memory the host can read: CPU, pinned by CUDA, pinned by ROCm."""

CUDA_DEVICES: Final = (2, 13)
"""Device types whose memory CUDA can copy: a GPU's own, and managed."""

_VERSION: Final = (1, 1)
_READ_ONLY, _IS_COPIED = 1, 2  # of `flags`

# Of the others, 3 is an opaque handle, and pycoll has no such floats of 4, 6 and 8 bits.
_FAMILY_CODES: Final = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_CODES: Final = {
    **{dtype.name: _FAMILY_CODES[dtype.family] for dtype in dtypes.TABLE},
    "bfloat16": 4,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_TYPES: Final = {  # by code, bits, and lanes (more of them: an element is a vector)
    (code, dtype.itemsize * 8, 1): dtype
    for name, code in _CODES.items()
    if (dtype := dtypes.of_name(name)) is not None
}

# Called with the GIL, as when a capsule dies that nobody has taken: every deleter bears that.
_Deleter = ctypes.PYFUNCTYPE(None, c_void_p)


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
        ("strides", ctypes.POINTER(c_int64)),  # in elements; NULL: C-contiguous
        ("byte_offset", c_uint64),
    )


class _Unversioned(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", c_void_p), ("deleter", _Deleter))
    name: ClassVar = b"dltensor"
    used: ClassVar = b"used_dltensor"
    major: ClassVar = _VERSION[0]
    flags: ClassVar = _READ_ONLY  # nobody says otherwise, and TensorFlow's arrays never change


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", _Deleter),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )
    name: ClassVar = b"dltensor_versioned"
    used: ClassVar = b"used_dltensor_versioned"


_Layout: TypeAlias = type[_Versioned] | type[_Unversioned]
_LAYOUTS: Final[tuple[_Layout, ...]] = (_Versioned, _Unversioned)


def _of_capsules(name: str, result: Any) -> Any:
    # A prototype of our own: those of ctypes.pythonapi belong to everybody in the process.
    prototype = ctypes.PYFUNCTYPE(result, ctypes.py_object, ctypes.c_char_p)
    return prototype((name, ctypes.pythonapi))


_is_valid = _of_capsules("PyCapsule_IsValid", ctypes.c_int)
_address = _of_capsules("PyCapsule_GetPointer", c_void_p)
_rename = _of_capsules("PyCapsule_SetName", ctypes.c_int)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# For a capsule that is dying: an object cannot be made of it any more.
_address_of_dying = ctypes.PYFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
for _layout in _LAYOUTS:  # a capsule keeps only the address of its name, and may outlive us
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_layout.used))


class Tensor(NamedTuple):
    """Memory of another library.

    Attributes:
        array: the elements, of dtype `dtype.storage`; None if the host cannot read them. Not
            writeable if the library does not allow it, or cannot say, or has made a copy (what
            is written to a copy is lost). The memory is given back when its last view dies.
        dtype: the element type.
        device: DLPack's device type and number.
        pointer: address of the first element on that device.
        shape, strides: elements along each axis, and bytes from one to the next.
        read_only: its library does not want it written, or cannot say, or this is a copy.
        owner: what gives the memory back when it dies; `array` keeps it.
    """

    array: Array | None
    dtype: DType
    device: tuple[int, int]
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool
    owner: object


class _Owner:
    """Calls the deleter when it dies, in whatever thread.

    Not in a child of fork: what a library keeps with memory (pinned pages, files) may still be the
    parent's. Nor when the interpreter ends: parts of the library may have gone already.
    """

    __array_interface__: dict[str, object]  # NumPy reads it, and makes the owner the array's base

    def __init__(self, address: int, deleter: Any) -> None:
        self._address = address
        self._deleter = deleter
        self._pid = os.getpid()

    # The defaults live as long as this function; names of the module may have gone before.
    def release(self, getpid: Any = os.getpid, is_finalizing: Any = sys.is_finalizing) -> None:
        deleter, self._deleter = self._deleter, None
        if deleter and self._pid == getpid() and not is_finalizing():
            deleter(self._address)

    __del__ = release


def export(x: Any, stream: int | None = None) -> object:
    """Return the capsule in which its library lends the memory of the array `x`.

    Args:
        x: an array with ``__dlpack__``.
        stream: for one on a GPU: the stream that its library shall have wait for what it has under
            way on the array.

    Raises:
        Exception: the library's own, if it will not lend this array without a copy.
    """
    ordered = {} if stream is None else {"stream": stream}
    for options in ({"max_version": _VERSION, "copy": False}, {"max_version": _VERSION}):
        try:
            return x.__dlpack__(**ordered, **options)
        except TypeError:
            pass  # it was made before this option
        except ValueError:  # it knows the options, and says so: array-api-strict as of 2022
            break
    return x.__dlpack__(**ordered)


def may_export(x: Any) -> bool:
    """Return whether DLPack has the elements of `x`, as far as `x` says what they are.

    Libraries have been seen that end the process when they are asked for others.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return True
    name = named(dtype)
    if name in _CODES:
        return True
    try:
        return np.dtype(name).kind in _FAMILY_CODES  # "half", "double"
    except TypeError:
        return False


def named(dtype: Any) -> str:
    """Return what the dtype of an array of any library is called in all of them."""
    name = getattr(dtype, "name", None)
    words = re.findall(r"\w+", name if isinstance(name, str) else str(dtype))
    return words[-1].lower() if words else ""  # Paddle: FLOAT32; MLX: mlx.core.float32


def take(capsule: object) -> Tensor:
    """Take the memory that a capsule lends; nobody can take it again.

    Raises:
        BufferError: it was taken before, or NumPy has no such array; then it is given back.
    """
    layout, address = _find(capsule)
    managed = layout.from_address(address)
    _rename(capsule, layout.used)  # first: an interrupt between the two may not free it twice
    owner = _Owner(address, managed.deleter)
    try:
        if managed.major != _VERSION[0]:  # then the deleter alone is where we look for it
            raise BufferError(f"it speaks version {managed.major} of DLPack")
        return _read(managed.tensor, managed.flags, owner)
    except BaseException:
        owner.release()  # an exception keeps `owner` alive
        raise


def _find(capsule: object) -> tuple[_Layout, int]:
    for layout in _LAYOUTS:
        if _is_valid(capsule, layout.name):
            return layout, _address(capsule, layout.name)
    raise BufferError("its __dlpack__() gave no unused capsule")


def _read(tensor: _Tensor, flags: int, owner: _Owner) -> Tensor:
    dtype = _TYPES.get((tensor.code, tensor.bits, tensor.lanes))
    if dtype is None:
        kind = f"code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes"
        raise BufferError(f"it has elements of a type that pycoll does not know ({kind})")
    ndim: int = tensor.ndim
    if not 0 <= ndim <= 64 or (ndim and not tensor.shape):
        raise BufferError(f"it has {ndim} dimensions, or no shape")
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    if ndim and tensor.strides:
        strides = tuple([_signed(n * dtype.itemsize) for n in tensor.strides[:ndim]])
    else:
        strides = tuple([math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(ndim)])
    device = (tensor.device_type, tensor.device_id)
    pointer = (tensor.data or 0) + tensor.byte_offset
    array = None
    if device[0] in HOST_DEVICES:
        try:
            array = _view(pointer, dtype, shape, strides, owner)
        except (ValueError, OverflowError) as exc:
            raise BufferError(f"it has the shape {shape}, the strides {strides}: {exc}") from exc
        if flags & (_READ_ONLY | _IS_COPIED):
            array.flags.writeable = False
    read_only = bool(flags & (_READ_ONLY | _IS_COPIED))
    return Tensor(array, dtype, device, pointer, shape, strides, read_only, owner)


def _signed(nbytes: int) -> int:
    """Return a stride in bytes with its sign.

    CuPy up to 14 divides negative strides by the size of an element as numbers without a sign of 64
    bits, https://github.com/cupy/cupy/issues/10172; the product has that sign again.
    """
    return nbytes - (1 << 64) if 1 << 63 <= nbytes < 1 << 64 else nbytes


def _view(
    pointer: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], owner: _Owner
) -> Array:
    if 0 in shape:
        return np.empty(shape, dtype.storage)  # there may be no memory
    if not pointer:
        raise ValueError("no memory")
    owner.__array_interface__ = {
        "version": 3,
        "data": (pointer, False),
        "shape": shape,
        "strides": strides,
        "typestr": dtype.storage.str,
    }
    return np.asarray(owner)


class Exported:
    """An array of `dtype.storage` that other libraries read as the type whose bits it holds."""

    def __init__(self, array: Array, dtype: DType) -> None:
        self._array = array
        self._code = _CODES[dtype.name]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> object:
        capsule = self._array.__dlpack__(**options)
        layout, address = _find(capsule)
        layout.from_address(address).tensor.code = self._code
        return capsule


class DeviceArray:
    """An array on a GPU that any library can read: by DLPack, or by the CUDA array interface.

    Attributes:
        pointer: address of its first element; it is C-contiguous.
        dtype: the element type.
        shape: elements along each axis.
        device: number of the GPU.
    """

    def __init__(
        self, pointer: int, dtype: DType, shape: tuple[int, ...], device: int, owner: object
    ) -> None:
        self.pointer = pointer
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self._owner = owner

    def __repr__(self) -> str:
        return f"<pycoll DeviceArray {self.dtype}{list(self.shape)} on GPU {self.device}>"

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if self.dtype.foreign:
            raise AttributeError(f"the CUDA array interface has no {self.dtype}; use DLPack")
        return {
            "version": 3,
            "data": (self.pointer if math.prod(self.shape) else 0, False),
            "shape": self.shape,
            "strides": None,
            "typestr": self.dtype.storage.str,
            "stream": None,  # nothing is under way any more
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICES[0], self.device

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None, **options: Any
    ) -> object:
        layout: _Layout = _Versioned if (max_version or (0, 0)) >= (1, 0) else _Unversioned
        managed = layout()
        managed.deleter = _forget
        if isinstance(managed, _Versioned):
            managed.major, managed.minor = _VERSION
        ndim = len(self.shape)
        shape = (c_int64 * ndim)(*self.shape)
        strides = (c_int64 * ndim)(*[math.prod(self.shape[i + 1 :]) for i in range(ndim)])
        tensor = managed.tensor
        tensor.data = self.pointer
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.ndim = ndim
        tensor.code, tensor.bits, tensor.lanes = _CODES[self.dtype.name], self.dtype.itemsize * 8, 1
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(c_int64))
        tensor.strides = ctypes.cast(strides, ctypes.POINTER(c_int64))
        address = ctypes.addressof(managed)
        _given[address] = (managed, shape, strides, self._owner)
        return _new_capsule(address, layout.name, ctypes.cast(_drop, c_void_p))


_given: Final[dict[int, object]] = {}
"""What other libraries have of ours, by the address of its struct."""


def _forget_given(address: int) -> None:
    _given.pop(address, None)


_forget = _Deleter(_forget_given)


def _drop_given(capsule: int) -> None:
    """Forget what nobody has taken out of a capsule."""
    for layout in _LAYOUTS:
        if _dying_is_valid(capsule, layout.name):
            _forget_given(_address_of_dying(capsule, layout.name))


_drop = _Deleter(_drop_given)
