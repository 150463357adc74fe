"""The socket that a rank inherits from its launcher: whose it is, what passes, when it is refused.

The protocol itself is tested over it, and over ZeroMQ, in test_rendezvous.py.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE

from pycoll._launcher.rendezvous_pairs import link_variable
from pycoll._launcher.rendezvous_server import Server
from pycoll._rendezvous.client import Client
from pycoll._rendezvous.local import FrameSocket, LocalLink, adopt, greeting
from pycoll._rendezvous.wire import WIRE_VERSION

KEY = bytes(range(32))
LIMIT_S = 30.0 * PATIENCE
MAX_NBYTES = 1 << 24

# A rank that joins the job; the test's own lines follow. `client()` makes one more client.
JOIN = """
import os, subprocess, sys
from pycoll._rendezvous.client import Client

def client():
    rank, size, key = (os.environ[f"PYCOLL_{name}"] for name in ("RANK", "SIZE", "KEY"))
    return Client(
        os.environ["PYCOLL_RENDEZVOUS"], bytes.fromhex(key), int(rank), int(size),
        link=os.environ["PYCOLL_LINK"],
    )

def way():
    return "zmq" if "zmq" in sys.modules else "local"

def error_of(function, *args):
    try:
        function(*args)
    except Exception as exc:
        return exc

rank = client()
"""
# A second process of the same rank: says what happens when it joins.
AGAIN = f"""{JOIN}
print(os.getpid(), way(), error_of(rank.join, {{}}, 20.0))
if sys.argv[1:]:
    open(f"{{__file__}}.fifo", sys.argv[1]).close()
rank.post("left", links=[])
rank.close(5.0)
"""

Run = Callable[..., list[str]]


@pytest.fixture
def ranks(tmp_path: Path) -> Run:
    """Run a script on ranks that go the way that `pycoll.init` goes; what they print, sorted."""
    (tmp_path / "again.py").write_text(AGAIN)

    def run(n: int, text: str, *program: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(JOIN + text)
        program = program or (sys.executable, str(script))
        done = subprocess.run(
            [sys.executable, "-m", "pycoll._launcher", "-n", str(n), "--", *program],
            capture_output=True,
            text=True,
            env={**os.environ, "AGAIN": str(tmp_path / "again.py"), "SCRIPT": str(script)},
            timeout=LIMIT_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return sorted(done.stdout.splitlines())

    return run


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(2, KEY) as one:
        yield one


def ends(nbytes: int | None = None) -> tuple[FrameSocket, FrameSocket]:
    """Both ends of a pair, whose kernel buffers are as small as they may be."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for one in pair:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return FrameSocket(pair[0], nbytes or MAX_NBYTES), FrameSocket(pair[1], nbytes or MAX_NBYTES)


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


# Whose it is.


def test_ranks_and_launcher_meet_without_importing_zeromq_or_numpy(ranks: Run) -> None:
    heavy = "{'zmq', 'numpy', 'socket', 'dataclasses', 'logging', 'hashlib'} & {*sys.modules}"
    text = f"rank.join({{}}, 20.0); print({heavy}, flush=True); rank.close(5.0)"
    assert ranks(2, text) == ["set()", "set()"]
    script = """if True:
        import sys
        from pycoll._launcher.cli import main
        status = main(["-n", "2", "--", sys.executable, sys.argv[1]])
        print(status, {"zmq", "numpy", "dataclasses", "pathlib", "hashlib"} & {*sys.modules})
    """
    argv = [sys.executable, "-c", script, os.devnull]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "0 set()\n"


def test_children_of_a_rank_do_not_inherit_what_it_has_adopted(ranks: Run) -> None:
    text = """
fd = int(os.environ["PYCOLL_LINK"].partition(":")[0])
print(os.get_inheritable(fd))
rank.join({}, 20.0)
rank.close(5.0)
"""
    assert ranks(1, text) == ["False"]


@pytest.mark.parametrize("close_fds", [True, False])
def test_a_process_started_by_a_rank_is_refused_and_both_are_named(
    ranks: Run, close_fds: bool
) -> None:
    text = f"""
rank.join({{}}, 20.0)
subprocess.run([sys.executable, os.environ["AGAIN"]], close_fds={close_fds}, check=True)
print(0, os.getpid())
rank.close(5.0)
"""
    parent, child = ranks(1, text)
    pid, way, message = child.split(maxsplit=2)
    assert way == "zmq"
    assert f"is already process {parent.split()[1]}; this is process {pid}" in message
    assert "must not call init()" in message


