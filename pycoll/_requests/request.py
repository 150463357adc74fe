"""Requests: calls that go on while their caller computes.

A request makes progress whenever any thread of its rank communicates or waits, and in the
background while none does. Waiting for one in an asyncio program sleeps in the event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from pycoll._calls import arguments
from pycoll._requests import done_callbacks
from pycoll._runtime.communicators import raise_requests_error
from pycoll._runtime.matching import Match
from pycoll._runtime.task import Call, Several, Started, caller, several_call
from pycoll._support.foreign_names import ABSENT_FROM_REQUESTS, OF_REQUESTS, Hinting
from pycoll._support.public_edge import edge, edges, public
from pycoll._support.wording import a_kind
from pycoll.errors import Error

if TYPE_CHECKING:
    from pycoll._calls.call_plan import CallPlan


R = TypeVar("R", covariant=True)
"""What the call returns."""

in_core: Callable[[Any, Any], Any] | None = None
"""The core's `wait_all`; None until a request was made. It returns None for what it cannot do."""

take_in_core: Callable[[Any, Any, bool], list[tuple[int, Any]] | None] | None = None
"""The core's `take`: what is done, for this caller; None: that is left to Python."""

wait_in_core: Callable[[str, list[Any], int, float], bool] | None = None
"""Waits for long until so many requests are done, or one has failed; False: that is left to tasks
of Python's."""


def begin(plan: CallPlan[Any]) -> Started:
    group, text, collective = plan.group, plan.text, plan.is_collective
    call = Call(text, group.number if collective else -1, group.context)
    signature = f"{text}\0{caller()}".encode() if collective else b""
    return group.engine.begin(call, partial(plan.steps, signature), plan.conclude, collective)


