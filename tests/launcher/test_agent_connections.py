"""The input of a rank elsewhere, frames, silence, and addresses that are tried."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agent_runs import LIMIT_S
from tiers import smoke

from pycoll._launcher import line, reach
from pycoll._launcher.host_routes import HostRoute
from pycoll._launcher.input import WINDOW_NBYTES, Input
from pycoll._launcher.line import MARKER, DescriptorLine
from pycoll._launcher.reach import Doorman, HostAddresses, Reachability, reach_all
from pycoll._launcher.reach_table import lines
from pycoll._support.environment import UNENCRYPTED


class Ends:
    """Two connected ends, of which one is tested."""

    def __init__(self, **options: Any) -> None:
        ours, self.theirs = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.heard: list[tuple[str, list[Any]]] = []
        self.lost: list[str] = []
        end = ours.detach()
        self.connection = DescriptorLine(
            end,
            end,
            self.selector,
            lambda kind, fields: self.heard.append((kind, fields)),
            self.lost.append,
            **options,
        )

    def turn(self) -> None:
        for key, _ in self.selector.select(0.1):
            key.data()

    def close(self) -> None:
        self.connection.close()
        self.theirs.close()
        self.selector.close()


READS = """
import hashlib, sys
import pycoll
comm = pycoll.init()
data = sys.stdin.buffer.read()
print(comm.rank, len(data), hashlib.sha256(data).hexdigest()[:8], flush=True)
"""


@pytest.mark.parametrize("kind", ["a file", "a pipe"])
def test_rank_0_has_the_input_wherever_it_is(run: Any, tmp_path: Path, kind: str) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "data").write_bytes(data)
    with contextlib.ExitStack() as stack:
        stdin: Any = stack.enter_context((tmp_path / "data").open("rb"))
        if kind == "a pipe":
            cat = stack.enter_context(
                subprocess.Popen(["cat"], stdin=stdin, stdout=subprocess.PIPE)
            )
            stdin = cat.stdout
        done = run("-H", "far:2,away:1", script=READS, stdin=stdin)
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256(data).hexdigest()[:8]
    nothing = hashlib.sha256(b"").hexdigest()[:8]
    wanted = [f"0 3000000 {digest}", f"1 0 {nothing}", f"2 0 {nothing}"]
    assert sorted(done.stdout.splitlines()) == wanted


def test_input_that_nobody_reads_holds_nothing_up(run: Any) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        script = "import pycoll\npycoll.init().barrier()"
        done = run("-H", "far:1,away:1", script=script, stdin=endless.stdout)
        endless.kill()
    said = done.stderr.removeprefix(f"pycoll-run: {UNENCRYPTED}\n")
    assert (done.returncode, said) == (0, "")


def test_a_rank_may_close_its_input_and_go_on(run: Any) -> None:
    script = """
import os, sys, time
import pycoll
comm = pycoll.init()
if comm.rank == 0:
    print(os.read(0, 4), flush=True)
    os.close(0)
for _ in range(20):
    comm.barrier()
    time.sleep(0.01)
"""
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        done = run("-H", "far:1,away:1", script=script, stdin=endless.stdout)
        endless.kill()
    assert (done.returncode, done.stdout) == (0, "b'y\\ny\\n'\n"), done.stderr


def test_input_that_is_closed_is_none(tmp_path: Path, run: Any) -> None:
    run("-H", "far:1", script=READS)  # writes ssh and the script
    words = [sys.executable, "-P", "-m", "pycoll._launcher", "-H", "far:2", tmp_path / "script.py"]
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell = ["sh", "-c", 'exec "$@" <&-', "sh", *words]
    done = subprocess.run(shell, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert sorted(line[:4] for line in done.stdout.splitlines()) == ["0 0 ", "1 0 "]


def test_an_agent_without_ranks_ends_when_it_is_told() -> None:
    # As where another host did not come: else the launcher would wait for this one, too.
    ours, theirs = socket.socketpair()
    heard: list[str] = []
    with theirs:
        words = [sys.executable, "-P", "-m", "pycoll._launcher.agent", "ssh"]
        agent = subprocess.Popen(words, stdin=theirs, stdout=theirs)
    with selectors.DefaultSelector() as selector:
        end = ours.detach()
        line = DescriptorLine(
            end,
            end,
            selector,
            lambda kind, fields: heard.append(kind),
            lambda why: heard.append("lost"),
            skips=True,
        )
        line.send("end")
        while not {"over", "lost"} & set(heard):
            ready = selector.select(LIMIT_S)
            assert ready
            for key, _ in ready:
                key.data()
        line.close()
    assert agent.wait(LIMIT_S) == 0
    assert "over" in heard


def test_there_may_be_no_input(run: Any) -> None:
    closed = os.open(os.devnull, os.O_WRONLY)  # which cannot be read
    try:
        done = run("-H", "far:1", script=READS, stdin=closed)
    finally:
        os.close(closed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 0 ")


class Line:
    """What an input is passed on by."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, kind: str, data: bytes) -> None:
        assert kind == "input"
        self.sent.append(data)


