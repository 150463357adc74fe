"""The communicators of one rank: what becomes of them, and what is told of other ranks.

Transports hand over what has come, and the launcher tells who has failed, left or broken a
communicator. Everything runs under the lock of the `Driver` that this is.
"""

from __future__ import annotations

import copy
import select
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

from pycoll._rendezvous.client import Client as Control
from pycoll._runtime.agreement import Agreement
from pycoll._runtime.context import Context
from pycoll._runtime.driver import Driver
from pycoll._runtime.last_calls import LastCalls
from pycoll._runtime.membership import Membership
from pycoll._runtime.task import Call, caller
from pycoll._runtime.waits import Waits
from pycoll._support.weak import weakly
from pycoll._transports.base import Arrival
from pycoll._transports.core import CoreTransport
from pycoll.errors import Error, MismatchError, OperationTimeout, PeerFailed, Revoked

CLOSED_IDS = 4096
"""Closed communicators that are remembered, so that late messages for them are dropped."""


class _Users(weakref.ref[object]):
    """Who can use a communicator; when that is freed, the core is told (`drop`).

    Attributes:
        ident: of the communicator.
    """

    __slots__ = ("ident",)

    ident: int


def raise_error(error: BaseException) -> None:
    """Raise `error`, one of ours as a fresh copy, so that tracebacks do not pile up in it."""
    raise (copy.copy(error) if isinstance(error, Error) else error)


def raise_requests_error(context: Context, error: BaseException) -> None:
    """Raise why a request has failed: so this rank hears why its communicator is broken."""
    if isinstance(error, MismatchError) and str(error) == str(context.broken):
        context.unheard = False
    raise_error(error)