@public
@edges
class Request(Hinting, Generic[R], foreign=OF_REQUESTS, absent=ABSENT_FROM_REQUESTS):
    """A call under way, returned by the methods whose names begin with ``i``.

    The arrays passed to the call belong to it until it is done: they must not be changed, and
    what it fills must not be read. A request that nobody keeps goes on all the same.
    """

    def __init__(self, plan: CallPlan[R]) -> None:
        self._group = plan.group
        self._receives = plan.receives
        self._cancelled: bool = False
        self._collected: bool = False
        self._task: Started | None = begin(plan)

    def wait(self, timeout: float | None = None) -> R:
        """Return the result, when the call is done.

        Args:
            timeout: seconds; None: `op_timeout` of the communicator, math.inf: none.

        Raises:
            OperationTimeout: they have passed. The call goes on, and may be waited for again.
            Error: as the blocking method raises it.
        """
        seconds = self._seconds(timeout)
        task = self._started()
        if not task.done:
            self._group.engine.wait(task, task.call, seconds)
        return self.result

    def test(self) -> bool:
        """Return whether the call is done, in whatever way; never waits."""
        return self._group.engine.look_at(self._started())

    @property
    def done(self) -> bool:
        """Whether the call is done, as far as is known without looking."""
        return self._started().done

    @property
    def result(self) -> R:
        """What the call returns.

        Raises:
            Error: it is not done yet; or as the blocking method raises it.
        """
        task = self._started()
        if not task.done:
            raise Error(f"{task.call} is not done yet; wait() for it")
        self._collected = True
        error = task.error or task.unfit
        if error is not None:
            raise_requests_error(self._group.context, error)
        result: R = task.result
        return result

    def cancel(self) -> bool:
        """Withdraw a receive; False if a message has come for it, or it is done.

        Its `wait` and `result` then raise Error. The message, when it comes, is another's.

        Raises:
            TypeError: this is no receive; nothing else can be taken back.
        """
        task = self._started()
        if not self._receives:
            raise TypeError(f"only a receive can be cancelled, not {task.call}")
        if task.done:
            return False
        with self._group.engine.locked():
            if not isinstance(task.waits_for, Match) or task.waits_for.done or task.done:
                return False
            self._cancelled = True
            task.abort(Error(f"{task.call} was cancelled"))
            return True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has withdrawn it."""
        return self._cancelled

    def add_done_callback(self, callback: Callable[[Request[R]], object]) -> None:
        """Have `callback(request)` called once, when the call is done, in whatever way.

        If it is done already, that is soon. The callback runs in a thread of pycoll's for
        callbacks, which moves no messages, and never in the caller's. It may take long, and may
        communicate and wait: others go on meanwhile. Those of one request run in the order in which
        they were added, one after the other; those of different requests in any order, or at once.
        `result` is there at once, or raises. Of a persistent request the call that is under way
        counts, or the last one.

        What the callback raises goes to ``threading.excepthook``, which prints it. Callbacks that
        have not begun when the program ends do not run.

        Args:
            callback: a function of one argument, this request. The request keeps it until it has
                run.

        Raises:
            TypeError: `callback` is no function.
            Error: a persistent request was not started; or this process has left.
        """
        if not callable(callback):
            raise TypeError(f"a callback is a function, not {a_kind(callback)}")
        self._started()
        callbacks: done_callbacks.Callbacks
        callbacks = vars(self).setdefault("_callbacks", done_callbacks.Callbacks())
        callbacks.add(callback, self)

    def __await__(self) -> Generator[Any, None, R]:
        """Wait in an asyncio program: the event loop goes on.

        Raises:
            OperationTimeout: `op_timeout` of the communicator has passed. The call goes on.
            RuntimeError: it is not done, and no event loop of asyncio runs here.
            Error: as the blocking method raises it.
        """
        task = self._started()
        if not task.done:
            from pycoll._requests import event_loop

            waiting = event_loop.wait(self._group.engine, task, self._group.op_timeout)
            yield from waiting.__await__()
        return self.result

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Request cannot be pickled: wait for it, and send its result")

    def __repr__(self) -> str:
        task = self._task
        if task is None:
            return "<pycoll.Request, not started>"
        state = "pending"
        if self._cancelled:
            state = "cancelled"
        elif task.done:
            state = "failed" if task.error or task.unfit else "done"
        return f"<pycoll.Request {task.call}: {state}>"

    # --- for the functions below -------------------------------------------------------------

    @property
    def _has_failed(self) -> bool:
        """Whether it is done, and has no result."""
        return _is_failed(self._started())

    def _state_for(self, core: Any) -> int:
        """Return what it is to the core's engine: 0: nothing, it is not Python's own, or not there.

        1: a wait has returned its result; 2: pending; 3: done.
        """
        if self._group.engine.transport.core is not core:
            return 0
        return 1 if self._collected else 2 + self.done

    def _claim(self) -> bool:
        """Whether no wait has returned the result; from now on this caller may, and no other."""
        with _claiming:
            was, self._collected = self._collected, True
        return not was

    def _started(self) -> Started:
        if self._task is None:
            raise Error("this persistent request was not started: call start() first")
        return self._task

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._group.op_timeout
        return arguments.check_timeout(timeout, "timeout")


@edge
def wait_all(requests: Iterable[Request[R]], timeout: float | None = None) -> list[R]:
    """Return the results of all requests, in their order.

    Args:
        requests: of one or several communicators.
        timeout: seconds for all together; None: `op_timeout` of the first's communicator,
            math.inf: none.

    Raises:
        OperationTimeout: they have passed. The requests go on.
        Error: that of a request that has failed, as soon as that is known; the others go on.
    """
    since = time.monotonic()
    if in_core is not None:
        results: list[R] | None = in_core(requests, timeout)
        if results is not None:
            return results
    listed = _listed("wait_all", requests)
    pending = [request for request in listed if not request.done]
    if pending and not any(request._has_failed for request in listed):
        seconds = pending[0]._seconds(timeout)
        _wait_for("wait_all", pending, len(pending), max(0.0, seconds + since - time.monotonic()))
    failed = next((index for index, request in enumerate(listed) if request._has_failed), None)
    if failed is not None:
        _result(listed, failed, listed[failed])
    return [request.result for request in listed]


@edge
def wait_any(requests: Iterable[Request[R]], timeout: float | None = None) -> tuple[int, R]:
    """Return the index and the result of one request that is done.

    Each request is given once, whichever thread asks: those whose results any wait has returned are
    passed over. If several are done it may be any of them.

    Args:
        requests: of one or several communicators.
        timeout: seconds; None: `op_timeout` of the first's communicator, math.inf: none.

    Raises:
        ValueError: no request is left.
        OperationTimeout: `timeout` seconds have passed. The requests go on.
        Error: that of the request, if it has failed; a note says which it is.
    """
    listed, taken = _take("wait_any", requests, timeout, several=False)
    ((index, request),) = taken
    return index, _result(listed, index, request)


@edge
def wait_some(
    requests: Iterable[Request[R]], timeout: float | None = None
) -> tuple[list[int], list[R]]:
    """Return the indices and the results of all requests that are done: at least one.

    Each request is given once, as by `wait_any`. One that has failed raises when nothing else is
    done. A new request in a list of more than 64 that was waited for before, at another place than
    that of one that was given, or the end, may be given by a later call.

    Raises:
        As `wait_any`.
    """
    listed, taken = _take("wait_some", requests, timeout, several=True)
    return [index for index, _ in taken], [_result(listed, *each) for each in taken]


@edge
def test_all(requests: Iterable[Request[Any]]) -> bool:
    """Return whether all requests are done, in whatever way; never waits.

    Args:
        requests: requests of any communicators.
    """
    return all([request.test() for request in _listed("test_all", requests)])


def _listed(what: str, requests: Any) -> list[Request[Any]]:
    if not isinstance(requests, Iterable):
        one = f". For one: request.{what[:4]}()" if isinstance(requests, Request) else ""
        raise TypeError(f"{what} takes a list of requests, not {a_kind(requests)}{one}")
    listed = list(requests)
    for request in listed:
        if not isinstance(request, Request):
            raise TypeError(f"{what} takes a list of requests, not one with {a_kind(request)}")
    return listed


_claiming = threading.Lock()
"""Held while a thread claims what is not the core's."""


