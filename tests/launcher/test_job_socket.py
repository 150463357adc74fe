"""The socket at which a job is asked (`pycoll status`): who reaches it, and what can be said there.

Only its user does: its folder keeps others out, and each end looks who the other is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_jobs import started
from patience import PATIENCE

from pycoll._launcher import job_socket
from pycoll._tools import jobs

LIMIT_S = 30 * PATIENCE
NOBODY = 65534

WAITS = """
import pycoll
comm = pycoll.init()
print("ready", flush=True)
comm.recv(0)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="another user is made by root")


@pytest.fixture
def job(tmp_path: Path, sockets: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job that runs, and the path of its socket."""
    script = tmp_path / "script.py"
    script.write_text(WAITS)
    with started("-n", "1", str(script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (path,) = sockets.iterdir()
        yield process, str(path)


def come(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(path)
    end.settimeout(LIMIT_S)
    return end


def as_nobody(do: Callable[[], str]) -> str:
    """What a function returns in a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = do()
        except BaseException as exc:
            said = type(exc).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


NONSENSE = (
    b"[" * job_socket.QUESTION_NBYTES,
    b"\xff\xfe",
    b"{" * 100,
    b"7",
    b"null",
    b"{}",
    b'{"want": []}',
    b'{"want": {"status": 1}}',
    b'"' + b"x" * 3 * job_socket.QUESTION_NBYTES,
)


def test_whatever_many_say_to_the_socket_of_a_job_it_goes_on_and_answers(
    job: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, path = job
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(come(path)) for _ in range(40)]
        for words in NONSENSE:
            with come(path) as asker:
                asker.send(words)
                asker.recv(1)  # an answer, or the end
        assert job_socket.ask(path, {"want": "about"}, LIMIT_S)["size"] == 1
        assert silent[0].recv(1) == b""  # the oldest make room
        assert job_socket.ask(path, {"want": "status"}, LIMIT_S)["size"] == 1
    assert process.poll() is None


def test_no_socket_is_left_of_a_launcher_that_is_killed_while_it_has_no_ranks_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sockets: Path
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec cat > /dev/null\n")  # ends with the launcher
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with started("-H", "other:1", "--", "true") as process:
        until(lambda: sockets.exists() and os.listdir(sockets) != [])
        (path,) = sockets.iterdir()
        with come(str(path)) as silent:  # it is in its loop
            silent.send(b'{"want": "about"}')
            assert silent.recv(1) == b"!"
        process.kill()
        until(lambda: not sockets.exists())


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_root
def test_another_user_does_not_reach_the_socket_and_would_get_no_answer(
    job: tuple[subprocess.Popen[bytes], str], sockets: Path
) -> None:
    _, path = job

    def ask() -> str:
        with come(path) as asker:
            asker.send(b'{"want": "about"}')
            return repr(asker.recv(1))

    sockets.parent.chmod(0o755)
    assert as_nobody(ask) == "PermissionError"
    sockets.chmod(0o777)
    os.chmod(path, 0o777)
    assert as_nobody(ask) in (repr(b""), "ConnectionResetError", "BrokenPipeError")
    assert job_socket.ask(path, {"want": "about"}, LIMIT_S)["size"] == 1


@needs_root
def test_the_socket_of_another_user_is_not_believed(sockets: Path) -> None:
    sockets.mkdir(mode=0o700)
    path = str(sockets / "1.0123abcd")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as liar:
        liar.bind(path)

        def listen() -> str:  # whose socket it is, is who listens
            liar.listen()
            return "listens"

        assert as_nobody(listen) == "listens"
        with pytest.raises(PermissionError, match=f"is of user {NOBODY}"):
            job_socket.ask(path, {"want": "about"}, LIMIT_S)
        assert jobs.running("0123abcd") == ([], [])
        assert os.path.exists(path)


@pytest.mark.parametrize("trick", ["link", "link to nowhere", "file", "open", "of another user"])
def test_a_folder_that_is_not_of_this_user_alone_is_neither_used_nor_looked_into(
    sockets: Path, tmp_path: Path, trick: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "1.0123abcd").touch()
    if trick == "link":
        sockets.symlink_to(elsewhere)
    elif trick == "link to nowhere":
        sockets.symlink_to(tmp_path / "nowhere")
    elif trick == "file":
        sockets.touch(mode=0o700)
    else:
        sockets.mkdir(mode=0o700)
        (sockets / "1.0123abcd").touch()
        if trick == "open":
            sockets.chmod(0o750)
        elif os.getuid() == 0:
            os.chown(sockets, NOBODY, NOBODY)
        else:
            pytest.skip("another user is made by root")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        with pytest.raises(PermissionError, match="is not a folder of this user alone"):
            job_socket._bind(end, str(sockets), "2.4567cdef")
        assert end.getsockname() == ""
    jobs.running()
    assert os.listdir(elsewhere) == ["1.0123abcd"]
    assert not (tmp_path / "nowhere").exists()
    if sockets.is_dir():
        assert os.listdir(sockets) == ["1.0123abcd"]