def test_two_processes_that_inherit_one_socket_do_not_share_it(ranks: Run) -> None:
    # A shell that starts both keeps the descriptor open for each of them. Neither leaves before
    # the other has tried to join: to open a FIFO takes two.
    both = 'mkfifo "$AGAIN.fifo"; "$1" "$AGAIN" r & "$1" "$AGAIN" w; wait'
    said = [line.split(maxsplit=2) for line in ranks(1, "", "sh", "-c", both, "sh", sys.executable)]
    assert sorted(way for _, way, _ in said) == ["local", "zmq"]
    (first,) = (pid for pid, _, message in said if message == "None")
    (second,) = ((pid, message) for pid, _, message in said if message != "None")
    assert f"is already process {first}; this is process {second[0]}" in second[1]


def test_a_rank_whose_wrapper_has_closed_the_socket_joins_by_zeromq(ranks: Run) -> None:
    text = """
print(way(), len(rank.join({}, 20.0)))
rank.post("left", links=[])
rank.close(5.0)
"""
    wrapper = 'import os, subprocess, sys; subprocess.run([sys.executable, os.environ["SCRIPT"]])'
    assert ranks(2, text, sys.executable, "-c", wrapper) == ["zmq 2", "zmq 2"]


@pytest.mark.parametrize(
    "link", ["", "x", "7", "-1:5", "1:2:3", f"{1 << 70}:1", "1048575:1", "0:x"]
)
def test_a_link_that_is_none_is_left_alone(link: str) -> None:
    assert adopt(link, KEY, MAX_NBYTES) is None


@pytest.mark.parametrize("kind", ["file", "pipe", "listener", "other pair", "other inode"])
def test_the_same_number_open_on_something_else_is_left_alone(
    tmp_path: Path, kind: str, server: Server
) -> None:
    a, b = socket.socketpair()
    with open(tmp_path / "file", "w+b") as file, a, b, socket.create_server(("", 0)) as listener:
        end, ours = os.pipe()
        b.send(greeting(bytes(32)))
        link = server.open_link()
        fd = {
            "file": file.fileno(), "pipe": end, "listener": listener.fileno(),
            "other pair": a.fileno(), "other inode": link,
        }[kind]  # fmt: skip
        variable = link_variable(fd) if kind != "other inode" else f"{fd}:1"
        os.set_inheritable(fd, True)
        assert adopt(variable, KEY, MAX_NBYTES) is None
        assert os.get_inheritable(fd)
        assert a.recv(100) == greeting(bytes(32))
        for descriptor in (end, ours, link):
            os.close(descriptor)


def test_who_has_another_key_leaves_the_socket_to_who_has_the_right_one(server: Server) -> None:
    link = link_variable(server.open_link())
    for wrong in (b"", bytes(32), KEY[:-1], KEY + b"x"):
        assert adopt(link, wrong, MAX_NBYTES) is None
    adopted = adopt(link, KEY, MAX_NBYTES)
    assert adopted is not None
    assert adopt(link, KEY, MAX_NBYTES) is None
    adopted.close(0.0)


def test_a_default_timeout_of_sockets_is_none_of_the_link(server: Server) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(LIMIT_S)
    try:
        link = adopt(link_variable(server.open_link()), KEY, MAX_NBYTES)
    finally:
        socket.setdefaulttimeout(before)
    assert link is not None
    assert link.pump() == []
    link.close(0.0)


# What passes.


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=20) | st.integers(0, 300_000).map(bytes), max_size=8))
def test_frames_of_any_length_arrive_whole_and_in_order(frames: list[bytes]) -> None:
    a, b = ends()
    got: list[bytes] = []
    for frame in frames:
        while not a.send(frame):
            got += b.receive()
    while not a.flush():
        got += b.receive()
    a.close()
    while b.is_open:
        got += b.receive()
    b.close()
    assert got == frames


def test_a_frame_that_is_too_long_cuts_the_connection() -> None:
    a, b = ends(1000)
    a.send(bytes(1000))
    a.send(bytes(1001))
    assert b.receive() == [bytes(1000)]
    assert not b.is_open
    a.close()
    b.close()


