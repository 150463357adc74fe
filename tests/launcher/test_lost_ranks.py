"""When which signal ends a rank that is lost while its job goes on."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from pycoll._launcher.outcome import RankState
from pycoll._launcher.signal_plan import LostRanks


def test_a_rank_has_two_seconds_and_what_it_leaves_behind_is_killed() -> None:
    sent: list[tuple[int, int]] = []
    lost = LostRanks(2.0, lambda rank, signum: sent.append((rank, signum)))
    slow, quick = RankState(3), RankState(5)
    lost.add(slow, 100.0)
    lost.add(quick, 100.0, at_once=True)
    assert sorted(lost.update(100.0)) == [102.0, 102.0, 104.0]
    assert sent == [(5, SIGTERM)]
    quick.status = -SIGTERM
    assert lost.update(102.0) == [104.0]
    assert sent[1:] == [(3, SIGTERM), (5, SIGKILL)]
    slow.status = 1
    assert lost.update(104.0) == []
    assert sent[3:] == [(3, SIGKILL)]
    assert slow.signalled
    assert quick.signalled


def test_a_rank_that_nothing_ends_is_not_waited_for() -> None:
    sent: list[int] = []
    lost, rank, now = LostRanks(2.0, lambda rank, signum: sent.append(signum)), RankState(0), 100.0
    lost.add(rank, now)
    while times := lost.update(now):
        assert rank.status is None
        now = min(times)
    assert sent == [SIGTERM] + [SIGKILL] * 10
    assert rank.status == -SIGKILL
