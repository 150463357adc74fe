"""Anything a user calls an array -> `Value`, a NumPy array over the same memory, and back.

This is the only file that knows frameworks. It imports PyTorch, JAX or ml_dtypes only when the
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
import contextlib
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import dlpack
from pycoll._dtypes import Array, DType
from pycoll._support.lazy_import import LazyModule
from pycoll.errors import TransportError

if TYPE_CHECKING:
    from pycoll._cuda import copies, cuda, staging
    from pycoll._cuda.staging import Stage
else:  # for arrays on a GPU alone
    copies, cuda = LazyModule("pycoll._cuda.copies"), LazyModule("pycoll._cuda.cuda")
    staging = LazyModule("pycoll._cuda.staging")

_OBJECTS: Final = (str, bytes, bytearray, int, float, complex, dict, list, tuple, np.generic)
_NUMBERS: Final[dict[str, tuple[Callable[[Any], Any], DType]]] = {
    "bool": (bool, dtypes.BOOL),
    "int": (int, dtypes.INT64),
    "float": (float, dtypes.FLOAT64),
    "complex": (complex, dtypes.COMPLEX128),
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

_ON_GPU = "cuda:"
_LEGACY_STREAM = 1
_NOT_EXPORTED = "a {} array cannot be sent: {}. Convert it first, for example to a NumPy array."
_MOVE = "Move it to the CPU first (PyTorch: x.cpu(), CuPy: x.get(), JAX: jax.device_get(x))."


@dataclass(slots=True, eq=False)
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
    """

    array: Array
    dtype: DType
    kind: str
    original: object = None
    stage: Stage | None = None
    gpu: int | None = None

    def follow(self, x: Value) -> None:
        """Write to it, on a GPU, only what comes after all of `x`, of the same memory, was read."""
        if self.stage is not None and x.stage is not None:
            self.stage.follow(x.stage)

    @property
    def place(self) -> Array:
        """The addresses of the elements where the user has them; only to be compared."""
        return self.array if self.stage is None else self.stage.place


def wrap(x: object, writing: bool = False) -> Value | None:
    """Return the array `x` as a Value over the same memory; None if it travels as an object.

    Args:
        x: what the user has passed.
        writing: it shall be written to.

    Objects are str, bytes, bytearray, numbers, NumPy scalars, None, containers, arrays of Python
    objects, and everything else that is not an array. Host memory is never copied, with two
    exceptions: lazily conjugated or negated PyTorch tensors, and JAX arrays that are spread over
    several devices. Of an array on a GPU, the Value's array is the staging buffer, empty as yet.

    Raises:
        TypeError: an array that can be neither (on a GPU that cannot be reached, sparse, masked);
            says what to do.
    """
    if isinstance(x, np.ndarray):
        return _wrap_numpy(x)
    if x is None or isinstance(x, _OBJECTS):
        return None
    if isinstance(x, memoryview):
        return _wrap_memoryview(x)
    if isinstance(x, stdlib_array.array):
        return _wrap_array(x)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        return _wrap_torch(torch, x, writing)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, getattr(jax, "Array", ())):
        return _wrap_jax(x)
    return _wrap_dlpack(x, writing)


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
    if isinstance(x, np.ndarray):
        raise TypeError(
            f"cannot reduce an array of {x.dtype}: it travels as a Python object. "
            "Convert it with x.astype(float), or pass a Python function as op to combine objects."
        )
    raise TypeError(
        f"cannot reduce a value of type {type_name(x)}: reductions take arrays and numbers. "
        "Convert it with numpy.asarray(x), or pass a Python function as op to combine objects."
    )


def fresh(dtype: DType, kind: str, shape: tuple[int, ...], gpu: int | None = None) -> Value:
    """Return an uninitialized C-contiguous Value that `unwrap` turns into the given kind.

    The kind becomes ``"numpy"`` if its library cannot be imported here or lacks the dtype, and that
    of the host if no GPU can be used here. On which GPU: `gpu`, None: the current one.

    Raises:
        TypeError: the result would be a NumPy array of bfloat16, and ml_dtypes is missing.
    """
    if kind.startswith(_ON_GPU):
        value = _fresh_on_gpu(dtype, kind.removeprefix(_ON_GPU), shape, gpu)
        if value is not None:
            return value
        kind = kind.removeprefix(_ON_GPU)
        if kind.startswith("dlpack"):  # such a library may have no arrays in host memory
            kind = "numpy"
    if not _importable(kind, dtype):
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


