"""What ranks wait in, told to the launcher: the table, mismatches, and the end of a connection."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from rendezvous_world import (
    DEADLINE_S,
    KEY,
    Job,
    broken,
    by_zmq,
    events,
    is_readable,
    pythonpath,
    settled,
)

from pycoll._launcher.rendezvous_carriers import Relayed
from pycoll._launcher.rendezvous_server import Server
from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.client import Client, Event
from pycoll.errors import BootstrapError


def test_the_members_of_a_broken_communicator_are_told_and_nobody_else(job: Job) -> None:
    _, clients = job.meet(3)
    fields = broken(b"seven")
    clients[0].post("broken", **fields)
    members = fields.pop("members")
    assert members == [0, 2]
    assert events(clients[0]) == events(clients[2]) == [Event("broken", fields)]
    assert settled(clients[1]) == []


def test_the_first_cause_that_breaks_a_communicator_is_the_one_that_counts(job: Job) -> None:
    _, clients = job.meet(3)
    clients[0].post("broken", **broken(7))
    events(clients[2])
    clients[2].post("broken", **broken(7, "OperationTimeout", rank=2))
    clients[2].post("broken", **broken(8, "OperationTimeout", rank=2))
    assert [e.fields["context"] for e in events(clients[0], 2)] == [7, 8]
    assert settled(clients[0]) == []


def wait_in(client: Client, call: str, where: str = "", **fields: Any) -> None:
    told = {"context": 7, "number": 5, "members": [0, 1], **fields}
    client.post("waiting", call=call, where=where, **told)


def test_two_calls_with_one_number_break_the_communicator_side_by_side(job: Job) -> None:
    _, clients = job.meet(3)
    wait_in(clients[1], "barrier()", "b.py:2")
    assert settled(clients[1]) == []
    wait_in(clients[0], "all_reduce(float32[4], op=sum)", "a.py:1")
    both = [events(clients[0]), events(clients[1])]
    assert both[0] == both[1]
    (event,) = both[0]
    assert event.kind == "broken"
    assert event.fields == {
        "context": 7,
        "error": "MismatchError",
        "rank": 0,
        "reason": "made another call than rank 1",
        "message": "ranks made different calls as collective number 5 of world:\n"
        "    rank 0: all_reduce(float32[4], op=sum) at a.py:1\n"
        "    rank 1: barrier() at b.py:2\n"
        "Make the same calls in the same order on all ranks.",
    }
    assert settled(clients[2]) == []


@pytest.mark.parametrize(
    "other",
    [
        {"call": "barrier", "where": "elsewhere.py:9"},
        {"call": "broadcast", "number": 6},
        {"call": "broadcast", "context": 8},
    ],
)
def test_the_same_call_another_number_or_another_communicator_is_no_mismatch(
    job: Job, other: dict[str, Any]
) -> None:
    _, clients = job.meet(2)
    wait_in(clients[0], "barrier")
    assert settled(clients[0]) == []
    wait_in(clients[1], **other)
    assert settled(clients[1]) == settled(clients[0]) == []


def test_point_to_point_calls_are_not_compared(job: Job) -> None:
    _, clients = job.meet(2)
    for client, call in zip(clients, ("recv from 1", "recv from 0"), strict=True):
        client.post("waiting", context=7, number=-1, call=call, where="")
        assert settled(client) == []


def test_a_rank_that_runs_again_is_not_compared(job: Job) -> None:
    _, clients = job.meet(2)
    wait_in(clients[0], "barrier")
    clients[0].post("running")
    assert settled(clients[0]) == []
    wait_in(clients[1], "broadcast")
    assert settled(clients[1]) == []


@by_zmq
def test_a_post_that_is_none_is_an_error_in_the_rank(job: Job) -> None:
    client = job.client("tcp://127.0.0.1:1", 0, 2)
    with pytest.raises(ValueError, match="there is no post 'sleeping'"):
        client.post("sleeping")
    with pytest.raises(ValueError, match="post 'abort' has the fields code"):
        client.post("abort")
    with pytest.raises(ValueError, match="field 'links' of post 'left'"):
        client.post("left", links=[2])


def test_the_table_says_what_each_rank_does(job: Job) -> None:
    launcher = job.launcher(2)
    job.joining(launcher, 0, 2, 1.0)
    table = launcher.call(launcher.server.table)
    assert re.fullmatch(r"rank 0: in init\(\), waiting .*, for 0\.\d s", table[0])
    assert table[1] == "rank 1: has not joined"

    launcher, clients = job.meet(6)
    wait_in(clients[1], "recv from 0", number=-1)
    wait_in(clients[2], "barrier()", "train.py:40")
    wait_in(clients[0], "recv from 2", "train.py:41", number=-1)
    clients[0].post("running")
    clients[3].post("raised", error="ValueError", text="", peer_failed=False)
    clients[4].post("left", links=[])
    for client in clients:
        settled(client)
    launcher.rank_ended(5, "exit status 0", True)
    table = clients[0].ask_table(DEADLINE_S)
    assert table == launcher.call(launcher.server.table)
    before = r"recv from 2 at train\.py:41"
    doing = rf"not waiting in pycoll, or for less than 0\.2 s; until 0\.\d s ago in {before}"
    assert re.fullmatch(f"rank 0: {doing}", table[0])
    assert re.fullmatch(r"rank 1: recv from 0, for 0\.\d s", table[1])
    assert re.fullmatch(r"rank 2: barrier\(\) #5 at train\.py:40, for 0\.\d s", table[2])
    assert table[3:] == [
        "rank 3: raised ValueError",
        "rank 4: has finalized",
        "rank 5: ended (exit status 0)",
    ]


def test_somebody_waits_in_init_in_a_call_or_natively(job: Job) -> None:
    launcher = job.launcher(2)
    is_anyone_waiting = launcher.server.is_anyone_waiting
    assert not launcher.call(is_anyone_waiting)
    waiting = job.joining(launcher, 1, 2)
    assert launcher.call(is_anyone_waiting)
    client = job.client(launcher.endpoint, 0, 2)
    client.join({}, DEADLINE_S)
    waiting.result(DEADLINE_S)
    assert not launcher.call(is_anyone_waiting)
    wait_in(client, "barrier")
    settled(client)
    assert launcher.call(is_anyone_waiting)
    launcher.rank_ended(0, "exit status 0", True)
    assert not launcher.call(is_anyone_waiting)
    launcher.server._waits_natively = lambda rank: "barrier()" if rank == 1 else ""
    assert launcher.call(is_anyone_waiting)


def test_events_that_come_while_the_table_is_asked_for_are_kept(job: Job) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(1, "exit status 0", True)
    assert len(clients[0].ask_table(DEADLINE_S)) == 2
    assert is_readable(clients[0].fileno(), 0)
    assert [event.kind for event in clients[0].progress()] == ["ended"]
    assert not is_readable(clients[0].fileno(), 0)


def test_a_table_that_comes_too_late_is_not_taken_for_the_next(job: Job) -> None:
    launcher, clients = job.meet(2)
    with launcher.stopped():
        assert clients[0].ask_table(0.05) == []
    wait_in(clients[0], "barrier")
    assert clients[0].ask_table(DEADLINE_S)[0].startswith("rank 0: barrier")


def test_posting_does_not_take_the_news_from_the_descriptor(job: Job) -> None:
    launcher, clients = job.meet(2)
    launcher.rank_ended(1, "exit status 0", True)
    assert is_readable(clients[0].fileno())
    for _ in range(100):
        clients[0].post("running")
    assert is_readable(clients[0].fileno(), 0)
    assert [event.kind for event in clients[0].progress()] == ["ended"]


def test_telling_ranks_does_not_take_the_news_from_the_servers_descriptor(job: Job) -> None:
    with Server(2, KEY) as server:
        clients = [job.client(server.endpoint, rank, 2) for rank in range(2)]
        futures = [job.start(client.join, {}, DEADLINE_S) for client in clients]
        while not all(future.done() for future in futures):
            server.progress()
        server.progress()
        assert not is_readable(server.fileno(), 0)
        clients[0].post("left", links=[])
        assert is_readable(server.fileno())
        time.sleep(0.005)  # when it sends, libzmq looks for news only once in a millisecond
        server.rank_ended(1, "exit status 0", True)
        assert is_readable(server.fileno(), 0)
        assert [notice.kind for notice in server.progress()] == ["left"]
        for client in clients:
            client.close(0.0)


def test_no_event_is_missed_by_ranks_that_post_and_ask_meanwhile(job: Job) -> None:
    count = 200
    _, clients = job.meet(4)

    def busy(client: Client) -> list[Event]:
        got: list[Event] = []
        while len(got) < count:
            client.post("running")
            assert is_readable(client.fileno())
            got += client.progress()
            assert client.ask_table(DEADLINE_S)
        return got

    futures = [job.start(busy, client) for client in clients[1:]]
    for number in range(count):
        clients[0].post("broken", **broken(number, members=[1, 2, 3]))
    for future in futures:
        assert [event.fields["context"] for event in future.result(DEADLINE_S)] == [*range(count)]


def test_a_stopped_launcher_neither_blocks_posts_nor_costs_memory_for_old_states(job: Job) -> None:
    launcher, clients = job.meet(1)
    with launcher.stopped():
        for number in range(20_000):
            wait_in(clients[0], f"barrier #{number} {'x' * 2000}", number=number, members=[0])
        clients[0].post("left", links=[])
        assert len(clients[0]._link._backlog) <= 2
    assert clients[0].ask_table(DEADLINE_S) == ["rank 0: has finalized"]
    assert launcher.notice("left").rank == 0


def test_close_returns_once_the_server_has_handled_what_was_posted(job: Job) -> None:
    launcher = job.launcher(1)
    script = """if True:
        import os, sys
        from pycoll._rendezvous.client import Client
        client = Client(sys.argv[1], bytes.fromhex(sys.argv[2]), 0, 1)
        client.join({}, 30)
        client.post("raised", error="ValueError", text="x" * 1000000, peer_failed=False)
        client.close(30)
        os._exit(1)
    """
    arguments = [sys.executable, "-c", script, launcher.endpoint, KEY.hex()]
    assert subprocess.run(arguments, env=pythonpath(), timeout=DEADLINE_S).returncode == 1
    launcher.notice("joined")
    assert launcher.has_notice()
    assert launcher.notice("raised").fields["error"] == "ValueError"


def test_close_does_not_wait_longer_than_it_may(job: Job) -> None:
    launcher, clients = job.meet(1)
    with launcher.stopped():
        clients[0].post("left", links=[])
        start = time.monotonic()
        clients[0].close(0.2)
        assert 0.2 <= time.monotonic() - start < DEADLINE_S / 6
        clients[0].close(DEADLINE_S)
    assert clients[0].progress() == []


def test_close_of_a_rank_that_was_refused_does_not_wait(job: Job) -> None:
    launcher = job.launcher(1)
    refused = job.client(launcher.endpoint, 0, 2)
    with pytest.raises(BootstrapError, match="this job has 1 ranks"):
        refused.join({}, DEADLINE_S)
    refused.post("raised", error="BootstrapError", text="", peer_failed=False)
    start = time.monotonic()
    refused.close(DEADLINE_S)
    assert time.monotonic() - start < DEADLINE_S / 6
    assert not launcher.has_notice()


@pytest.mark.parametrize("way", ["zmq", "local"])
def test_nothing_stays_open_after_close(way: str) -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    job = Job(way)
    launcher, clients = job.meet(2)
    clients[0].close(DEADLINE_S)
    launcher.server.fileno()
    job.close()
    launcher.server.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


@pytest.mark.parametrize("link", ["", "link_variable(server.open_link())"])
def test_a_forked_child_that_closes_its_copy_leaves_the_parents_connection_alone(
    link: str,
) -> None:
    script = """if True:
        import os, sys, threading
        from pycoll._rendezvous.client import Client
        from pycoll._launcher.rendezvous_pairs import link_variable
        from pycoll._launcher.rendezvous_server import Server
        server = Server(1, bytes(32))
        client = Client(server.endpoint, bytes(32), 0, 1, link=%s)
        def serve():
            while True:
                if any(n.kind == "left" for n in server.progress()):
                    break
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client.join({}, 30)
        if (pid := os.fork()) == 0:
            client.close(30)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        client.post("left", links=[])
        thread.join(30)
        client.close(0)
        server.close()
        print("well")
    """
    command = [sys.executable, "-W", "ignore", "-c", script % (link or "''")]
    done = subprocess.run(
        command, env=pythonpath(), timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("well\n", "")


class Host:
    """The connection to another host, as the server has it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, kind: str, *fields: Any) -> None:
        self.sent.append((kind, *fields))


