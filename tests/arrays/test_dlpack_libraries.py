"""Memory by DLPack between real libraries, and on a GPU."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import numpy as np
import pytest
from dlpack_capsules import CPU, CUDA, Exported, name_of
from tiers import few

from pycoll import _dtypes as dtypes
from pycoll._arrays import conversion, dlpack


@pytest.mark.parametrize("error", [BufferError, TypeError, ValueError])
def test_an_array_that_its_library_will_not_lend_travels_as_an_object(error: Any) -> None:
    class Library:
        def __dlpack__(self, **_: Any) -> object:
            raise error("strings")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (CPU, 0)

    with pytest.raises(error, match="strings"):
        dlpack.export(Library())
    assert conversion.wrap(Library()) is None


class Asked:
    """An array of a library that counts how often it is asked for DLPack."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.asked = 0

    def __dlpack__(self, **_: Any) -> object:
        self.asked += 1
        return np.ones(2).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int | None]:
        return (CPU, None)  # as Paddle's


class Named:
    def __init__(self, name: object, text: str = "") -> None:
        self.name = name
        self.text = text

    def __str__(self) -> str:
        return self.text


NO_DTYPE_OF_DLPACK = [
    Named("string"),
    Named("resource"),
    Named("qint8"),
    Named("int4"),
    Named(None, "a_library.strings"),
    Named(None, ""),
    np.dtype("U4"),
    np.dtype("V8"),
    np.dtype("M8[s]"),
    np.dtype(object),
]


@pytest.mark.parametrize("dtype", NO_DTYPE_OF_DLPACK, ids=lambda dtype: f"{dtype.name} {dtype}")
def test_a_library_is_not_asked_for_elements_that_dlpack_has_not(dtype: Any) -> None:
    x = Asked(dtype)
    assert conversion.wrap(x) is None
    assert x.asked == 0  # it might end the process


DTYPES_OF_DLPACK = [
    None,
    np.dtype("f8"),
    Named("float64"),
    Named("FLOAT64"),
    Named("bfloat16"),
    Named("double"),
    Named(None, "a_library.core.float64"),
    Named(None, "<dtype: 'float64'>"),
    Named(lambda: "a method", "float8_e5m2"),
]


@pytest.mark.parametrize("dtype", DTYPES_OF_DLPACK, ids=str)
def test_a_dtype_is_known_however_its_library_writes_it(dtype: Any) -> None:
    x = Asked(dtype)
    value = conversion.wrap(x)
    assert value is not None
    assert (x.asked, value.array.tolist()) == (1, [1, 1])


def test_a_result_that_its_library_would_convert_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    single = types.SimpleNamespace(from_dlpack=lambda x: np.from_dlpack(x).astype(np.float32))
    monkeypatch.setitem(sys.modules, "single", single)  # type: ignore[arg-type]
    for dtype in (dtypes.FLOAT32, dtypes.FLOAT64):
        value = conversion.fresh(dtype, "dlpack:single", (1,))
        value.array[...] = 1 + 2.0**-52
        result = conversion.unwrap(value)
        assert (result.dtype, result[0]) == (dtype.storage, dtype.storage.type(1 + 2.0**-52))


PATTERNS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "every second": lambda x: x[1::2, ::3],
    "a row": lambda x: x[2],
    "0-d": lambda x: x[1, 2, ...],
    "empty": lambda x: x[:, 6:],
}


FLOAT8 = [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]


@pytest.mark.parametrize("name", [dtype.name for dtype in dtypes.TABLE if not dtype.foreign])
def test_arrays_of_numpy_are_lent_and_read(name: str) -> None:
    patterns = {
        **PATTERNS,
        "backwards": lambda x: x[::-1, ::-2],
        "broadcast": lambda x: np.broadcast_to(x, (2, 4, 6)),
    }
    for pattern in patterns.values():
        x = pattern(np.arange(24).astype(name).reshape(4, 6))
        # Without flags, NumPy does not lend what may not be written to.
        forms: list[dict[str, Any]] = [{}] if x.flags.writeable else []
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
            forms.append({"max_version": (1, 0)})
        for options in forms:
            tensor = dlpack.take(x.__dlpack__(**options))
            assert tensor.array is not None
            assert tensor.dtype.name == name
            assert (tensor.array.shape, tensor.array.dtype) == (x.shape, x.dtype)
            assert tensor.array.tobytes() == x.tobytes()
            assert tensor.array.flags.writeable == bool(options and x.flags.writeable)
            assert 0 in x.shape or tensor.array.ctypes.data == x.ctypes.data


