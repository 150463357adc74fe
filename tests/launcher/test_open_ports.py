"""Each port that a job opens, when strangers come: silent, slow, wrong, many, and who replay.

Of other ports, or by other means: tests/transports/test_flood.py and test_handshake.py (ranks by
tcp), tests/rendezvous/test_rendezvous_strangers.py and test_strangers.py (the launcher's),
test_munge.py (rank 0 in Slurm).
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launcher_jobs import started
from node_jobs import LIMIT_S, until_listening
from port_strangers import SILENT, Recorder, Strangers
from tiers import smoke

from pycoll._launcher import reach
from pycoll._launcher.reach import Doorman, HostAddresses, reach_all
from pycoll._support.environment import free_port

TOGETHER = """
import os, sys, pycoll
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
while not any(comm.all_gather(os.path.exists(sys.argv[1]))):
    assert comm.all_gather(comm.rank) == [0, 1]
"""


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_node_0_lets_in_whom_it_should_and_nobody_else(
    nodes: Any, script: Any, tmp_path: Path
) -> None:
    job, path, end = nodes(2), script(TOGETHER), tmp_path / "end"
    first = job.start(0, "-n", "2", path, str(end))
    until_listening(job.port)
    recorder = Recorder(job.port)
    with Strangers(job.port) as strangers:
        strangers.come()
        job.start(1, path, PYCOLL_RENDEZVOUS=f"tcp://127.0.0.1:{recorder.port}")
        for _ in range(2):
            assert first.stdout.readline() == "ready\n"
        assert num_descriptors(first.pid) < SILENT  # those that are silent cost none
        said = max(recorder.said, key=len)
        assert len(said) > 300  # all of a handshake by CURVE, and what came then
        assert strangers.is_cut_after(bytes(said))
        strangers.come()
        end.touch()
        assert job.end(0)[0] == 0
        assert job.end(1) == (0, "", "")
    recorder.close()


def test_where_ranks_meet_that_nobody_has_started_is_open_to_them_alone(tmp_path: Path) -> None:
    script, end, port = tmp_path / "sums.py", tmp_path / "end", free_port()
    script.write_text(TOGETHER)

    def start(rank: int, port: int) -> subprocess.Popen[str]:
        own = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
        place = {"RANK": str(rank), "SIZE": "2", "KEY": key}
        place["RENDEZVOUS"] = f"tcp://127.0.0.1:{port}"
        return subprocess.Popen(
            [sys.executable, str(script), str(end)],
            env={**own, **{f"PYCOLL_{name}": value for name, value in place.items()}},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    key = secrets.token_hex(32)
    ranks = [start(0, port)]
    try:
        until_listening(port)
        with Strangers(port) as strangers:
            strangers.come()
            ranks.append(start(1, port))
            for rank in ranks:
                assert rank.stdout is not None
                assert rank.stdout.readline() == "ready\n"
            strangers.come()
            end.touch()
            assert [rank.wait(LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


LINK = """
import sys, pycoll
comm = pycoll.init()
if comm.rank == 0:
    print(comm._group.engine.transport.outside.peers[1].address()["endpoint"], flush=True)
    input()
assert comm.all_gather(1) == [1, 1]
"""


@pytest.mark.parametrize("encrypted", [(), ("--encrypt",)])
def test_a_rank_by_zeromq_makes_its_link_among_strangers(
    script: Any, encrypted: tuple[str, ...]
) -> None:
    with started("-n", "2", "--transport", "zmq", *encrypted, script(LINK)) as job:
        assert job.stdout is not None
        assert job.stdin is not None
        port = int(job.stdout.readline().rpartition(b":")[2])
        with Strangers(port) as strangers:
            strangers.come()
            job.stdin.write(b"\n")
            assert job.wait(LIMIT_S) == 0


KEY = bytes(range(32))


@pytest.fixture
def doorman() -> Any:
    one = Doorman(KEY, 7)
    yield one
    one.close()


@smoke
def test_a_host_is_found_among_strangers(doorman: Doorman) -> None:
    with Strangers(doorman.port) as strangers:
        strangers.come()
        for _ in range(3):  # more than it listens to at a time
            strangers.come(silent=0)
        [found] = reach_all([HostAddresses(7, doorman.port, ["127.0.0.1"])], KEY)
        assert (found.address, found.failures) == ("127.0.0.1", [])


def test_a_question_that_is_asked_again_gets_the_answer_that_was_heard_before(
    doorman: Doorman,
) -> None:
    recorder = Recorder(doorman.port)
    [found] = reach_all([HostAddresses(7, recorder.port, ["127.0.0.1"])], KEY)
    assert found.address
    answers = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", doorman.port), LIMIT_S) as stranger:
            stranger.sendall(recorder.said[0])
            answers.append(stranger.recv(1000))
    recorder.close()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 36


def drip(connection: socket.socket, nbytes: int) -> bool:
    """Say so many bytes, one after the other, slowly; returns whether that was possible."""
    connection.settimeout(0.1)
    for _ in range(nbytes):
        try:
            connection.sendall(b"x")
            if connection.recv(1000) == b"":
                return False
        except TimeoutError:
            pass
        except ConnectionError:
            return False
    return True


@pytest.mark.parametrize("side", ["asks", "answers"])
def test_who_says_a_byte_now_and_then_has_as_long_as_all_others(
    side: str, monkeypatch: pytest.MonkeyPatch, doorman: Doorman
) -> None:
    monkeypatch.setattr(reach, "_TRY_S", 0.5)
    if side == "asks":
        with socket.create_connection(("127.0.0.1", doorman.port), LIMIT_S) as stranger:
            assert not drip(stranger, reach._QUESTION.size - 1)
        return
    with socket.create_server(("127.0.0.1", 0)) as liar, ThreadPoolExecutor(1) as pool:

        def lie() -> bool:
            with liar.accept()[0] as caller:
                caller.recv(1000)
                return drip(caller, reach._ANSWER.size - 1)

        lying = pool.submit(lie)
        port = liar.getsockname()[1]
        [found] = reach_all([HostAddresses(7, port, ["127.0.0.1"])], KEY)
        assert not lying.result()
    assert found.failures == [f"127.0.0.1 port {port}: no answer in 0.5 s (a firewall?)"]
