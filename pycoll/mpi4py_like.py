"""A communicator for libraries that take one of mpi4py's, such as schwimmbad and dask-mpi.

Pass ``Comm(pycoll.init())`` to such a library. If it also imports mpi4py itself, call `stand_in`
before: it gets this module then, and needs neither mpi4py nor an MPI. docs/pool_of_ranks.md shows
both. Nothing else of mpi4py is here; docs/collectives.md says what its calls are named in pycoll.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

import pycoll
from pycoll._runtime import envelope
from pycoll._runtime.envelope import ANY_SOURCE, ANY_TAG
from pycoll._support import foreign_names
from pycoll._support.foreign_names import Hinting
from pycoll._support.public_edge import edge, edges
from pycoll.errors import Error

__all__ = ["ANY_SOURCE", "ANY_TAG", "Comm", "Status", "stand_in"]


class MpiStatus(envelope.Status, shown_as="Status"):
    """Who sent a message, and with which tag: attributes `source` and `tag`, or mpi4py's methods.

    `nbytes` and `count` are those of `pycoll.Status`.
    """

    __slots__ = ()

    def Get_source(self) -> int:
        """Return the rank of the sender."""
        return self.source

    def Get_tag(self) -> int:
        """Return the tag."""
        return self.tag


Status = MpiStatus


@edges
class MpiComm(Hinting, shown_as="Comm"):
    """A communicator of pycoll with those methods of mpi4py's that such libraries call.

    It is another interface to `comm`: both may be used, and a message sent by one is received by
    the other. Values travel as with `comm`, and errors are those of `comm`. If `mpi4py.MPI` is
    imported in this process, `source`, `dest` and `tag` are read as its constants ANY_SOURCE,
    ANY_TAG and PROC_NULL, whose values differ from MPI to MPI; `status` may be its Status.

    Args:
        comm: the communicator, as `pycoll.init` returns it.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    @edge
    def __init__(self, comm: pycoll.Communicator) -> None:
        if not isinstance(comm, pycoll.Communicator):
            raise TypeError(
                f"comm is a pycoll.Communicator, such as pycoll.init(), not {type(comm).__name__}"
            )
        self._comm = comm

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    def Get_rank(self) -> int:
        """Return the rank of this process."""
        return self._comm.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._comm.size

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send `obj` to rank `dest` with `tag`, as `Communicator.send`."""
        self._comm.send(obj, _peer(dest), tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send `obj` to rank `dest` with `tag`, as `Communicator.ssend`: returns when received."""
        self._comm.ssend(obj, _peer(dest), tag)

    def recv(
        self, buf: None = None, source: Any = None, tag: Any = None, status: Any = None
    ) -> Any:
        """Receive a message and return its value.

        Args:
            buf: None. mpi4py has a buffer in this place; pass `source` by name.
            source: rank; None: any.
            tag: None: any.
            status: filled in with source and tag; one of this module's or of mpi4py's.
        """
        if buf is not None:
            raise TypeError("recv takes no buffer: pass source by name, as in recv(source=0)")
        found = envelope.Status()
        value = self._comm.recv(_peer(source), _tag(tag), status=found)
        _fill(status, found)
        return value

    def Probe(self, source: Any = None, tag: Any = None, status: Any = None) -> bool:
        """Wait for a message, which stays in the queue, and return True.

        Args:
            source, tag, status: as of `recv`.
        """
        _fill(status, self._comm.probe(_peer(source), _tag(tag)))
        return True

    def Iprobe(self, source: Any = None, tag: Any = None, status: Any = None) -> bool:
        """Return whether a message is here; it stays in the queue.

        Args:
            source, tag, status: as of `recv`.
        """
        found = self._comm.iprobe(_peer(source), _tag(tag))
        if found is not None:
            _fill(status, found)
        return found is not None

    probe, iprobe = Probe, Iprobe

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the `obj` of rank `root` on every rank; what the others pass is ignored."""
        return self._comm.broadcast(obj if self.rank == root else None, root)

    def Barrier(self) -> None:
        """Wait for all ranks."""
        self._comm.barrier()

    barrier = Barrier

    def Abort(self, errorcode: int = 1) -> None:
        """End all ranks of the job; does not return.

        Args:
            errorcode: exit status of the job. mpi4py's default, 0, would look like success.
        """
        self._comm.abort(errorcode)

    if not TYPE_CHECKING:  # or type checkers would take any name for a method

        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            said = f"pycoll's own communicator has, comm.{name}"
            try:
                getattr(self._comm, name)
            except AttributeError as exc:
                said = str(exc)
            try:
                raise AttributeError(f"pycoll.mpi4py_like.Comm has no {name!r}: {said}")
            except AttributeError as exc:
                exc.__traceback__ = None  # as `edge.hide`: the caller's line is the last one shown
                raise

    def __repr__(self) -> str:
        return f"Comm({self._comm!r})"


Comm = MpiComm


@edge
def stand_in() -> None:
    """Have ``from mpi4py import MPI`` give this module, from now on and in this process.

    Then ``MPI.COMM_WORLD`` is ``Comm(pycoll.init())``. Call it before the library imports mpi4py;
    a second call does nothing.

    Raises:
        Error: mpi4py itself has been imported already.
    """
    this = sys.modules[__name__]
    loaded = sys.modules.get("mpi4py")
    if getattr(loaded, "MPI", None) is this:
        return
    if loaded is not None:
        raise Error(
            "mpi4py is imported already: call stand_in() before, or leave it out and pass the "
            "library Comm(pycoll.init())"
        )
    package = types.ModuleType("mpi4py", "pycoll's stand-in: pycoll.mpi4py_like")
    package.__spec__ = importlib.machinery.ModuleSpec("mpi4py", None)
    package.MPI = this  # type: ignore[attr-defined]
    sys.modules["mpi4py"] = package


def _peer(value: Any) -> Any:
    """Return a rank as pycoll's, where it may be one of mpi4py's constants; None is any source."""
    if value is None:
        return ANY_SOURCE
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and value == mpi.ANY_SOURCE:
        return ANY_SOURCE
    if mpi is not None and value == mpi.PROC_NULL:
        return envelope.PROC_NULL
    return value


def _tag(value: Any) -> Any:
    """The same for a tag."""
    mpi = sys.modules.get("mpi4py.MPI")
    return ANY_TAG if value is None or (mpi is not None and value == mpi.ANY_TAG) else value


def _fill(status: Any, found: envelope.Status) -> None:
    """Tell a status of this module or of mpi4py what was found; None: nobody asks."""
    if status is None:
        return
    mpi = sys.modules.get("mpi4py.MPI")
    from_nobody = found.source == envelope.PROC_NULL
    status.source = mpi.PROC_NULL if mpi is not None and from_nobody else found.source
    status.tag = mpi.ANY_TAG if mpi is not None and from_nobody else found.tag
    if isinstance(status, envelope.Status):
        status.nbytes = found.nbytes


if TYPE_CHECKING:
    COMM_WORLD: Comm
else:  # or type checkers would take any name for one of ours

    def __getattr__(name):
        if name == "COMM_WORLD":
            return Comm(pycoll.init())
        said = foreign_names.of_module(name)
        text = f"pycoll.mpi4py_like has no {name!r}" + (f": {said}" if said else "")
        try:
            raise AttributeError(text)
        except AttributeError as exc:
            exc.__traceback__ = None
            raise