def unwrapped(x: Any) -> Any:
    """Return the user's kind of object for a Value, and an object as it is."""
    return unwrap(x) if isinstance(x, Value) else x


def unwrap(value: Value) -> Any:
    """Return the user's kind of object over `value.array`, without a copy where the kind can.

    What is on a GPU is complete when the copies are done that `copies.conclude` tells of. An
    array.array is a copy, a JAX array may be one. What has no such form (an array.array that is
    not one-dimensional) comes as a NumPy array.
    """
    array, dtype = value.array, value.dtype
    if value.kind == "cuda:jax" and value.original is None:
        return _to_jax(array, dtype, value.gpu or 0)
    if value.kind.startswith(_ON_GPU) and value.stage is None:  # a view into what has come
        value = fresh(dtype, value.kind, array.shape, value.gpu)
        value.array[...] = array
    if value.stage is not None:
        value.stage.flush()
    if value.original is not None:
        return value.original
    base, _, detail = value.kind.partition(":")
    match base:
        case "torch":
            return _to_torch(array, dtype)
        case "jax":
            return _to_jax(array, dtype)
        case "memoryview":
            return _to_memoryview(array, detail)
        case "array" if array.ndim == 1 and dtype.code and dtype.storage.char in "bBhHiIlLfd":
            # Through a memoryview: frombytes() takes no strides.
            result = stdlib_array.array(detail or dtype.storage.char)
            result.frombytes(as_bytes(np.ascontiguousarray(array)))
            return result
        case "dlpack":
            module = dtypes.import_library(detail)
            if hasattr(module, "from_dlpack"):
                return module.from_dlpack(dlpack.Exported(array, dtype) if dtype.foreign else array)
        case "pair" if array.ndim == 0 and array.dtype.names is not None:
            kinds = detail.split(",")
            fields = zip(array.dtype.names, kinds, strict=True)
            return tuple(_to_number(array[name], kind) for name, kind in fields)
        case "numpy_scalar" | "bool" | "int" | "float" | "complex" if array.ndim == 0:
            return _to_number(_to_numpy(array, dtype), value.kind)
    return _to_numpy(array, dtype)


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


def check_out(out: object, dtype: DType, shape: tuple[int, ...]) -> Value:
    """Return the user's `out` as a Value to write to; it may be non-contiguous.

    Raises:
        TypeError: it is not an array.
        ValueError: it is read-only, of another dtype or shape, or overlaps itself.
    """
    value = wrap(out, writing=True)
    if value is None:
        raise TypeError(
            f"out is not an array but a value of type {type_name(out)}. "
            "Pass a writable array, for example numpy.empty(shape, dtype)."
        )
    if value.kind in ("jax", "cuda:jax"):
        raise ValueError(
            "out is a JAX array, and those never change. Leave out away and use the result."
        )
    if value.original is not out:
        raise ValueError(
            "out is a lazily conjugated or negated view. Pass a plain tensor: out.resolve_conj()."
        )
    if value.dtype != dtype:
        raise ValueError(
            f"out has dtype {value.dtype}, but the result is {dtype}. "
            "Pass an array of that dtype; values are never converted."
        )
    if value.array.shape != shape:
        raise ValueError(
            f"out has shape {value.array.shape}, but the result has shape {shape}. "
            "Pass an array of exactly that shape."
        )
    if not value.place.flags.writeable:
        raise ValueError("out is read-only. Pass a writable array, for example a copy of it.")
    if _overlaps_itself(value.place):
        raise ValueError(
            f"out overlaps itself: with strides {value.place.strides} several elements share "
            "their memory. Pass an array that is not broadcast or expanded, for example a copy."
        )
    return value


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


def as_bytes(array: Array) -> memoryview:
    """Return the memory of a C-contiguous array as a 1-D memoryview of format ``"B"``."""
    assert array.flags.c_contiguous
    if array.nbytes == 0:
        return memoryview(b"") if not array.flags.writeable else memoryview(bytearray())
    # By way of uint8: datetime64 exports no buffer of its own.
    return array.reshape(-1).view(np.uint8).data