class Communicators(Driver):
    """The communicators that are open on this rank, and who of the others is still there.

    Args:
        transport: the core's engine; `start` was not called yet.
        control: the connection to the launcher, joined; None: a job without one.

    Attributes:
        rank: world rank of this process.
        contexts: the open communicators, by number.
        last_calls: what ranks have called last on them, and on those that are closed.
        membership: who has failed or left.
        waits: what the launcher is told of long waits.
    """

    def __init__(self, transport: CoreTransport, control: Control | None) -> None:
        super().__init__(transport, control)
        self.rank = transport.rank
        self.contexts: dict[int, Context] = {}
        core, me = transport.core, weakref.proxy(self)
        self.membership = Membership(self.rank, me, has_launcher=control is not None)
        num_started, is_quiet = weakly(self._num_started), weakly(self._is_quiet)
        self.waits = Waits(control, num_started, is_quiet, lambda: core.thread)
        self.last_calls = LastCalls(self.rank, self.contexts)
        self._first_error = ""
        self._unclaimed: dict[int, dict[Arrival, None]] = {}
        self._broken_early: dict[int, Error] = {}
        self._agreements: dict[tuple[int, int], Agreement] = {}  # by communicator and number
        self._closed_ids: dict[int, int] = {}  # and how many collective calls were made there
        self._job_lost: Error | None = None  # pycoll-run is gone
        # Of what was closed: bytes that cannot be given back, where it was made, who has failed.
        self._kept: list[tuple[int, tuple[str, int], int]] = []
        # no pycoll-run: ranks have started the meeting process and the agents
        self.under_another_launcher = False

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
        self.last_calls.close(context)
        self._closed_ids.setdefault(context.ident, context.num_calls)
        if len(self._closed_ids) > CLOSED_IDS:
            del self._closed_ids[next(iter(self._closed_ids))]
        context.close()
        if context.shm is not None:
            failed = [rank for rank in context.members if rank in self.membership.failed]
            nbytes = context.shm.taken_nbytes if failed else 0
            if nbytes:
                self._kept.append((nbytes, context.made_at, failed[0]))
            context.shm.close()
            context.shm = None  # it refers to the context
        self.contexts.pop(context.ident, None)  # last: an interrupted close is done again

    def close_when_dropped(self, context: Context, users: object) -> None:
        """Close a communicator once `users` is freed: then nobody can use it any more.

        That happens at any moment and in any thread, perhaps in the middle of this engine. So the
        core only puts it on a list, and whoever makes progress next closes it.
        """
        context.users = seen = _Users(users, self._core.drop)
        seen.ident = context.ident

    def _close_dropped(self) -> None:
        count = len(self._dropped)
        for users in self._dropped[:count]:
            context = self.contexts.get(users.ident)
            if context is not None:  # else it was closed, or a signal has interrupted this
                error = self._compare(context)
                self.last_calls.note(error if isinstance(error, MismatchError) else None)
                self.close_context(context)
                self.last_calls.drop(context)
        del self._dropped[:count]

    def warn_of_kept_memory(self) -> None:
        """Tell, once, what could not be given back; without the lock, when this is closed."""
        kept, self._kept = self._kept, []
        if kept:
            nbytes, (path, line), failed = sum(each[0] for each in kept), kept[0][1], kept[0][2]
            warnings.warn_explicit(
                f"rank {self.rank}: {len(kept)} communicators that are closed or were dropped keep "
                f"{nbytes} bytes of shared memory until the job ends, because a member has failed "
                f"and cannot give them up (the first was made here, and has rank {failed})",
                ResourceWarning,
                path,
                line,
            )

    def break_for(self, call: Call, error: BaseException) -> None:
        """Make the communicator of a call that ends with `error` unusable on all its ranks."""
        if call.context.broken is not None:
            return
        self.note(error)
        shown = error
        if not isinstance(error, MismatchError | OperationTimeout | PeerFailed):
            shown = PeerFailed(self.rank, f"gave up {call.short} ({_told(error)})")
        self.break_context(call.context, shown)

    def break_context(self, context: Context, error: BaseException) -> None:
        """Make a communicator unusable on all its ranks; those where it is broken know why."""
        try:
            if self.control is not None:
                failure = error if isinstance(error, PeerFailed) else None
                self.control.post(
                    "broken",
                    context=context.ident,
                    error=type(error).__name__,
                    rank=failure.rank if failure else self.rank,
                    reason=failure.reason if failure else "",
                    message=str(error),
                    members=list(context.members),
                )
        finally:
            context.fail(error)

    def begin_agreement(self, context: Context, call: str, flag: bool) -> Agreement:
        """Begin to agree with the living ranks of a communicator, broken or not; with the lock."""
        if self._job_lost is not None:
            raise_error(self._job_lost)
        number, context.num_agreements = context.num_agreements, context.num_agreements + 1
        agreement = Agreement(number, [rank for rank in context.members if rank != self.rank])
        if self.control is None:
            agreement.decide(flag, context.members)
            return agreement
        self._agreements[context.ident, number] = agreement
        self.control.post(
            "agree",
            context=context.ident,
            number=number,
            name=context.name,
            call=call,
            where=caller(),
            members=list(context.members),
            flag=flag,
        )
        return agreement

    def revoke(self, context: Context) -> None:
        """Make a communicator unusable on all its ranks; with the lock."""
        self.break_context(context, Revoked(self.rank, _revoked(self.rank, context.name)))

    def _found_different(self, context: Context, error: MismatchError) -> None:
        unheard = not self._is_waited_in(context)
        if context.broken is None:
            self.note(error)
            self.break_context(context, error)
        context.unheard = unheard

    def _is_waited_in(self, context: Context) -> bool:
        """Whether a thread is in a call there, and hears why it ends; of a request nobody may."""
        return not context.pending <= self._requests

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
        return self._compare(context)

    def _compare(self, context: Context) -> Error | None:
        if context.broken is None and context.shm is not None:
            error = context.shm.differing()
            if error is not None:  # ranks that are still in the call hear of it, too
                self._found_different(context, error)
        unheard, context.unheard = context.unheard, False
        return context.broken if unheard and isinstance(context.broken, Error) else None

    def note(self, error: BaseException) -> None:
        """Remember the first error: who needs this rank when it has left shall know."""
        self._first_error = self._first_error or _in_a_line(_told(error))

    def _num_started(self, ident: int) -> int:
        """Return how many collective calls on a communicator this rank has started."""
        context = self.contexts.get(ident)
        return context.num_calls if context is not None else self._closed_ids.get(ident, 0)

    def _is_quiet(self) -> bool:
        """Whether nothing is on its way here, or from here without a call of this rank's."""
        return not (
            self.transport.is_receiving
            or self.transport.is_behind
            or any(context.turns or context.being_read for context in self.contexts.values())
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
                        self.last_calls.hear(event.fields["rank"], event.fields["calls"])
        return self.membership.departed()

    # --- what the launcher tells -----------------------------------------------------------

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "broken":
            ident, error = fields["context"], _broken_error(fields)
            context = self.contexts.get(ident)
            if context is not None:
                self.note(error)
                if isinstance(error, MismatchError) and context.broken is None:
                    context.unheard = not self._is_waited_in(context)
                context.fail(error)
            elif ident in self._closed_ids:
                self.last_calls.hear_broken(ident, error)
            else:  # this rank is still about to make it
                self._broken_early[ident] = error
        elif kind == "agreed":
            agreement = self._agreements.pop((fields["context"], fields["number"]), None)
            if agreement is not None:
                agreement.hear(fields)
        elif kind == "look":
            self.waits.answer(fields["round"], fields["contexts"])
        elif kind == "returned":
            self.last_calls.hear(fields["rank"], fields["calls"])
        elif kind == "told":
            self.transport.hear(fields["rank"], fields["note"])
        elif kind == "lost":
            if self.under_another_launcher:
                reason = "its meeting process, or pycoll's launcher on this host, is gone"
                self._job_lost = PeerFailed(0, reason)
            else:
                self._job_lost = Error(
                    f"rank {self.rank}: the connection to pycoll-run is gone; the job cannot go on"
                )
            self._fail_all(self._job_lost)
        else:
            if kind == "left":
                self.last_calls.hear(fields["rank"], fields["calls"])
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

    def peer_cut(self, rank: int, reason: str) -> None:
        """A link is lost, and its peer has not ended: the launcher may end one of the two."""
        if self.control is not None:
            self.control.post("cut", rank=rank, reason=reason)

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

    def _fail_all(self, error: BaseException) -> None:
        for context in list(self.contexts.values()):
            context.fail(error)
        while self._agreements:
            self._agreements.popitem()[1].finish(error)


def _told(error: BaseException) -> str:
    """Return the kind and the text of an error of the user's, whatever that text is."""
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:
        return type(error).__name__


def _revoked(rank: int, name: str) -> str:
    return f"rank {rank} has revoked {name}: no rank can use it any more"


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


def _broken_error(fields: dict[str, Any]) -> Error:
    if fields["error"] == "PeerFailed":
        return PeerFailed(fields["rank"], fields["reason"], fields["message"])
    if fields["error"] == "Revoked":
        return Revoked(fields["rank"], fields["message"])
    kinds: dict[str, type[Error]] = {
        "MismatchError": MismatchError,
        "OperationTimeout": OperationTimeout,
    }
    return kinds.get(fields["error"], Error)(fields["message"])
