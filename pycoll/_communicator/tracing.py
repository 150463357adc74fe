"""Records what the calls of a process do (`pycoll-run --trace`), around what they are otherwise.

A process that is not traced never imports this: its communicators and requests have the methods of
the core, as ever. In one that is traced each communicator gets methods that record when the call
begins and ends, and call those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll._communicator.described import Picked, Place, nbytes_of, number_of, picked, picker
from pycoll._communicator.requests_traced import RequestTracer, place_of_caller
from pycoll._requests.request import Request
from pycoll._runtime.envelope import Status
from pycoll._support.public_edge import edge
from pycoll._trace.records import FAILED, Recorder
from pycoll._transports._core import METHODS

if TYPE_CHECKING:
    from pycoll._calls.group import Group
    from pycoll._communicator.communicator import Communicator

_COLLECTIVES = (*METHODS, "allreduce")
_MESSAGES = ("send", "ssend", "bsend", "recv", "sendrecv")
_PROBES = ("probe", "iprobe", "mprobe", "improbe")
_MAKING = ("dup", "split", "split_by_host", "grid", "share")
_STATUS_AT = {"recv": 3, "sendrecv": 6}  # where that argument stands
_POLLED = ("iprobe", "improbe")
_TWINS = tuple(f"i{name}" for name in (*_COLLECTIVES, *_MESSAGES))


class Tracer:
    """Records the calls of a process.

    Args:
        recorder: keeps the records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._requests = RequestTracer(recorder)
        self._requests.install()
        self._pickers: dict[str, Callable[..., Picked]] = {}

    def methods(self, twin: Communicator, fast: dict[str, Any]) -> dict[str, Any]:
        """Return methods that record their calls.

        Args:
            twin: of a communicator (`Communicator.__init__`).
            fast: the core's methods; what is not there is the class's.
        """
        place = Place(twin._group, self._recorder)
        traced = {}
        for name in (*_COLLECTIVES, *_MESSAGES, *_PROBES, *_MAKING, *_TWINS):
            method = getattr(type(twin), name)
            call = fast.get(name) or method.__get__(twin)
            make = self._polling if name in _POLLED else self._traced
            made = make(name, method, call, twin._group, place)
            traced[name] = edge(functools.update_wrapper(made, method))
        return fast | traced

    def _picker(self, name: str, method: Callable[..., Any]) -> Callable[..., Picked]:
        if name not in self._pickers:
            self._pickers[name] = picker(method)
        return self._pickers[name]

    def _traced(
        self,
        name: str,
        method: Callable[..., Any],
        call: Callable[..., Any],
        group: Group,
        place: Place,
    ) -> Callable[..., Any]:
        """Return the method that records the calls of another."""
        recorder, requests = self._recorder, self._requests
        pick, what = self._picker(name, method), recorder.number_of(name)
        communicator, algorithms = place.communicator, place.algorithms
        base = name[1:] if name in _TWINS else name
        is_collective = base in _COLLECTIVES or base in _MAKING
        status_at = _STATUS_AT.get(base, -1)

        def traced(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            x, peer, source, tag, receive_tag, op, forced, status = picked(pick, args, kwargs)
            number, nbytes = -1, nbytes_of(x)
            algorithm, kind = 0, None
            if is_collective:
                number = place.next_call
                if forced is not None:
                    algorithm = recorder.number_of(str(forced))
                else:
                    kind = place.kind_of(base, name == base, x, nbytes, op)
                    algorithm = algorithms.get(kind, -1) if kind is not None else 0
            elif status is None and len(args) <= status_at:
                kwargs["status"] = status = Status()
            ordinal = recorder.begin(
                what,
                communicator,
                max(algorithm, 0),
                number,
                nbytes,
                number_of(peer),
                number_of(source),
                number_of(tag),
                number_of(receive_tag),
                place_of_caller(recorder),
            )
            try:
                result = call(*args, **kwargs)
            except BaseException:
                recorder.end(ordinal, FAILED)
                raise
            recorder.end(ordinal)
            if algorithm < 0 and kind is not None:  # not before: the others would wait for this
                recorder.set_algorithm(ordinal, place.explain(group, kind))
            if isinstance(result, Request):
                requests.follow(result, ordinal, status)
            elif status is not None:
                requests.matched(ordinal, status)
            elif nbytes < 0 and result is not None:
                requests.received(ordinal, result, nbytes_of(result))
            return result

        return traced

    def _polling(
        self,
        name: str,
        method: Callable[..., Any],
        call: Callable[..., Any],
        group: Group,
        place: Place,
    ) -> Callable[..., Any]:
        """Return a probe that is recorded when it finds something: programs ask again and again."""
        recorder, requests = self._recorder, self._requests
        what = recorder.number_of(name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            found = call(*args, **kwargs)
            if found is not None:
                ordinal = recorder.begin(what, place.communicator, place=place_of_caller(recorder))
                recorder.end(ordinal)
                requests.received(ordinal, found, -1)
            return found

        return traced
