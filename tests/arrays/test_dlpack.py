"""Memory that other libraries lend by DLPack: in capsules made by hand, and in real ones."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlpack_capsules import CPU, CUDA, CUDA_HOST, ROCM_HOST, Exported, name_of
from hypothesis import example, given
from hypothesis import strategies as st
from patience import PATIENCE

from pycoll import _dtypes as dtypes
from pycoll._arrays import conversion, dlpack
from pycoll._arrays.value import Value

INT, UINT, FLOAT, OPAQUE, BFLOAT, COMPLEX, BOOL = range(7)


READ_ONLY, IS_COPIED = 1, 2


new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class HandMade:
    """An array whose capsules are made byte by byte; must outlive what is taken.

    Attributes:
        given_back: for each call of the deleter, the struct's address and the thread.
    """

    def __init__(
        self,
        memory: Any = None,
        *,
        type: tuple[int, ...] = (FLOAT, 64, 1),
        shape: tuple[int, ...] | None = (3,),
        ndim: int | None = None,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        flags: int = 0,
        version: tuple[int, int] | None = (1, 1),
        device: tuple[int, int] = (CPU, 0),
        deleter: bool = True,
    ) -> None:
        self.given_back: list[tuple[int, int]] = []
        self._memory = np.arange(3.0) if memory is None else memory
        self._delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            lambda address: self.given_back.append((address, threading.get_ident()))
        )
        dims = [(ctypes.c_int64 * len(x))(*x) if x else None for x in (shape, strides)]
        addresses = [ctypes.addressof(x) if x else 0 for x in dims]
        data = self._memory.ctypes.data if isinstance(self._memory, np.ndarray) else self._memory
        size = len(shape or ()) if ndim is None else ndim
        tensor = struct.pack("PiiiBBHPPQ", data, *device, size, *type, *addresses, offset)
        delete = ctypes.cast(self._delete, ctypes.c_void_p).value or 0 if deleter else 0
        if version is None:
            text, self._name = tensor + struct.pack("PP", 0, delete), b"dltensor"
        else:
            text = struct.pack("IIPPQ", *version, 0, delete, flags) + tensor
            self._name = b"dltensor_versioned"
        self._struct = ctypes.create_string_buffer(text, len(text))
        self._dims = dims
        self._device = device

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    def __dlpack__(self, *, max_version: Any = None, copy: Any = None, stream: Any = None) -> Any:
        return new_capsule(self.address, self._name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def taken(x: HandMade) -> np.ndarray[Any, Any]:
    found = dlpack.take(dlpack.export(x)).array
    assert found is not None
    return found


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1), (1, 9)])
def test_a_capsule_is_renamed_and_the_memory_given_back_when_its_last_view_dies(
    version: tuple[int, int] | None,
) -> None:
    x = HandMade(version=version)
    capsule: Any = x.__dlpack__()
    tensor = dlpack.take(capsule)
    assert name_of(capsule) == (b"used_dltensor" if version is None else b"used_dltensor_versioned")
    assert tensor.array is not None
    assert tensor.array.tolist() == [0, 1, 2]
    assert tensor.array.ctypes.data == tensor.pointer == x._memory.ctypes.data
    view = tensor.array[1:].reshape(2, 1).T
    del tensor
    gc.collect()
    assert x.given_back == []
    assert view.tolist() == [[1, 2]]
    del view, capsule
    assert x.given_back == [(x.address, threading.get_ident())]


def test_a_capsule_is_taken_once() -> None:
    x = HandMade()
    capsule: Any = x.__dlpack__()
    first = dlpack.take(capsule)
    with pytest.raises(BufferError, match="no unused capsule"):
        dlpack.take(capsule)
    assert x.given_back == []
    del first
    assert len(x.given_back) == 1


OTHER_NAME = b"something else"  # a capsule does not keep it


@pytest.mark.parametrize("capsule", [None, 5, new_capsule(1, OTHER_NAME, None)])
def test_what_is_no_capsule_of_dlpack_is_refused(capsule: object) -> None:
    with pytest.raises(BufferError, match="no unused capsule"):
        dlpack.take(capsule)


def test_memory_without_a_deleter_is_never_given_back() -> None:
    x = HandMade(deleter=False)
    assert taken(x).tolist() == [0, 1, 2]
    assert x.given_back == []


def test_the_last_view_may_die_in_another_thread() -> None:
    x = HandMade()
    views = [taken(x)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert [who for _, who in x.given_back] == [thread.ident]


def test_the_memory_of_an_array_without_elements_is_given_back_at_once() -> None:
    x = HandMade(0, shape=(3, 0, 2))
    found = taken(x)
    assert (found.shape, found.dtype) == ((3, 0, 2), np.float64)
    assert len(x.given_back) == 1


def in_a_process(script: str) -> str:
    """Run a script that knows HandMade and `taken`; return what it prints."""
    folder = str(Path(__file__).parents[1] / "helpers")
    prelude = (
        f"import runpy, sys\nsys.path.append({folder!r})\nmade = runpy.run_path({__file__!r})\n"
        "HandMade, taken = made['HandMade'], made['taken']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_forked_child_does_not_give_back_what_is_its_parents() -> None:
    said = in_a_process("""
        import os
        x = HandMade()
        view = taken(x)
        child = os.fork()
        del view
        if child == 0:
            os._exit(len(x.given_back))
        print(os.waitpid(child, 0)[1], len(x.given_back))
    """)
    assert said.split() == ["0", "1"]


def test_at_the_end_of_the_interpreter_nothing_is_called() -> None:
    said = in_a_process("""
        import builtins, os, threading
        x = HandMade()
        x.given_back = type("Said", (), {"append": lambda *_: os.write(1, b"called ")})()
        builtins.kept = kept = taken(x)
        again = taken(x)
        del again
    """)
    assert said.split() == ["called"]


def test_ten_thousand_calls_leave_no_memory_behind() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def call() -> None:
        value = conversion.wrap(Exported(np.ones(8192)))
        assert value is not None
        assert conversion.unwrap(Value(value.array[::2], value.dtype, "numpy")).sum() == 4096

    for _ in range(100):
        call()
    before = resident()
    for _ in range(10_000):
        call()
    assert resident() - before < 8 << 20  # of 640 MB


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another major version": ({"version": (2, 0)}, "version 2"),
    "vectors": ({"type": (FLOAT, 32, 4)}, "4 lanes"),
    "no lanes": ({"type": (FLOAT, 32, 0)}, "0 lanes"),
    "opaque": ({"type": (OPAQUE, 64, 1)}, "code 3"),
    "bits": ({"type": (BOOL, 1, 1)}, "1 bits"),
    "half bytes": ({"type": (17, 4, 1)}, "code 17, 4 bits"),
    "another float of 8 bits": ({"type": (7, 8, 1)}, "code 7"),
    "a negative number of dimensions": ({"ndim": -1}, "-1 dimensions"),
    "too many dimensions": ({"shape": (1,) * 65}, "65 dimensions"),
    "no shape": ({"shape": None, "ndim": 1}, "no shape"),
    "a negative shape": ({"shape": (3, -1)}, "negative"),
    "a negative shape without elements": ({"shape": (0, -1)}, "negative"),
    "no memory": ({"memory": 0}, "no memory"),
    "more than there is": ({"shape": (1 << 40, 1 << 40)}, "too big|too large|maximum"),
    "a stride that is no number of bytes": ({"strides": (1 << 62,)}, "strides"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_no_array_can_have_is_refused_and_given_back_at_once(case: str) -> None:
    options, why = REFUSED[case]
    x = HandMade(**options)
    with pytest.raises(BufferError, match=why) as info:
        dlpack.take(x.__dlpack__())
    assert len(x.given_back) == 1
    del info
    gc.collect()
    assert len(x.given_back) == 1
    with pytest.raises(TypeError, match=rf"(?s)array cannot be sent: .*({why}).*Convert it first"):
        conversion.wrap(x)


def test_exactly_the_types_that_pycoll_has_are_read() -> None:
    # As dlpack.h numbers them.
    codes = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}
    small = {"e4m3fn": 10, "e4m3fnuz": 11, "e5m2": 12, "e5m2fnuz": 13, "e8m0fnu": 14}
    wanted = {(codes["bool"], 8): "bool"} | {(n, 8): f"float8_{x}" for x, n in small.items()}
    for dtype in dtypes.TABLE[1:]:
        wanted[codes[dtype.name.rstrip("0123456789")], 8 * dtype.itemsize] = dtype.name
    memory, found = np.zeros(16, np.uint8), {}
    for code, bits in itertools.product(range(24), [1, 2, 4, 6, 8, 16, 32, 64, 80, 96, 128]):
        x = HandMade(memory, type=(code, bits, 1), shape=())
        try:
            tensor = dlpack.take(x.__dlpack__())
        except BufferError:
            continue
        assert tensor.array is not None
        assert tensor.array.dtype == tensor.dtype.storage
        found[code, bits] = tensor.dtype.name
        del tensor
    assert found == wanted


@pytest.mark.parametrize(
    ("flags", "version", "writeable"),
    [
        (0, (1, 1), True),
        (READ_ONLY, (1, 0), False),
        (IS_COPIED, (1, 0), False),
        (READ_ONLY | IS_COPIED, (1, 1), False),
        (4, (1, 1), True),  # about types of less than a byte
        (0, None, False),  # nobody said that it may be written to
    ],
)
def test_only_what_the_library_allows_is_written_to(
    flags: int, version: tuple[int, int] | None, writeable: bool
) -> None:
    memory = np.zeros(3)
    x = HandMade(memory, flags=flags, version=version)
    found = taken(x)
    assert found.flags.writeable is writeable
    if writeable:
        conversion.check_out(x, dtypes.FLOAT64, (3,)).array[...] = 7
        assert memory.tolist() == [7, 7, 7]
    else:
        with pytest.raises(ValueError, match="read-only"):
            conversion.check_out(x, dtypes.FLOAT64, (3,))
        with pytest.raises(ValueError, match="WRITEABLE"):
            found.flags.writeable = True


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None, int]:
    """A shape, strides in elements, and the first element's index, within 64 elements."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    strides = tuple(draw(st.integers(-5, 5)) for _ in shape)
    first = -sum(min(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True) if n)
    if draw(st.booleans()):
        return shape, None, 0
    return shape, strides, first