def test_no_more_input_is_on_the_way_than_the_window() -> None:
    reading, writing = os.pipe()
    line = Line()
    with selectors.DefaultSelector() as selector, open(reading, "rb"), open(writing, "wb") as end:
        one = Input(reading, selector, line)  # type: ignore[arg-type]

        def read_all() -> None:
            while True:
                one.update(0.0)
                ready = selector.select(0) if selector.get_map() else []
                if not ready:
                    return
                for key, _ in ready:
                    key.data()

        for _ in range(20):
            end.write(bytes(60_000))
            end.flush()
            read_all()
            if len(b"".join(line.sent)) >= WINDOW_NBYTES:
                break
        assert len(b"".join(line.sent)) == WINDOW_NBYTES
        read_all()
        assert len(b"".join(line.sent)) == WINDOW_NBYTES
        one.taken(1000)
        read_all()
        assert len(b"".join(line.sent)) == WINDOW_NBYTES + 1000
        one.taken(-1)
        read_all()
        assert len(b"".join(line.sent)) == WINDOW_NBYTES + 1000
        one.close()


def test_a_terminal_is_read_only_in_the_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    line = Line()
    try:
        with selectors.DefaultSelector() as selector:
            one = Input(theirs, selector, line)  # type: ignore[arg-type]
            os.write(ours, b"first\n")
            monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
            assert one.update(10.0) < 12.0
            assert not selector.get_map()
            monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
            assert one.update(11.0) < 13.0
            for key, _ in selector.select(10.0):
                key.data()
            assert line.sent == [b"first\n"]
            monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
            one.update(12.0)
            assert not selector.get_map()
            one.close()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.fixture
