"""When the launcher calls it a deadlock: a real server, and clients that say what a test wants."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from pycoll._launcher import process
from pycoll._launcher import watch as watching
from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._launcher.rendezvous_server import Server
from pycoll._launcher.watch import Watch
from pycoll._rendezvous.client import Client

KEY = bytes(range(32))
DEADLINE_S = 30.0  # for what must happen
SIZE = 2

Answer = Callable[[int, int], dict[str, Any] | None]
"""Given a rank and how often it was asked before: what differs from a plain answer; or None."""


class Ranks:
    """Two ranks, each in a receive from the other, and their launcher."""

    def __init__(self) -> None:
        self.server = Server(SIZE, KEY)
        self.told: list[list[str]] = []
        self.are_certain: list[bool] = []  # of each table, whether the ranks wait for ever
        self.watch = Watch(
            self.server, SIZE, 0.02, self._tell, lambda rank, pid: process.doing(pid)
        )
        self.clients = []
        for rank in range(SIZE):
            descriptor = self.server.open_link()
            variable = link_variable(descriptor)
            self.clients.append(Client(self.server.endpoint, KEY, rank, SIZE, link=variable))
        with ThreadPoolExecutor(SIZE) as pool:
            joins = [pool.submit(client.join, {}, DEADLINE_S) for client in self.clients]
            while not all(join.done() for join in joins):
                self.server.progress()
        self.num_asked = [0] * SIZE

    def _tell(self, lines: list[str], is_certain: bool) -> None:
        self.told.append(lines)
        self.are_certain.append(is_certain)

    def wait(self, rank: int, serial: int = 1, **fields: Any) -> None:
        """Say that a rank waits for the other."""
        call = {"context": 1, "number": -1, "call": "recv()", "where": "a.py:1", "serial": serial}
        self.clients[rank].post("waiting", **{**call, **fields})

    def until_told(self, count: int, answer: Answer = lambda rank, asked: {}) -> list[str]:
        """Go on until so many tables were told; return the last."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.told) < count:
            assert time.monotonic() < deadline
            self.step(answer)
        return self.told[-1]

    def until_asked(self, count: int, answer: Answer) -> None:
        """Go on until the ranks were asked so many times more."""
        end, deadline = sum(self.num_asked) + SIZE * count, time.monotonic() + DEADLINE_S
        while sum(self.num_asked) < end:
            assert time.monotonic() < deadline
            self.step(answer)

    def step(self, answer: Answer = lambda rank, asked: {}, ahead_s: float = 0.0) -> float:
        """Let the launcher and then the ranks do what is to be done."""
        self.server.progress()
        wake = self.watch.update(time.monotonic() + ahead_s)
        for rank, client in enumerate(self.clients):
            for event in client.progress():
                assert event.kind == "look"
                changed = answer(rank, self.num_asked[rank])
                self.num_asked[rank] += 1
                if changed is not None:
                    plain = {
                        "round": event.fields["round"],
                        "serial": 1,
                        "call": (1, -1),
                        "options": [[(1, -1, [1 - rank])]],
                        "started": [],
                        "quiet": True,
                        "threads": 0,
                        "ends": False,
                    }
                    client.post("seen", **{**plain, **changed})
        return wake

    def close(self) -> None:
        for client in self.clients:
            client.close(0.0)
        self.server.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(watching, "_ANSWER_S", 0.2)
    ranks = Ranks()
    yield ranks
    ranks.close()


def both_wait(ranks: Ranks) -> None:
    for rank in range(SIZE):
        ranks.wait(rank)


def test_three_answers_that_agree_prove_a_deadlock(ranks: Ranks) -> None:
    both_wait(ranks)
    table = ranks.until_told(1)
    assert table[0] == "deadlock: rank 0 waits for 1, which waits for 0"
    assert ranks.num_asked == [3, 3]
    assert ranks.are_certain == [True]


def test_an_operation_is_told_once(ranks: Ranks) -> None:
    both_wait(ranks)
    ranks.until_told(1)
    assert ranks.step(ahead_s=1000.0) == float("inf")
    assert len(ranks.told) == 1
    ranks.clients[0].post("running")
    ranks.wait(0, serial=2, call="the next()")
    table = ranks.until_told(2, lambda rank, asked: {"serial": 2 - rank})
    assert any("the next()" in line for line in table)


@pytest.mark.parametrize("threads", [0, 1])
def test_who_closes_a_circle_in_an_operation_that_was_told_of_is_told_of(
    ranks: Ranks, threads: int
) -> None:
    ranks.wait(1, number=5)
    assert ranks.until_told(1)[0].startswith("waiting for rank 0")
    ranks.wait(0, number=5)
    table = ranks.until_told(2, lambda rank, asked: {"threads": threads})
    doubt = "perhaps a deadlock (ranks 0-1 have other threads)" if threads else "deadlock"
    assert table[0] == f"{doubt}: rank 0 waits for 1, which waits for 0"
    assert sum("recv() #5" in line for line in table) == 2, table
    ranks.step(ahead_s=1000.0)
    assert len(ranks.told) == 2


