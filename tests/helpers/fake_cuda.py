"""A CUDA driver without a GPU, in tests/helpers/fake_cuda: NVIDIA's own cuda-bindings call it.

    path = build(folder)                      compile it: folder/libcuda.so.1
    load(path)                                into this process, before cuda.bindings looks for one
    subprocess.run(..., env=os.environ | environment(path, devices=2))

It is stricter and nastier than a GPU, never more lenient. Device memory cannot be touched by the
host, and holds 0xA5 until it is written. A stream is a queue, and nothing in it runs before
somebody asks or waits: then operations of all streams run, in an order that the seed chooses. What
a copy will write holds 0xDB until the copy has run. A copy to or from memory that is not there (any
more) is an illegal address, from which its context never recovers; so is one with page-locked
memory that was given back too early. Registered ranges may not share a page. The default streams
(0 and 1 are one; 2, one for each thread) wait for no other. Waiting for what is held lasts a minute
at most: CUDA_ERROR_LAUNCH_TIMEOUT. What network devices write is seen after a flush.

The functions below speak to the driver of this process, loaded or found by LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsInt

from patience import PATIENCE

from pycoll._cuda import cuda

SOURCES = Path(__file__).resolve().parent / "fake_cuda"
NAME = "libcuda.so.1"
NVRTC = "libnvrtc.so.12", "libnvrtc.so.13"
FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden")
FRESH, UNDONE = 0xA5, 0xDB
"""What memory holds that nobody has written, and what the destination of a copy not yet run."""


def build(folder: Path) -> Path:
    """Compile the driver, and return the path of its libcuda.so.1 in `folder`.

    Raises:
        RuntimeError: there is no compiler, or it says no.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the fake CUDA driver needs gcc")
    path = folder / NAME
    sources = sorted(SOURCES.glob("*.c"))
    _compile(compiler, sources, path)
    for name in NVRTC:
        _compile(compiler, sorted((SOURCES / "nvrtc").glob("*.c")), folder / name)
    return path


def _compile(compiler: str, sources: list[Path], path: Path) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    command = [
        compiler,
        *FLAGS,
        "-shared",
        "-pthread",
        f"-Wl,-soname,{path.name}",
        "-o",
        fresh,
        *sources,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * PATIENCE)
    if done.returncode:
        raise RuntimeError(f"the fake CUDA driver cannot be compiled: {done.stderr}")
    fresh.replace(path)  # at once: another process may be loading it


def load(path: Path, *, devices: int = 2, seed: int = 1) -> None:
    """Make it the driver of this process. Once: a later call leaves the first one's as it is.

    Raises:
        RuntimeError: the process has another driver already.
    """
    try:
        ctypes.CDLL(NAME, os.RTLD_NOLOAD)
    except OSError:
        os.environ["FAKE_CUDA_DEVICES"], os.environ["FAKE_CUDA_SEED"] = str(devices), str(seed)
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        finally:
            del os.environ["FAKE_CUDA_DEVICES"], os.environ["FAKE_CUDA_SEED"]
        cuda.is_usable.cache_clear()  # another module's tests may have asked when it was not
    if not hasattr(ctypes.CDLL(NAME), "fake_seed"):
        raise RuntimeError("this process has loaded another CUDA driver")


