"""The meeting of ranks: a real server, and real clients in threads and processes, on loopback.

What does not depend on the way to the server is tested over both: ZeroMQ, and inherited sockets.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from rendezvous_world import DEADLINE_S, KEY, Job, by_zmq, events, join_fields, pythonpath

from pycoll._launcher.rendezvous_server import Notice
from pycoll._rendezvous import wire as wire
from pycoll._rendezvous.wire import WIRE_VERSION
from pycoll.errors import BootstrapError


def test_every_rank_gets_what_each_has_said_by_rank(job: Job) -> None:
    launcher = job.launcher(5)
    infos = [{"rank": rank, "blob": bytes([rank]), "name": f"host {rank}"} for rank in range(5)]
    clients = [job.client(launcher.endpoint, rank, 5) for rank in range(5)]
    futures = [job.start(client.join, infos[r], DEADLINE_S) for r, client in enumerate(clients)]
    assert [future.result() for future in futures] == [infos] * 5


def test_one_rank_meets_itself_even_with_no_end_of_patience(job: Job) -> None:
    assert job.client(job.launcher(1).endpoint, 0, 1).join({"a": 1}, math.inf) == [{"a": 1}]


def test_the_launcher_hears_of_each_process_that_joined(job: Job) -> None:
    launcher = job.launcher(2)
    assert launcher.call(launcher.server.missing) == [0, 1]
    job.joining(launcher, 1, 2)
    assert launcher.call(launcher.server.missing) == [0]
    job.client(launcher.endpoint, 0, 2).join({}, DEADLINE_S)
    assert launcher.notice("joined") == Notice("joined", 0, {"pid": os.getpid()})
    assert launcher.call(launcher.server.missing) == []


def test_who_is_missing_is_named_at_the_deadline(job: Job) -> None:
    launcher = job.launcher(4)
    client = job.client(launcher.endpoint, 1, 4)
    with pytest.raises(BootstrapError, match=r"rank 1 waited 0\.\d s .*ranks 0, 2-3 of 4 have"):
        client.join({}, 0.3)


def test_one_missing_rank_is_named_in_the_singular(job: Job) -> None:
    launcher = job.launcher(2)
    with pytest.raises(BootstrapError, match="rank 0 of 2 has not joined"):
        job.client(launcher.endpoint, 1, 2).join({}, 0.3)


def test_only_the_lowest_rank_present_prints_who_is_missing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = job.launcher(4)
    clients = [job.client(launcher.endpoint, rank, 4, notice_s=0.1) for rank in (1, 2)]
    for future in [job.start(client.join, {}, 0.75) for client in clients]:
        assert isinstance(future.exception(), BootstrapError)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith("pycoll: rank 1 has waited 0.")
        assert line.endswith("s for ranks 0, 3 of 4 to join the job")


def test_a_rank_that_gave_up_may_join_again(job: Job) -> None:
    launcher = job.launcher(2)
    impatient = job.client(launcher.endpoint, 0, 2)
    with pytest.raises(BootstrapError):
        impatient.join({}, 0.2)
    with pytest.raises(RuntimeError, match="joins once"):
        impatient.join({}, 0.2)
    impatient.close(DEADLINE_S)
    assert launcher.call(launcher.server.missing) == [0, 1]
    again = job.client(launcher.endpoint, 0, 2)
    both = [again, job.client(launcher.endpoint, 1, 2)]
    assert [len(f.result()) for f in [job.start(c.join, {}, DEADLINE_S) for c in both]] == [2, 2]


def test_a_rank_that_gave_up_and_ended_has_ended(job: Job) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    stranger.join(launcher, 1, 2)
    launcher.rank_ended(1, "exit status 1", False)
    stranger.send(wire.pack("withdraw", {}))
    stranger.answers_until_heard()
    assert launcher.call(launcher.server.table)[1] == "rank 1: ended (exit status 1)"


def test_a_rank_that_gave_up_when_all_had_joined_has_failed(job: Job) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    stranger.join(launcher, 1, 2)
    client = job.client(launcher.endpoint, 0, 2)
    client.join({}, DEADLINE_S)
    stranger.send(wire.pack("withdraw", {}))
    assert events(client)[0].fields["reason"] == "gave up waiting for the job to meet"


@pytest.mark.parametrize("clean", [True, False])
def test_a_rank_that_ended_before_it_joined_ends_the_meeting_for_all(job: Job, clean: bool) -> None:
    launcher = job.launcher(3)
    waiting = job.joining(launcher, 0, 3)
    launcher.rank_ended(2, "exit status 3", clean)
    with pytest.raises(BootstrapError, match=r"rank 2 ended before it joined.*: exit status 3"):
        waiting.result(DEADLINE_S)
    with pytest.raises(BootstrapError, match=r"rank 2 ended before it joined.*: exit status 3"):
        job.client(launcher.endpoint, 1, 3).join({}, DEADLINE_S)
    with pytest.raises(BootstrapError, match="rank 2 has already ended: exit status 3"):
        job.client(launcher.endpoint, 2, 3).join({}, DEADLINE_S)


def test_a_rank_that_joined_and_died_ends_the_meeting(job: Job) -> None:
    launcher = job.launcher(3)
    waiting = job.joining(launcher, 0, 3)
    job.stranger(launcher.endpoint).join(launcher, 1, 3)
    launcher.rank_ended(1, "killed by signal 9 (SIGKILL)", False)
    with pytest.raises(BootstrapError, match=r"rank 1 ended before all ranks had joined.*SIGKILL"):
        waiting.result(DEADLINE_S)


@by_zmq
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "raised",
            {"error": "ValueError", "text": "Traceback: bad", "peer_failed": False},
            "rank 1 failed before all .*: raised ValueError\nTraceback: bad",
        ),
        ("abort", {"code": 3}, r"rank 1 failed before all .*: called abort\(3\)"),
        ("left", {"links": []}, "rank 1 left before all"),
    ],
)
def test_a_rank_that_goes_before_all_have_joined_ends_the_meeting(
    job: Job, kind: str, fields: dict[str, Any], message: str
) -> None:
    launcher = job.launcher(3)
    waiting = job.joining(launcher, 0, 3)
    stranger = job.stranger(launcher.endpoint)
    stranger.join(launcher, 1, 3)
    stranger.send(wire.pack(kind, fields))
    with pytest.raises(BootstrapError, match=message):
        waiting.result(DEADLINE_S)
    assert launcher.notice(kind).rank == 1


def test_a_rank_number_twice_names_both_processes_and_leaves_the_first_alone(job: Job) -> None:
    launcher = job.launcher(2)
    waiting = job.joining(launcher, 1, 2)
    script = (
        "import sys, os; from pycoll._rendezvous.client import Client\n"
        "c = Client(sys.argv[1], bytes.fromhex(sys.argv[2]), 1, 2)\n"
        "try: c.join({}, 30)\n"
        "except Exception as e: print(os.getpid(), e)\n"
        "c.close(5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, launcher.endpoint, KEY.hex()],
        env=pythonpath(), capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    pid, message = done.stdout.split(maxsplit=1)
    assert f"rank 1 is already process {os.getpid()}; this is process {pid}" in message
    assert "must not call init()" in message
    job.client(launcher.endpoint, 0, 2).join({}, DEADLINE_S)
    assert len(waiting.result(DEADLINE_S)) == 2


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("version", WIRE_VERSION + 1, f"version {WIRE_VERSION + 1} .* version {WIRE_VERSION}:"),
        ("version", None, "speaks version None"),
        ("size", 3, "is rank 0 of 3, but this job has 2 ranks"),
        ("rank", 2, "not understood"),
        ("rank", -1, "not understood"),
        ("rank", "1", "not understood"),
        ("pid", 0, "not understood"),
        ("info", {}, "not understood"),
        ("info", bytes(wire.MAX_INFO_NBYTES + 1), "not understood"),
    ],
)
def test_a_join_that_does_not_fit_is_refused_with_the_reason(
    job: Job, field: str, value: object, answer: str
) -> None:
    launcher = job.launcher(2)
    stranger = job.stranger(launcher.endpoint)
    kind, fields = stranger.ask("join", **join_fields(**{field: value}))
    assert kind == "refused"
    assert re.search(answer, fields["message"])
    assert launcher.call(launcher.server.missing) == [0, 1]


@by_zmq
def test_info_that_is_too_large_is_an_error_before_anything_is_sent(job: Job) -> None:
    client = job.client("tcp://127.0.0.1:1", 0, 2)
    with pytest.raises(ValueError, match="65536 bytes"):
        client.join({"blob": bytes(wire.MAX_INFO_NBYTES)}, DEADLINE_S)


@by_zmq
def test_64_clients_join_in_less_than_a_second_of_the_servers_processor_time(job: Job) -> None:
    script = """if True:
        import select, sys, time
        from pycoll._launcher.rendezvous_server import Server
        server = Server(64, bytes.fromhex(sys.argv[1]))
        print(server.endpoint, flush=True)
        start, poll = time.process_time(), select.poll()
        poll.register(server.fileno(), select.POLLIN)
        poll.register(0, select.POLLIN)
        while 0 not in dict(poll.poll()):
            server.progress()
        print(time.process_time() - start)
        server.close()
    """
    with subprocess.Popen(
        [sys.executable, "-c", script, KEY.hex()],
        env=pythonpath(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        clients = [job.client(endpoint, rank, 64) for rank in range(64)]
        for future in [job.start(client.join, {}, DEADLINE_S) for client in clients]:
            assert len(future.result(DEADLINE_S)) == 64
        output, _ = server.communicate("", DEADLINE_S)
    assert float(output) < 1.0