def test_what_all_ranks_are_told_goes_to_another_host_once() -> None:
    hosts = [Host(), Host()]
    peers = [Relayed(hosts[rank // 3], 10 + rank % 3) for rank in range(6)]
    with Server(6, KEY) as server:

        def say(who: int, kind: str, **fields: Any) -> None:
            server.hear(peers[who], wire.pack(kind, fields))

        def told() -> list[list[tuple[str, Any, str]]]:
            found = []
            for host in hosts:
                frames = [(k, to, wire.unpack(frame, 10)[0]) for k, to, frame in host.sent]
                found.append(frames)
                host.sent.clear()
            return found

        version = wire.WIRE_VERSION
        for rank in range(6):
            say(rank, "join", version=version, rank=rank, size=6, pid=100 + rank, info=b"\x80")
        assert told() == [[("links", [10, 11, 12], "met")]] * 2
        for number in range(2):
            for rank in range(6):
                say(rank, "exchange", round=number, info=b"\x80")
            assert told() == [[("links", [10, 11, 12], "exchanged")]] * 2
        say(4, "who")
        assert told() == [[], [("link", 11, "who")]]
        say(0, "exchange", round=2, info=b"\x80")
        say(0, "exchange", round=2, info=b"\x80")  # it had given up, and asks again
        server.rank_ended(1, "killed", clean=False)
        assert told() == [
            [("links", [10, 12], "failed"), ("links", [10], "refused")],
            [("links", [10, 11, 12], "failed")],
        ]