def ends() -> Any:
    made: list[Ends] = []

    def make(**options: Any) -> Ends:
        made.append(Ends(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def framed(body: bytes) -> bytes:
    return (len(body) + 1).to_bytes(4, "little") + body + b"\n"


def test_frames_come_in_pieces_and_several_at_a_time(ends: Any) -> None:
    two = ends()
    sender = ends()
    sender.connection.send("a", 1, b"\0\1")
    sender.connection.send("b", "\udcff")
    data = sender.theirs.recv(1000)
    for index in range(len(data)):
        two.theirs.send(data[index : index + 1])
        two.turn()
    two.theirs.send(data)
    two.turn()
    assert two.heard == [("a", [1, b"\0\1"]), ("b", ["\udcff"])] * 2


@pytest.mark.parametrize(
    "wrong", [framed(b"\xc1"), framed(b"\x90"), b"\xff\xff\xff\xff", framed(b"\1")]
)
def test_what_is_no_frame_ends_the_connection(ends: Any, wrong: bytes) -> None:
    two = ends()
    two.theirs.send(wrong)
    two.turn()
    assert two.lost == ["it sends what makes no sense"]
    assert not two.connection.is_open
    two.connection.send("late")


def test_what_comes_before_the_marker_is_kept_as_noise(ends: Any) -> None:
    two = ends(skips=True)
    noise = b"Last login\n" + framed(b"\x91\xa1x") + MARKER[:5]
    for part in (noise, MARKER[:3], MARKER[3:] + framed(b"\x91\xa1a")):
        two.theirs.send(part)
        two.turn()
    assert two.connection.noise == noise
    assert two.heard == [("a", [])]


@smoke
def test_an_end_that_reads_late_gets_everything(ends: Any) -> None:
    two = ends()
    body = b"x" * 5_000_000
    two.connection.send("long", body)
    got = bytearray()
    while len(got) < len(body):
        got += two.theirs.recv(1 << 20)
        two.turn()
    assert body in bytes(got)


def test_silence_is_noticed(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two = ends()
    now = time.monotonic()
    assert not two.connection.is_silent(now)
    for second in range(1, int(line.LOST_S)):
        assert not two.connection.is_silent(now + second)
    assert two.connection.is_silent(now + line.LOST_S + 1)
    assert two.connection.beat_at() <= now + line.BEAT_S


def test_time_in_which_one_was_stopped_itself_is_no_silence(ends: Any) -> None:
    two = ends()
    now = time.monotonic()
    assert not two.connection.is_silent(now + 1)
    resumed = now + 1000
    assert not two.connection.is_silent(resumed)
    for second in range(1, 4):
        assert not two.connection.is_silent(resumed + second)
    for second in range(4, 12):
        lost = two.connection.is_silent(resumed + second)
    assert lost


KEY = bytes(range(32))


@pytest.fixture
def doorman() -> Any:
    one = Doorman(KEY, 7)
    yield one
    one.close()


def test_the_first_address_that_works_is_taken(doorman: Doorman) -> None:
    [found] = reach_all(
        [HostAddresses(7, doorman.port, ["127.0.0.2", "127.0.0.1"])], KEY, measures=True
    )
    assert found.address == "127.0.0.2"
    assert found.failures == []
    assert found.latency_s > 0 < found.nbytes_per_s


def test_who_answers_must_be_the_host_that_was_meant(doorman: Doorman) -> None:
    [found] = reach_all([HostAddresses(6, doorman.port, ["127.0.0.1"])], KEY)
    assert found == Reachability(
        6, "", [f"127.0.0.1 port {doorman.port}: another host answers there"]
    )


def test_a_stranger_is_told_nothing_and_believed_nothing(doorman: Doorman) -> None:
    [found] = reach_all([HostAddresses(7, doorman.port, ["127.0.0.1"])], bytes(32))
    assert found.failures == [
        f"127.0.0.1 port {doorman.port}: whoever listens there is not of this job"
    ]
    with socket.create_server(("127.0.0.1", 0)) as liar:

        def lie() -> None:
            with liar.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(bytes(36))

        thread = threading.Thread(target=lie)
        thread.start()
        port = liar.getsockname()[1]
        [found] = reach_all([HostAddresses(7, port, ["127.0.0.1"])], KEY)
        thread.join()
    assert found.failures == [f"127.0.0.1 port {port}: whoever listens there is not of this job"]


def test_why_an_address_does_not_work_is_said(
    doorman: Doorman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_TRY_S", 0.2)
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        bound.bind(("127.0.0.1", 0))
        port, silent = bound.getsockname()[1], deaf.getsockname()[1]
        refused, slow = reach_all(
            [HostAddresses(7, port, ["127.0.0.1"]), HostAddresses(8, silent, ["127.0.0.1"])], KEY
        )
    assert refused.failures == [f"127.0.0.1 port {port}: connection refused"]
    assert slow.failures == [f"127.0.0.1 port {silent}: no answer in 0.2 s (a firewall?)"]


def test_the_table_of_ways() -> None:
    ways = [
        HostRoute("a", "b", Reachability(1, "10.0.0.2", [], 12e-6, 2.5e9)),
        HostRoute(
            "b", "a", Reachability(0, "", ["10.0.0.1 port 5: no answer in 5 s (a firewall?)"])
        ),
    ]
    assert lines(["a", "b"], ways, {"b": -3.25}, {"c": "a"}) == [
        "from \\ to  a       b",
        "a          -       10.0.0.2 12 us 2.5 GB/s",
        "b          no way  -",
        "c is a, the same host",
        "b cannot reach a:",
        "    10.0.0.1 port 5: no answer in 5 s (a firewall?)",
        "the clock of b is 3.2 s behind this host's",
    ]
