"""Anything a user calls an array -> `Value`, a NumPy array over the same memory, and back.

Only this file and `libraries` know frameworks. PyTorch, JAX or ml_dtypes are imported only when the
user's object comes from them, or when a result of their kind is to be made.

    wrap(x)            x is an array: its Value, no copy; None: x travels as an object
    wrap_operand(x)    the same for reductions, which take numbers too
    fresh(...)         memory for a result
    unwrap(value)      the kind of object the user passed in

A kind names what `unwrap` makes: numpy, torch, jax, cupy, memoryview, array, dlpack:MODULE, and for
reductions int, float, complex, bool, numpy_scalar and pair; ``cuda:torch`` is torch on a GPU: such
an array has a staging buffer in host memory (`staging`), and nobody else sees more of it. Where the
dtype alone does not tell (C's long and long long are both int64) the character that does follows:
``array:q``, ``memoryview:c``, ``numpy_scalar:Q``. A pair names the kinds of its two numbers:
``pair:float,int``.
"""

from __future__ import annotations

import array as stdlib_array
import functools
import math
import re
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pycoll._arrays import dlpack, libraries, refusals
from pycoll._arrays.value import ON_GPU
from pycoll._arrays.value import Value as Value
from pycoll._arrays.value import type_name as type_name
from pycoll._cuda import cuda, staging
from pycoll._cuda.late_copies import LateCopies
from pycoll._support.lazy_import import LazyModule

if TYPE_CHECKING:
    import numpy as np

    from pycoll import _dtypes as dtypes
    from pycoll._dtypes import Array, DType
else:  # a program that sends objects alone imports no NumPy
    np, dtypes = LazyModule("numpy"), LazyModule("pycoll._dtypes")

_OBJECTS: Final = (str, bytes, bytearray, int, float, complex, dict, list, tuple)

_NUMBERS: Final[dict[str, tuple[Callable[[Any], Any], str]]] = {
    "bool": (bool, "bool"),
    "int": (int, "int64"),
    "float": (float, "float64"),
    "complex": (complex, "complex128"),
}

_NUMBER: Final = r"int|float|complex|bool|numpy_scalar(?::[qQ])?"

_KIND: Final = re.compile(
    r"numpy|(?:cuda:)?(?:torch|jax|cupy|dlpack:[A-Za-z_]\w{0,63})"
    r"|memoryview(?::[qQnNc])?|array(?::[qQ])?"
    rf"|(?P<number>{_NUMBER})|(?P<pair>pair:(?:{_NUMBER}),(?:{_NUMBER}))",
    re.ASCII,
)

# Steps that np.shares_memory may take to decide exactly; slices of one array need a handful.
_OVERLAP_WORK: Final = 10_000


def wrap(x: object, writing: bool = False) -> Value | None:
    """Return the array `x` as a Value over the same memory; None if it travels as an object.

    Args:
        x: what the user has passed.
        writing: it shall be written to.

    Objects are str, bytes, bytearray, numbers, NumPy scalars, None, containers, arrays of Python
    objects, arrays with masks, units and the like, and everything else that is not an array. Host
    memory is never copied, with two exceptions: lazily conjugated or negated PyTorch tensors, and
    JAX arrays that are spread over several devices. Of an array on a GPU, the Value's array is the
    staging buffer, empty as yet.

    Raises:
        TypeError: an array that can be neither (a tensor that is sparse, or on a GPU that cannot be
            reached); says what to do.
    """
    if "numpy" in sys.modules:
        if type(x) is np.ndarray:
            return libraries.wrap_numpy(x)
        if isinstance(x, np.generic):
            return None
    value = _wrap_other(x, writing)
    if value is not None and type(x) not in libraries.known_to_core and value.stage is None:
        _look_at(type(x), value.kind)
    return value


