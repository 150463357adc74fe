"""Floating-point environments that a program may have set, by the C library."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

DEFAULT, FLUSHING, UPWARD = "default", "flushing", "upward"
"""Round to nearest; the same with subnormals taken for zero; round up."""

_IS_X86 = platform.machine() == "x86_64"
# Of fenv_t, the word that counts; in it the bits that flush (FTZ and DAZ; FZ), and that round up.
_WORD, _FLUSH, _UP = (7, 0x8040, 0x4000) if _IS_X86 else (0, 1 << 24, 1 << 22)
_CONTROL = 0xFFC0 if _IS_X86 else 0xFFFFFFFF

_C = ctypes.CDLL("libm.so.6")


def control() -> int:
    """Return how this thread computes with floats: MXCSR without its flags, or FPCR."""
    words = (ctypes.c_uint32 * 8)()
    assert _C.fegetenv(words) == 0
    return int(words[_WORD]) & _CONTROL


@contextlib.contextmanager
def floats(environment: str) -> Iterator[int]:
    """Have this thread compute in an environment; gives what `control` then returns."""
    before, words = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    assert _C.fegetenv(before) == 0
    ctypes.memmove(words, before, ctypes.sizeof(words))
    words[_WORD] |= {DEFAULT: 0, FLUSHING: _FLUSH, UPWARD: _UP}[environment]
    try:
        assert _C.fesetenv(words) == 0
        yield control()
    finally:
        assert _C.fesetenv(before) == 0
