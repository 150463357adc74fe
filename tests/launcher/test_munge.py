"""Rank 0's server for ranks that share a secret by munge; munge itself is pretended."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pycoll._launcher import exchange, munge
from pycoll._launcher.reach import listen_everywhere
from pycoll.errors import BootstrapError

# The ports derive from it: those of another process that tests are others.
JOB = str(os.getpid())
ENVIRON = {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "localhost"}

# A credential is the user and the text in hexadecimal; one of munge is read by that user only.
MUNGE = """#!/bin/sh
printf 'user%s:' "$(id -u)"; od -An -v -tx1 | tr -d ' \\n'
"""
UNMUNGE = """#!/bin/sh
credential=$(cat)
case $credential in user*:*) ;; *) echo 'unmunge: Error: Invalid credential' >&2; exit 3;; esac
user=${credential%%:*}
echo "UID:  somebody (${user#user})" >&2
printf "$(printf %s "${credential#*:}" | sed 's/../\\\\x&/g')"
"""


@pytest.fixture(autouse=True)
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("munge", MUNGE), ("unmunge", UNMUNGE)):
        program = tmp_path / name
        program.write_text(text.replace("/bin/sh", "/bin/bash"))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


class Job:
    """Rank 0 of a job, which tells `text`, in a thread."""

    def __init__(self, size: int, text: str) -> None:
        self.ranks = [munge.Munge(ENVIRON, rank, size) for rank in range(size)]
        self.failures: list[Exception] = []
        self.thread = threading.Thread(target=self._serve, args=[text])
        self.thread.start()

    def _serve(self, text: str) -> None:
        try:
            assert self.ranks[0].share(text, 20.0) == text
        except Exception as exc:
            self.failures.append(exc)

    def end(self) -> None:
        self.thread.join()
        assert not self.failures


def first_port() -> int:
    return munge.Munge(ENVIRON, 0, 2)._ports[0]


def connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 10.0
    while True:
        try:
            return socket.create_connection(("localhost", port), 20.0)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def squatter() -> Iterator[socket.socket]:
    """Who listens at the first port, where rank 0 would."""
    with listen_everywhere(first_port()) as listener:
        yield listener


def test_all_are_told() -> None:
    job = Job(4, "the ticket; of this job")
    assert [rank.share("", 20.0) for rank in job.ranks[1:]] == ["the ticket; of this job"] * 3
    job.end()


def test_who_says_nothing_holds_nobody_up() -> None:
    job = Job(2, "x")
    idle = [connected(first_port()) for _ in range(5)]
    began = time.monotonic()
    assert job.ranks[1].share("", 20.0) == "x"
    assert time.monotonic() - began < munge._TALK_S
    job.end()
    for one in idle:
        one.close()


def test_who_drips_is_cut_off_after_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge, "_TALK_S", 0.5)
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.1):
            theirs.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with ours, theirs:
        with pytest.raises(TimeoutError):
            munge._line(ours, began + 0.5)
        stop.set()
        dripping.join()
    assert time.monotonic() - began < 10.0


def test_a_stranger_gets_nothing() -> None:
    job = Job(2, "secret")
    other = f"user{os.geteuid() + 1}:{f'ask {JOB}.3 1 abc'.encode().hex()}".encode()
    wrong_step = munge._encode(f"ask {JOB}.4 1 abc")
    for said in (b"garbage", other, wrong_step, b"", b"x" * 100_000):
        with connected(first_port()) as stranger, stranger.makefile("rb") as answer:
            stranger.sendall(said + b"\n")
            with contextlib.suppress(ConnectionResetError):  # it has not read everything
                assert answer.read() == b""
    assert job.ranks[1].share("", 20.0) == "secret"
    job.end()


def test_who_cannot_read_the_answer_does_not_stand_for_a_rank() -> None:
    job = Job(2, "secret")
    with connected(first_port()) as relay, relay.makefile("rb") as answer:
        relay.sendall(munge._encode(f"ask {JOB}.3 1 abc") + b"\n")
        assert answer.readline()
        relay.sendall(b"thanks\n")
        assert answer.read() == b""
    job.thread.join(0.5)
    assert job.thread.is_alive()  # rank 0 waits for the rank itself
    assert job.ranks[1].share("", 20.0) == "secret"
    job.end()


def test_a_rank_believes_no_reflection(squatter: socket.socket) -> None:
    def reflect() -> None:
        connection = squatter.accept()[0]
        with connection:
            connection.sendall(connection.recv(10_000))

    reflecting = threading.Thread(target=reflect)
    reflecting.start()
    with pytest.raises(ValueError, match=r"is not rank 0 of this job|not enough"):
        munge.Munge(ENVIRON, 1, 2)._ask_at(first_port(), time.monotonic() + 30.0)
    reflecting.join()


def test_a_port_that_is_taken_is_passed_by(squatter: socket.socket) -> None:
    squatter.close()
    with socket.create_server(("", first_port())) as silent:
        refusing = threading.Thread(target=lambda: silent.accept()[0].close())
        refusing.start()
        job = Job(2, "x")
        assert job.ranks[1].share("", 20.0) == "x"
        job.end()
        refusing.join()


def test_the_reason_is_the_first_ports() -> None:
    with pytest.raises(TimeoutError, match=rf"port {first_port()}: .*refused"):
        munge.Munge(ENVIRON, 1, 2).share("", 0.1)


def test_rank_0_tells_who_has_not_come() -> None:
    with pytest.raises(TimeoutError, match="2 of 3 ranks have not asked rank 0"):
        munge.Munge(ENVIRON, 0, 3).share("x", 0.2)


def environ_of(**more: str) -> dict[str, str]:
    return {**ENVIRON, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **more}


@pytest.mark.parametrize("program", ["munge", "nothing"])
def test_a_munge_that_does_not_work_is_named(
    pretended: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    said = "there is no munge here"
    if program == "munge":
        said = "munge: Error: Failed to access"
        text = "#!/bin/sh\necho 'munge: Error: Failed to access \"/run/munge\"' >&2; exit 6\n"
        (pretended / "munge").write_text(text)
    else:
        monkeypatch.setenv("PATH", "")
    environ = environ_of()
    launched = exchange.find(environ)
    assert launched is not None
    with pytest.raises(BootstrapError, match=said):
        exchange.join(environ, launched, 5.0)


def test_a_munge_that_hangs_is_given_up(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pretended / "munge").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(munge, "_TALK_S", 0.2)
    assert munge.why_not() == "munge does not answer in 0.2 s"


def test_steps_of_one_key_meet_apart() -> None:
    def meeting(**more: str) -> Any:
        environ = environ_of(PYCOLL_KEY="ab" * 32, **more)
        launched = exchange.find(environ)
        assert launched is not None
        return exchange._agreed_meeting(environ, launched)

    assert meeting() == meeting()
    assert meeting()[1] != meeting(SLURM_STEP_ID="4")[1] != "ab" * 32