def _wrap_other(x: Any, writing: bool) -> Value | None:
    """The same for what is no plain array of NumPy's."""
    if "numpy" in sys.modules and isinstance(x, np.ndarray):
        return libraries.wrap_numpy(x)
    if x is None or isinstance(x, _OBJECTS):
        return None
    if isinstance(x, memoryview):
        return libraries.wrap_memoryview(x)
    if isinstance(x, stdlib_array.array):
        return libraries.wrap_array(x)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        return libraries.wrap_torch(torch, x, writing)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, getattr(jax, "Array", ())):
        return libraries.wrap_jax(x)
    kind = type(x)
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        return libraries.wrap_dlpack(x, writing)
    return None


def _look_at(cls: type[Any], kind: str) -> None:
    """Have the core ask here what is in the memory of arrays of this type."""

    def seen(x: Any, writing: bool = False) -> Array | None:
        if kind != "numpy" and x.__dlpack_device__()[0] not in dlpack.HOST_DEVICES:
            return None
        value = wrap_target(x) if writing else wrap(x)
        if value is None or value.kind != kind:
            return None
        if writing:
            libraries.tell_written(value)
        libraries.tell_dtype(value.dtype)
        return libraries.to_numpy(value.array, value.dtype)

    def made(array: Array) -> Any:
        value = libraries.wrap_numpy(array)
        assert value is not None, "it has come of one"
        return unwrap(Value(value.array, value.dtype, kind))

    to_write = functools.partial(seen, writing=True)
    libraries.let_core_ask(cls, kind, seen, to_write, made if kind != "numpy" else None)


def wrap_operand(x: object) -> Value:
    """Return `x` as a Value for a reduction: an array, a number, or a pair (value, index).

    Numbers become new 0-d arrays: int64, float64, complex128, bool, or a NumPy scalar's dtype.

    Raises:
        TypeError: `x` is neither; says what to do.
        ValueError: an int outside int64.
    """
    value = wrap(x)
    if value is not None:
        return value
    number = _number(x)
    if number is not None:
        array, dtype, kind = number
        return Value(array, dtype, kind)
    if type(x) is tuple and len(x) == 2:
        elements = [_number(element) for element in x]
        if all(element is not None and element[1].code for element in elements):
            (left, left_type, left_kind), (right, right_type, right_kind) = elements  # type: ignore[misc]
            if not (left_type.foreign or right_type.foreign):
                fields = [("value", left_type.storage), ("index", right_type.storage)]
                pair = np.array((left[()], right[()]), fields)
                kind = f"pair:{left_kind},{right_kind}"
                return Value(pair, dtypes.of_numpy(pair.dtype), kind)
    raise TypeError(refusals.of_operand(x))


def fresh(dtype: DType, kind: str, shape: tuple[int, ...], gpu: int | None = None) -> Value:
    """Return an uninitialized C-contiguous Value that `unwrap` turns into the given kind.

    The kind becomes ``"numpy"`` if its library cannot be imported here or lacks the dtype, and that
    of the host if no GPU can be used here. On which GPU: `gpu`, None: the current one.

    Raises:
        TypeError: the result would be a NumPy array of bfloat16, and ml_dtypes is missing.
    """
    if kind.startswith(ON_GPU):
        value = _fresh_on_gpu(dtype, kind.removeprefix(ON_GPU), shape, gpu)
        if value is not None:
            return value
        kind = kind.removeprefix(ON_GPU)
        if kind.startswith("dlpack"):  # such a library may have no arrays in host memory
            kind = "numpy"
    if not libraries.importable(kind, dtype):
        kind = "numpy"
    if kind == "numpy":
        dtypes.to_numpy(dtype)  # raises now, not after the data came
    return Value(np.empty(shape, dtype.storage), dtype, kind)