def type_name(x: object) -> str:
    """Return what messages call the type of a value."""
    if isinstance(x, np.ndarray) and x.dtype.hasobject:
        return "numpy.ndarray of Python objects"
    module, name = type(x).__module__, type(x).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _wrap_numpy(x: Array) -> Value | None:
    plain = x
    if type(x) is not np.ndarray:
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(x, masked.MaskedArray):
            raise TypeError(
                "a masked array cannot be sent: its mask would be lost. "
                "Pass x.filled(value), or x.data and x.mask one after the other."
            )
        plain = x.view(np.ndarray)
    try:
        dtype = dtypes.of_numpy(x.dtype)
    except TypeError:
        return None
    if dtype.foreign and dtype.code and _core is not None:
        _core.add_dtype(x.dtype, dtype.code)
    return Value(plain.view(dtype.storage) if dtype.foreign else plain, dtype, "numpy", x)


def _wrap_memoryview(x: memoryview) -> Value:
    try:
        array = np.asarray(x)
        dtype = dtypes.of_numpy(array.dtype)
    except (TypeError, ValueError, BufferError) as exc:
        raise TypeError(
            f"a memoryview of format {x.format!r} does not hold numbers. "
            "Pass its bytes with x.cast('B'), or x.tobytes() as an object."
        ) from exc
    detail = f":{x.format}" if x.format in ("q", "Q", "n", "N", "c") else ""
    return Value(array, dtype, f"memoryview{detail}", x)


def _wrap_array(x: stdlib_array.array[Any]) -> Value | None:
    if x.typecode in "uw":  # text
        return None
    array = np.asarray(x)
    detail = f":{x.typecode}" if x.typecode in "qQ" else ""
    return Value(array, dtypes.of_numpy(array.dtype), f"array{detail}", x)


def _wrap_torch(torch: Any, x: Any, writing: bool) -> Value:
    on_gpu = x.device.type == "cuda" and torch.version.hip is None
    if x.device.type != "cpu" and not on_gpu:
        raise TypeError(f"a tensor on the device {x.device} cannot be sent. {_MOVE}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(
            f"a tensor of layout {'nested' if x.is_nested else x.layout} cannot be sent. "
            "Make it dense first, with x.to_dense() or torch.nested.to_padded_tensor(x, 0)."
        )
    dtype = dtypes.of_name(str(x.dtype).removeprefix("torch."))
    if dtype is None:
        raise TypeError(
            f"a tensor of dtype {x.dtype} cannot be sent. "
            "Convert it, for example with x.float(), or send its bits with x.view(torch.uint8)."
        )
    try:
        plain = x.detach()
        if plain.is_conj() or plain.is_neg():
            # Its memory holds other values than the tensor shows: only a copy has the right ones.
            x = plain = plain.resolve_conj().resolve_neg()
        if on_gpu:
            with _staging_for("torch"):
                return _stage_torch(torch, x, plain, dtype, writing)
        # Not by DLPack: that takes ten times as long, for nothing that these two lines have not.
        if dtype.foreign:  # unknown to NumPy, and uint16 to older PyTorch
            bits = torch.int16 if dtype.itemsize == 2 else torch.uint8
            array = plain.view(bits).numpy().view(dtype.storage)
        else:
            array = plain.numpy()
    except (RuntimeError, TypeError, ValueError) as exc:
        raise TypeError(
            f"a tensor of type {type_name(x)} has no memory of its own here: {exc}. "
            "Pass a plain tensor, for example x.to_local() or one made outside of a trace."
        ) from exc
    return Value(array, dtype, "torch", x)


def _stage_torch(torch: Any, x: Any, plain: Any, dtype: DType, writing: bool) -> Value:
    if not writing:
        plain = plain.contiguous()  # what the GPU does at once, copies do row by row
    number: int = plain.device.index
    device = cuda.device(number)
    ready = device.mark(torch.cuda.current_stream(number).cuda_stream)
    shape, itemsize = tuple(plain.shape), dtype.itemsize
    strides = tuple([stride * itemsize for stride in plain.stride()])
    place = (plain.data_ptr(), dtype.storage, shape, strides)
    stage = staging.Stage(device, *place, ready, plain, is_target=writing)
    return _staged(stage, dtype, "torch", x)


def _to_torch(array: Array, dtype: DType) -> Any:
    torch = dtypes.import_library("torch")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # PyTorch has neither
    if not dtype.foreign:
        return torch.from_numpy(array)
    bits = np.int16 if dtype.itemsize == 2 else np.uint8
    return torch.from_numpy(array.view(bits)).view(getattr(torch, dtype.name))


