"""Records what becomes of requests in a process that is traced: when they are done, who waits."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

from pycoll._requests import request as requests
from pycoll._requests.core_collectives import CoreCollective
from pycoll._requests.core_requests import Both, CoreRequest, PersistentRequest
from pycoll._requests.matched import Message
from pycoll._requests.request import Request
from pycoll._runtime.envelope import Status
from pycoll._runtime.task import made_elsewhere, users_frame
from pycoll._support.public_edge import edge
from pycoll._trace.records import FAILED, Recorder

_places: dict[tuple[CodeType, int], int] = {}
_MOST_PLACES = 1 << 14  # a program that makes code anew all the time is not kept in memory


def place_of_caller(recorder: Recorder) -> int:
    """Return where the program made the call (`place_of_call`), as the number of a string."""
    if (elsewhere := made_elsewhere()) is not None:
        return recorder.number_of("{}:{}".format(*elsewhere))
    frame = users_frame(sys._getframe(3))
    if frame is None:
        return 0
    key = frame.f_code, frame.f_lasti
    place = _places.get(key)
    if place is None:
        place = recorder.number_of(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        if len(_places) < _MOST_PLACES:
            _places[key] = place
    return place


class _Posted(NamedTuple):
    """The call that has made a request.

    Attributes:
        ordinal: of its record.
        status: what a receive fills in; None: it is none.
    """

    ordinal: int
    status: Status | None


class RequestTracer:
    """Records what becomes of the requests of a process.

    Args:
        recorder: keeps the records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        """Have all waits of this process recorded; called once."""
        kinds: tuple[Any, ...] = (Request, CoreRequest, CoreCollective, Both, PersistentRequest)
        for kind in kinds:
            kind.wait = self._waiting(kind, kind.wait)
        for name in ("recv", "irecv"):
            setattr(Message, name, self._taking(name, getattr(Message, name)))
        in_core, take_in_core = requests.in_core, requests.take_in_core
        assert in_core is not None
        assert take_in_core is not None
        requests.in_core = self._waiting_for_all(in_core)
        requests.take_in_core = self._taking_done(take_in_core)
        requests._wait_for = self._waiting_in_python(requests._wait_for)

    def follow(self, request: Any, ordinal: int, status: Status | None) -> None:
        """Have it recorded when a request is done, which a call has made."""
        request._posted = _Posted(ordinal, status)
        parts = (request._received, request._sent) if isinstance(request, Both) else (request,)
        left = [part for part in parts if not (part.done and not part._has_failed)]
        if not left:
            self._done(request._posted)
            return
        engine = request._group.engine
        if engine.is_inside():
            return
        posted, pending = request._posted, len(left)

        def tell(task: Any) -> None:
            nonlocal pending
            pending -= 1
            if task.error is not None or task.unfit is not None:
                self._recorder.failed(ordinal)
            if pending == 0:
                self._done(posted)

        with engine.locked():
            for part in left:
                task = part._started()
                if task.done:
                    tell(task)
                else:
                    task.watchers[functools.partial(tell)] = None

    def matched(self, ordinal: int, status: Status) -> None:
        """Record which message a receive has got."""
        self._recorder.matched(ordinal, status.source, status.tag, status.nbytes)

    def received(self, ordinal: int, result: Any, nbytes: int) -> None:
        """Record what a call that is not a receive has returned."""
        if isinstance(result, Message):
            result = result.status
        if isinstance(result, Status):
            self.matched(ordinal, result)
        elif nbytes >= 0:
            self._recorder.set_nbytes(ordinal, nbytes)

    def _done(self, posted: _Posted) -> None:
        self._recorder.done(posted.ordinal)
        if posted.status is not None:
            self.matched(posted.ordinal, posted.status)

    def _waited(self, request: Any, by: int) -> None:
        """A call has waited for a request that is done now."""
        posted = _posted(request)
        if posted is not None:
            self._recorder.waited(posted.ordinal, by)
            if posted.status is not None:
                self.matched(posted.ordinal, posted.status)

    def _record(
        self, what: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int]:
        """Call something; returns what it returns, and the ordinal of its record."""
        __tracebackhide__ = True
        recorder = self._recorder
        ordinal = recorder.begin(recorder.number_of(what), place=place_of_caller(recorder))
        try:
            result = call(*args, **kwargs)
        except BaseException:
            recorder.end(ordinal, FAILED)
            raise
        recorder.end(ordinal)
        return result, ordinal

    def _waiting(self, kind: type[Any], wait: Callable[..., Any]) -> Callable[..., Any]:
        def traced(request: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            # A wait of the core's may end in one of Python's, which is the same: one record.
            is_inside = kind is Request and type(request) is not Request
            passes_on = kind is PersistentRequest and type(request._in_core) is Request
            if is_inside or passes_on or _posted(request) is None:
                return wait(request, *args, **kwargs)
            result, ordinal = self._record("wait", wait, (request, *args), kwargs)
            self._waited(request, ordinal)
            return result

        return edge(functools.update_wrapper(traced, wait))

    def _taking(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Record what is done with a message that a probe has taken."""

        def traced(message: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result, ordinal = self._record(f"Message.{name}", call, (message, *args), kwargs)
            self.received(ordinal, message, -1)
            if isinstance(result, Request):
                self.follow(result, ordinal, None)
            return result

        return edge(functools.update_wrapper(traced, call))

    def _waiting_for_all(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Record a wait of the core's, for all requests, if it does it."""

        def traced(listed: Any, timeout: Any) -> Any:
            __tracebackhide__ = True
            if not isinstance(listed, list | tuple):
                return wait(listed, timeout)
            result, ordinal = self._record("wait_all", wait, (listed, timeout), {})
            if result is not None:
                self._waited_for(listed, ordinal)
            return result

        return traced

    def _taking_done(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Record a wait of the core's, for some requests, if it does it."""

        def traced(listed: Any, timeout: Any, several: bool) -> Any:
            __tracebackhide__ = True
            what = "wait_some" if several else "wait_any"
            taken, ordinal = self._record(what, take, (listed, timeout, several), {})
            self._waited_for((request for _, request in taken or ()), ordinal)
            return taken

        return traced

    def _waiting_in_python(self, wait: Callable[..., None]) -> Callable[..., None]:
        def traced(what: str, pending: Any, needed: int, timeout: float | None) -> None:
            __tracebackhide__ = True
            _, ordinal = self._record(what, wait, (what, pending, needed, timeout), {})
            self._waited_for(pending, ordinal)

        return traced

    def _waited_for(self, listed: Iterable[Any], ordinal: int) -> None:
        for request in listed:
            if isinstance(request, Request) and request.done:
                self._waited(request, ordinal)


def _posted(request: Any) -> _Posted | None:
    """Return the call that has made a request; None: it was not recorded."""
    if isinstance(request, PersistentRequest):
        request = request._in_core
    posted: _Posted | None = getattr(request, "_posted", None)
    return posted
