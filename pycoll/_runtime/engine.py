"""The engine of one rank: it owns the core's, and tells who failed.

It is a `Driver`: that half of it knows threads and waiting, this one calls and failures.
"""

from __future__ import annotations

import copy
import math
import select
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from pycoll._rendezvous.client import Client as Control
from pycoll._runtime.context import Context
from pycoll._runtime.driver import Driver
from pycoll._runtime.last_calls import LastCalls
from pycoll._runtime.membership import Membership
from pycoll._runtime.task import Call, CallSteps, Started, Task, caller
from pycoll._runtime.waits import Waits, options_of
from pycoll._transports.base import Arrival, Elsewhere, Operation, Parts, Reach
from pycoll._transports.core import CoreTransport
from pycoll.errors import Error, MismatchError, OperationTimeout, PeerFailed

if TYPE_CHECKING:
    from pycoll._runtime.host_memory import SharedMemory

CONFIRM_S = 5.0
"""Seconds past its deadline that a send which cannot be taken back any more waits for the receiver
to confirm it. That takes a moment, unless the receiver was stopped or gave up half-way."""

CLOSED_IDS = 4096
"""Closed communicators that are remembered, so that late messages for them are dropped."""


def raise_error(error: BaseException) -> None:
    """Raise `error`, one of ours as a fresh copy, so that tracebacks do not pile up in it."""
    raise (copy.copy(error) if isinstance(error, Error) else error)


def left_without(error: PeerFailed, call: Call) -> PeerFailed:
    """Return the error for a rank that has left in good order, and without making this call."""
    name = call.text.partition("(")[0]
    text = f"rank {error.rank} is needed, but has left without calling {name}(): {error.reason}"
    return PeerFailed(error.rank, error.reason, text)


