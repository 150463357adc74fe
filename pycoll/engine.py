"""The engine of one rank: it owns the transports, drives them, and tells who failed.

It is a `Driver`: that half of it knows threads and waiting, this one calls and failures.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from pycoll.context import Context
from pycoll.driver import Driver
from pycoll.errors import Error, MismatchError, OperationTimeout, PeerFailed
from pycoll.launcher.rendezvous import Client as Control
from pycoll.membership import Membership
from pycoll.scratch import Scratch
from pycoll.task import Call, CallSteps, Started, Task, caller
from pycoll.transports.base import Arrival, Operation, Parts, Transport

if TYPE_CHECKING:
    from pycoll.memory import SharedMemory

REPORT_AFTER_S = 0.2
"""A wait that lasts this long is reported to the launcher: for tables, and to compare calls."""

CONFIRM_S = 5.0
"""Seconds past its deadline that a send which cannot be taken back any more waits for the receiver
to confirm it. That takes a moment, unless the receiver was stopped or gave up half-way."""

CLOSED_IDS = 4096
"""Closed communicators that are remembered, so that late messages for them are dropped."""


def raise_error(error: BaseException) -> None:
    """Raise `error`, one of ours as a fresh copy, so that tracebacks do not pile up in it."""
    raise (copy.copy(error) if isinstance(error, Error) else error)


class Engine(Driver):
    """Everything one rank needs to communicate.

    Args:
        rank: world rank of this process.
        transports: for each world rank the transport that reaches it; `start` was not called yet.
        control: the connection to the launcher, joined; None: a job without one.
        op_timeout: default deadline of an operation, seconds; math.inf: none.
        shared_memory: that of this host, or why there is none.

    Attributes:
        hosts: by world rank the number of its host.
        borrowers: whether a world rank can reach memory of a GPU, by its identity (`lending`).
        scratch: memory for what is on its way.
    """

    def __init__(
        self,
        rank: int,
        transports: list[Transport],
        control: Control | None,
        op_timeout: float = math.inf,
        shared_memory: SharedMemory | str = "there is one rank",
    ) -> None:
        memory = shared_memory if not isinstance(shared_memory, str) else None
        super().__init__(transports, control, memory.host if memory is not None else None)
        self.rank = rank
        self.transports = transports
        self.op_timeout = op_timeout
        self.shared_memory = memory
        self.no_shared_memory = shared_memory if isinstance(shared_memory, str) else ""
        self.borrowers: dict[tuple[int, bytes], bool] = {}
        self.hosts: tuple[int, ...] = (0,) * len(transports)
        self.scratch = Scratch()
        self.contexts: dict[int, Context] = {}
        self.membership = Membership(rank, self, has_launcher=control is not None)
        self._unclaimed: dict[int, dict[Arrival, None]] = {}
        self._broken_early: dict[int, Error] = {}
        self._closed_ids: dict[int, None] = {}
        self._gives_up = False

    # --- communicators ---------------------------------------------------------------------

    def open_context(self, ident: int, members: tuple[int, ...]) -> Context:
        """Register a communicator; messages that came for it already are handed over."""
        context = Context(ident, members, self.rank)
        context.on_mismatch = self.break_context
        self.contexts[ident] = context
        for rank in members:
            if rank in self.membership.failed:
                context.fail(self.membership.failed[rank])
            if rank in self.membership.gone:
                context.peer_gone(rank, self.membership.gone[rank])
        if ident in self._broken_early:
            context.fail(self._broken_early.pop(ident))
        for arrival in self._unclaimed.pop(ident, {}):
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
        if not isinstance(error, MismatchError | OperationTimeout | PeerFailed):
            shown = PeerFailed(self.rank, f"gave up a collective ({_told(error)})")
        try:
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
        finally:
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
        held = self.interrupts.hold()
        try:
            return self._run(call, steps, deadline, collective)
        finally:
            if held:
                self._end_hold(call.context if collective else None)

    def _run(
        self, call: Call, steps: Callable[[], CallSteps], deadline: float, collective: bool
    ) -> Any:
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
                # What is sent in a collective, or without a deadline, is never taken back.
                self._gives_up = not collective and deadline != math.inf
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

    def begin(
        self,
        call: Call,
        steps: Callable[[], CallSteps],
        conclude: Callable[[Any], tuple[Any, Sequence[Operation]]],
        collective: bool,
    ) -> Started:
        """Start a call that goes on while its caller computes.

        Args:
            call: what it is.
            steps: makes it.
            conclude: gives, of what the call has returned, what the caller gets, and what must
                be done before.
            collective: if it fails, its communicator breaks.
        """
        context = call.context
        with self.locked():
            self._progress()
            if context.broken is not None:
                raise_error(context.broken)
            self._gives_up = False
            task = Started(steps(), conclude, call, lambda task: self._ended(task, collective))
            context.pending.add(task)
            self._requests.add(task)
            task.start()
            return task

    def _ended(self, task: Started, collective: bool) -> None:
        context = task.call.context
        context.pending.discard(task)
        self._requests.discard(task)
        if collective and task.error is not None:
            self.break_context(context, task.error)

    def look_at(self, operation: Operation) -> bool:
        """Do what can be done now; returns whether `operation` is done."""
        if not operation.done:
            with self.locked():
                self._progress()
        return operation.done

    def wait(self, operation: Operation, call: Call, timeout: float) -> None:
        """Return when an operation is done that goes on by itself.

        Raises:
            OperationTimeout: that took longer than `timeout` seconds; it goes on.
        """
        deadline = time.monotonic() + timeout if timeout != math.inf else math.inf
        with self.locked():
            self._progress()
            if not operation.done:
                self._wait(operation, deadline, call, gives_up=False)

    def _end_hold(self, collective: Context | None) -> None:
        """Raise an interrupt that came during a call, and break what was called collectively."""
        try:
            self.interrupts.release()
        except KeyboardInterrupt as exc:
            if collective is not None and self.closed is None:
                with self.locked():
                    self.break_context(collective, exc)
            raise

    def send(self, context: Context, peer: int, header: bytes, parts: Parts) -> Operation:
        """Start sending to the world rank `peer`."""
        transport = self.transports[peer]
        start = transport.send if self._gives_up else transport.push
        return self.membership.refuse(peer) or start(peer, header, parts)

    def hold(self, context: Context, peer: int, header: bytes, parts: Parts) -> Operation:
        """Start sending what nobody copies before it is received: longer than what is buffered."""
        refusal = self.membership.refuse(peer)
        return refusal or self.transports[peer].send(peer, header, parts)

    # --- waiting ---------------------------------------------------------------------------

    def _wait(
        self, operation: Operation, deadline: float, call: Call, gives_up: bool = True
    ) -> None:
        """Return when `operation` is done; the lock is held on entry and at the end.

        With `gives_up` it will be cancelled if this raises.
        """
        started = time.monotonic()
        report_at = started + REPORT_AFTER_S
        reported = False
        limit = deadline
        try:
            while not operation.done:
                self.interrupts.check()
                now = time.monotonic()
                if now >= limit and gives_up and operation.committed:
                    limit = deadline + CONFIRM_S
                if not reported and (now >= report_at or now >= limit):
                    reported = True
                    self.report(call, now - started)
                if now >= limit:
                    raise self.timeout(call)
                until = limit if reported else min(limit, report_at)
                if self._driving:
                    self._sleep(operation, until)
                else:
                    self._drive(operation, until)
        finally:
            if reported and self.control is not None and self.closed is None:
                self.control.post("running")

    # --- for waits outside: those of the compiled core ---------------------------------------

    def look(self, context: Context) -> None:
        """Take in what has come; raise why `context` is broken, if it is."""
        with self.locked():
            self._progress()
            if context.broken is not None:
                raise_error(context.broken)

    def give_up(self, context: Context, error: BaseException) -> None:
        """Break a communicator whose call has failed, unless this rank has left the job."""
        if self.closed is None:
            with self.locked():
                self.break_context(context, error)

    def running(self) -> None:
        """Tell the launcher that a wait which was reported is over."""
        if self.control is not None and self.closed is None:
            with self.locked():
                self.control.post("running")

    def timeout(self, call: Call) -> OperationTimeout:
        """Return the error for a call that was not done in time; under the lock."""
        table = self.control.ask_table(1.0) if self.control is not None else []
        doing = "".join(f"\n    {line}" for line in table)
        others = f" What the ranks are doing:{doing}" if doing else ""
        return OperationTimeout(
            f"rank {self.rank}: {call} at {caller()} was not done by its deadline.{others}"
        )

    def report(self, call: Call, waited_s: float) -> None:
        """Tell the launcher what this rank waits in; under the lock."""
        if self.control is not None:
            self.control.post(
                "waiting",
                context=call.context.ident,
                number=call.number,
                call=call.text,
                where=caller(),
                members=list(call.context.members),
                waited_s=waited_s,
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
            self._unclaimed.setdefault(ident, {})[arrival] = None

    def withdrawn(self, arrival: Arrival) -> None:
        """A message was taken back before it was received."""
        ident = int.from_bytes(arrival.header[1:9], "little")
        context = self.contexts.get(ident)
        if context is not None:
            context.withdrawn(arrival)
        else:
            self._unclaimed.get(ident, {}).pop(arrival, None)

    def finished(self, peer: int) -> None:
        """Everything that `peer` ever sent has arrived."""
        self.membership.farewell(peer)

    def lost(self, peer: int, reason: str) -> None:
        """The link to `peer` is gone; the launcher knows why, if anybody does."""
        self.membership.link_lost(peer, reason)

    def tell(self, peer: int, letter: bytes) -> None:
        """Send a letter of a transport's to that of `peer`, by way of the launcher."""
        if self.control is not None:
            self.control.post("tell", rank=peer, letter=letter)

    def listen(self, timeout_s: float) -> Collection[int]:
        """Hand over the letters that come; returns the ranks that have ended or left."""
        if self.control is not None:
            self._control_poller.poll(timeout_s * 1000)
            for event in self.control.progress():
                if event.kind == "told":
                    self._event(event.kind, event.fields)
                elif event.kind in ("failed", "left", "ended"):
                    self.membership.note(event.fields["rank"])
        return self.membership.departed()

    # --- what the launcher tells -----------------------------------------------------------

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "broken":
            ident = fields["context"]
            context = self.contexts.get(ident)
            if context is not None:
                context.fail(_broken_error(fields))
            elif ident not in self._closed_ids:  # this rank is still about to make it
                self._broken_early[ident] = _broken_error(fields)
        elif kind == "told":
            self.transports[fields["rank"]].hear(fields["rank"], fields["letter"])
        elif kind == "lost":
            error = Error(
                f"rank {self.rank}: the connection to pycoll-run is gone; the job cannot go on"
            )
            self._fail_all(error)
        else:
            self.membership.event(kind, fields)

    def peer_failed(self, error: PeerFailed) -> None:
        """A rank has failed: so do all communicators it is in."""
        self._drain()
        # First the contexts: their error says more than what the transport can say.
        for context in list(self.contexts.values()):
            if error.rank in context.members:
                context.fail(error)
        self.transports[error.rank].forget(error.rank, error.reason)

    def peer_gone(self, error: PeerFailed) -> None:
        """A rank has ended in good order: what waits for it fails, and nothing else."""
        self._drain()
        self.transports[error.rank].forget(error.rank, error.reason)
        for context in list(self.contexts.values()):
            context.peer_gone(error.rank, error)

    def _drain(self) -> None:
        """Take in all that is here: what a rank sent before it ended is still delivered."""
        for transport in self._distinct:
            while transport.progress():
                pass

    # --- the end ---------------------------------------------------------------------------

    def close(self, reason: str, timeout_s: float, keep_control: bool = False) -> None:
        """Deliver what was accepted for sending, tell the others, and end. Idempotent.

        With `keep_control` the connection to the launcher stays open, for last words.
        """
        if self.closed is not None:
            return
        with self.locked():
            self.closed = reason
            links = sorted({peer for transport in self._distinct for peer in transport.links()})
            for transport in self._distinct:
                transport.close(timeout_s)
            # Other threads may wait in them. Not before: senders would hear that what was never
            # received has been dropped, and go on as if it had been.
            self._fail_all(Error(reason))
            if self.control is not None:
                self.control.post("left", links=links)
                if not keep_control:
                    self.control.close(timeout_s)
            self._close_seats()
        self._end_background(timeout_s)

    def _fail_all(self, error: BaseException) -> None:
        for context in list(self.contexts.values()):
            context.fail(error)


def _told(error: BaseException) -> str:
    """Return the kind and the text of an error of the user's, whatever that text is."""
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:
        return type(error).__name__


def _broken_error(fields: dict[str, Any]) -> Error:
    if fields["error"] == "PeerFailed":
        return PeerFailed(fields["rank"], fields["reason"], fields["message"])
    kinds: dict[str, type[Error]] = {
        "MismatchError": MismatchError,
        "OperationTimeout": OperationTimeout,
    }
    return kinds.get(fields["error"], Error)(fields["message"])