@example(((2,), (-1,), 1), "u2", True, False)
@given(layouts(), st.sampled_from(["i1", "u2", "f4", "c16"]), st.booleans(), st.booleans())
def test_elements_are_found_whatever_the_strides(
    layout: Any, kind: str, by_offset: bool, versioned: bool
) -> None:
    shape, strides, first = layout
    memory = np.arange(64).astype(kind)
    code = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX}[kind[0]]
    start = memory[first:] if first < 64 else memory
    x = HandMade(
        memory if by_offset else start,
        type=(code, memory.itemsize * 8, 1),
        shape=shape,
        strides=strides,
        offset=first * memory.itemsize if by_offset else 0,
        version=(1, 1) if versioned else None,
    )
    steps = None if strides is None else [stride * memory.itemsize for stride in strides]
    wanted = np.lib.stride_tricks.as_strided(start, shape, steps)
    tensor = dlpack.take(dlpack.export(x))
    assert tensor.array is not None
    assert np.array_equal(tensor.array, wanted)
    assert tensor.shape == shape
    if 0 not in shape:
        assert tensor.array.ctypes.data == tensor.pointer == start.ctypes.data
        assert tensor.array.flags.c_contiguous == wanted.flags.c_contiguous
        if strides is not None:
            assert tensor.strides == tuple(steps or ())
    del tensor
    assert len(x.given_back) == 1