@pytest.mark.parametrize(
    ("before", "heading"),
    [
        ({"threads": 1}, "perhaps a deadlock (ranks 0-1 have other threads)"),
        ({"quiet": False}, "perhaps a deadlock (something may be on its way)"),
        ({"ends": True}, "deadlock until a deadline passes"),
        (None, "waiting for rank "),
    ],
    ids=["a thread has ended", "what came was not for it", "an alarm was called off", "it goes on"],
)
def test_what_was_told_of_is_told_again_when_it_has_become_a_deadlock(
    ranks: Ranks, before: dict[str, Any] | None, heading: str
) -> None:
    both_wait(ranks)
    assert ranks.until_told(1, lambda rank, asked: before)[0].startswith(heading)
    ranks.until_asked(4, lambda rank, asked: before)
    assert len(ranks.told) == 1  # it is as it was
    table = ranks.until_told(2)
    assert table[0] == "deadlock: rank 0 waits for 1, which waits for 0"
    assert ranks.are_certain == [False, True]
    assert ranks.step(ahead_s=1000.0) == float("inf")
    assert len(ranks.told) == 2


def test_who_comes_to_an_operation_that_was_told_of_closes_no_circle(ranks: Ranks) -> None:
    ranks.wait(1, number=5)
    ranks.until_told(1)
    ranks.wait(0, number=5)
    ranks.until_asked(4, lambda rank, asked: {} if rank else {"options": []})
    assert len(ranks.told) == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda rank, asked: {"serial": 1 + asked if rank else 1},  # it is in another wait each time
        lambda rank, asked: {"options": []} if rank else {},  # it is not known for whom it waits
        lambda rank, asked: None if rank and asked == 2 else {},  # it did not answer at last
        lambda rank, asked: None if rank else {},  # nor ever
    ],
)
def test_less_than_that_is_none(ranks: Ranks, answer: Answer) -> None:
    both_wait(ranks)
    assert "deadlock" not in ranks.until_told(1, answer)[0]
    assert ranks.are_certain == [False]


def test_a_rank_that_does_not_wait_is_not_asked_and_its_process_is_looked_at(ranks: Ranks) -> None:
    ranks.wait(0)
    table = ranks.until_told(1)
    assert table[0].startswith("waiting for rank 1, which is ")
    assert f"process {os.getpid()}" in table[3]
    assert ranks.num_asked == [1, 0]


def test_who_leaves_a_call_and_comes_to_it_again_is_looked_at_anew(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(watching, "time", clock)
    for name in ("_PAUSE_S", "_ANSWER_S"):
        monkeypatch.setattr(watching, name, 1000.0)  # of this clock
    ranks.watch = Watch(ranks.server, SIZE, 1000.0, ranks._tell, lambda rank, pid: "")
    waits, answer = ranks.server.calls.waits(), lambda rank, asked: None if asked else {}
    deadline = time.monotonic() + DEADLINE_S

    def step_until(done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline
            ranks.step(answer, ahead_s)

    for rank in range(SIZE):
        ranks.wait(rank, number=5)
        step_until(lambda: len(waits) > rank)  # noqa: B023 - called at once
    ahead_s = 1500.0  # both have waited long
    step_until(lambda: ranks.num_asked == [1, 1] and len(ranks.watch._answers) == 2)
    ranks.step(answer, ahead_s)  # the pause has begun
    ranks.clients[0].post("running")
    step_until(lambda: 0 not in waits)
    ahead_s = 3000.0  # the pause is over
    step_until(lambda: ranks.num_asked[1] == 2)  # the second look has begun, without rank 0
    ranks.wait(0, serial=2, number=5)
    step_until(lambda: 0 in waits)
    ahead_s = 4500.0  # nobody has answered: that look is over, and the next one begins
    step_until(lambda: ranks.num_asked == [2, 3])
    assert ranks.told == []
    ahead_s = 6000.0
    step_until(lambda: bool(ranks.told))


def test_what_has_ended_meanwhile_is_not_told(ranks: Ranks) -> None:
    both_wait(ranks)

    def answer(rank: int, asked: int) -> dict[str, Any]:
        if rank == 0 and asked == 1:
            ranks.clients[0].post("running")
        return {}

    deadline = time.monotonic() + DEADLINE_S
    while ranks.num_asked[0] < 2:
        assert time.monotonic() < deadline
        ranks.step(answer)
    ranks.clients[1].post("running")
    for _ in range(3):
        ranks.step()
    assert ranks.step(ahead_s=1000.0) == float("inf")
    assert ranks.told == []