def _take(
    what: str, requests: Iterable[Request[R]], timeout: float | None, several: bool
) -> tuple[Sequence[Request[R]], list[tuple[int, Request[R]]]]:
    """Return the requests, and those that are done and are this caller's now, with their indices.

    The core does it, but for what it does not know, and for waits that take long.
    """
    since = time.monotonic()
    listed = requests if isinstance(requests, list | tuple) else _listed(what, requests)
    left_s = timeout
    while True:
        taken = take_in_core(listed, left_s, several) if take_in_core is not None else None
        if taken is not None:
            return listed, taken
        left = [pair for pair in enumerate(_listed(what, listed)) if not pair[1]._collected]
        done = [pair for pair in left if pair[1].done]
        wanted = [pair for pair in done if several and not pair[1]._has_failed] or done[:1]
        taken = [pair for pair in wanted if pair[1]._claim()]
        if taken:
            return listed, taken
        if wanted:
            continue  # other threads have taken them
        if not left:
            raise ValueError(f"{what}: no request is left whose result was not returned already")
        waiting = [request for _, request in left]
        deadline = since + waiting[0]._seconds(timeout)
        _wait_for(what, waiting, 1, max(0.0, deadline - time.monotonic()))
        left_s = max(0.0, deadline - time.monotonic())


def _result(requests: Sequence[Request[R]], index: int, request: Request[R]) -> R:
    try:
        return request.result
    except Exception as exc:
        exc.add_note(f"request {index} of {len(requests)}: {request!r}")
        raise


def _is_failed(task: Started) -> bool:
    return task.done and (task.error or task.unfit) is not None


def _wait_for(
    what: str, pending: Sequence[Request[Any]], needed: int, timeout: float | None
) -> None:
    """Return when so many more are done, or one has failed."""
    engine = pending[0]._group.engine
    seconds = pending[0]._seconds(timeout)
    if wait_in_core is not None and wait_in_core(what, list(pending), needed, seconds):
        return
    pending = [request for request in pending if not request.done] or pending
    needed = min(needed, len(pending))
    tasks = [request._started() for request in pending]  # which may take the engine's lock
    if any(request._group.engine is not engine for request in pending):
        return _wait_in_worlds(what, pending, tasks, needed, seconds)
    with engine.locked():
        waiting = list(dict.fromkeys(task for task in tasks if not task.done))
        needed = min(needed - sum(task.done for task in tasks), len(waiting))
        if needed <= 0 or any(map(_is_failed, tasks)):
            return
        several = Several(waiting, needed)
    call = several_call(what, len(waiting), waiting[0].call)
    try:
        engine.wait(several, call, seconds)
    finally:
        if not several.done:
            with engine.locked():
                several.forget()


def _wait_in_worlds(
    what: str,
    pending: Sequence[Request[Any]],
    tasks: Sequence[Started],
    needed: int,
    seconds: float,
) -> None:
    """The same for requests of several worlds: each goes on by itself."""
    ended = threading.Semaphore(0)

    def tell(task: Started) -> None:
        ended.release()

    deadline = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
    try:
        for request, task in zip(pending, tasks, strict=True):
            with request._group.engine.locked():
                if task.done:
                    tell(task)
                else:
                    task.watchers[tell] = None
        for _ in range(needed):
            if any(map(_is_failed, tasks)):
                return
            if not ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
                late = next(index for index, task in enumerate(tasks) if not task.done)
                engine = pending[late]._group.engine
                first = tasks[late].call
                text = f"{what} of {len(tasks)} requests of several worlds, of which {first}"
                with engine.locked():
                    raise engine.timeout(Call(text, -1, first.context))
    finally:
        for task in tasks:
            task.watchers.pop(tell, None)