def environment(
    path: Path,
    *,
    devices: int = 1,
    seed: int = 1,
    fail: str = "",
    trace: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The variables of a process that shall find this driver; see fail() for `fail`.

    `trace` writes a line for each call to standard error. CUDA_VISIBLE_DEVICES chooses devices by
    number as it does with the real driver.
    """
    folders = [str(path.parent), *filter(None, [environ.get("LD_LIBRARY_PATH")])]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(folders),
        "FAKE_CUDA_DEVICES": str(devices),
        "FAKE_CUDA_SEED": str(seed),
        "FAKE_CUDA_FAIL": fail,
        "FAKE_CUDA_TRACE": str(int(trace)),
    }


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL(NAME)
    library.fake_seed.argtypes = [ctypes.c_uint64]
    library.fake_hold.argtypes = [ctypes.c_void_p]
    library.fake_hold.restype = ctypes.c_uint64
    library.fake_release.argtypes = [ctypes.c_uint64]
    library.fake_release.restype = ctypes.c_bool
    library.fake_capture.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    library.fake_capture.restype = ctypes.c_bool
    library.fake_fail.argtypes = [ctypes.c_char_p]
    library.fake_fail.restype = ctypes.c_bool
    library.fake_stats.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.fake_attribute.argtypes = [ctypes.c_int, ctypes.c_int]
    library.fake_attribute.restype = ctypes.c_bool
    library.fake_dma.argtypes = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    for function in (library.fake_peek, library.fake_poke):
        function.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
    return library


def seed(number: int) -> None:
    """Choose the order in which things happen from now on."""
    _driver().fake_seed(number)


def hold(stream: SupportsInt) -> int:
    """Enqueue what does not end before release(): a long kernel. Return its number."""
    number: int = _driver().fake_hold(int(stream))
    if not number:
        raise ValueError(f"no stream {int(stream):#x}, or no current context")
    return number


def release(number: int) -> None:
    """End what hold() has enqueued; who waits for it goes on."""
    if not _driver().fake_release(number):
        raise ValueError(f"nothing is held under the number {number}")


def capture(stream: SupportsInt, begins: bool) -> None:
    """Begin or end the capture of a stream into a graph, which keeps nothing."""
    if not _driver().fake_capture(int(stream), begins):
        raise ValueError(f"no stream {int(stream):#x}, or no current context")


def run_all() -> None:
    """Run all that is enqueued and not held."""
    _driver().fake_run_all()


def fail(text: str) -> None:
    """Choose the calls that will fail, instead of those chosen before; "" is none.

    "cuMemAlloc:2:2,cuMemcpyDtoHAsync:*:700": the second call of cuMemAlloc from now on returns the
    error 2, all of cuMemcpyDtoHAsync return 700. They do nothing else.
    """
    if not _driver().fake_fail(text.encode()):
        raise ValueError(f"not name:number:error,...: {text!r}")


def attribute(number: int, value: int) -> None:
    """Choose what all devices answer when asked for an attribute."""
    if not _driver().fake_attribute(number, value):
        raise ValueError(f"no attribute {number}")


class DmaBuf:
    """Device memory as a network device has it that has registered a dma-buf.

    Args:
        descriptor: of the dma-buf; it may be closed then.

    Attributes:
        nbytes: of the memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._id, self._base, self.nbytes = struct.unpack("QQQ", os.pread(descriptor, 24, 0))

    def read(self, offset: int, nbytes: int) -> bytes:
        """What is there now, whatever is enqueued."""
        into = ctypes.create_string_buffer(nbytes)
        self._access(offset, into, None, nbytes)
        return into.raw

    def write(self, offset: int, data: bytes) -> None:
        """Write it now; it is seen when it is flushed."""
        self._access(offset, None, data, len(data))

    def _access(self, offset: int, into: Any, data: bytes | None, nbytes: int) -> None:
        if _driver().fake_dma(self._id, self._base + offset, into, data, nbytes):
            raise ValueError("the memory of this dma-buf is not there any more")


def reset() -> None:
    """Forget what is enqueued, errors that stick to contexts, fail(), and counts."""
    _driver().fake_reset()


def stats() -> dict[str, int]:
    """What there is and what has happened in this process, by name.

    There is: allocations, allocated_bytes, registered, ipc_opened, streams,
    events, busy_streams (with something enqueued), waiting (threads, for what is held). Has
    happened: enqueued, run (copies and sets), h2d_bytes, d2h_bytes, d2d_bytes, set_bytes,
    pageable_copies (enqueued from or to host memory that is not page-locked), illegal_accesses,
    calls_without_context, flushes (of what network devices have written), kernels (run).
    """
    text = ctypes.create_string_buffer(2048)
    if _driver().fake_stats(text, len(text)):
        raise RuntimeError("the counts are longer than expected")
    return {
        name: int(value)
        for name, _, value in (line.partition("=") for line in text.value.decode().split())
    }


def peek(pointer: SupportsInt, nbytes: int) -> bytes:
    """What device memory holds now, whatever is enqueued."""
    into = ctypes.create_string_buffer(nbytes)
    if _driver().fake_peek(int(pointer), into, nbytes):
        raise ValueError(f"no {nbytes} bytes of device memory at {int(pointer):#x}")
    return into.raw


def poke(pointer: SupportsInt, data: bytes) -> None:
    """Write device memory now, whatever is enqueued."""
    if _driver().fake_poke(int(pointer), data, len(data)):
        raise ValueError(f"no {len(data)} bytes of device memory at {int(pointer):#x}")
