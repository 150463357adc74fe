"""Who is still there: what this rank knows of the others' ends, and what follows.

    failed  it died, raised, exited with another status than 0, or its link was cut. Every
            communicator it is in is broken.
    left    it has finished in good order: what it sent before is still delivered, and ranks that
            do not need it go on unharmed.
    gone    it has left or ended, and its last message is here: who waits for more fails.

The launcher knows how a process ended, so a lost link alone is no verdict, only the beginning of
a wait for one. A launcher that is stopped gives none: then ranks give up, and their links are lost,
too. Whoever blamed the owner of a lost link would blame them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycoll._transports.base import Operation
from pycoll.errors import Error, PeerFailed

if TYPE_CHECKING:
    from pycoll._runtime.communicators import Communicators

VERDICT_S = 3.0
"""Seconds that a lost link waits for the launcher to say what became of the peer."""

SETTLE_S = 1.0
"""Seconds after which a rank that has finished counts as gone, whatever it becomes later."""

FAREWELL_S = 3.0
"""Seconds to wait for the last message of a rank that has ended in good order: after SETTLE_S, and
in less than the 5 s within which everybody must know."""


class NoVerdict(Error):
    """The link to a rank is lost, and the launcher does not say what became of it."""


class Membership:
    """What one rank knows of the others.

    Args:
        me: this rank; ranks are world ranks here.
        listener: who acts on it, under its own lock.
        has_launcher: whether somebody else will say how a rank has ended.

    Attributes:
        failed: rank -> the error to raise.
        gone: rank -> the error to raise.
    """

    def __init__(self, me: int, listener: Communicators, has_launcher: bool) -> None:
        self._me = me
        self._listener = listener
        self._has_launcher = has_launcher
        self.failed: dict[int, Error] = {}
        self.gone: dict[int, PeerFailed] = {}
        self._left: dict[int, list[int]] = {}
        self._errors: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._heard_farewell: set[int] = set()
        self._awaits_farewell: set[int] = set()
        self._refused: dict[int, list[Operation]] = {}

    def note(self, rank: int) -> None:
        """Know that a rank has ended, however, when nothing follows from it any more."""
        self._left.setdefault(rank, [])

    def departed(self) -> set[int]:
        """Return the ranks that have failed, ended or left, as far as that is known."""
        return {*self.failed, *self.gone, *self._left, *self._ended}

    def refuse(self, peer: int) -> Operation | None:
        """Return an operation that fails, if nothing can be sent to `peer`; else None."""
        if peer not in self.gone and peer not in self._left:
            return None
        refused = Operation()
        if peer in self.gone:
            refused.finish(self.gone[peer])
        else:  # when it is known how it ended
            self._refused.setdefault(peer, []).append(refused)
        return refused

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Hear from the launcher: "failed", "left" or "ended"."""
        rank = fields["rank"]
        if kind == "failed":
            self._fail(rank, fields["reason"], fields["detail"])
        elif kind == "left":
            self._left[rank] = fields["links"]
            self._errors[rank] = fields["error"]
            self._listener.after(SETTLE_S, lambda: self._settle(rank))
        elif kind == "ended":
            self._ended[rank] = fields["reason"]
            if rank in self._left:
                self._settle(rank)
            else:
                self._listener.after(SETTLE_S, lambda: self._settle(rank))

    def farewell(self, peer: int) -> None:
        """Hear from a transport that everything `peer` ever sent has arrived."""
        self._heard_farewell.add(peer)
        if peer in self._ended or peer in self._awaits_farewell or not self._has_launcher:
            self._settle(peer)

    def link_lost(self, peer: int, reason: str) -> None:
        """Hear from a transport that the link to `peer` is gone."""
        if not self._has_launcher:
            self._judge(peer, reason, True)
        elif not self._is_known(peer):
            answered = self._listener.call_launcher()
            self._listener.after(VERDICT_S, lambda: self._judge(peer, reason, answered()))

    def _is_known(self, rank: int) -> bool:
        return rank in self.failed or rank in self.gone or rank in self._left

    def _judge(self, rank: int, reason: str, answered: bool) -> None:
        if self._is_known(rank):
            return
        if answered:
            self._listener.peer_cut(rank, reason)
            return self._fail(rank, reason, "")
        parted = "it left in good order" if rank in self._heard_farewell else reason
        self._lose(
            rank,
            NoVerdict(
                f"rank {self._me} has lost its link to rank {rank} ({parted}), and pycoll-run has "
                f"not answered for {VERDICT_S:g} s: it is stopped, or its host is overloaded. Only "
                "pycoll-run knows which rank failed first; continue it (fg, or kill -CONT) to hear"
            ),
            reason,
        )

    def _fail(self, rank: int, reason: str, detail: str) -> None:
        if rank in self.failed or rank == self._me:
            return
        message = f"rank {rank} failed: {reason}"
        if detail:
            message += "\n" + "\n".join(f"    {line}" for line in detail.rstrip().splitlines())
        self._lose(rank, PeerFailed(rank, reason, message), reason)

    def _lose(self, rank: int, error: Error, reason: str) -> None:
        self.failed[rank] = error
        self._listener.peer_failed(rank, error, reason)
        self._finish_refused(rank, error)

    def _settle(self, rank: int) -> None:
        """Count a rank that has ended in good order as gone, once its last message is here."""
        if rank in self.gone or rank in self.failed:
            return
        if self._me in self._left.get(rank, ()) and rank not in self._heard_farewell:
            if rank not in self._awaits_farewell:
                self._awaits_farewell.add(rank)
                self._listener.after(FAREWELL_S, lambda: self.farewell(rank))
            return
        reason = self._ended.get(rank, "called finalize")
        if self._errors.get(rank):
            reason += f", after its first error: {self._errors[rank]}"
        what = "has ended" if rank in self._ended else "has left the job"
        error = PeerFailed(rank, reason, f"rank {rank} is needed, but {what}: {reason}")
        self.gone[rank] = error
        self._listener.peer_gone(error)
        self._finish_refused(rank, error)

    def _finish_refused(self, rank: int, error: Error) -> None:
        for refused in self._refused.pop(rank, []):
            refused.finish(error)
