"""Whatever a user calls an array -> Value, and back."""

from __future__ import annotations

import array
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_cases import Exported, wrapped
from patience import PATIENCE

from pycoll import _dtypes as dtypes
from pycoll._arrays import conversion
from pycoll._arrays.value import Value


def sent(x: object) -> Any:
    """What another rank makes of `x`: described, parsed, filled with its elements."""
    value = wrapped(x)
    dtype, kind, shape = conversion.from_description(conversion.describe(value))
    result = conversion.fresh(dtype, kind, shape)
    result.array[...] = value.array
    return conversion.unwrap(result)


def same_memory(value: Value, x: np.ndarray[Any, Any]) -> bool:
    return value.array.ctypes.data == x.ctypes.data


STRIDED = [
    np.arange(12.0).reshape(3, 4)[::-1, ::2],
    np.arange(12.0).reshape(3, 4).T,
    np.broadcast_to(np.float32(3), (2, 3)),
    np.zeros((0, 3), np.int8),
    np.array(5, np.uint16),
    np.asfortranarray(np.ones((2, 3), np.complex64)),
]


@pytest.mark.parametrize("x", STRIDED, ids=["negative", "transposed", "zero", "empty", "0-d", "F"])
def test_numpy_arrays_of_any_strides_are_not_copied(x: np.ndarray[Any, Any]) -> None:
    value = wrapped(x)
    assert value.array is x
    assert conversion.unwrap(value) is x
    result = sent(x)
    assert type(result) is np.ndarray
    assert (result.shape, result.dtype) == (x.shape, x.dtype)
    assert np.array_equal(result, x)
    assert result.flags.c_contiguous
    assert result.flags.writeable


def test_a_read_only_array_stays_read_only_when_wrapped() -> None:
    x = np.arange(3)
    x.flags.writeable = False
    assert not wrapped(x).array.flags.writeable


def test_a_matrix_is_seen_as_a_plain_array() -> None:
    with pytest.warns(PendingDeprecationWarning):
        x = np.matrix([[1.0, 2.0]])
    value = wrapped(x)
    assert type(value.array) is np.ndarray
    assert same_memory(value, x)
    assert type(sent(x)) is np.ndarray


def test_a_record_array_comes_as_a_structured_array() -> None:
    x = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    result = sent(x)
    assert result.dtype == np.dtype([("a", "i4"), ("b", "f8")])
    assert result["b"][0] == 2.0


def test_a_bfloat16_array_is_viewed_not_copied(ml_dtypes: Any) -> None:
    x = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)[:, ::-1]
    value = wrapped(x)
    assert value.dtype is dtypes.BFLOAT16
    assert value.array.dtype == np.uint16
    assert same_memory(value, x)
    result = sent(x)
    assert result.dtype == ml_dtypes.bfloat16
    assert np.array_equal(result, x)