def here() -> int | None:
    """Return the number of the GPU on which this thread works; None: on none, as far as is seen.

    Programs that use no GPU are not made to look for one.
    """
    gpus = getattr(sys.modules.get("torch"), "cuda", None)  # None: it is being imported
    if gpus is not None and gpus.is_initialized():
        return int(gpus.current_device())
    if any(
        name in sys.modules for name in ("pycoll._cuda.staging", "cupy", "cuda.bindings.driver")
    ):
        return cuda.current() if cuda.is_usable() else None
    return None


def unwrapped(x: Any, late: LateCopies | None = None) -> Any:
    """Return the user's kind of object for a Value, and an object as it is; as `unwrap`."""
    return unwrap(x, late) if isinstance(x, Value) else x


def unwrap(value: Value, late: LateCopies | None = None) -> Any:
    """Return the user's kind of object over `value.array`, without a copy where the kind can.

    What is on a GPU is complete when the copies are done that `late` gets; None: they are. An
    array.array is a copy, a JAX array may be one. What has no such form (an array.array that is
    not one-dimensional) comes as a NumPy array.
    """
    array, dtype = value.array, value.dtype
    if value.kind == "cuda:jax" and value.original is None:
        return libraries.to_jax(array, dtype, value.gpu or 0)
    if value.kind.startswith(ON_GPU) and value.stage is None:  # a view into what has come
        value = fresh(dtype, value.kind, array.shape, value.gpu)
        value.array[...] = array
    if value.stage is not None:
        value.stage.flush(late)
    if value.original is not None:
        return filled(value)
    base, _, detail = value.kind.partition(":")
    match base:
        case "torch":
            return libraries.to_torch(array, dtype)
        case "jax":
            return libraries.to_jax(array, dtype)
        case "memoryview":
            return libraries.to_memoryview(array, detail)
        case "array" if array.ndim == 1 and dtype.code and dtype.storage.char in "bBhHiIlLfd":
            # Through a memoryview: frombytes() takes no strides.
            result = stdlib_array.array(detail or dtype.storage.char)
            result.frombytes(as_bytes(np.ascontiguousarray(array)))
            return result
        case "dlpack":
            x = libraries.to_library(detail, array, dtype)
            if x is not None:
                return x
        case "pair" if array.ndim == 0 and array.dtype.names is not None:
            kinds = detail.split(",")
            fields = zip(array.dtype.names, kinds, strict=True)
            return tuple(_to_number(array[name], kind) for name, kind in fields)
        case "numpy_scalar" | "bool" | "int" | "float" | "complex" if array.ndim == 0:
            return _to_number(libraries.to_numpy(array, dtype), value.kind)
    return libraries.to_numpy(array, dtype)


def filled(value: Value) -> object:
    """Return the user's own object, over whose memory `value` is; its library is told of writes."""
    if value.is_target:
        libraries.tell_written(value)
    return value.original


def describe(value: Value) -> bytes:
    """Return dtype, kind and shape of `value` as a few bytes for `from_description`."""
    kind = value.kind.encode()
    shape = value.array.shape
    head = struct.pack(
        f"<BBB{len(kind)}s{len(shape)}Q", value.dtype.code, len(kind), len(shape), kind, *shape
    )
    return head + dtypes.encode(value.dtype)


def from_description(description: bytes) -> tuple[DType, str, tuple[int, ...]]:
    """Return the dtype, kind and shape that `describe` wrote. Nothing is evaluated or imported.

    Raises:
        ValueError: this is not a description.
    """
    try:
        code, kind_length, ndim = struct.unpack_from("<BBB", description)
        name, *dims = struct.unpack_from(f"<{kind_length}s{ndim}Q", description, 3)
        kind = name.decode("ascii")
    except (struct.error, UnicodeDecodeError) as exc:
        raise ValueError(f"not a description of an array: {description[:80]!r}") from exc
    dtype = dtypes.decode(code, bytes(description[3 + kind_length + 8 * ndim :]))
    shape = tuple(dims)
    match = _KIND.fullmatch(kind)
    if match is None:
        raise ValueError(f"not a kind of array: {kind[:80]!r}")
    if (match["number"] or match["pair"]) and (shape or not _holds(dtype, kind)):
        raise ValueError(f"a number of kind {kind} cannot be {dtype} of shape {shape}")
    if ndim > 64 or math.prod(max(dim, 1) for dim in shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"no array of {dtype} can have the shape {shape}")
    return dtype, kind, shape