def test_what_was_sent_before_the_end_is_received_after_it() -> None:
    a, b = ends()
    assert a.send(b"unread")  # so that the end comes as an error, not as an end of file
    assert b.send(b"last words")
    b.close()
    assert a.receive() == [b"last words"]
    assert not a.is_open
    assert a.send(b"to nobody")
    a.close()


def test_a_link_is_lost_once_even_if_a_forked_process_holds_the_socket() -> None:
    ours, theirs = socket.socketpair()
    copy = os.dup(theirs.fileno())  # what a fork has: closing the socket does not end it
    link = LocalLink(FrameSocket(theirs, MAX_NBYTES))
    ours.close()
    assert is_readable(link.fileno(), LIMIT_S)
    assert link.pump() == []
    assert not link.is_open
    assert not is_readable(link.fileno())
    link.wake()
    assert is_readable(link.fileno())
    assert link.pump() == []
    assert not is_readable(link.fileno())
    link.close(0.0)
    link.close(0.0)
    os.close(copy)


def test_close_delivers_what_waits_as_long_as_it_may() -> None:
    ours, theirs = socket.socketpair()
    link = LocalLink(FrameSocket(theirs, MAX_NBYTES))
    frames = [bytes([number]) * 300_000 for number in range(5)]
    for frame in frames:
        link.send(frame)
    reader = FrameSocket(ours, MAX_NBYTES)
    link.close(0.05)  # nobody reads
    got: list[bytes] = []
    while reader.is_open:
        got += reader.receive()
    reader.close()
    assert len(got) < len(frames)
    assert got == frames[: len(got)]


def meet(server: Server) -> list[Client]:
    """Two clients of a server in this thread, which have met."""
    clients = [
        Client("", KEY, rank, 2, link=link_variable(server.open_link())) for rank in range(2)
    ]
    for client in clients:
        client._send(
            "join",
            {"version": WIRE_VERSION, "rank": client._rank, "size": 2, "pid": 1, "info": b"\x80"},
        )
    assert [notice.kind for notice in server.progress()] == ["joined", "joined"]
    for client in clients:
        assert client.progress() == []
        assert client._answers.pop("met")
    return clients


def test_a_rank_that_does_not_read_costs_the_launcher_bounded_memory(server: Server) -> None:
    stopped, talker = meet(server)
    told: list[Any] = []
    cause = {"error": "OperationTimeout", "rank": 1, "reason": "", "members": [0, 1]}
    message = "x" * (1 << 20)
    for context in range(100):
        talker.post("broken", context=context, message=message, **cause)
        while len(told) <= context:
            server.progress()
            told += talker.progress()
    (pair,) = (
        pair
        for pair in server._carriers.pairs._pairs.values()
        if server._by_peer[pair] == stopped._rank
    )
    assert 60 << 20 < pair._waiting_nbytes < 66 << 20
    # It goes on: what was kept arrives in order, and nothing of what was dropped.
    got: list[Any] = []
    while pair._waiting_nbytes or pair._waits_to_send:
        server.progress()
        got += stopped.progress()
    got += stopped.progress()
    assert [event.fields["context"] for event in got] == list(range(len(got)))
    assert 60 < len(got) < 70
    for client in (stopped, talker):
        client.close(0.0)


def test_the_launcher_sleeps_while_a_rank_does_not_read(server: Server) -> None:
    stopped, talker = meet(server)
    talker.post("raised", error="E", text="x" * (1 << 20), peer_failed=False)
    while not server.progress():
        talker.progress()
    assert not is_readable(server.fileno())
    assert is_readable(stopped.fileno())
    while not (events := stopped.progress()):
        server.progress()
    assert events[0].fields["detail"] == "x" * (1 << 20)
    assert not is_readable(server.fileno())
    for client in (stopped, talker):
        client.close(0.0)


def test_a_rank_that_is_gone_leaves_the_launchers_descriptor_quiet(server: Server) -> None:
    clients = meet(server)
    for client in clients:
        client.close(0.0)
    assert is_readable(server.fileno(), LIMIT_S)
    server.progress()
    assert not is_readable(server.fileno())
    server.rank_ended(0, "exit status 0", True)
    server.rank_ended(1, "exit status 1", False)
    assert server.table()[1] == "rank 1: ended (exit status 1)"