@pytest.mark.parametrize(
    "x",
    [
        None,
        "text",
        b"bytes",
        bytearray(3),
        1,
        2.5,
        1j,
        True,
        [1, 2],
        (1, 2),
        {"a": 1},
        {1},
        np.float32(3),
        np.array([None]),
        np.zeros(2, [("a", "O")]),
        array.array("w" if "w" in array.typecodes else "u", "text"),
        range(3),
        object(),
        (ctypes.c_int * 3)(),
        np.ndarray,
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_array_travels_as_an_object(x: object) -> None:
    assert conversion.wrap(x) is None


@pytest.mark.parametrize("dtype", [">f8", "M8[ns]", "S3", "U2", "g", "V3", [("a", "f4", (2,))]])
def test_other_numpy_dtypes_move(dtype: Any) -> None:
    x = np.zeros((2, 3), dtype)
    x.view(np.uint8)[...] = 7
    result = sent(x)
    assert result.dtype == x.dtype
    assert result.tobytes() == x.tobytes()


@pytest.mark.parametrize("char", list("?bBhHiIlLqQnNfdc"))
def test_a_memoryview_comes_back_with_its_format(char: str) -> None:
    if char in "nN" and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("NumPy 1 does not read the formats n and N")
    x = memoryview(bytearray(range(16))).cast(char)  # type: ignore[call-overload]
    result = sent(x)
    assert isinstance(result, memoryview)
    assert (result.format, result.shape) == (char, x.shape)
    assert result.tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", ["e", "F", "D", ">i4"])
def test_a_memoryview_of_a_numpy_format_comes_back_with_it(dtype: str) -> None:
    x = np.ones((2, 3), dtype).data
    result = sent(x)
    assert (result.format, result.shape, result.tobytes()) == (x.format, x.shape, x.tobytes())


def test_a_memoryview_of_ctypes_is_an_array() -> None:
    result = sent(memoryview((ctypes.c_int * 3)(1, 2, 3)))
    assert isinstance(result, memoryview)
    assert result.tolist() == [1, 2, 3]


def test_a_strided_or_read_only_memoryview_is_not_copied() -> None:
    strided = memoryview(bytearray(range(10)))[::-2]
    assert wrapped(strided).array.tolist() == strided.tolist()
    wrapped(strided).array[0] = 77
    assert strided[0] == 77
    assert not wrapped(memoryview(b"abc")).array.flags.writeable


def test_a_memoryview_without_elements_or_dimensions_moves() -> None:
    assert sent(np.empty((0, 2), "q").data).shape == (0, 2)
    scalar = sent(np.array(5, "q").data)
    assert (scalar.shape, scalar.format, scalar.tolist()) == ((), "q", 5)


def test_a_memoryview_of_pointers_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"does not hold numbers\. Pass its bytes"):
        conversion.wrap(memoryview((ctypes.c_void_p * 2)()))


@pytest.mark.parametrize("typecode", list("bBhHiIlLqQfd"))
@pytest.mark.parametrize("count", [0, 3])
def test_an_array_array_comes_back_with_its_typecode(typecode: str, count: int) -> None:
    x = array.array(typecode, range(count))
    result = sent(x)
    assert isinstance(result, array.array)
    assert result.typecode == typecode
    assert result == x
    result.append(1)  # nothing holds its buffer


def test_a_gathered_array_array_is_a_numpy_array_because_it_has_two_dimensions() -> None:
    value = wrapped(array.array("i", [1, 2]))
    result = conversion.unwrap(conversion.fresh(value.dtype, value.kind, (3, 2)))
    assert isinstance(result, np.ndarray)
    assert result.shape == (3, 2)


def test_a_strided_part_of_a_result_can_be_unwrapped() -> None:
    backwards = np.arange(4, dtype=np.int32)[::-1]
    for kind in ("array", "memoryview", "numpy"):
        result = conversion.unwrap(Value(backwards, dtypes.INT32, kind))
        assert list(result) == [3, 2, 1, 0]


FLOAT8 = [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]


TORCH_DTYPES = [dtype.name for dtype in dtypes.TABLE] + ["float8_e5m2"]


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_a_tensor_comes_back_as_a_tensor(torch: Any, name: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).to(getattr(torch, name))
    result = sent(x)
    assert type(result) is torch.Tensor
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    assert torch.equal(result.float() if "8_" in name else result, x.float() if "8_" in name else x)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_a_tensor_is_not_copied_whatever_its_strides(torch: Any, name: str) -> None:
    x = torch.zeros(3, 4).to(getattr(torch, name)).t()[1:]
    value = wrapped(x)
    assert value.array.ctypes.data == x.data_ptr()
    assert value.array.shape == (3, 3)
    value.array[0, 1] = 1
    assert bool(x[0, 1])
    assert conversion.unwrap(value) is x


def test_a_tensor_that_requires_grad_is_read_without_its_graph(torch: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert wrapped(leaf).array.tolist() == [1, 1, 1]
    assert wrapped(leaf * 2).array.tolist() == [2, 2, 2]
    assert type(sent(torch.nn.Parameter(torch.ones(2)))) is torch.Tensor


def test_lazily_conjugated_and_negated_tensors_have_the_values_they_show(torch: Any) -> None:
    x = torch.tensor([1 + 2j]).conj()
    assert wrapped(x).array.tolist() == [1 - 2j]
    assert wrapped(x.imag).array.tolist() == [-2.0]
    assert conversion.unwrap(wrapped(x)).tolist() == [1 - 2j]
    with pytest.raises(ValueError, match="resolve_conj"):
        conversion.check_out(x, dtypes.COMPLEX64, (1,))


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory_are_refused_with_advice(torch: Any) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for x, advice in [
        (torch.zeros(3, 3).to_sparse(), "to_dense"),
        (torch.zeros(3, 3).to_sparse_csr(), "to_dense"),
        (nested, "to_padded_tensor"),
        (torch.zeros(3, device="meta"), "CPU"),
        (torch.zeros(3, dtype=torch.complex32), r"x\.to\(torch\.complex64\)"),
        (torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8), "x.dequantize"),
        (torch._efficientzerotensor((3,)), "plain tensor"),
        (torch.nn.parameter.UninitializedParameter(), "plain tensor"),
    ]:
        with pytest.raises(TypeError, match=advice):
            conversion.wrap(x)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_of_any_dtype_is_sent_or_refused_with_advice(torch: Any) -> None:
    every = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    refused = set()
    for dtype in every:
        x = torch.empty(3, dtype=dtype)
        if dtypes.of_name(str(dtype).removeprefix("torch.")) is None:
            with pytest.raises(TypeError, match=r"send its bits|dequantize"):
                conversion.wrap(x)
            refused.add(dtype)
        else:
            value = wrapped(x)
            assert f"torch.{value.dtype}" == str(dtype)
            assert value.array.ctypes.data == x.data_ptr()
    assert {str(dtype) for dtype in every - refused} == {
        f"torch.{name}" for name in [*(dtype.name for dtype in dtypes.TABLE), *FLOAT8]
    }


def test_a_read_only_or_reversed_result_becomes_a_tensor_by_a_copy(torch: Any) -> None:
    x = np.arange(3)
    x.flags.writeable = False
    assert conversion.unwrap(Value(x, dtypes.INT64, "torch")).tolist() == [0, 1, 2]
    assert conversion.unwrap(Value(x[::-1], dtypes.INT64, "torch")).tolist() == [2, 1, 0]


def test_a_tensor_result_shares_the_memory_it_was_received_in(torch: Any) -> None:
    value = conversion.fresh(dtypes.BFLOAT16, "torch", (4,))
    assert conversion.unwrap(value).data_ptr() == value.array.ctypes.data


@pytest.mark.parametrize("kind", ["torch", "jax", "dlpack:no_such_library_here", "cupy"])
def test_without_the_senders_library_a_value_comes_as_numpy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "jax", "jax.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    value = conversion.fresh(dtypes.FLOAT32, kind, (2,))
    assert value.kind == "numpy"
    assert type(conversion.unwrap(value)) is np.ndarray


def test_bfloat16_without_any_library_is_refused_before_it_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("torch", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TypeError, match="ml_dtypes"):
        conversion.fresh(dtypes.BFLOAT16, "torch", (2,))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "int32", "complex64", "float16"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_a_jax_array_comes_back_as_one(jax: Any, name: str, shape: tuple[int, ...]) -> None:
    x = jax.numpy.ones(shape, name)
    value = wrapped(x)
    assert not value.array.flags.writeable
    if value.array.size:
        assert value.array.ctypes.data == x.unsafe_buffer_pointer()
    result = sent(x)
    assert isinstance(result, jax.Array)
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    assert bool((result == x).all())


@pytest.mark.parametrize("name", ["int64", "float64", "complex128", "uint64"])
def test_a_jax_result_of_64_bits_keeps_them(jax: Any, name: str) -> None:
    dtype = dtypes.of_name(name)
    assert dtype is not None
    value = conversion.fresh(dtype, "jax", (2,))
    value.array[...] = 2**33 + 1
    result = conversion.unwrap(value)
    assert isinstance(result, jax.Array)
    assert result.dtype == name
    assert np.asarray(result).tolist() == [2**33 + 1] * 2


def test_a_jax_array_that_has_no_elements_to_read_is_refused(jax: Any) -> None:
    refused: list[str] = []

    def traced(x: Any) -> Any:
        with pytest.raises(TypeError, match=r"inside jit, .* has no value yet") as info:
            conversion.wrap(x)
        refused.append(str(info.value))
        return x

    jax.jit(traced)(jax.numpy.ones(3))
    assert len(refused) == 1
    with pytest.raises(TypeError, match="key_data"):
        conversion.wrap(jax.random.key(0))
    deleted = jax.numpy.ones(3)
    deleted.delete()
    with pytest.raises(TypeError, match="deleted"):
        conversion.wrap(deleted)


def test_a_jax_out_is_refused_because_it_never_changes(jax: Any) -> None:
    with pytest.raises(ValueError, match="JAX"):
        conversion.check_out(jax.numpy.ones(3), dtypes.FLOAT32, (3,))


def test_an_array_with_dlpack_is_read_without_a_copy() -> None:
    x = np.arange(6.0).reshape(2, 3)[:, ::2]
    value = wrapped(Exported(x))
    assert same_memory(value, x)
    assert value.kind == f"dlpack:{Exported.__module__}"


def test_a_result_is_made_by_the_from_dlpack_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "a_library", sys.modules[Exported.__module__])
    value = conversion.fresh(dtypes.FLOAT32, "dlpack:a_library", (2,))
    result = conversion.unwrap(value)
    assert isinstance(result, Exported)
    assert same_memory(value, result.x)


ON_A_GPU = """
import sys
import pytest
from pycoll._arrays import conversion as arrays

class Exported:
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **options):
        raise AssertionError("it cannot be read anyway")

class Cuda:
    __cuda_array_interface__ = dict(
        version=3, shape=(3,), typestr="<f4", data=(4096, False), strides=None
    )

if sys.argv[1] == "cuda-bindings":
    sys.modules["cuda.bindings"] = None
for x in (Exported(), Cuda()):
    with pytest.raises(TypeError, match=f"{sys.argv[1]}(.|\\n)* Move it to the CPU"):
        arrays.wrap(x)
"""


@pytest.mark.parametrize("missing", ["cuda-bindings", "NVIDIA driver"])
def test_an_array_on_a_gpu_that_cannot_be_used_is_refused_with_advice(
    missing: str, tmp_path: Path
) -> None:
    if missing == "NVIDIA driver":
        pytest.importorskip("cuda.bindings.driver")
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")  # what the machine has is not found
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU, missing],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def test_what_its_library_will_not_export_travels_as_an_object() -> None:
    assert conversion.wrap(Exported(np.array(["text"]))) is None