def check_out(out: object, dtype: DType, shape: tuple[int, ...], name: str = "out") -> Value:
    """Return the user's `out` as a Value to write to; it may be non-contiguous.

    Args:
        out: what the user has passed.
        dtype, shape: of the result.
        name: what errors call it.

    Raises:
        TypeError: it is not an array.
        ValueError: it may not be written to, or is of another dtype or shape.
    """
    value = wrap_target(out, name)
    check_fits(value, dtype, shape, name)
    return value


def wrap_target(out: object, name: str = "out") -> Value:
    """Return the user's array `out` as a Value to write to; called `name` in errors.

    Raises:
        TypeError: it is not an array.
        ValueError: it may not be written to: it is read-only, overlaps itself, or is a tensor
            whose gradient would not know of it.
    """
    value = wrap(out, writing=True)
    if value is None:
        raise TypeError(refusals.of_target(out, name))
    library = value.kind.removeprefix(ON_GPU)
    if library == "jax":
        raise ValueError(
            f"{name} is a JAX array, and those never change. Leave it away and use the result."
        )
    if value.original is not out:
        raise ValueError(
            f"{name} is a lazily conjugated or negated view. "
            f"Pass a plain tensor: {name}.resolve_conj().resolve_neg()."
        )
    if library == "torch":
        libraries.check_gradient(value.original, name)
    if not value.place.flags.writeable:
        raise ValueError(f"{name} is read-only. {refusals.of_read_only(library)}")
    if _overlaps_itself(value.place):
        raise ValueError(
            f"{name} overlaps itself: with strides {value.place.strides} several elements share "
            "their memory. Pass an array that is not broadcast or expanded, for example a copy."
        )
    value.is_target = True
    return value


def check_fits(out: Value, dtype: DType, shape: tuple[int, ...], name: str = "out") -> None:
    """Check that a result of this dtype and shape can go to `out`, called `name` in errors.

    Raises:
        ValueError: it cannot.
    """
    if out.dtype != dtype:
        raise ValueError(
            f"{name} has dtype {out.dtype}, but the result is {dtype}. "
            "Pass an array of that dtype; values are never converted."
        )
    if out.array.shape != shape:
        raise ValueError(
            f"{name} has shape {out.array.shape}, but the result has shape {shape}. "
            "Pass an array of exactly that shape."
        )


def overlap(a: Array, b: Array) -> bool:
    """Return whether two arrays have an element's byte in common.

    Exact, as np.shares_memory, except for contrived strides: there True if their bounds overlap.
    """
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def contiguous(array: Array) -> Array:
    """Return the array itself if it is C-contiguous, else a copy that is."""
    return array if array.flags.c_contiguous else array.copy(order="C")


