"""The non-blocking and the persistent twins of a communicator's methods.

Every one is made from the method of `Calls` that prepares the call, so that their arguments are
the same, and are checked in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from pycoll._calls.call_plan import CallPlan
from pycoll._calls.calls import Calls
from pycoll._calls.group import Group
from pycoll._requests import core_requests
from pycoll._requests.request import Request
from pycoll._support.foreign_names import Hinting
from pycoll._support.public_edge import edges

if TYPE_CHECKING:
    from pycoll._requests.core_requests import PersistentRequest

P = ParamSpec("P")
R = TypeVar("R")
Prepare = Callable[Concatenate[Calls, P], CallPlan[R]]


def _started(prepare: Prepare[P, R]) -> Callable[Concatenate[NonBlocking, P], Request[R]]:
    """Make the non-blocking twin of a method."""

    def start(self: NonBlocking, /, *args: P.args, **kwargs: P.kwargs) -> Request[R]:
        self._check_open()
        _no_timeout(kwargs)
        return Request(prepare(self._nonblocking_calls, *args, **kwargs))

    _document(start, prepare, "", f"i{prepare.__name__}", "Start")
    return start


def _persistent(
    prepare: Prepare[P, R],
) -> Callable[Concatenate[Persistent, P], PersistentRequest[R]]:
    """Make the persistent twin of a method."""

    def make(self: Persistent, /, *args: P.args, **kwargs: P.kwargs) -> PersistentRequest[R]:
        _no_timeout(kwargs)
        plan = prepare(self._calls, *args, **kwargs)  # to find now what is wrong with the arguments

        def in_python(*args: P.args, **kwargs: P.kwargs) -> Request[R]:
            return Request(prepare(self._calls, *args, **kwargs))

        begin = self._in_core.get(f"i{prepare.__name__}", in_python)
        return core_requests.PersistentRequest(
            self._group, plan.receives, begin, args, dict(kwargs)
        )

    _document(make, prepare, "persistent.", prepare.__name__, "Make a persistent")
    return make


def _no_timeout(kwargs: dict[str, object]) -> None:
    if "timeout" in kwargs:
        raise TypeError("a request takes no timeout where it is made: give it to its wait()")


def _document(
    twin: Callable[..., Request[Any]],
    prepare: Callable[..., CallPlan[Any]],
    place: str,
    name: str,
    does: str,
) -> None:
    """Give a twin its name, its text, and the signature of `prepare`, for help()."""
    shown = FunctionType(prepare.__code__, {}, name, prepare.__defaults__)
    shown.__kwdefaults__ = prepare.__kwdefaults__
    shown.__annotations__ = prepare.__annotations__ | {"return": "Request"}
    twin.__wrapped__ = shown  # type: ignore[attr-defined]
    twin.__name__, twin.__qualname__ = name, f"Communicator.{place}{name}"
    twin.__doc__ = (
        f"{does} `{prepare.__name__}`; returns a `Request`. The arguments are those of "
        f"`Communicator.{prepare.__name__}`, without timeout."
    )


@edges
class NonBlocking:
    """The methods that start a call and return a `Request`."""

    _group: Group
    _nonblocking_calls: Calls

    def _check_open(self) -> None:
        raise NotImplementedError

    ibarrier = _started(Calls.barrier)
    ibroadcast = _started(Calls.broadcast)
    ireduce = _started(Calls.reduce)
    iall_reduce = _started(Calls.all_reduce)
    iallreduce = iall_reduce
    iall_reduce_many = _started(Calls.all_reduce_many)
    igather = _started(Calls.gather)
    iall_gather = _started(Calls.all_gather)
    iscatter = _started(Calls.scatter)
    ireduce_scatter = _started(Calls.reduce_scatter)
    iall_to_all = _started(Calls.all_to_all)
    iscan = _started(Calls.scan)
    iexscan = _started(Calls.exscan)
    igatherv = _started(Calls.gatherv)
    iall_gatherv = _started(Calls.all_gatherv)
    iscatterv = _started(Calls.scatterv)
    iall_to_allv = _started(Calls.all_to_allv)
    ireduce_scatterv = _started(Calls.reduce_scatterv)
    isend = _started(Calls.send)
    issend = _started(Calls.ssend)
    ibsend = _started(Calls.bsend)
    irecv = _started(Calls.recv)
    isendrecv = _started(Calls.sendrecv)


@edges
class Persistent(Hinting, foreign={}, prefix="comm.persistent."):
    """Makes requests that can be started again and again: ``comm.persistent.all_reduce(x)``."""

    def __init__(self, group: Group, calls: Calls, in_core: Mapping[str, Any]) -> None:
        self._group = group
        self._calls = calls
        self._in_core = in_core  # the core's methods, by name

    def __repr__(self) -> str:
        return f"<pycoll.Communicator.persistent of {self._group.name}>"

    barrier = _persistent(Calls.barrier)
    broadcast = _persistent(Calls.broadcast)
    reduce = _persistent(Calls.reduce)
    all_reduce = _persistent(Calls.all_reduce)
    allreduce = all_reduce
    all_reduce_many = _persistent(Calls.all_reduce_many)
    gather = _persistent(Calls.gather)
    all_gather = _persistent(Calls.all_gather)
    scatter = _persistent(Calls.scatter)
    reduce_scatter = _persistent(Calls.reduce_scatter)
    all_to_all = _persistent(Calls.all_to_all)
    scan = _persistent(Calls.scan)
    exscan = _persistent(Calls.exscan)
    gatherv = _persistent(Calls.gatherv)
    all_gatherv = _persistent(Calls.all_gatherv)
    scatterv = _persistent(Calls.scatterv)
    all_to_allv = _persistent(Calls.all_to_allv)
    reduce_scatterv = _persistent(Calls.reduce_scatterv)
    send = _persistent(Calls.send)
    ssend = _persistent(Calls.ssend)
    bsend = _persistent(Calls.bsend)
    recv = _persistent(Calls.recv)
    sendrecv = _persistent(Calls.sendrecv)