def _wrap_jax(x: Any) -> Value:
    try:
        platforms = {device.platform for device in x.devices()}
        if platforms == {"cpu"}:
            array = np.asarray(x)
            dtype = dtypes.of_numpy(array.dtype)
    except (TypeError, RuntimeError) as exc:  # traced, deleted, typed random keys
        raise TypeError(
            f"this JAX array cannot be read: {exc}. "
            "Pass a concrete array, outside of jit, or a random key as jax.random.key_data(x)."
        ) from exc
    if platforms == {"gpu"} and len(x.devices()) == 1:
        value = _wrap_dlpack(x, writing=False)
        if value is not None and value.stage is not None:
            return value
    if platforms != {"cpu"}:
        raise TypeError(f"a JAX array on {', '.join(sorted(platforms))} cannot be sent. {_MOVE}")
    return Value(array.view(dtype.storage) if dtype.foreign else array, dtype, "jax", x)


def _to_jax(array: Array, dtype: DType, gpu: int | None = None) -> Any:
    jax = dtypes.import_library("jax")
    with contextlib.ExitStack() as stack:
        devices = jax.local_devices(backend="cpu" if gpu is None else "gpu")
        stack.enter_context(jax.default_device(devices[gpu or 0]))
        if dtype.name in ("int64", "uint64", "float64", "complex128"):
            # Else JAX would make 32 bits of them.
            enable = getattr(jax, "enable_x64", None)
            if enable is None:
                enable = dtypes.import_library("jax.experimental").enable_x64
            stack.enter_context(enable(True))
        return jax.numpy.asarray(_to_numpy(array, dtype))


def _wrap_dlpack(x: Any, writing: bool) -> Value | None:
    module = type(x).__module__.partition(".")[0]
    if not hasattr(type(x), "__dlpack__"):
        if hasattr(type(x), "__cuda_array_interface__"):
            with _staging_for(module):
                return _wrap_interface(x, module, writing)
        return None
    try:
        device, number = map(int, x.__dlpack_device__())
        capsule = dlpack.export(x) if device in dlpack.HOST_DEVICES else None
    except Exception:
        # The library says itself that this one is no array: an Arrow column of strings.
        return None
    if device in dlpack.CUDA_DEVICES:
        with _staging_for(module):
            return _stage_dlpack(x, module, number, writing)
    if capsule is not None:
        try:
            tensor = dlpack.take(capsule)
        except BufferError as exc:
            raise TypeError(_NOT_EXPORTED.format(module, exc)) from exc
        if tensor.array is not None:
            return Value(tensor.array, tensor.dtype, f"dlpack:{module}", x)
        device = tensor.device[0]
    raise TypeError(f"a {module} array on DLPack device {device} cannot be sent. {_MOVE}")


# --- arrays on a GPU -------------------------------------------------------------------------


@contextlib.contextmanager
def _staging_for(module: str) -> Iterator[None]:
    try:
        yield
    except TransportError as exc:
        raise TypeError(f"a {module} array on a GPU cannot be sent: {exc}. {_MOVE}") from exc


def _staged(stage: Stage, dtype: DType, library: str, x: object) -> Value:
    return Value(stage.make_buffer(), dtype, _ON_GPU + library, x, stage, stage.device.number)


def _stage_dlpack(x: Any, module: str, number: int, writing: bool) -> Value:
    """Stage an array whose library has a stream of ours wait for what it has under way."""
    device = cuda.device(number)
    lane = copies.side(device).meetings.pick()
    try:
        tensor = dlpack.take(dlpack.export(x, lane.stream))
    except BufferError as exc:
        raise TypeError(_NOT_EXPORTED.format(module, exc)) from exc
    ready = lane.last = lane.ready = device.mark(lane.stream)
    place = (tensor.pointer, tensor.dtype.storage, tensor.shape, tensor.strides)
    read_only = tensor.read_only
    if read_only and hasattr(type(x), "__cuda_array_interface__"):
        _, read_only = x.__cuda_array_interface__["data"]  # old capsules cannot say
    stage = staging.Stage(device, *place, ready, tensor.owner, not read_only, writing)
    library = module if module in ("jax", "cupy") else f"dlpack:{module}"
    if module == "jaxlib":
        library = "jax"
    return _staged(stage, tensor.dtype, library, x)


