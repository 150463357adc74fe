"""Ranks that have met: what they exchange, and what they are told of each other."""

from __future__ import annotations

from typing import Any

import pytest
from rendezvous_world import DEADLINE_S, Job, events, is_readable, settled

from pycoll._launcher.rendezvous_server import Notice
from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.client import Client, Event
from pycoll.errors import BootstrapError


def exchange_all(job: Job, clients: list[Client], info: dict[str, Any]) -> list[Any]:
    futures = [
        job.start(client.exchange, {**info, "rank": rank}, DEADLINE_S)
        for rank, client in enumerate(clients)
    ]
    return [future.result(DEADLINE_S) for future in futures]


def test_ranks_that_have_met_exchange_infos_round_by_round(job: Job) -> None:
    _, clients = job.meet(3)
    for number in range(3):
        expected = [{"round": number, "rank": rank} for rank in range(3)]
        assert exchange_all(job, clients, {"round": number}) == [expected] * 3


def test_who_is_missing_from_an_exchange_is_named_and_may_still_come(job: Job) -> None:
    launcher, clients = job.meet(3)
    message = r"rank 1 waited 0\.\d s .*ranks 0, 2 of 3 have not exchanged addresses"
    with pytest.raises(BootstrapError, match=message):
        clients[1].exchange({}, 0.3)

    def given() -> bytes | None:
        return launcher.server._given.get(1)

    first = launcher.call(given)  # it counts, until there is another
    again = job.start(clients[1].exchange, {"again": True, "rank": 1}, DEADLINE_S)
    while launcher.call(given) == first:
        pass
    others = [job.start(clients[rank].exchange, {}, DEADLINE_S) for rank in (0, 2)]
    for future in (again, *others):
        assert future.result(DEADLINE_S) == [{}, {"again": True, "rank": 1}, {}]
    assert exchange_all(job, clients, {"third": True})[2][1] == {"third": True, "rank": 1}


def test_an_exchange_that_completed_after_one_had_given_up_counts_for_its_next_try(
    job: Job,
) -> None:
    _, clients = job.meet(2)
    for limit_s in 0.2, 2, 20:  # by then the launcher must have answered
        with pytest.raises(BootstrapError) as raised:
            clients[0].exchange({"rank": 0}, limit_s)
        if "does not answer" not in str(raised.value):
            break
    assert "rank 1 of 2 has not exchanged addresses" in str(raised.value)
    both = [{"rank": 0}, {"rank": 1}]
    assert clients[1].exchange({"rank": 1}, DEADLINE_S) == both
    assert clients[0].exchange({"too": "late"}, DEADLINE_S) == both
    assert exchange_all(job, clients, {"next": 1})[0] == [
        {"next": 1, "rank": 0},
        {"next": 1, "rank": 1},
    ]


@pytest.mark.parametrize("kind", ["ended", "failed", "left"])
def test_an_exchange_fails_when_a_rank_goes_and_the_event_is_kept(job: Job, kind: str) -> None:
    launcher, clients = job.meet(3)
    waiting = job.start(clients[0].exchange, {}, DEADLINE_S)
    while launcher.call(lambda: launcher.server._given.get(0)) is None:
        pass
    if kind == "left":
        clients[2].post("left", links=[])
        expected = "rank 2 has left the job"
    else:
        launcher.rank_ended(2, "exit status 7", kind == "ended")
        expected = "rank 2 (has ended|failed): exit status 7"
    with pytest.raises(BootstrapError, match=f"rank 0 cannot exchange addresses: {expected}"):
        waiting.result(DEADLINE_S)
    assert is_readable(clients[0].fileno(), 0)
    assert [event.kind for event in clients[0].progress()] == [kind]
    with pytest.raises(BootstrapError, match=f"rank 1 cannot exchange addresses: {expected}"):
        clients[1].exchange({}, DEADLINE_S)


def test_an_exchange_fails_when_the_launcher_goes(job: Job) -> None:
    launcher, clients = job.meet(2)
    waiting = job.start(clients[0].exchange, {}, DEADLINE_S)
    while launcher.call(lambda: launcher.server._given.get(0)) is None:
        pass
    launcher.close()
    with pytest.raises(BootstrapError, match="was lost before all ranks had exchanged addresses"):
        waiting.result(DEADLINE_S)
    assert [event.kind for event in clients[0].progress()] == ["lost"]


def test_an_exchange_comes_after_joining_and_before_closing(job: Job) -> None:
    client = job.client(job.launcher(1).endpoint, 0, 1)
    with pytest.raises(RuntimeError, match="has joined"):
        client.exchange({}, DEADLINE_S)
    client.join({}, DEADLINE_S)
    assert client.exchange({"a": 1}, DEADLINE_S) == [{"a": 1}]
    client.close(DEADLINE_S)
    with pytest.raises(RuntimeError, match="has joined"):
        client.exchange({}, DEADLINE_S)


def test_a_rank_that_raised_is_told_to_the_others_and_the_launcher(job: Job) -> None:
    launcher, clients = job.meet(3)
    clients[1].post("raised", error="ValueError", text="Traceback...", peer_failed=False)
    failed = Event("failed", {"rank": 1, "reason": "raised ValueError", "detail": "Traceback..."})
    assert events(clients[0]) == events(clients[2]) == [failed]
    assert settled(clients[1]) == []
    notice = launcher.notice("raised")
    assert notice.rank == 1
    assert (notice.fields["error"], notice.fields["text"]) == ("ValueError", "Traceback...")
    assert not notice.fields["peer_failed"]