def operand(array: Array) -> Array:
    """Return the array itself if it is C-contiguous and aligned, else a copy: what C reduces."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy(order="C")


def as_bytes(array: Array) -> memoryview:
    """Return the memory of a C-contiguous array as a 1-D memoryview of format ``"B"``."""
    assert array.flags.c_contiguous
    if array.nbytes == 0:
        return memoryview(b"") if not array.flags.writeable else memoryview(bytearray())
    # By way of uint8: datetime64 exports no buffer of its own.
    return array.reshape(-1).view(np.uint8).data


def _fresh_on_gpu(
    dtype: DType, library: str, shape: tuple[int, ...], gpu: int | None
) -> Value | None:
    """Return memory for an array of a library on a GPU; None: it cannot be there."""
    base, _, module = library.partition(":")
    if not cuda.is_usable():
        return None
    if base == "dlpack":
        found = dtypes.import_library(module)
        number = cuda.current() if gpu is None else gpu
        memory = staging.DeviceMemory(cuda.device(number), dtype.itemsize * math.prod(shape))
        array = dlpack.DeviceArray(memory.pointer, dtype, shape, number, memory)
        strides = tuple([math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))])
        place = (memory.pointer, dtype.storage, shape, strides)
        stage = staging.Stage(cuda.device(number), *place, None, memory, is_target=True)
        x = found.from_dlpack(array) if hasattr(found, "from_dlpack") else array
        return libraries.staged(stage, dtype, library, x)
    found = dtypes.import_library(base)
    if base == "cupy":
        if found is None:
            return None
        with found.cuda.Device(cuda.current() if gpu is None else gpu):
            return wrap(found.empty(shape, dtypes.to_numpy(dtype)), writing=True)
    if not libraries.importable(base, dtype):
        return None
    if base == "jax":  # its arrays never change: made of the host's memory, when that is filled
        if "gpu" not in {device.platform for device in found.local_devices()}:
            return None
        return Value(np.empty(shape, dtype.storage), dtype, ON_GPU + base, gpu=gpu)
    if not found.cuda.is_available():
        return None
    name = f"cuda:{found.cuda.current_device() if gpu is None else gpu}"
    return wrap(found.empty(shape, dtype=getattr(found, dtype.name), device=name), writing=True)


def _number(x: object) -> tuple[Array, DType, str] | None:
    """Return a number as a 0-d array, its dtype and its kind."""
    if isinstance(x, np.generic):  # before float and complex, which some of them derive from
        array = np.array(x)
        if isinstance(x, np.flexible) and array.dtype.names is None:
            return None  # text and bytes
        dtype = dtypes.of_numpy(array.dtype)
        detail = f":{array.dtype.char}" if array.dtype.char in "qQ" else ""
        return array.view(dtype.storage), dtype, f"numpy_scalar{detail}"
    if isinstance(x, bool):
        return np.array(x), dtypes.BOOL, "bool"
    if isinstance(x, int):
        if not -(1 << 63) <= x < 1 << 63:
            raise ValueError(
                f"the int {x if x.bit_length() < 200 else '...'} does not fit into int64. "
                "Pass a float, or a Python function as op to combine unbounded ints."
            )
        return np.array(int(x), np.int64), dtypes.INT64, "int"
    if isinstance(x, float):
        return np.array(float(x), np.float64), dtypes.FLOAT64, "float"
    if isinstance(x, complex):
        return np.array(complex(x), np.complex128), dtypes.COMPLEX128, "complex"
    return None


def _holds(dtype: DType, kind: str) -> bool:
    """Return whether numbers of this kind have this dtype."""
    base, _, detail = kind.partition(":")
    if base == "pair":
        names = dtype.storage.names or ()
        fields = [dtypes.reducing(dtype.storage[name]) for name in names]
        kinds = detail.split(",")
        return len(fields) == 2 and all(
            field is not None and _holds(field, part)
            for field, part in zip(fields, kinds, strict=True)
        )
    return base == "numpy_scalar" or dtype is dtypes.of_name(_NUMBERS[base][1])


def _to_number(array: Array, kind: str) -> Any:
    base, _, detail = kind.partition(":")
    scalar = libraries.recast(array, detail)[()]
    return scalar if base == "numpy_scalar" else _NUMBERS[base][0](scalar)


def _overlaps_itself(array: Array) -> bool:
    """Return whether elements share memory; True also for contrived strides that are hard."""
    if array.size == 0:
        return False
    reach = array.itemsize
    axes = zip(array.strides, array.shape, strict=True)
    for stride, dim in sorted((abs(stride), dim) for stride, dim in axes if dim > 1):
        if stride < reach:
            return True
        reach += stride * (dim - 1)
    return False