def test_memory_need_not_be_aligned() -> None:
    memory = np.zeros(25, np.uint8)
    memory[1:].view(np.float64)[...] = [1, 2, 3]
    found = taken(HandMade(memory, offset=1))
    assert found.tolist() == [1, 2, 3]
    assert not found.flags.aligned


@pytest.mark.parametrize("device", [CPU, CUDA_HOST, ROCM_HOST])
def test_memory_of_the_host_is_read_whoever_pinned_it(device: int) -> None:
    x = HandMade(device=(device, 0))
    assert taken(x).tolist() == [0, 1, 2]
    value = conversion.wrap(x)
    assert value is not None
    assert value.array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("device", [(CUDA, 1), (10, 0), (13, 0), (14, 3), (99, 0)])
def test_memory_of_a_device_is_described_and_not_touched(device: tuple[int, int]) -> None:
    x = HandMade(0xDEAD0000, shape=(2, 3), offset=16, device=device)
    tensor = dlpack.take(dlpack.export(x))
    assert tensor.array is None
    assert (tensor.device, tensor.pointer) == (device, 0xDEAD0010)
    assert (tensor.dtype, tensor.shape, tensor.strides) == (dtypes.FLOAT64, (2, 3), (24, 8))
    assert x.given_back == []
    del tensor
    assert len(x.given_back) == 1
    if device[0] in dlpack.CUDA_DEVICES:
        return  # whether it can be sent, the driver knows
    with pytest.raises(TypeError, match=f"DLPack device {device[0]} .*Move it to the CPU"):
        conversion.wrap(x)
    assert len(x.given_back) == 1  # it was not even asked for


def test_the_capsule_knows_better_than_the_array_where_the_memory_is() -> None:
    x = HandMade(0xDEAD0000, device=(CUDA, 0))
    x.__dict__["_device"] = (CPU, 0)
    with pytest.raises(TypeError, match=r"DLPack device 2 .*Move it to the CPU"):
        conversion.wrap(x)
    assert len(x.given_back) == 1


def test_a_library_is_asked_for_the_newest_form_that_it_knows() -> None:
    asked: list[dict[str, Any]] = []

    class Library:
        def __init__(self, *known: str) -> None:
            self.known = known

        def __dlpack__(self, **options: Any) -> object:
            asked.append(options)
            if set(options) - set(self.known):
                raise TypeError("unexpected keyword argument")
            return len(asked)

    newest = {"max_version": (1, 1), "copy": False}
    for known, wanted in [
        (("max_version", "copy"), [newest]),
        (("max_version",), [newest, {"max_version": (1, 1)}]),
        ((), [newest, {"max_version": (1, 1)}, {}]),
    ]:
        asked.clear()
        assert dlpack.export(Library(*known)) == len(wanted)
        assert asked == wanted


def test_a_library_may_know_the_newest_form_and_refuse_it() -> None:
    class Library:
        def __dlpack__(self, max_version: Any = None, copy: Any = None) -> object:
            if max_version is not None:
                raise ValueError("max_version needs a newer version of the array API")
            return "a capsule"

    assert dlpack.export(Library()) == "a capsule"
