"""Arrays of NumPy, PyTorch, JAX, CuPy and of everything with DLPack: as a `Value`, and back."""

from __future__ import annotations

import array as stdlib_array
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pycoll import _dtypes as dtypes
from pycoll._arrays import dlpack, refusals
from pycoll._arrays.refusals import said
from pycoll._arrays.subclasses import means_more
from pycoll._cuda import copies, cuda, staging
from pycoll._dtypes import Array, DType
from pycoll.errors import TransportError

if TYPE_CHECKING:
    from pycoll._cuda.staging import Stage
from pycoll._arrays.value import ON_GPU, Value, type_name

_LEGACY_STREAM = 1

_NOT_EXPORTED = "a {} array cannot be sent: {}. Convert it first, for example to a NumPy array."

_MOVE = "Move it to the CPU first (PyTorch: x.cpu(), CuPy: x.get(), JAX: jax.device_get(x))."


def wrap_numpy(x: Array) -> Value | None:
    plain = x
    if type(x) is not np.ndarray:
        if means_more(x):
            return None
        plain = np.asarray(x)  # not by view(), which a subclass may have overridden
    try:
        dtype = dtypes.of_numpy(x.dtype)
    except TypeError:
        return None
    tell_dtype(dtype)
    return Value(plain.view(dtype.storage) if dtype.foreign else plain, dtype, "numpy", x)


def tell_dtype(dtype: DType) -> None:
    """Tell the core of a dtype that is not NumPy's own."""
    if dtype.foreign and dtype.code and _core is not None:
        _core.add_dtype(dtypes.to_numpy(dtype), dtype.code)


def wrap_memoryview(x: memoryview) -> Value:
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


def wrap_array(x: stdlib_array.array[Any]) -> Value | None:
    if x.typecode in "uw":  # text
        return None
    array = np.asarray(x)
    detail = f":{x.typecode}" if x.typecode in "qQ" else ""
    return Value(array, dtypes.of_numpy(array.dtype), f"array{detail}", x)


def wrap_torch(torch: Any, x: Any, writing: bool) -> Value:
    on_gpu = x.device.type == "cuda" and torch.version.hip is None
    if x.device.type != "cpu" and not on_gpu:
        raise TypeError(f"a tensor on the device {x.device} cannot be sent. {_MOVE}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(
            f"a tensor of layout {'nested' if x.is_nested else x.layout} cannot be sent. "
            "Make it dense first, with x.to_dense() or torch.nested.to_padded_tensor(x, 0)."
        )
    is_functional = getattr(torch, "_is_functional_tensor", None)
    if is_functional is not None and is_functional(x):  # numpy() would be of memory that is freed
        raise TypeError(
            "a tensor inside torch.func.functionalize cannot be sent: it has no memory of its own. "
            "Call pycoll outside of functionalize."
        )
    dtype = dtypes.of_name(str(x.dtype).removeprefix("torch."))
    if dtype is None:
        raise TypeError(refusals.of_tensor(x))
    try:
        plain = x.detach()
        if plain.is_conj() or plain.is_neg():
            # Its memory holds other values than the tensor shows: only a copy has the right ones.
            x = plain = plain.resolve_conj().resolve_neg()
        if on_gpu:
            with _staging_for("torch"):
                return _stage_torch(torch, x, plain, dtype, writing)
        if type(plain).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError("it is a subclass with a __torch_dispatch__")
        # Not by DLPack: that takes ten times as long, for nothing that this has not.
        array = np.asarray(_TensorMemory(plain, dtype.storage))
    except (RuntimeError, TypeError, ValueError) as exc:
        is_batched = getattr(getattr(torch._C, "_functorch", None), "is_batchedtensor", None)
        if is_batched is not None and is_batched(x):
            raise TypeError(
                "a tensor inside torch.vmap cannot be sent: it stands for many values. Call "
                "pycoll outside of vmap, with the tensor that has the batch's axis."
            ) from None
        raise TypeError(
            f"a tensor of type {type_name(x)} has no memory of its own here: {said(exc)}. "
            "Pass a plain tensor, for example x.to_local() or one made outside of a trace."
        ) from exc
    if type(x) not in known_to_core:
        _introduce_torch(torch, x)
    return Value(array, dtype, "torch", x)


class _TensorMemory:
    """The memory of a tensor, for NumPy, whose array keeps the tensor.

    After Tensor.numpy() its storage could not be resized any more, as FSDP does.
    """

    def __init__(self, tensor: Any, storage: np.dtype[Any]) -> None:
        pointer, shape = tensor.data_ptr(), tuple(tensor.shape)
        if not pointer:
            if tensor.numel():
                raise TypeError("it has no memory")
            pointer = _NOWHERE.ctypes.data
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": tuple([stride * storage.itemsize for stride in tensor.stride()]),
            "typestr": storage.str,
        }


_NOWHERE: Final = np.empty(1)
"""Where arrays without elements are."""