class Engine(Driver):
    """Everything one rank needs to communicate.

    Args:
        transport: the core's engine; `start` was not called yet.
        size: number of ranks.
        control: the connection to the launcher, joined; None: a job without one.
        op_timeout: default deadline of an operation, seconds; math.inf: none.
        shared_memory: that of this host, or why there is none.

    Attributes:
        rank: world rank of this process.
        hosts: by world rank the number of its host.
        borrowers: whether a world rank can reach memory of a GPU, by its identity (`cuda_ipc`).
    """

    def __init__(
        self,
        transport: CoreTransport,
        size: int,
        control: Control | None,
        op_timeout: float = math.inf,
        shared_memory: SharedMemory | str = "there is one rank",
    ) -> None:
        memory = shared_memory if not isinstance(shared_memory, str) else None
        super().__init__(transport, control)
        self.rank = rank = transport.rank
        self.op_timeout = op_timeout
        self.shared_memory = memory
        self.no_shared_memory = shared_memory if isinstance(shared_memory, str) else ""
        self.borrowers: dict[tuple[int, bytes], bool] = {}
        self.hosts: tuple[int, ...] = (0,) * size
        self.contexts: dict[int, Context] = {}
        self.membership = Membership(rank, self, has_launcher=control is not None)
        self._last_calls = LastCalls(rank, self.contexts)
        self._first_error = ""
        self._unclaimed: dict[int, dict[Arrival, None]] = {}
        self._broken_early: dict[int, Error] = {}
        self._closed_ids: dict[int, int] = {}  # and how many collective calls were made there
        self._gives_up = False
        self.waits = Waits(control, self._num_started, self._is_quiet)
        self._job_lost: Error | None = None  # pycoll-run is gone
        self.has_helpers = False  # in its place there are processes that ranks have started

    # --- communicators ---------------------------------------------------------------------

    def open_context(self, ident: int, members: tuple[int, ...]) -> Context:
        """Register a communicator; messages that came for it already are handed over."""
        context = Context(ident, members, self.rank, self.transport)
        context.on_mismatch = self._found_different
        self.contexts[ident] = context
        if self._job_lost is not None:
            context.fail(self._job_lost)
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
        """Forget a communicator, but for what ranks that leave later compare."""
        self._last_calls.close(context)
        self.contexts.pop(context.ident, None)
        context.close()
        self._closed_ids[context.ident] = context.num_started()
        if len(self._closed_ids) > CLOSED_IDS:
            del self._closed_ids[next(iter(self._closed_ids))]

    def break_context(self, context: Context, error: BaseException) -> None:
        """Make a communicator unusable on all its ranks, for the reason `error`."""
        if context.broken is not None:
            return
        self._note(error)
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

    def _found_different(self, context: Context, error: MismatchError) -> None:
        unheard = not context.pending
        self.break_context(context, error)
        context.unheard = unheard

    def check(self, context: Context) -> None:
        """Raise why a communicator is broken, if it is."""
        if context.broken is not None:
            context.unheard = False
            raise_error(context.broken)

    def look_back(self, context: Context) -> Error | None:
        """Return how calls of other ranks differ from this one's that nobody was told of yet.

        For a rank that leaves; with the lock. It does not wait for who may come later.
        """
        self._progress()
        if context.broken is None and context.in_core is not None:
            error = context.in_core.differing()
            if error is not None:  # ranks that are still in the call hear of it, too
                self._found_different(context, error)
        unheard, context.unheard = context.unheard, False
        return context.broken if unheard and isinstance(context.broken, Error) else None

    def _note(self, error: BaseException) -> None:
        """Remember the first error: who needs this rank when it has left shall know."""
        self._first_error = self._first_error or _in_a_line(_told(error))

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
        inside = self.is_inside()
        try:
            self.enter(inside)
            return self._run(call, steps, deadline, collective)
        finally:
            if not inside:
                if self._is_mine():
                    self.leave()
                self._end_hold(call.context if collective else None)

    def _run(
        self, call: Call, steps: Callable[[], CallSteps], deadline: float, collective: bool
    ) -> Any:
        context = call.context
        try:
            task: Task | None = None
            try:  # from the beginning: an interrupt may come at any moment
                self._progress()
                self.check(context)
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
                error = self.named(task.error, call)
                if collective:
                    self.break_context(context, error)
                elif isinstance(error, PeerFailed):
                    self._note(error)
                raise_error(error)
            return task.result
        finally:
            self.leave()

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
        with self.locked():
            self._progress()
            self.check(call.context)
            self._gives_up = False
            return self.start(call, steps(), conclude, collective)

    def start(
        self,
        call: Call,
        steps: CallSteps,
        conclude: Callable[[Any], tuple[Any, Sequence[Operation]]],
        collective: bool,
    ) -> Started:
        """The same, with the lock."""
        task = Started(steps, conclude, call, lambda task: self._ended(task, collective))
        call.context.pending.add(task)
        self._requests.add(task)
        task.start()
        return task

    def go_on(self, call: Call, steps: CallSteps) -> None:
        """Have what is left of a call done while nobody waits for it; with the lock.

        It goes on when its communicator is closed, too: its caller cannot know when it is done.
        """
        task = Started(steps, lambda result: (result, ()), call, lambda t: self._ended(t, False))
        self._requests.add(task)
        task.start()

    def named(self, error: BaseException, call: Call) -> BaseException:
        """Name the call that a rank which has left in good order has not made."""
        if (
            isinstance(error, PeerFailed)
            and call.number >= 0
            and error.rank in call.context.gone
            and call.context.left_before(error.rank, call.number)
        ):
            return left_without(error, call)
        return error

    def _ended(self, task: Started, collective: bool) -> None:
        context = task.call.context
        context.pending.discard(task)
        self._requests.discard(task)
        if collective and task.error is not None:
            task.error = self.named(task.error, task.call)
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
        start = self.transport.send if self._gives_up else self.transport.push
        return self.membership.refuse(peer) or start(peer, header, parts)

    def hold(self, context: Context, peer: int, header: bytes, parts: Parts) -> Operation:
        """Start sending what nobody copies before it is received, however short it is."""
        refusal = self.membership.refuse(peer)
        return refusal or self.transport.offer(peer, header, parts)

    def reach(self, peer: int, part: memoryview, elsewhere: Elsewhere) -> Reach | None:
        """Have what will be sent to `peer` taken from where it really is; see `Transport.reach`."""
        return self.transport.reach_to(peer, part, elsewhere)

    # --- waiting ---------------------------------------------------------------------------

    def _wait(
        self, operation: Operation, deadline: float, call: Call, gives_up: bool = True
    ) -> None:
        """Return when `operation` is done; the lock is held on entry and at the end.

        With `gives_up` it will be cancelled if this raises.
        """
        started = time.monotonic()
        report_at = started + self.waits.report_after_s
        reported = 0
        limit = deadline
        try:
            while not operation.done:
                self.interrupts.check()
                now = time.monotonic()
                if now >= limit and gives_up and operation.committed:
                    limit = deadline + CONFIRM_S
                if not reported and (now >= report_at or now >= limit):
                    reported = self.waits.begin(
                        call,
                        now - started,
                        deadline != math.inf,
                        lambda: options_of(operation, call),
                    )
                if now >= limit:
                    raise self.timeout(call)
                until = limit if reported else min(limit, report_at)
                self._drive(operation, until)
        finally:
            if reported and self.closed is None:
                self.waits.end(reported)

    # --- for waits outside: those of the compiled core ---------------------------------------

    def look(self, context: Context) -> None:
        """Take in what has come; raise why `context` is broken, if it is."""
        with self.locked():
            self._progress()
            self.check(context)

    def give_up(self, context: Context, error: BaseException) -> None:
        """Break a communicator whose call has failed, unless this rank has left the job."""
        if self.closed is None:
            with self.locked():
                self.break_context(context, error)
                context.unheard = False

    def running(self, wait: int) -> None:
        """Tell the launcher that a wait of which it was told is over."""
        if self.closed is None:
            with self.locked():
                self.waits.end(wait)

    def timeout(self, call: Call) -> OperationTimeout:
        """Return the error for a call that was not done in time; under the lock."""
        table = self.control.ask_table(1.0) if self.control is not None else []
        doing = "".join(f"\n    {line}" for line in table)
        others = f" What the ranks are doing:{doing}" if doing else ""
        if self.control is not None and not table:
            others = " pycoll-run, which knows what the others do, does not answer: is it stopped?"
        return OperationTimeout(
            f"rank {self.rank}: {call} at {caller()} was not done by its deadline.{others}"
        )

    def _num_started(self, ident: int) -> int:
        """Return how many collective calls on a communicator this rank has started."""
        context = self.contexts.get(ident)
        return context.num_started() if context is not None else self._closed_ids.get(ident, 0)

    def _is_quiet(self) -> bool:
        """Whether nothing is on its way here, or from here without a call of this rank's."""
        return not (
            self.transport.is_receiving
            or self.transport.is_behind
            or any(context.turns or context.borrowed for context in self.contexts.values())
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

    def tell(self, peer: int, note: bytes) -> None:
        """Send a note of a transport's to that of `peer`, by way of the launcher."""
        if self.control is not None:
            self.control.post("tell", rank=peer, note=note)

    def listen(self, timeout_s: float) -> Collection[int]:
        """Hand over the notes that come; returns the ranks that have ended or left."""
        if self.control is not None:
            poller = select.poll()  # of its own: another thread may be looking
            poller.register(self.control.fileno(), select.POLLIN)
            poller.poll(timeout_s * 1000)
            for event in self.control.progress():
                if event.kind == "told":
                    self._event(event.kind, event.fields)
                elif event.kind in ("failed", "left", "ended"):
                    self.membership.note(event.fields["rank"])
                    if event.kind == "left":
                        self._last_calls.hear(event.fields["rank"], event.fields["calls"])
        return self.membership.departed()

    # --- what the launcher tells -----------------------------------------------------------

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "broken":
            ident, error = fields["context"], _broken_error(fields)
            context = self.contexts.get(ident)
            if context is not None:
                self._note(error)
                if isinstance(error, MismatchError) and not (context.broken or context.pending):
                    context.unheard = True
                context.fail(error)
            elif ident not in self._closed_ids:  # this rank is still about to make it
                self._broken_early[ident] = error
        elif kind == "look":
            self.waits.answer(fields["round"], fields["contexts"])
        elif kind == "told":
            self.transport.hear(fields["rank"], fields["note"])
        elif kind == "lost":
            if self.has_helpers:
                reason = "its helper, by which the ranks have met, or this host's agent is gone"
                self._job_lost = PeerFailed(0, reason)
            else:
                self._job_lost = Error(
                    f"rank {self.rank}: the connection to pycoll-run is gone; the job cannot go on"
                )
            self._fail_all(self._job_lost)
        else:
            if kind == "left":
                self._last_calls.hear(fields["rank"], fields["calls"])
            self.membership.event(kind, fields)

    def call_launcher(self) -> Callable[[], bool]:
        """Ask the launcher for a sign of life; the result says whether one has come."""
        control = self.control
        assert control is not None
        before = control.num_received
        control.call()
        return lambda: control.num_received > before

    def peer_failed(self, rank: int, error: Error, reason: str) -> None:
        """A rank has failed: so do all communicators it is in."""
        self._drain()
        # First the contexts: their error says more than what the transport can say.
        for context in list(self.contexts.values()):
            if rank in context.members:
                context.fail(error)
        self.transport.forget(rank, reason)

    def peer_gone(self, error: PeerFailed) -> None:
        """A rank has ended in good order: what waits for it fails, and nothing else."""
        self._drain()
        self.transport.forget(error.rank, error.reason)
        for context in list(self.contexts.values()):
            context.peer_gone(error.rank, error)

    def _drain(self) -> None:
        """Take in all that is here: what a rank sent before it ended is still delivered."""
        while self.transport.progress():
            pass

    # --- the end ---------------------------------------------------------------------------

    def close(self, reason: str, timeout_s: float, keep_control: bool = False) -> Error | None:
        """Deliver what was accepted for sending, tell the others, and end. Idempotent.

        With `keep_control` the connection to the launcher stays open, for last words; also if this
        returns an error: how calls of other ranks differ from this one's.
        """
        if self.closed is not None:
            return None
        with self.locked():
            found = [self.look_back(context) for context in list(self.contexts.values())]
            self._finish_turns(time.monotonic() + timeout_s)
            self.closed = reason
            links = self.transport.links()
            self.transport.close(timeout_s)
            # Other threads may wait in them. Not before: senders would hear that what was never
            # received has been dropped, and go on as if it had been.
            for context in list(self.contexts.values())[::-1]:  # the world's last: it is told
                self._last_calls.close(context)
            self._fail_all(Error(reason))
            self.contexts.clear()
            if self.control is not None:
                self.control.post(
                    "left",
                    links=links,
                    calls=self._last_calls.told(),
                    error=self._first_error,
                )
                deadline = time.monotonic() + timeout_s
                # Who leaves later hears of who has left before.
                for event in self.control.settle(timeout_s):
                    if event.kind == "left":
                        self._last_calls.hear(event.fields["rank"], event.fields["calls"])
            error = next(filter(None, [*found, self._last_calls.different]), None)
            if self.control is not None and not keep_control and error is None:
                self.control.close(max(0.0, deadline - time.monotonic()))
            self._end_waiting()
        self._end_driving(timeout_s)
        return error

    def _finish_turns(self, deadline: float) -> None:
        """Let what is to be sent come from its GPU, and be handed over."""
        for context in list(self.contexts.values()):
            for turn in list(context.turns.values()):  # the last of each receiver
                if not turn.done and time.monotonic() < deadline:
                    self._drive(turn, deadline)

    def _fail_all(self, error: BaseException) -> None:
        for context in list(self.contexts.values()):
            context.fail(error)


def _told(error: BaseException) -> str:
    """Return the kind and the text of an error of the user's, whatever that text is."""
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:
        return type(error).__name__


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _broken_error(fields: dict[str, Any]) -> Error:
    if fields["error"] == "PeerFailed":
        return PeerFailed(fields["rank"], fields["reason"], fields["message"])
    kinds: dict[str, type[Error]] = {
        "MismatchError": MismatchError,
        "OperationTimeout": OperationTimeout,
    }
    return kinds.get(fields["error"], Error)(fields["message"])
