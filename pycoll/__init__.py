"""pycoll: MPI-style collective communication in Python, with no MPI underneath.

Start ranks with ``pycoll-run -n 4 script.py``; in the script:

    import pycoll
    comm = pycoll.init()
    total = comm.all_reduce(comm.rank)

See README.md, and the docstring of `Communicator`.
"""

from __future__ import annotations

import importlib

from pycoll.errors import (
    BootstrapError,
    Error,
    MismatchError,
    OperationTimeout,
    PeerFailed,
    ProofError,
    TransportError,
    TruncationError,
)

TYPE_CHECKING = False  # typing's own takes longer to import than this file
if TYPE_CHECKING:
    from typing import Any

    from pycoll.communicator import Communicator
    from pycoll.context import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
    from pycoll.grid import Grid
    from pycoll.launcher.function import run
    from pycoll.ops import Op
    from pycoll.registration import prove, register_algorithm
    from pycoll.request import Request, wait_all, wait_any, wait_some
    from pycoll.world import finalize, init

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "PROC_NULL",
    "BootstrapError",
    "Communicator",
    "Error",
    "Grid",
    "MismatchError",
    "Op",
    "OperationTimeout",
    "PeerFailed",
    "ProofError",
    "Request",
    "Status",
    "TransportError",
    "TruncationError",
    "algorithms",
    "finalize",
    "init",
    "prove",
    "register_algorithm",
    "run",
    "wait_all",
    "wait_any",
    "wait_some",
]

# Imported when first used, so that `import pycoll` costs next to nothing.
_HOMES = {
    "ANY_SOURCE": "pycoll.context",
    "ANY_TAG": "pycoll.context",
    "PROC_NULL": "pycoll.context",
    "Communicator": "pycoll.communicator",
    "Grid": "pycoll.grid",
    "Op": "pycoll.ops",
    "Request": "pycoll.request",
    "Status": "pycoll.context",
    "finalize": "pycoll.world",
    "init": "pycoll.world",
    "prove": "pycoll.registration",
    "register_algorithm": "pycoll.registration",
    "run": "pycoll.launcher.function",
    "wait_all": "pycoll.request",
    "wait_any": "pycoll.request",
    "wait_some": "pycoll.request",
}


def algorithms(collective: str) -> list[str]:
    """List the names of the algorithms of a collective, for the argument `algorithm`.

    Those that `register_algorithm` has added are at the end.

    Raises:
        ValueError: there is no such collective; the message names those there are.
    """
    from pycoll.group import SHARED_MEMORY
    from pycoll.schedules import names

    return [SHARED_MEMORY, *names(collective)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pycoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
