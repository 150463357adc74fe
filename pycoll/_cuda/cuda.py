"""CUDA, as far as pycoll needs it: page-locked memory, copies, streams, events, memory of others.

The only module that knows cuda-bindings. It makes no context of its own: it uses each GPU's primary
one, as PyTorch, CuPy and JAX do, and leaves the thread's current context as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pycoll._cuda.rows import Rows, bearable
from pycoll.errors import Error, TransportError

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for every GPU
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: apart from the legacy default stream
_QUIET: Final = 1 | 2  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
_LAZY_PEERS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_HANDLE_NBYTES: Final = 64
_PAGE: Final = mmap.PAGESIZE
_BY_HOST: Final = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_TO_ALL: Final = 200  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES

INSTALL: Final = "Install it with: pip install cuda-bindings"

CAPTURED: Final = (
    "a CUDA graph is being captured on the stream of this array, and no call of pycoll can be a "
    "part of one: it waits for the GPU and for other ranks on the host. Nothing was sent. Call it "
    "before or after the capture, between replays of graphs"
)


class IpcHandle(NamedTuple):
    """What another process needs to read memory of this one's GPU.

    Attributes:
        handle: of the allocation.
        offset: of the memory in it, in bytes.
        base, nbytes: of the allocation, in that process.
    """

    handle: bytes
    offset: int
    base: int = 0
    nbytes: int = 0


class DirectAccess(NamedTuple):
    """What a network device may do with a GPU's memory by itself.

    Attributes:
        reads: read it.
        writes: write it, and be seen.
        is_flushed: whether what it has written must be flushed to be seen.
    """

    reads: bool
    writes: bool
    is_flushed: bool


@functools.cache
def bindings() -> Any:
    """Return cuda-bindings' driver module, initialized.

    Raises:
        TransportError: it is not installed, or finds no GPU; says so.
    """
    try:
        from cuda.bindings import driver
    except ImportError as exc:
        raise TransportError(f"the package cuda-bindings is missing. {INSTALL}") from exc
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as exc:  # the library of the driver, or a function in it
        why = str(exc).rstrip(".")
        if type(exc).__name__ == "DynamicLibNotFoundError":
            why = "libcuda.so.1 was not found"
        raise TransportError(f"the NVIDIA driver cannot be used: {why}") from exc
    if result != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"the NVIDIA driver cannot be used: {_text(driver, result)}")
    return driver


def _text(driver: Any, result: Any) -> str:
    _, text = driver.cuGetErrorString(result)
    name = getattr(result, "name", str(result))
    return f"{text.decode()} ({name})" if text else name


def call(name: str, *args: Any) -> Any:
    """Call a function of the driver; returns what it gives: nothing, a value, or several.

    Raises:
        TransportError: it failed.
    """
    driver = bindings()
    result, *values = getattr(driver, name)(*args)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(f"CUDA: {name} failed: {_text(driver, result)}")
    return values[0] if len(values) == 1 else values


def count() -> int:
    """Return how many GPUs this process can use.

    Raises:
        TransportError: CUDA cannot be used; says why.
    """
    return int(call("cuDeviceGetCount"))


def current() -> int:
    """Return the number of the GPU on which this thread works, 0 if it has not chosen one."""
    driver = bindings()
    result, device = driver.cuCtxGetDevice()
    return int(device) if result == driver.CUresult.CUDA_SUCCESS else 0


def owner(pointer: int) -> int:
    """Return the number of the GPU on which memory is."""
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    with device(current()):
        return int(call("cuPointerGetAttribute", attribute, pointer))


@functools.cache
def is_usable() -> bool:
    """Whether this process can use a GPU."""
    try:
        return count() > 0
    except TransportError:
        return False


@functools.cache
def device(number: int) -> Device:
    """Return a GPU, by its number in this process.

    Raises:
        TransportError: it cannot be used; says why.
    """
    return Device(number)


class Gpu(NamedTuple):
    """What a GPU is, for people.

    Attributes:
        number: in this process, as CUDA_VISIBLE_DEVICES has it.
        name: what its maker calls it.
        nbytes: of its memory.
        state: whether it can be used, in words.
        direct: what network devices may do with its memory.
    """

    number: int
    name: str
    nbytes: int
    state: str
    direct: DirectAccess


def describe() -> list[Gpu]:
    """Return what GPUs there are; none of them has to do anything for it.

    Raises:
        TransportError: CUDA cannot be used; says why.
    """
    driver = bindings()
    asked = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    modes = driver.CUcomputemode
    states = {
        int(modes.CU_COMPUTEMODE_PROHIBITED): "not usable: its compute mode is PROHIBITED",
        int(modes.CU_COMPUTEMODE_EXCLUSIVE_PROCESS): "usable by one process at a time",
    }
    found = []
    for number in range(count()):
        gpu = call("cuDeviceGet", number)
        name = call("cuDeviceGetName", 128, gpu).split(b"\0")[0].decode()
        mode = int(call("cuDeviceGetAttribute", asked, gpu))
        nbytes = int(call("cuDeviceTotalMem", gpu))
        found.append(Gpu(number, name, nbytes, states.get(mode, "usable"), _direct(gpu)))
    return found


def _direct(gpu: Any) -> DirectAccess:
    """Ask what network devices may do with a GPU's memory."""
    attributes = bindings().CUdevice_attribute

    def ask(name: str) -> int:
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:  # an older cuda-bindings
            return 0
        try:
            return int(call("cuDeviceGetAttribute", attribute, gpu))
        except TransportError:  # an older driver
            return 0

    reads = bool(ask("DMA_BUF_SUPPORTED"))
    is_flushed = ask("GPU_DIRECT_RDMA_WRITES_ORDERING") < _TO_ALL
    flushes = bool(ask("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & _BY_HOST)
    return DirectAccess(reads, reads and (flushes or not is_flushed), is_flushed)


class Device:
    """A GPU. As a context manager, it is the one on which this thread works.

    Attributes:
        number: the GPU's, in this process.
        name: what its maker calls it.
        uuid: the same in all processes.
        direct: what network devices may do with its memory.
    """

    def __init__(self, number: int) -> None:
        handle = call("cuDeviceGet", number)
        self.direct = _direct(handle)
        self.number = number
        self.name = call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
        self.uuid = bytes(call("cuDeviceGetUuid", handle).bytes)
        self._context = call("cuDevicePrimaryCtxRetain", handle)
        self._pid = os.getpid()
        self._idle: list[Any] = []  # events

    def __enter__(self) -> Device:
        self.check_process()
        call("cuCtxPushCurrent", self._context)
        return self

    def check_process(self) -> None:
        """Raise Error in a child of fork."""
        if self._pid != os.getpid():
            raise Error("a forked child can neither communicate nor use its parent's GPU")

    def __exit__(self, *exc_info: object) -> None:
        call("cuCtxPopCurrent")

    def architecture(self) -> tuple[int, int, int]:
        """Return its compute capability, major and minor, and how many multiprocessors it has."""
        attributes = bindings().CUdevice_attribute
        gpu = call("cuDeviceGet", self.number)
        asked = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        names = [getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}") for name in asked]
        major, minor, count = [int(call("cuDeviceGetAttribute", name, gpu)) for name in names]
        return major, minor, count

    # --- streams ---------------------------------------------------------------------------

    def stream(self) -> int:
        """Make a stream that waits for no other; it lives as long as the process."""
        with self:
            return int(call("cuStreamCreate", _NON_BLOCKING))

    def pending(self, stream: int) -> Mark | None:
        """Remember what a library's stream has been given to do so far; None: that is done.

        An event takes a turn of this process on the GPU, which other processes share.

        Raises:
            Error: it is being captured into a CUDA graph, which no call of pycoll can be part of.
        """
        driver = bindings()
        with self:
            if self._is_captured(stream):
                raise Error(CAPTURED)
            (result,) = driver.cuStreamQuery(driver.CUstream(stream))
            return None if result == driver.CUresult.CUDA_SUCCESS else self.mark(stream)

    def mark(self, stream: int) -> Mark:
        """Remember what a stream has been given to do so far."""
        driver = bindings()
        with self:
            try:
                event = self._idle.pop()
            except IndexError:
                event = call("cuEventCreate", _QUIET)
            call("cuEventRecord", event, driver.CUstream(stream))
        return Mark(self, event)

    def _is_captured(self, stream: int) -> bool:
        driver = bindings()
        result, status = driver.cuStreamIsCapturing(driver.CUstream(stream))
        if result != driver.CUresult.CUDA_SUCCESS:  # the legacy stream while another is captured
            return bool(result == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return int(status) != 0

    def follow(self, stream: int, mark: Mark) -> None:
        """Have what a stream is given from now on wait for `mark`, which may be another GPU's."""
        driver = bindings()
        with self:
            call("cuStreamWaitEvent", driver.CUstream(stream), mark.event, 0)

    def drain(self, stream: int) -> None:
        """Sleep until a stream has ended what it was given, in whatever way."""
        driver = bindings()
        with contextlib.suppress(TransportError), self:
            call("cuStreamSynchronize", driver.CUstream(stream))

    # --- memory ----------------------------------------------------------------------------

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that copies go by themselves."""
        with self:
            call("cuMemHostRegister", address, nbytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Take that back."""
        with self:
            call("cuMemHostUnregister", address)

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory on the GPU.

        Raises:
            TransportError: there is not so much.
        """
        with self:
            return int(call("cuMemAlloc", max(1, nbytes)))

    def free(self, pointer: int) -> None:
        """Give back what `allocate` has returned; waits until nothing uses it."""
        with self:
            call("cuMemFree", pointer)

    def copy(
        self, stream: int, rows: Sequence[Rows], pointer: int, address: int, to_host: bool
    ) -> None:
        """Have rows copied between the GPU and the host, in the order of a stream.

        Args:
            stream: of this GPU.
            rows: what to copy.
            pointer: of the array's first element, on the GPU.
            address: of the host's memory.
            to_host: the direction.
        """
        driver = bindings()
        handle = driver.CUstream(stream)
        with self:
            for piece in rows:
                if piece.height == 1:
                    there, here = pointer + piece.device, address + piece.host
                    if to_host:
                        call("cuMemcpyDtoHAsync", here, there, piece.width, handle)
                    else:
                        call("cuMemcpyHtoDAsync", there, here, piece.width, handle)
                    continue
                for part in bearable(piece):
                    call("cuMemcpy2DAsync", _parameters(part, pointer, address, to_host), handle)

    def copy_within(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Have bytes copied from one place of a GPU to another, in the order of a stream."""
        driver = bindings()
        with self:
            call("cuMemcpyDtoDAsync", to, source, nbytes, driver.CUstream(stream))

    # --- memory that network devices reach -------------------------------------------------

    def export(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Return a dma-buf of memory, which the caller closes, and where the memory begins in it.

        It consists of whole pages. None: the driver does not give one (CUDA's pools, for one).
        """
        kind = bindings().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        offset = pointer % _PAGE
        length = -(-(offset + nbytes) // _PAGE) * _PAGE
        try:
            with self:
                found = call("cuMemGetHandleForAddressRange", pointer - offset, length, kind, 0)
        except TransportError:
            return None
        return int(found), offset

    def flush(self) -> None:
        """Have everything on this machine's GPUs see what network devices have written here."""
        if not self.direct.is_flushed:
            return
        driver = bindings()
        target = driver.CUflushGPUDirectRDMAWritesTarget
        scope = driver.CUflushGPUDirectRDMAWritesScope
        with self:
            call(
                "cuFlushGPUDirectRDMAWrites",
                target.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                scope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
            )

    # --- memory of other processes -----------------------------------------------------------

    def ipc_handle(self, pointer: int) -> IpcHandle | None:
        """Return what another process needs to read the memory at `pointer`.

        None: its allocator does not allow it (memory pools, expandable segments).
        """
        try:
            with self:
                handle = call("cuIpcGetMemHandle", pointer)
                base, nbytes = map(int, call("cuMemGetAddressRange", pointer))
        except TransportError:
            return None
        name = ctypes.string_at(handle.getPtr(), _HANDLE_NBYTES)
        return IpcHandle(name, pointer - base, base, nbytes)

    def buffer_id(self, pointer: int) -> int:
        """Return a number that no other allocation of this process has ever had."""
        with self:
            asked = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
            return int(call("cuPointerGetAttribute", asked, pointer))

    def open_ipc(self, handle: bytes) -> int:
        """Return where the allocation of another process is in this one's addresses.

        Raises:
            TransportError: it cannot be reached from here.
        """
        driver = bindings()
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_NBYTES)
        with self:
            return int(call("cuIpcOpenMemHandle", opened, _LAZY_PEERS))

    def close_ipc(self, base: int) -> None:
        """Let go of what `open_ipc` has returned."""
        with self:
            call("cuIpcCloseMemHandle", base)


class Mark:
    """What a stream had been given to do when this was made.

    Attributes:
        event: CUDA's name for it.
    """

    __slots__ = ("_device", "event")

    def __init__(self, device: Device, event: Any) -> None:
        self._device = device
        self.event = event

    def is_done(self) -> bool:
        """Whether it has been done.

        Raises:
            TransportError: it, or something else on this GPU, has failed.
        """
        driver = bindings()
        with self._device:
            (result,) = driver.cuEventQuery(self.event)
        if result == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if result != driver.CUresult.CUDA_SUCCESS:
            raise TransportError(
                f"CUDA: work on {self._device.name} failed: {_text(driver, result)}"
            )
        return True

    def wait(self) -> None:
        """Sleep until it has been done; other threads go on.

        Raises:
            TransportError: it, or something else on this GPU, has failed.
        """
        with self._device:
            call("cuEventSynchronize", self.event)

    def __del__(self) -> None:
        self._device._idle.append(self.event)


def _parameters(rows: Rows, pointer: int, address: int, to_host: bool) -> Any:
    driver = bindings()
    kinds = driver.CUmemorytype
    copy = driver.CUDA_MEMCPY2D()
    there, here = pointer + rows.device, address + rows.host
    if to_host:
        copy.srcMemoryType, copy.dstMemoryType = (
            kinds.CU_MEMORYTYPE_DEVICE,
            kinds.CU_MEMORYTYPE_HOST,
        )
        copy.srcDevice, copy.srcPitch = there, rows.pitch
        copy.dstHost, copy.dstPitch = here, rows.step
    else:
        copy.srcMemoryType, copy.dstMemoryType = (
            kinds.CU_MEMORYTYPE_HOST,
            kinds.CU_MEMORYTYPE_DEVICE,
        )
        copy.srcHost, copy.srcPitch = here, rows.step
        copy.dstDevice, copy.dstPitch = there, rows.pitch
    copy.WidthInBytes, copy.Height = rows.width, rows.height
    return copy
