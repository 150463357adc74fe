"""MPI, where it runs in this process already: by it the ranks share their secret.

MPI's launcher serves each process once: who asked it beside MPI would end MPI's own conversation
with it, and MPI_Finalize would then hang (Open MPI) or end the process (MPICH).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from typing import Any

from pycoll.errors import BootstrapError

_NBYTES = 1 << 16  # of a ticket: a key, a port and the addresses of a host
_PAUSE_S = 0.001  # between looks: MPI has nothing to sleep on


class MpiWorld:
    """The ranks of MPI's world: `exchange.Board`.

    Args:
        mpi: the module `mpi4py.MPI`.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def share(self, text: str, timeout: float) -> str:
        """See `Board`. A collective of MPI's, so all ranks must have come to it."""
        deadline = time.monotonic() + timeout
        data = text.encode()
        if len(data) > _NBYTES:
            raise BootstrapError(f"what rank 0 has to share is longer than {_NBYTES} bytes")
        buffer = bytearray(data.ljust(_NBYTES, b"\0"))
        request = self._mpi.COMM_WORLD.Ibcast([buffer, self._mpi.BYTE], root=0)
        while not request.Test():
            if time.monotonic() >= deadline:
                raise TimeoutError("not all ranks of MPI's world have called pycoll.init()")
            time.sleep(_PAUSE_S)
        return bytes(buffer).rstrip(b"\0").decode()


def find(who: str, size: int) -> MpiWorld | None:
    """Return MPI's world, if MPI runs in this process; None: it does not.

    Args:
        who: the launcher.
        size: how many ranks it says that there are.

    Raises:
        BootstrapError: MPI runs here, but cannot be used.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        if is_running():
            raise BootstrapError(
                f"MPI is initialized in this process, and {who} serves nobody beside it: start the "
                f"program with pycoll-run -n {size}; or import mpi4py.MPI before pycoll.init()"
            )
        return None
    if not mpi.Is_initialized():
        return None
    if mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() != size:
        why = "has ended" if mpi.Is_finalized() else "has another number of ranks"
        raise BootstrapError(
            f"MPI {why} in this process, which {who} started as one of {size} ranks: start the "
            f"program with pycoll-run -n {size}; or call pycoll.init() before MPI_Finalize"
        )
    return MpiWorld(mpi)


def is_running() -> bool:
    """Whether a library of MPI that this process has loaded is initialized, and not finalized."""
    paths = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.partition("/")[2].rstrip("\n")
            if path.rpartition("/")[2].startswith("libmpi"):
                paths.add(f"/{path}")
    for path in paths:
        begun, over = ctypes.c_int(0), ctypes.c_int(0)
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path)
            library.MPI_Initialized(ctypes.byref(begun))
            library.MPI_Finalized(ctypes.byref(over))
        if begun.value and not over.value:
            return True
    return False