@pytest.mark.parametrize("name", [dtype.name for dtype in dtypes.TABLE] + FLOAT8)
def test_tensors_of_torch_are_lent_and_read(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    patterns = {**PATTERNS, "expanded": lambda x: x[:1].expand(3, 6)}
    for pattern in patterns.values():
        x = pattern(torch.arange(24).reshape(4, 6).to(getattr(torch, name)))
        value = conversion.wrap(Exported(x))
        assert value is not None
        assert value.dtype.name == name
        assert value.array.tobytes() == bytes(x.reshape(-1).view(torch.uint8).tolist())
        assert value.array.flags.writeable
        assert not x.numel() or value.array.ctypes.data == x.data_ptr()
        # and the other way: as a result of that library
        exported = dlpack.Exported(value.array, value.dtype) if value.dtype.foreign else value.array
        again = torch.from_dlpack(exported)
        assert (again.dtype, again.shape) == (x.dtype, x.shape)
        if x.numel():
            assert (again.data_ptr(), again.stride()) == (x.data_ptr(), x.stride())


@pytest.mark.parametrize("name", ["bool", "int32", "uint8", "float16", "bfloat16", "complex64"])
def test_arrays_of_jax_are_lent_and_read(name: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    for x in (jax.numpy.ones((2, 3), name), jax.numpy.ones((), name), jax.numpy.ones(0, name)):
        value = conversion.wrap(Exported(x))
        assert value is not None
        assert value.dtype.name == name
        assert value.array.tobytes() == np.asarray(x).tobytes()
        assert not value.array.flags.writeable  # they never change


def test_a_result_of_bfloat16_is_of_the_library_that_lent_one() -> None:
    x = np.array([0x3F80, 0x4000], np.uint16)  # 1 and 2

    class Library(types.ModuleType):
        def from_dlpack(self, x: Any) -> Any:
            return dlpack.take(dlpack.export(x))

    sys.modules["a_library"] = Library("a_library")
    try:
        for dtype in (dtypes.BFLOAT16, dtypes.of_name("float8_e5m2"), dtypes.UINT16):
            assert dtype is not None
            kind, shape = "dlpack:a_library", (2,)
            value = conversion.fresh(dtype, kind, shape)
            assert value.kind == kind
            value.array[...] = x.astype(dtype.storage)
            result = conversion.unwrap(value)
            assert result.dtype is dtype
            assert result.array.tolist() == value.array.tolist()
            assert result.pointer == value.array.ctypes.data
    finally:
        del sys.modules["a_library"]


class Owner:
    """Memory that says when it dies."""

    def __init__(self, deaths: list[str]) -> None:
        self._deaths = deaths

    def __del__(self) -> None:
        self._deaths.append("owner")


def exported(
    deaths: list[str], shape: tuple[int, ...] = (2, 3), dtype: dtypes.DType = dtypes.FLOAT32
) -> dlpack.DeviceArray:
    return dlpack.DeviceArray(0xDEAD0000, dtype, shape, 1, Owner(deaths))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, b"dltensor"),
        ({"max_version": (0, 8)}, b"dltensor"),
        ({"max_version": None}, b"dltensor"),
        ({"max_version": (1, 0)}, b"dltensor_versioned"),
        ({"max_version": (2, 0), "stream": 1, "copy": False}, b"dltensor_versioned"),
    ],
)
def test_memory_on_a_gpu_is_exported_in_the_form_that_is_asked_for(
    options: dict[str, Any], name: bytes
) -> None:
    deaths: list[str] = []
    for dtype in (*dtypes.TABLE, dtypes.of_name("float8_e5m2")):
        assert dtype is not None
        array = exported(deaths, dtype=dtype)
        assert array.__dlpack_device__() == (CUDA, 1)
        capsule = array.__dlpack__(**options)
        assert name_of(capsule) == name
        tensor = dlpack.take(capsule)
        assert (tensor.array, tensor.device, tensor.pointer) == (None, (CUDA, 1), 0xDEAD0000)
        assert (tensor.dtype, tensor.shape) == (dtype, (2, 3))
        assert tensor.strides == (3 * dtype.itemsize, dtype.itemsize)
        assert tensor.read_only is (name == b"dltensor")  # the old form cannot say


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
@pytest.mark.parametrize("shape", few([(2, 0, 3), (4,)], [(), (0,)]))
def test_memory_on_a_gpu_lives_as_long_as_somebody_has_it(
    options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    deaths: list[str] = []
    array = exported(deaths, shape)
    tensors = [dlpack.take(array.__dlpack__(**options)) for _ in range(2)]
    del array
    gc.collect()
    for _ in range(2):
        assert deaths == []
        tensor = tensors.pop()
        assert tensor.shape == shape
        del tensor
        gc.collect()
    assert deaths == ["owner"]


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
def test_a_capsule_of_a_gpu_that_nobody_takes_gives_its_memory_back(
    options: dict[str, Any],
) -> None:
    deaths: list[str] = []
    array = exported(deaths)
    capsule = array.__dlpack__(**options)
    del array
    gc.collect()
    assert deaths == []
    del capsule
    gc.collect()
    assert deaths == ["owner"]


def test_the_cuda_array_interface_tells_the_same() -> None:
    deaths: list[str] = []
    interface = exported(deaths, dtype=dtypes.COMPLEX64).__cuda_array_interface__
    assert (interface["data"], interface["shape"]) == ((0xDEAD0000, False), (2, 3))
    assert (interface["typestr"], interface["strides"]) == ("<c8", None)
    assert (interface["version"], interface["stream"]) == (3, None)
    assert exported(deaths, (0, 3)).__cuda_array_interface__["data"] == (0, False)
    assert not hasattr(exported(deaths, dtype=dtypes.BFLOAT16), "__cuda_array_interface__")