def test_a_rank_that_raised_peer_failed_is_told_to_the_launcher_alone(job: Job) -> None:
    launcher, clients = job.meet(2)
    clients[1].post("raised", error="PeerFailed", text="...", peer_failed=True)
    assert launcher.notice("raised").fields["peer_failed"] is True
    assert settled(clients[0]) == []
    launcher.rank_ended(1, "exit status 1", False)
    failed = {"rank": 1, "reason": "exit status 1", "detail": ""}
    assert events(clients[0]) == [Event("failed", failed)]


def test_abort_is_a_failure_with_its_code(job: Job) -> None:
    launcher, clients = job.meet(2)
    clients[0].post("abort", code=7)
    failed = {"rank": 0, "reason": "called abort(7)", "detail": ""}
    assert events(clients[1]) == [Event("failed", failed)]
    assert launcher.notice("abort") == Notice("abort", 0, {"code": 7})


def test_a_rank_that_left_is_told_with_its_links_its_last_calls_and_its_error(job: Job) -> None:
    launcher, clients = job.meet(3)
    calls = [[1, 3, 2, "barrier()\0x.py:1"], [1 << 61, 1, -1, ""]]
    clients[2].post("left", links={1, 0}, calls=calls, error="Error: first")
    fields = {"links": [0, 1], "calls": calls, "error": "Error: first"}
    left = Event("left", {"rank": 2, **fields})
    assert events(clients[0]) == events(clients[1]) == [left]
    assert launcher.notice("left") == Notice("left", 2, fields)


def test_who_leaves_later_has_heard_of_who_has_left_before(job: Job) -> None:
    _, clients = job.meet(2)
    clients[0].post("left", links=[])
    assert clients[0].settle(5.0) == []
    clients[1].post("left", links=[])
    assert [event.fields["rank"] for event in clients[1].settle(5.0)] == [0]
    assert clients[1].settle(5.0) == []  # nothing was posted since


@pytest.mark.parametrize("clean", [True, False])
def test_a_rank_that_ended_is_told_once(job: Job, clean: bool) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(0, "exit status X", clean)
    launcher.rank_ended(0, "again", not clean)
    ended = Event("ended", {"rank": 0, "reason": "exit status X"})
    failed = Event("failed", {"rank": 0, "reason": "exit status X", "detail": ""})
    assert settled(clients[1]) == [ended if clean else failed]


def test_a_note_reaches_one_rank_in_the_order_of_sending(job: Job) -> None:
    _, clients = job.meet(3)
    notes = [bytes([number]) * number for number in range(5)]
    for note in notes:
        clients[0].post("tell", rank=2, note=note)
    told = [Event("told", {"rank": 0, "note": note}) for note in notes]
    assert events(clients[2], len(notes)) == told
    assert settled(clients[1]) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 3, "note": b""},
        {"rank": -1, "note": b""},
        {"rank": 0, "note": b"x" * 1025},
        {"rank": 0, "note": "text"},
    ],
    ids=["no such rank", "a negative rank", "too long", "no bytes"],
)
def test_a_note_that_makes_no_sense_is_refused(job: Job, fields: dict[str, Any]) -> None:
    _, clients = job.meet(3)
    with pytest.raises(ValueError, match="'tell'"):
        clients[1].post("tell", **fields)


def test_a_note_to_a_rank_that_has_ended_is_dropped(job: Job) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(1, "exit status 0", True)
    clients[0].post("tell", rank=1, note=b"too late")
    assert [event.kind for event in settled(clients[0])] == ["ended"]


def test_a_rank_that_raised_and_then_ended_has_failed_once(job: Job) -> None:
    launcher, clients = job.meet(2)
    clients[0].post("raised", error="KeyError", text="", peer_failed=False)
    launcher.notice("raised")
    launcher.rank_ended(0, "exit status 1", False)
    assert [event.fields["reason"] for event in settled(clients[1])] == ["raised KeyError"]


def test_the_end_of_the_launcher_is_an_event_after_all_others_and_comes_once(job: Job) -> None:
    launcher = job.launcher(2)
    clients = [job.client(launcher.endpoint, rank, 2) for rank in range(2)]
    for future in [job.start(client.join, {}, DEADLINE_S) for client in clients]:
        future.result()
    launcher.rank_ended(1, "exit status 0", True)
    launcher.close()
    assert [event.kind for event in events(clients[0], 2)] == ["ended", "lost"]
    assert not is_readable(clients[0].fileno(), 0)
    clients[0].post("running")
    assert clients[0].ask_table(DEADLINE_S) == []
    assert clients[0].progress() == []
    clients[0].close(DEADLINE_S)


def test_text_that_is_no_unicode_or_too_long_arrives_all_the_same(job: Job) -> None:
    launcher, clients = job.meet(2)
    text = "begin \udcff " + "x" * (wire.MAX_FRAME_NBYTES + 1) + " end"
    clients[0].post("raised", error="E", text=text, peer_failed=False)
    clients[0].close(DEADLINE_S)
    (event,) = events(clients[1])
    assert event.fields["detail"].startswith("begin \\udcff xxx")
    assert event.fields["detail"].endswith("xxx end")
    assert "characters left out" in launcher.notice("raised").fields["text"]