known_to_core: Final[set[type]] = {memoryview, stdlib_array.array}
"""Types of arrays that the core looks at, or asks Python about."""

_MOST_KNOWN: Final = 256


def let_core_ask(cls: type, kind: str, seen: Any, to_write: Any, made: Any) -> None:
    """Have the core ask for what stands for arrays of this type; see `add_viewed` there."""
    if len(known_to_core) < _MOST_KNOWN and _core is not None:
        known_to_core.add(cls)
        _core.add_viewed(cls, kind, seen, to_write, made)


def _introduce_torch(torch: Any, x: Any) -> None:
    """Have the core look at tensors of this type, unless the type does anything of its own."""
    cls, base = type(x), torch.Tensor
    does_nothing = getattr(torch._C, "_disabled_torch_function_impl", None)
    if cls is base or (
        cls.__torch_function__ is does_nothing and cls.__torch_dispatch__ is base.__torch_dispatch__
    ):
        tell = getattr(torch._C, "_increment_version", None)
        if tell is None:
            tell = torch.autograd.graph.increment_version

        def kept(tensor: Any) -> Any:
            """Keep its memory while a call goes on: its storage cannot be resized any more."""
            plain = tensor.detach()
            return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()

        if _core is not None and _core.add_library("torch", x, tell, kept):
            known_to_core.add(cls)


def _stage_torch(torch: Any, x: Any, plain: Any, dtype: DType, writing: bool) -> Value:
    if not writing:
        plain = plain.contiguous()  # what the GPU does at once, copies do row by row
    number: int = plain.device.index
    device = cuda.device(number)
    ready = device.pending(torch.cuda.current_stream(number).cuda_stream)
    shape, itemsize = tuple(plain.shape), dtype.itemsize
    strides = tuple([stride * itemsize for stride in plain.stride()])
    place = (plain.data_ptr(), dtype.storage, shape, strides)
    stage = staging.Stage(device, *place, ready, plain, is_target=writing)
    return staged(stage, dtype, "torch", x)


def check_gradient(x: Any, name: str) -> None:
    """Refuse to write to a tensor whose gradient would not know of it, as PyTorch itself does.

    Of a leaf alone PyTorch says so; of other tensors it would trace what is written, as it cannot
    here. Under torch.no_grad() nobody asks for that.
    """
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            f"{name} is a tensor that requires a gradient, which would not know what is written to "
            f"it. Call this under torch.no_grad(), or pass {name}.detach()."
        )


def tell_written(value: Value) -> None:
    """Tell the library of an array that it was written to.

    PyTorch then raises an error where a gradient would need the elements that were there before.
    """
    if value.kind in ("torch", "cuda:torch"):
        sys.modules["torch"].autograd.graph.increment_version(value.original)


def to_torch(array: Array, dtype: DType) -> Any:
    torch = dtypes.import_library("torch")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # PyTorch has neither
    if not dtype.foreign:
        return torch.from_numpy(array)
    bits = np.int16 if dtype.itemsize == 2 else np.uint8
    return torch.from_numpy(array.view(bits)).view(getattr(torch, dtype.name))


def wrap_jax(x: Any) -> Value | None:
    try:
        platforms = {device.platform for device in x.devices()}
        array = np.asarray(x) if platforms == {"cpu"} else None
    except (TypeError, RuntimeError) as exc:  # traced, deleted, typed random keys
        if hasattr(x, "aval") and "Tracer" in type(x).__name__:
            raise TypeError(
                "inside jit, vmap or grad a JAX array has no value yet. Call pycoll between such "
                "functions, or inside of jit by jax.experimental.io_callback(..., ordered=True)."
            ) from None
        raise TypeError(
            f"this JAX array cannot be read: {said(exc)}. "
            "Pass a concrete array, outside of jit, or a random key as jax.random.key_data(x)."
        ) from exc
    if array is not None:
        try:
            dtype = dtypes.of_numpy(array.dtype)
        except TypeError:  # int4, for one
            return None
        return Value(array.view(dtype.storage) if dtype.foreign else array, dtype, "jax", x)
    if platforms == {"gpu"} and len(x.devices()) == 1:
        value = wrap_dlpack(x, writing=False)
        if value is not None and value.stage is not None:
            return value
    raise TypeError(f"a JAX array on {', '.join(sorted(platforms))} cannot be sent. {_MOVE}")


def to_jax(array: Array, dtype: DType, gpu: int | None = None) -> Any:
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
        return jax.numpy.asarray(to_numpy(array, dtype))


