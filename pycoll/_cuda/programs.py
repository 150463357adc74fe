"""Kernels: text that NVRTC compiles, loaded for a GPU, put into a stream.

NVRTC comes with the CUDA toolkit, or as the package nvidia-cuda-nvrtc; PyTorch and CuPy bring it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from pycoll._cuda.cuda import Device, bindings, call
from pycoll.errors import TransportError

# Each operation rounded, as a processor does it: no contraction, nothing flushed to zero.
_OPTIONS: Final = (b"--fmad=false", b"-ftz=false", b"-prec-div=true", b"-prec-sqrt=true")
_THREADS: Final = 512
_BLOCKS_EACH: Final = 4
"""Blocks on each multiprocessor: 2048 threads, which is all that fit."""


class CompiledKernel:
    """A kernel on a GPU.

    Args:
        device: the GPU.
        text: what NVRTC compiles.
        name: of the kernel.

    Raises:
        TransportError: it cannot be compiled, or loaded; says why.
    """

    def __init__(self, device: Device, text: str, name: str) -> None:
        self._device = device
        major, minor, self._num_multiprocessors = device.architecture()
        image = compiled(text, major * 10 + minor)
        with device:
            self._module = call("cuModuleLoadData", image)
            self._function = call("cuModuleGetFunction", self._module, name.encode())

    def launch(self, stream: int, num_threads: int, arguments: Sequence[Any]) -> None:
        """Put it into a stream, for so many threads at most, with arguments of ctypes."""
        blocks = -(-max(1, num_threads) // _THREADS)
        blocks = min(blocks, _BLOCKS_EACH * self._num_multiprocessors)
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
        where = bindings().CUstream(stream)
        with self._device:
            call(
                "cuLaunchKernel",
                *(self._function, *grid, *block, 0),
                *(where, ctypes.addressof(addresses), 0),
            )


def compiled(text: str, capability: int) -> bytes:
    """Compile a text for GPUs of a compute capability (90: 9.0).

    For GPUs that are newer than this NVRTC that gives PTX, which the driver compiles.

    Raises:
        TransportError: it cannot be; says why.
    """
    nvrtc = _nvrtc()
    try:
        known = [int(arch) for arch in _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())]
        best = max((arch for arch in known if arch <= capability), default=0)
        kind = "sm" if best == capability else "compute"
        options = [f"--gpu-architecture={kind}_{best}".encode(), *_OPTIONS]
        program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"", 0, [], []))
        try:
            _compile(nvrtc, program, options)
            size, get = (
                (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
                if kind == "sm"
                else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            )
            image: bytes = b" " * _checked(nvrtc, size(program))
            _checked(nvrtc, get(program, image))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
    except RuntimeError as exc:  # its library is not there, or lacks a function
        raise TransportError(f"NVRTC cannot be used: {str(exc).rstrip('.')}") from exc
    return image


def why_not() -> str | None:
    """Return why nothing can be compiled here; None: it can."""
    try:
        nvrtc = _nvrtc()
        _checked(nvrtc, nvrtc.nvrtcVersion())
    except TransportError as exc:
        return f"not usable: {exc}"
    except RuntimeError:  # its library
        return "not usable: NVRTC was not found. Install it with: pip install nvidia-cuda-nvrtc"
    return None


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as exc:
        raise TransportError(f"NVRTC cannot be used: {exc}") from exc
    return nvrtc


def _compile(nvrtc: Any, program: Any, options: Sequence[bytes]) -> None:
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
    if result == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    text = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, text)
    said = text.rstrip(b"\0 ").decode(errors="replace").strip()
    raise TransportError(f"NVRTC: {result.name}: {said}")


def _checked(nvrtc: Any, returned: Any) -> Any:
    result, *values = returned
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TransportError(f"NVRTC: {getattr(result, 'name', result)}")
    return values[-1] if values else None
