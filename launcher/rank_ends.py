"""What becomes of a job's ranks, what the others hear of it, and whether the job goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pycoll._launcher.hosts import Hosts
from pycoll._launcher.inspection import Inspection
from pycoll._launcher.job_spec import Options
from pycoll._launcher.outcome import CANNOT_START, Decision, RankState, end_text
from pycoll._launcher.output import Relay
from pycoll._launcher.rendezvous_server import Server
from pycoll._launcher.signal_plan import LostRanks, SignalPlan
from pycoll._launcher.wait_table import PREFIX


class RankEnds:
    """The part of a job (`spawn.Job`) that hears how ranks end.

    Args:
        options: how the job runs.

    Attributes:
        server: where the ranks meet.
    """

    server: Server
    _relay: Relay
    _hosts: Hosts
    _inspection: Inspection

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ranks = [RankState(rank) for rank in range(options.size)]
        self._started = time.monotonic()
        self._decision: Decision | None = None
        self._over_at: float | None = None  # when the job is left, all ranks having ended
        self._plan = SignalPlan(options.grace_s)
        self._lost = LostRanks(
            options.grace_s, lambda rank, signum: self._hosts.of(rank).signal_rank(rank, signum)
        )

    def tell(self, lines: Sequence[str]) -> None:
        """Show lines of the launcher's own."""
        self._relay.say("\n".join([f"{PREFIX}{lines[0]}", *lines[1:]]))

    def say(self, text: str) -> None:
        """Tell what happens to who wants to know."""
        if self._options.verbose:
            self._relay.say(f"{PREFIX}{text}")

    def _refuse(self, status: int, text: str) -> None:
        """End the job before it has begun."""
        now = time.monotonic()
        self._decide(now, status, text)
        self._over_at = now

    def _decide(self, now: float, status: int, text: str, table: Sequence[str] = ()) -> None:
        """End the job for a reason of our own; the first one counts."""
        if table:
            text = "\n    ".join([f"{text}; what each rank did:", *table])
        if self._decision is None:
            self._decision = Decision(now, status, text, tuple(table))

    def lost(self, rank: int) -> None:
        """Called when the process that joined as a rank has ended."""
        self._ranks[rank].lost_at = time.monotonic()

    def _lose(self, rank: RankState, now: float) -> None:
        """The process that joined has ended, and nothing more came of it.

        What was started here is not that process: it lives on, or has ended with status 0, as a
        shell does that hides how its programs end.
        """
        rank.lost_at = None
        if rank.left or rank.status:
            return
        rank.died = True
        self.server.rank_ended(rank.rank, f"process {rank.joined}, which had joined, died", False)
        self._failed(rank, now)

    def _end_lost(self, rank: RankState) -> None:
        """The others hear of a status of 0 when it is known that the process that joined left.

        That process has ended, and knows more than the one that was started here. Its last words
        are heard before this, or within `spawn.LINGER_S`; else it is lost, whatever the status.
        """
        has_spoken = rank.left or rank.raised is not None
        if rank.status == 0 and rank.lost_at is not None and has_spoken:
            rank.lost_at = None
            self.server.rank_ended(rank.rank, end_text(0), True)

    def _blame(self, needed: RankState, rank: RankState, now: float) -> None:
        """A rank raised PeerFailed: the one it needed failed if it ended without finalizing."""
        if needed.status == 0 and not needed.left and needed.failed_at is None:
            needed.needed_by = rank.rank
            self._failed(needed, now)

    def ended(self, rank: int, status: int) -> None:
        """Called when the process of a rank has ended."""
        state = self._ranks[rank]
        state.status = status
        text = end_text(status)
        self.say(f"rank {rank}: {text}")
        if status == 0 and state.lost_at is not None:
            self._end_lost(state)
            return
        self.server.rank_ended(rank, text, status == 0)
        if status != 0:
            self._failed(state, time.monotonic())

    def gone(
        self,
        ranks: Sequence[int],
        host: str,
        why: str,
        message: Sequence[str],
        is_ending: bool = False,
    ) -> None:
        """Called when a host is lost, with its ranks, or will be soon."""
        if not self._hosts.have_started:
            self._refuse(CANNOT_START, "\n    ".join([f"{host}: {why}", *message]))
            return
        now = time.monotonic()
        for state in [self._ranks[rank] for rank in ranks]:
            if state.status is not None:
                continue
            state.gone = f"lost with its host {host}: {why}"
            if not is_ending:
                state.status = 1
                self.server.rank_ended(state.rank, state.gone, False)
            elif not self._goes_on:
                self._plan.end(now)
            self._failed(state, now)

    def _failed(self, rank: RankState, now: float) -> None:
        """A rank failed: unless that is our own doing, the others have some seconds to end.

        Or they go on, and only that rank is to end, with what it has started.
        """
        if rank.failed_at is None and not rank.signalled:
            self._inspection.keep_calls(f"rank {rank.rank} had failed")
            rank.failed_at = now
            if not self._goes_on:
                return self._plan.fail(now)
            self._lost.add(rank, now, at_once=bool(rank.gone))
            what = f"rank {rank.rank} failed after {now - self._started:.1f} s"
            self.tell([f"{what}: {rank.describe_so_far()}; the others go on"])

    @property
    def _goes_on(self) -> bool:
        """Whether the job goes on when a rank fails."""
        return self._options.survive and self.server.has_met and not self._plan

    def _part(self, rank: RankState, other: RankState, reason: str, now: float) -> None:
        """End a rank that lives, but not for another one: all must see the same ranks."""
        if rank.status is None and rank.failed_at is None:
            rank.gone = f"its link to rank {other.rank} was cut: {reason}"
            self.server.fail(rank.rank, rank.gone)
            self._failed(rank, now)