def wrap_dlpack(x: Any, writing: bool) -> Value | None:
    """Return what has `__dlpack__` or `__cuda_array_interface__` as a Value; None: it is none."""
    module = type(x).__module__.partition(".")[0]
    if not hasattr(type(x), "__dlpack__"):
        with _staging_for(module):
            return _wrap_interface(x, module, writing)
    try:
        if not dlpack.may_export(x):
            return None
        device, number = [int(part or 0) for part in x.__dlpack_device__()]  # Paddle: (1, None)
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
            raise TypeError(_NOT_EXPORTED.format(module, said(exc))) from exc
        if tensor.array is not None:
            return Value(tensor.array, tensor.dtype, f"dlpack:{module}", x)
        device = tensor.device[0]
    raise TypeError(f"a {module} array on DLPack device {device} cannot be sent. {_MOVE}")


@contextlib.contextmanager
def _staging_for(module: str) -> Iterator[None]:
    try:
        yield
    except TransportError as exc:
        raise TypeError(f"a {module} array on a GPU cannot be sent: {said(exc)}. {_MOVE}") from exc


def staged(stage: Stage, dtype: DType, library: str, x: object) -> Value:
    return Value(stage.make_buffer(), dtype, ON_GPU + library, x, stage, stage.device.number)


def _stage_dlpack(x: Any, module: str, number: int, writing: bool) -> Value:
    """Stage an array whose library has a stream of ours wait for what it has under way."""
    device = cuda.device(number)
    device.check_process()  # the library would say something else
    with copies.streams_of(device).meetings.pick() as side_stream:
        try:
            tensor = dlpack.take(dlpack.export(x, side_stream.handle))
        except BufferError as exc:
            raise TypeError(_NOT_EXPORTED.format(module, said(exc))) from exc
        ready = side_stream.last = side_stream.ready = device.pending(side_stream.handle)
    place = (tensor.pointer, tensor.dtype.storage, tensor.shape, tensor.strides)
    read_only = tensor.read_only
    if read_only:  # perhaps: old capsules cannot say. JAX has no interface for its bfloat16
        interface = getattr(x, "__cuda_array_interface__", None)
        read_only = interface["data"][1] if interface is not None else True
    stage = staging.Stage(device, *place, ready, tensor.owner, not read_only, writing)
    library = module if module in ("jax", "cupy") else f"dlpack:{module}"
    if module == "jaxlib":
        library = "jax"
    return staged(stage, tensor.dtype, library, x)


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
        raise TypeError(_NOT_EXPORTED.format(module, said(exc))) from exc
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) * storage.itemsize for i in range(len(shape))]
    device = cuda.device(cuda.owner(pointer) if pointer else 0)
    ready = device.pending(_LEGACY_STREAM if stream is None else stream)  # None: Numba's, for one
    place = (pointer, dtype.storage, shape, tuple(strides))
    stage = staging.Stage(device, *place, ready, x, not read_only, writing)
    return staged(stage, dtype, f"dlpack:{module}", x)


def to_library(module: str, array: Array, dtype: DType) -> Any:
    """Return an array of a library with DLPack over the same memory, or a copy.

    None: it cannot make one of this dtype: MLX makes float32 of float64.
    """
    make = _maker(module)
    if make is None:
        return None
    x = make(array, dtype)
    return x if dlpack.named(getattr(x, "dtype", dtype)) == dtype.name else None


def _maker(module: str) -> Callable[[Array, DType], Any] | None:
    """Return what makes arrays of a library; None: nothing does."""
    library = dtypes.import_library({"mlx": "mlx.core"}.get(module, module))
    if module == "tensorflow" and library is not None:
        # Not by from_dlpack: memory that is not aligned ends the process. This copies it then.
        return lambda array, dtype: library.convert_to_tensor(to_numpy(array, dtype))
    take = getattr(library, "from_dlpack", None)
    if take is None:
        return None
    return lambda array, dtype: take(dlpack.Exported(array, dtype) if dtype.foreign else array)


def to_memoryview(array: Array, detail: str) -> memoryview:
    view = recast(array, detail).data
    if detail and view.format != detail and view.nbytes and view.c_contiguous:
        view = view.cast("B").cast(detail, view.shape)  # type: ignore[call-overload]
    return view


def to_numpy(array: Array, dtype: DType) -> Array:
    return array.view(dtypes.to_numpy(dtype)) if dtype.foreign else array


def recast(array: Array, char: str) -> Array:
    """Return the array under another character for the same type, as long long for long."""
    return array.view(char) if char and np.dtype(char) == array.dtype else array


def importable(kind: str, dtype: DType) -> bool:
    """Return whether `unwrap` can make this kind of this dtype here."""
    base, _, detail = kind.partition(":")
    if base in ("torch", "jax"):
        library = dtypes.import_library("jax.numpy" if base == "jax" else base)
        return bool(dtype.code or dtype.foreign) and hasattr(library, dtype.name)
    if base == "dlpack":
        known = dtype.code > 0 or dtype.foreign
        return known and _maker(detail) is not None
    return base != "cupy"


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
    _core.add_library("memoryview", memoryview(b""), None, None)
    _core.add_library("array", stdlib_array.array("d"), None, None)
    return _core


_core = _introduce_numpy()