def _wrap_interface(x: Any, module: str, writing: bool) -> Value:
    """Stage an array that has the CUDA array interface alone."""
    interface = x.__cuda_array_interface__
    try:
        pointer, read_only = interface["data"]
        shape, storage = tuple(interface["shape"]), np.dtype(interface["typestr"])
        dtype = dtypes.of_numpy(storage)
        strides = interface.get("strides")
        stream = interface.get("stream")
        if interface.get("mask") is not None:
            raise ValueError("it has a mask")
    except (KeyError, TypeError, ValueError) as exc:
        raise TypeError(_NOT_EXPORTED.format(module, exc)) from exc
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) * storage.itemsize for i in range(len(shape))]
    device = cuda.device(cuda.owner(pointer) if pointer else 0)
    ready = device.mark(_LEGACY_STREAM if stream is None else stream)  # None: Numba's, for one
    place = (pointer, dtype.storage, shape, tuple(strides))
    stage = staging.Stage(device, *place, ready, x, not read_only, writing)
    return _staged(stage, dtype, f"dlpack:{module}", x)


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
        memory = staging.Memory(cuda.device(number), dtype.itemsize * math.prod(shape))
        array = dlpack.DeviceArray(memory.pointer, dtype, shape, number, memory)
        strides = tuple([math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))])
        place = (memory.pointer, dtype.storage, shape, strides)
        stage = staging.Stage(cuda.device(number), *place, None, memory, is_target=True)
        x = found.from_dlpack(array) if hasattr(found, "from_dlpack") else array
        return _staged(stage, dtype, library, x)
    found = dtypes.import_library(base)
    if base == "cupy":
        if found is None:
            return None
        with found.cuda.Device(cuda.current() if gpu is None else gpu):
            return wrap(found.empty(shape, dtypes.to_numpy(dtype)), writing=True)
    if not _importable(base, dtype):
        return None
    if base == "jax":  # its arrays never change: made of the host's memory, when that is filled
        if "gpu" not in {device.platform for device in found.local_devices()}:
            return None
        return Value(np.empty(shape, dtype.storage), dtype, _ON_GPU + base, gpu=gpu)
    if not found.cuda.is_available():
        return None
    name = f"cuda:{found.cuda.current_device() if gpu is None else gpu}"
    return wrap(found.empty(shape, dtype=getattr(found, dtype.name), device=name), writing=True)


def _to_memoryview(array: Array, detail: str) -> memoryview:
    view = _recast(array, detail).data
    if detail and view.format != detail and view.nbytes and view.c_contiguous:
        view = view.cast("B").cast(detail, view.shape)  # type: ignore[call-overload]
    return view


def _to_numpy(array: Array, dtype: DType) -> Array:
    return array.view(dtypes.to_numpy(dtype)) if dtype.foreign else array


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
    return base == "numpy_scalar" or dtype is _NUMBERS[base][1]


def _to_number(array: Array, kind: str) -> Any:
    base, _, detail = kind.partition(":")
    scalar = _recast(array, detail)[()]
    return scalar if base == "numpy_scalar" else _NUMBERS[base][0](scalar)


def _recast(array: Array, char: str) -> Array:
    """Return the array under another character for the same type, as long long for long."""
    return array.view(char) if char and np.dtype(char) == array.dtype else array


def _importable(kind: str, dtype: DType) -> bool:
    """Return whether `unwrap` can make this kind of this dtype here."""
    base, _, detail = kind.partition(":")
    if base in ("torch", "jax"):
        library = dtypes.import_library("jax.numpy" if base == "jax" else base)
        return bool(dtype.code or dtype.foreign) and hasattr(library, dtype.name)
    if base == "dlpack":
        known = dtype.code > 0 or dtype.foreign
        return known and hasattr(dtypes.import_library(detail), "from_dlpack")
    return base != "cupy"


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


def _introduce_numpy() -> Any:
    """Return the compiled core when it knows NumPy's arrays and dtypes; None: it cannot."""
    from pycoll._transports import _core

    sample = np.empty((2, 3))
    swapped = sample.T
    swapped.flags.writeable = False
    if not _core.use_numpy(np.empty, sample, sample.ctypes.data, swapped):
        return None
    for char in "?bhilqBHILQefdFD":
        dtype = np.dtype(char)
        _core.add_dtype(dtype, dtypes.of_numpy(dtype).code)
    return _core


_core = _introduce_numpy()
