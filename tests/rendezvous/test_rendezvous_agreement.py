"""What living ranks agree on, by a real server and real clients."""

from __future__ import annotations

from typing import Any

import pytest
from rendezvous_world import Job, events, settled

from pycoll._launcher.rendezvous_server import Notice
from pycoll._rendezvous.client import Client, Event


def agree(client: Client, call: str = "agree()", flag: bool = True, number: int = 0) -> None:
    where = {"context": 1, "number": number, "name": "world", "where": "train.py:3"}
    client.post("agree", call=call, flag=flag, members=[0, 1, 2], **where)


def agreed(flag: bool, ranks: list[int], number: int = 0, different: str = "") -> Event:
    fields = {"context": 1, "number": number, "flag": flag, "ranks": ranks}
    return Event("agreed", {**fields, "different": different})


def test_all_hear_whether_every_flag_is_true_when_the_last_has_come(job: Job) -> None:
    _, clients = job.meet(3)
    for number, flags in enumerate([(True, True, True), (True, False, True)]):
        for client, flag in zip(clients, flags, strict=True):
            agree(client, flag=flag, number=number)
        wanted = [agreed(all(flags), [0, 1, 2], number)]
        assert [events(client) for client in clients] == [wanted] * 3


FAILED = Event("failed", {"rank": 1, "reason": "killed", "detail": ""})


@pytest.mark.parametrize("has_given", [False, True])
def test_who_failed_does_not_count_and_that_is_heard_before(job: Job, has_given: bool) -> None:
    launcher, clients = job.meet(3)
    if has_given:
        agree(clients[1], "shrink()", flag=False)
        settled(clients[1])  # it has been heard
    agree(clients[0], "shrink()")
    settled(clients[0])
    launcher.rank_ended(1, "killed", False)
    agree(clients[2], "shrink()")
    assert launcher.notice("shrunk") == Notice("shrunk", 0, {"left_out": [1]})
    for client in (clients[0], clients[2]):
        assert settled(client) == [FAILED, agreed(True, [0, 2])]


def test_an_end_decides_what_waits_for_it_and_is_heard_before(job: Job) -> None:
    launcher, clients = job.meet(3)
    for client in (clients[0], clients[2]):
        agree(client, flag=client is clients[0])
        assert settled(client) == []
    launcher.rank_ended(1, "killed", False)
    for client in (clients[0], clients[2]):
        assert settled(client) == [FAILED, agreed(False, [0, 2])]


def test_who_has_left_is_left_out(job: Job) -> None:
    launcher, clients = job.meet(3)
    clients[0].post("left", links=[])
    for client in clients[1:]:
        agree(client, "shrink()")
    for client in clients[1:]:
        assert events(client, 2)[1:] == [agreed(True, [1, 2])]
    assert launcher.notice("shrunk") == Notice("shrunk", 1, {"left_out": [0]})
    launcher.rank_ended(2, "killed", False)
    agree(clients[1], "shrink()", number=1)
    assert launcher.notice("shrunk") == Notice("shrunk", 1, {"left_out": [0, 2]})


def test_who_has_failed_is_not_heard(job: Job) -> None:
    _, clients = job.meet(3)
    clients[0].post("raised", error="ValueError", text="no", peer_failed=False)
    agree(clients[0], flag=False)
    settled(clients[0])
    for client in clients[1:]:
        agree(client)
    for client in clients[1:]:
        assert events(client, 2)[1:] == [agreed(True, [1, 2])]


def test_different_calls_are_shown_to_all(job: Job) -> None:
    _, clients = job.meet(3)
    for client, call in zip(clients, ("shrink()", "shrink()", "agree()"), strict=True):
        agree(client, call)
    [event], *others = [events(client) for client in clients]
    different: Any = event.fields["different"]
    assert others == [[event]] * 2
    assert "    rank 0: shrink() at train.py:3\n    rank 2: agree() at train.py:3\n" in different
