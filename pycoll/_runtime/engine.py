"""The engine of one rank: it makes calls, waits for them, and ends them.

It is in three layers: a `Driver` knows threads and waiting, `Communicators` what is open and what
is told, this one calls and their deadlines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll._rendezvous.client import Client as Control
from pycoll._runtime.agreement import Agreement
from pycoll._runtime.communicators import Communicators, raise_error
from pycoll._runtime.context import Context
from pycoll._runtime.task import Call, CallSteps, Started, Task, caller
from pycoll._runtime.waits import options_of
from pycoll._selection.agreed import Agreed
from pycoll._transports.base import Elsewhere, Operation, Parts, Reach
from pycoll._transports.core import CoreTransport
from pycoll.errors import Error, OperationTimeout, PeerFailed

if TYPE_CHECKING:
    from pycoll._transports._core import MappedHost

CONFIRM_S = 5.0
"""Seconds past its deadline that a send which cannot be taken back any more waits for the receiver
to confirm it. That takes a moment, unless the receiver was stopped or gave up half-way."""

_GOODBYE_S = 2.0
"""So long a rank that leaves has for the rest, though its sends have taken all of its time."""


class SharedMemory(NamedTuple):
    """The memory that this rank shares with the others on its host.

    Attributes:
        host: as this rank has mapped it.
        ranks: world ranks of this host, in the order of their local ranks.
        single_copy: whether ranks may try to read each other's memory.
    """

    host: MappedHost
    ranks: tuple[int, ...]
    single_copy: bool


def left_without(error: PeerFailed, call: Call) -> PeerFailed:
    """Return the error for a rank that has left in good order, and without making this call."""
    name = call.text.partition("(")[0]
    text = f"rank {error.rank} is needed, but has left without calling {name}(): {error.reason}"
    return PeerFailed(error.rank, error.reason, text)


class Engine(Communicators):
    """Everything one rank needs to communicate.

    Args:
        transport: the message engine of the core, as a transport; `start` was not called yet.
        size: number of ranks.
        control: the connection to the launcher, joined; None: a job without one.
        op_timeout: default deadline of an operation, seconds; math.inf: none.
        shared_memory: that of this host, or why there is none.

    Attributes:
        hosts: by world rank the number of its host.
        agreed: what the ranks have agreed on when they met.
        ipc_peers: whether a world rank can reach memory of a GPU, by its identity (`cuda_ipc`).
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
        self.op_timeout = op_timeout
        self.shared_memory = memory
        self.no_shared_memory = shared_memory if isinstance(shared_memory, str) else ""
        self.ipc_peers: dict[tuple[int, bytes], bool] = {}
        self.hosts: tuple[int, ...] = (0,) * size
        self.agreed = Agreed()

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
                self._end_hold(call if collective else None)

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
                task.start()
                if not task.done:
                    self._wait(task, deadline, call)
            except BaseException as exc:
                if collective:
                    self.break_for(call, exc)
                if task is not None:
                    task.abort(exc)
                raise
            finally:
                if task is not None:
                    context.pending.discard(task)
            if task.error is not None:
                error = self.named(task.error, call)
                if collective:
                    self.break_for(call, error)
                elif isinstance(error, PeerFailed):
                    self.note(error)
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
            self.break_for(task.call, task.error)

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

    def agree(self, call: Call, flag: bool, timeout: float) -> Agreement:
        """Agree with the living ranks of a communicator; `timeout` in seconds.

        Raises:
            OperationTimeout: that took longer.
            MismatchError: ranks have called different things.
            Error: pycoll-run is gone.
        """
        with self.locked():
            agreement = self.begin_agreement(call.context, call.text, flag)
        self.wait(agreement, call, timeout)
        if agreement.error is not None:
            raise_error(agreement.error)
        return agreement

    def _end_hold(self, collective: Call | None) -> None:
        """Raise an interrupt that came during a call, and break what was called collectively."""
        try:
            self.interrupts.release()
        except KeyboardInterrupt as exc:
            if collective is not None and self.closed is None:
                with self.locked():
                    self.break_for(collective, exc)
            raise

    def send(
        self, peer: int, header: bytes, parts: Parts, may_be_withdrawn: bool = False
    ) -> Operation:
        """Start sending to the world rank `peer`; what may be withdrawn is not sent ahead."""
        start = self.transport.send if may_be_withdrawn else self.transport.push
        return self.membership.refuse(peer) or start(peer, header, parts)

    def hold(self, peer: int, header: bytes, parts: Parts) -> Operation:
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

    # --- for waits outside: those in shared memory ------------------------------------------

    def look(self, context: Context) -> None:
        """Take in what has come; raise why `context` is broken, if it is."""
        with self.locked():
            self._progress()
            self.check(context)

    def give_up(self, call: Call, error: BaseException) -> None:
        """Break the communicator of a call that has failed, unless this rank has left the job."""
        if self.closed is None:
            with self.locked():
                self.break_for(call, error)
                call.context.unheard = False

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

    # --- the end ---------------------------------------------------------------------------

    def close(
        self, reason: str, timeout_s: float, keep_control: bool = False, has_raised: bool = False
    ) -> Error | None:
        """Deliver what was accepted for sending, tell the others, and end. Idempotent.

        With `keep_control` the connection to the launcher stays open, for last words; also if this
        returns an error: how calls of other ranks differ from this one's. If an exception ends this
        rank (`keep_control` or `has_raised`) it waits for nobody to receive its copies.
        """
        if self.closed is not None:
            return None
        found: list[Error | None] = []
        deadline = time.monotonic() + timeout_s
        try:
            with self.locked():
                self._finish_sends(deadline, with_copies=not (keep_control or has_raised))
                found += [self.look_back(context) for context in list(self.contexts.values())]
        finally:  # also when it is interrupted
            rest_s = max(_GOODBYE_S, deadline - time.monotonic())
            error = self._leave(reason, rest_s, found, keep_control)
        return error

    def _leave(
        self, reason: str, timeout_s: float, found: list[Error | None], keep_control: bool
    ) -> Error | None:
        with self.locked():
            self.closed = reason
            links = self.transport.links()
            self.transport.close(timeout_s)
            # Other threads may wait in them. Not before: senders would hear that what was never
            # received has been dropped, and go on as if it had been.
            for context in list(self.contexts.values())[::-1]:  # the world's last: it is told
                self.last_calls.close(context)
            self._fail_all(Error(reason))
            for context in self.contexts.values():
                if context.shm is not None:  # the others may go on for long without this rank
                    context.shm.close()
                    context.shm = None  # it refers to the context
            self.contexts.clear()
            self._dropped.clear()
            if self.control is not None:
                self.control.post(
                    "left",
                    links=links,
                    calls=self.last_calls.told(),
                    error=self._first_error,
                )
                deadline = time.monotonic() + timeout_s
                # Who leaves later hears of who has left before.
                for event in self.control.settle(timeout_s):
                    if event.kind == "left":
                        self.last_calls.hear(event.fields["rank"], event.fields["calls"])
            error = next(filter(None, [*found, self.last_calls.different]), None)
            if self.control is not None and not keep_control and error is None:
                self.control.close(max(0.0, deadline - time.monotonic()))
            self._end_waiting()
        self._end_driving(timeout_s)
        return error

    def _finish_sends(self, deadline: float, with_copies: bool) -> None:
        """Have what was sent come from its GPU, and be handed over; and copies be received."""
        while time.monotonic() < deadline:
            operation = next((turn for turn in self._turns() if not turn.done), None)
            if operation is None and with_copies:  # which begin with the end of their turn
                operation = next((copy for copy in self._copies() if not copy.done), None)
            if operation is None:
                return
            self._drive(operation, deadline)

    def _turns(self) -> list[Operation]:
        """The last turns of each receiver."""
        return [turn for each in self.contexts.values() for turn in each.turns.values()]

    def _copies(self) -> list[Started]:
        """What goes on though nobody waits for it."""
        return [task for task in self._requests if task not in task.call.context.pending]
