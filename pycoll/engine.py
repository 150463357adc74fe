"""The engine of one rank: it owns the transports, drives them, and tells who failed.

Who drives. One lock owns everything. A thread that waits drives: it lets the transports progress
until its operation is done, and sleeps in poll() between. When a second thread wants the lock, it
rings the driver's bell, does what it has to do, and if it must wait it sleeps until the driver
finds its operation done or hands the driving over. Nothing runs when nobody waits.

Calls are generators that yield operations and return a result, so that the same code can serve a
blocking call (start and wait) and one that goes on while its caller computes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, NamedTuple

from pycoll.context import Context
from pycoll.errors import Error, MismatchError, OperationTimeout, PeerFailed
from pycoll.launcher.rendezvous import Client
from pycoll.transports.base import Arrival, Operation, Parts, Transport

CallSteps = Generator[Operation, None, Any]
"""A call: yields what it waits for, returns its result."""

REPORT_AFTER_S = 0.3
"""A wait that lasts this long is reported to the launcher: for tables, and to compare calls."""

VERDICT_S = 3.0
"""Seconds that a lost link waits for the launcher to say what became of the peer."""

SETTLE_S = 1.0
"""Seconds after which a rank that has finished counts as gone, whatever it becomes later."""

FAREWELL_S = 3.0
"""Seconds to wait for the last message of a rank that has ended in good order: after SETTLE_S, and
in less than the 5 s within which everybody must know."""

CLOSED_IDS = 4096
"""Closed communicators that are remembered, so that late messages for them are dropped."""


class Call(NamedTuple):
    """What the user called, for messages: a text, its number (-1: point to point), its context."""

    text: str
    number: int
    context: Context

    def __str__(self) -> str:
        return self.text if self.number < 0 else f"{self.text} #{self.number}"


class Task(Operation):
    """A call under way.

    Attributes:
        result: what the call returned.
    """

    __slots__ = ("_current", "_interruption", "_running", "_steps", "result")

    def __init__(self, steps: CallSteps) -> None:
        super().__init__()
        self._steps = steps
        self._current: Operation | None = None
        self._running = False
        self._interruption: BaseException | None = None
        self.result: Any = None

    def start(self) -> None:
        """Run up to the first operation that is not done yet."""
        self._advance(None)

    def abort(self, error: BaseException) -> None:
        """Raise `error` inside the call, where it waits, and be done with it."""
        if self.done:
            return
        if self._running:  # the call itself has found out: raised when it next waits
            self._interruption = error
            return
        if self._current is not None:
            self._current.then(_ignore)
        self._resume(error)
        if not self.done:
            self._steps.close()
            self.finish(error)

    def _advance(self, operation: Operation | None) -> None:
        error = operation.error if operation is not None else None
        while not self.done:
            current = self._resume(error)
            if current is None:
                return
            error, self._interruption = self._interruption, None
            if error is None:
                if not current.done:
                    self._current = current
                    current.then(self._advance)
                    return
                error = current.error

    def _resume(self, error: BaseException | None) -> Operation | None:
        """Run the call up to its next operation; None: it has ended."""
        self._running = True
        try:
            return self._steps.throw(error) if error else next(self._steps)
        except StopIteration as stop:
            self.result = stop.value
            self.finish()
        except BaseException as exc:
            self.finish(exc)
        finally:
            self._running = False
        return None


def _ignore(operation: Operation) -> None:
    pass


class _Sleeper:
    """A thread that waits while another one drives."""

    __slots__ = ("event", "operation")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.event = threading.Event()


def raise_error(error: BaseException) -> None:
    """Raise `error`, one of ours as a fresh copy, so that tracebacks do not pile up in it."""
    raise (copy.copy(error) if isinstance(error, Error) else error)


class Engine:
    """Everything one rank needs to communicate.

    Args:
        rank: world rank of this process.
        transports: for each world rank the transport that reaches it; `start` was not called yet.
        control: the connection to the launcher, joined; None: a job without one.
    """

    def __init__(self, rank: int, transports: list[Transport], control: Client | None) -> None:
        self.rank = rank
        self.transports = transports
        self.control = control
        self.contexts: dict[int, Context] = {}
        self.closed: str | None = None
        self.failed: dict[int, PeerFailed] = {}
        self._gone: dict[int, PeerFailed] = {}
        self._left: dict[int, list[int]] = {}
        self._ended: dict[int, str] = {}
        self._finished: set[int] = set()
        self._awaited: set[int] = set()
        self._refused: dict[int, list[Operation]] = {}
        self._unclaimed: dict[int, list[Arrival]] = {}
        self._closed_ids: dict[int, None] = {}
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._gate = threading.Lock()
        self._state = threading.Lock()
        self._owner = 0
        self._driving = False
        self._sleepers: list[_Sleeper] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._distinct = list(dict.fromkeys(transports))
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        for transport in self._distinct:
            self._poller.register(transport.fileno(), select.POLLIN)
        if control is not None:
            self._poller.register(control.fileno(), select.POLLIN)

    # --- the lock --------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the engine; a thread that drives lets go of it at once."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        if self.closed is not None:
            raise Error(self.closed)
        if self._owner == threading.get_ident():
            raise Error(
                "a reduction operator or a signal handler must not communicate: "
                "it runs in the middle of an operation"
            )
        with self._gate:
            if not self._state.acquire(blocking=False):
                os.eventfd_write(self._bell, 1)
                self._state.acquire()
        self._owner = threading.get_ident()

    def _leave(self) -> None:
        self._wake_sleepers()
        self._owner = 0
        self._state.release()

    # --- communicators ---------------------------------------------------------------------

    def open_context(self, ident: int, members: tuple[int, ...]) -> Context:
        """Register a communicator; messages that came for it already are handed over."""
        context = Context(ident, members, self.rank)
        context.on_mismatch = lambda error: self.break_context(context, error)
        self.contexts[ident] = context
        for rank in members:
            if rank in self.failed:
                context.fail(self.failed[rank])
            if rank in self._gone:
                context.peer_gone(rank, self._gone[rank])
        for arrival in self._unclaimed.pop(ident, []):
            context.arrived(arrival)
        return context

    def close_context(self, context: Context) -> None:
        """Forget a communicator."""
        self.contexts.pop(context.ident, None)
        context.close()
        self._closed_ids[context.ident] = None
        if len(self._closed_ids) > CLOSED_IDS:
            del self._closed_ids[next(iter(self._closed_ids))]

    def break_context(self, context: Context, error: BaseException) -> None:
        """Make a communicator unusable on all its ranks, for the reason `error`."""
        if context.broken is not None:
            return
        shown = error
        if not isinstance(error, Error):
            doing = f"{type(error).__name__}: {error}".rstrip(": ")
            reason = f"gave up a collective ({doing})"
            shown = PeerFailed(self.rank, reason)
        if self.control is not None:
            failure = shown if isinstance(shown, PeerFailed) else None
            self.control.post(
                "broken",
                context=context.ident,
                error=type(shown).__name__,
                rank=failure.rank if failure else self.rank,
                reason=failure.reason if failure else "",
                message=str(shown),
                members=list(context.members),
            )
        context.fail(shown)

    # --- calls -----------------------------------------------------------------------------

    def run(
        self, call: Call, steps: Callable[[], CallSteps], timeout: float, collective: bool
    ) -> Any:
        """Run a call to its end; `timeout` in seconds, math.inf: none.

        Raises:
            OperationTimeout: the deadline passed; a collective's breaks its communicator.
            Error: what else went wrong.
        """
        deadline = time.monotonic() + timeout if timeout != math.inf else math.inf
        context = call.context
        self._enter()
        try:
            task: Task | None = None
            try:  # from the beginning: an interrupt may come at any moment
                self._progress()
                if context.broken is not None:
                    raise_error(context.broken)
                task = Task(steps())
                context.pending.add(task)
                task.start()
                if not task.done:
                    self._wait(task, deadline, call)
            except BaseException as exc:
                if collective:
                    self.break_context(context, exc)
                if task is not None:
                    task.abort(exc)
                raise
            finally:
                if task is not None:
                    context.pending.discard(task)
            if task.error is not None:
                if collective:
                    self.break_context(context, task.error)
                raise_error(task.error)
            return task.result
        finally:
            self._leave()

    def send(self, context: Context, peer: int, header: bytes, parts: Parts) -> Operation:
        """Start sending to the world rank `peer`."""
        if peer in self._gone or peer in self._left:
            refused = Operation()
            if peer in self._gone:
                refused.finish(self._gone[peer])
            else:  # failed when it is known how it ended
                self._refused.setdefault(peer, []).append(refused)
            return refused
        return self.transports[peer].send(peer, header, parts)

    # --- waiting ---------------------------------------------------------------------------

    def _wait(self, operation: Operation, deadline: float, call: Call) -> None:
        """Return when `operation` is done; the lock is held on entry and at the end."""
        report_at = time.monotonic() + REPORT_AFTER_S
        reported = False
        try:
            while not operation.done:
                now = time.monotonic()
                if now >= deadline:
                    raise self._timeout(call)
                if not reported and now >= report_at:
                    reported = True
                    self._report(call)
                until = deadline if reported else min(deadline, report_at)
                if self._driving:
                    self._sleep(operation, until)
                else:
                    self._drive(operation, until)
        finally:
            if reported and self.control is not None and self.closed is None:
                self.control.post("running")

    def _drive(self, operation: Operation, until: float) -> None:
        self._driving = True
        try:
            while not operation.done:
                if self._progress():
                    self._wake_sleepers()
                    continue
                limit = min([until, *(due for due, _ in self._timers)])
                now = time.monotonic()
                if now >= until:
                    return
                timeout_ms = None if limit == math.inf else max(0, math.ceil((limit - now) * 1e3))
                for descriptor, _ in self._poller.poll(timeout_ms):
                    if descriptor == self._bell:
                        self._make_room()
        finally:
            self._driving = False
            if self._sleepers:
                self._sleepers[0].event.set()

    def _make_room(self) -> None:
        """Let the thread in that rang the bell: it holds the gate until it has the lock."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._leave()
        with self._gate:
            self._state.acquire()
        self._owner = threading.get_ident()

    def _sleep(self, operation: Operation, until: float) -> None:
        sleeper = _Sleeper(operation)
        self._sleepers.append(sleeper)
        self._leave()
        try:
            sleeper.event.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        finally:
            with self._gate:
                if not self._state.acquire(blocking=False):
                    os.eventfd_write(self._bell, 1)
                    self._state.acquire()
            self._owner = threading.get_ident()
            self._sleepers.remove(sleeper)
            # Woken to drive, but done (or out of time): the next one has to.
            if not self._driving and self._sleepers:
                self._sleepers[0].event.set()

    def _progress(self) -> bool:
        worked = False
        for transport in self._distinct:
            worked |= transport.progress()
        if self.control is not None:
            for event in self.control.progress():
                worked = True
                self._event(event.kind, event.fields)
        if self._timers:
            now = time.monotonic()
            for timer in [timer for timer in self._timers if timer[0] <= now]:
                worked = True
                self._timers.remove(timer)
                timer[1]()
        return worked

    def _wake_sleepers(self) -> None:
        for sleeper in self._sleepers:
            if sleeper.operation.done:
                sleeper.event.set()

    def _timeout(self, call: Call) -> OperationTimeout:
        table = self.control.ask_table(1.0) if self.control is not None else []
        doing = "".join(f"\n    {line}" for line in table)
        others = f" What the ranks are doing:{doing}" if doing else ""
        return OperationTimeout(
            f"rank {self.rank}: {call} at {_where()} was not done by its deadline.{others}"
        )

    def _report(self, call: Call) -> None:
        if self.control is not None:
            self.control.post(
                "waiting",
                context=call.context.ident,
                number=call.number,
                call=call.text,
                where=_where(),
                members=list(call.context.members),
            )

    # --- what the transports tell ----------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """A message has come: its header begins with a kind and the communicator's number."""
        ident = int.from_bytes(arrival.header[1:9], "little")
        context = self.contexts.get(ident)
        if context is not None:
            context.arrived(arrival)
        elif ident in self._closed_ids:
            arrival.release()
        else:
            # The sender has made a communicator that this rank is still about to make.
            arrival.header = bytes(arrival.header)
            self._unclaimed.setdefault(ident, []).append(arrival)

    def withdrawn(self, arrival: Arrival) -> None:
        """A message was taken back before it was received."""
        ident = int.from_bytes(arrival.header[1:9], "little")
        context = self.contexts.get(ident)
        if context is not None:
            context.withdrawn(arrival)
        elif arrival in self._unclaimed.get(ident, []):
            self._unclaimed[ident].remove(arrival)

    def finished(self, peer: int) -> None:
        """Everything that `peer` ever sent has arrived."""
        self._finished.add(peer)
        if peer in self._ended or peer in self._awaited or self.control is None:
            self._settle(peer)

    def lost(self, peer: int, reason: str) -> None:
        """The link to `peer` is gone; the launcher knows why, if anybody does."""
        if peer in self.failed or peer in self._gone or peer in self._left:
            return
        if self.control is None:
            self._peer_failed(peer, reason, "")
        else:
            self._after(VERDICT_S, lambda: self._judge(peer, reason))

    def _judge(self, peer: int, reason: str) -> None:
        if peer not in self.failed and peer not in self._gone and peer not in self._left:
            self._peer_failed(peer, reason, "")

    # --- what the launcher tells -----------------------------------------------------------

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "failed":
            self._peer_failed(fields["rank"], fields["reason"], fields["detail"])
        elif kind == "broken":
            context = self.contexts.get(fields["context"])
            if context is not None:
                context.fail(_broken_error(fields))
        elif kind == "left":
            rank = fields["rank"]
            self._left[rank] = fields["links"]
            self._after(SETTLE_S, lambda: self._settle(rank))
        elif kind == "ended":
            rank = fields["rank"]
            self._ended[rank] = fields["reason"]
            if rank in self._left:
                self._settle(rank)
            else:
                self._after(SETTLE_S, lambda: self._settle(rank))
        elif kind == "lost":
            error = Error(
                f"rank {self.rank}: the connection to pycoll-run is gone; the job cannot go on"
            )
            for context in list(self.contexts.values()):
                context.fail(error)

    def _peer_failed(self, rank: int, reason: str, detail: str) -> None:
        if rank in self.failed or rank == self.rank:
            return
        for transport in self._distinct:  # what it sent before is still delivered
            while transport.progress():
                pass
        message = f"rank {rank} failed: {reason}"
        if detail:
            message += "\n" + "\n".join(f"    {line}" for line in detail.rstrip().splitlines())
        error = PeerFailed(rank, reason, message)
        self.failed[rank] = error
        self.transports[rank].forget(rank, reason)
        for context in list(self.contexts.values()):
            if rank in context.members:
                context.fail(error)
        for refused in self._refused.pop(rank, []):
            refused.finish(error)

    def _settle(self, rank: int) -> None:
        """Count a rank that has ended in good order as gone, once its last message is here."""
        if rank in self._gone or rank in self.failed:
            return
        if self.rank in self._left.get(rank, ()) and rank not in self._finished:
            if rank not in self._awaited:
                self._awaited.add(rank)
                self._after(FAREWELL_S, lambda: self.finished(rank))
            return
        reason = self._ended.get(rank, "it has finished: no more messages will come from it")
        error = PeerFailed(rank, reason, f"rank {rank} is needed, but has ended: {reason}")
        self._gone[rank] = error
        self.transports[rank].forget(rank, reason)
        for context in list(self.contexts.values()):
            context.peer_gone(rank, error)
        for refused in self._refused.pop(rank, []):
            refused.finish(error)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    # --- the end ---------------------------------------------------------------------------

    def close(self, reason: str, timeout_s: float) -> None:
        """Deliver what was accepted for sending, tell the others, and end. Idempotent."""
        if self.closed is not None:
            return
        with self.locked():
            self.closed = reason
            links = sorted({peer for transport in self._distinct for peer in transport.links()})
            for transport in self._distinct:
                transport.close(timeout_s)
            # Other threads may wait in them. Not before: senders would hear that what was never
            # received has been dropped, and go on as if it had been.
            for context in list(self.contexts.values()):
                context.fail(Error(reason))
            if self.control is not None:
                self.control.post("left", links=links)
                self.control.close(timeout_s)
            os.close(self._bell)


def _broken_error(fields: dict[str, Any]) -> Error:
    if fields["error"] == "PeerFailed":
        return PeerFailed(fields["rank"], fields["reason"], fields["message"])
    kinds: dict[str, type[Error]] = {
        "MismatchError": MismatchError,
        "OperationTimeout": OperationTimeout,
    }
    return kinds.get(fields["error"], Error)(fields["message"])


def _where() -> str:
    """Return file:line of the innermost frame that is not pycoll's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pycoll."):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
