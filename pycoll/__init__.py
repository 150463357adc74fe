"""pycoll: MPI-style collective communication in Python, with no MPI underneath.

Start ranks with ``pycoll-run -n 4 script.py``; in the script:

    import pycoll
    comm = pycoll.init()
    total = comm.all_reduce(comm.rank)

See README.md, and the docstring of `Communicator`.
"""

from __future__ import annotations

import sys

if "t" in sys.abiflags:  # as sysconfig's Py_GIL_DISABLED says, which takes longer to ask
    raise ImportError(
        "pycoll does not run on free-threaded CPython: use a Python that has the GIL"
        " (python3.13, not python3.13t)"
    )

from pycoll.errors import (
    BootstrapError,
    Error,
    MismatchError,
    OperationTimeout,
    PeerFailed,
    ProofError,
    Revoked,
    TransportError,
    TruncationError,
)

# False. typing's own takes longer to import than this file, and editors skip what a literal rules
# out.
TYPE_CHECKING = bool()  # noqa: UP018
if TYPE_CHECKING:
    from pycoll._arrays.operators import Op
    from pycoll._communicator.communicator import Communicator
    from pycoll._communicator.grid import Grid, compute_dims
    from pycoll._drawing.show import show
    from pycoll._functions.function import run
    from pycoll._functions.pool import Pool
    from pycoll._registration import algorithms, prove, register_algorithm
    from pycoll._requests.matched import Message
    from pycoll._requests.request import Request, test_all, wait_all, wait_any, wait_some
    from pycoll._runtime.counters import Counters
    from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
    from pycoll._runtime.shared_arrays import empty, empty_like, share_arrays, zeros
    from pycoll._support.environment import usable_cores
    from pycoll._world.joining import join
    from pycoll._world.session import finalize, init

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "PROC_NULL",
    "BootstrapError",
    "Communicator",
    "Counters",
    "Error",
    "Grid",
    "Message",
    "MismatchError",
    "Op",
    "OperationTimeout",
    "PeerFailed",
    "Pool",
    "ProofError",
    "Request",
    "Revoked",
    "Status",
    "TransportError",
    "TruncationError",
    "algorithms",
    "compute_dims",
    "empty",
    "empty_like",
    "finalize",
    "init",
    "join",
    "prove",
    "register_algorithm",
    "run",
    "share_arrays",
    "show",
    "test_all",
    "usable_cores",
    "wait_all",
    "wait_any",
    "wait_some",
    "zeros",
]

# Imported when first used, so that `import pycoll` costs next to nothing.
_HOMES = {
    "ANY_SOURCE": "pycoll._runtime.envelope",
    "ANY_TAG": "pycoll._runtime.envelope",
    "PROC_NULL": "pycoll._runtime.envelope",
    "Communicator": "pycoll._communicator.communicator",
    "Counters": "pycoll._runtime.counters",
    "Grid": "pycoll._communicator.grid",
    "Message": "pycoll._requests.matched",
    "Op": "pycoll._arrays.operators",
    "Pool": "pycoll._functions.pool",
    "Request": "pycoll._requests.request",
    "Status": "pycoll._runtime.envelope",
    "algorithms": "pycoll._registration",
    "compute_dims": "pycoll._communicator.grid",
    "empty": "pycoll._runtime.shared_arrays",
    "empty_like": "pycoll._runtime.shared_arrays",
    "finalize": "pycoll._world.session",
    "init": "pycoll._world.session",
    "join": "pycoll._world.joining",
    "prove": "pycoll._registration",
    "register_algorithm": "pycoll._registration",
    "run": "pycoll._functions.function",
    "share_arrays": "pycoll._runtime.shared_arrays",
    "show": "pycoll._drawing.show",
    "test_all": "pycoll._requests.request",
    "usable_cores": "pycoll._support.environment",
    "wait_all": "pycoll._requests.request",
    "wait_any": "pycoll._requests.request",
    "wait_some": "pycoll._requests.request",
    "zeros": "pycoll._runtime.shared_arrays",
}


if not TYPE_CHECKING:  # or type checkers would take any name for one of ours

    def __getattr__(name):
        from importlib import import_module

        home = _HOMES.get(name)
        if home is None:
            names = import_module("pycoll._support.foreign_names")
            said = names.of_module(name)
            text = f"module 'pycoll' has no attribute {name!r}" + (f": {said}" if said else "")
            try:
                # `from pycoll import name` asks first whether there is one, and drops this text.
                asks = sys._getframe(1).f_globals.get("__name__")
                importing = asks in ("importlib._bootstrap", "_frozen_importlib")
                is_final = importing and said and name not in names.SUBMODULES
                raise (ImportError if is_final else AttributeError)(text)
            except (AttributeError, ImportError) as exc:
                exc.__traceback__ = None  # as `edge.hide`
                raise
        try:
            value = getattr(import_module(home), name)
        except ImportError as exc:
            if exc.name != "pycoll._transports._core":
                raise
            from pycoll._transports.shm import missing_core

            other = f"the compiled core is of another version of pycoll ({exc}): install it again"
            raise BootstrapError(missing_core() or other) from None
        if hasattr(value, "__code__"):  # a function; classes see to it themselves
            value.__module__ = __name__
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
