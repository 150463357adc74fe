"""Other hosts as the launcher sees them, where ssh is a program that starts the agent right here.

What needs real hosts is in test_hosts.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from pycoll._launcher import connection, reach
from pycoll._launcher.connection import MARKER, Connection
from pycoll._launcher.host_routes import Way
from pycoll._launcher.hostlist import Slots, lay_out, parse_hosts, read_hostfile
from pycoll._launcher.input import WINDOW_NBYTES, Input
from pycoll._launcher.reach import Doorman, Reach, Target, reach_all
from pycoll._launcher.reach_table import lines
from pycoll._launcher.spawn import UNENCRYPTED
from pycoll.errors import Error

LIMIT_S = 60 * PATIENCE

SSH = """\
#!/bin/sh
for word; do last=$word; done
BEFORE
exec env -i HOME="$HOME" PATH=/usr/bin:/bin SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" \\
    sh -c "$last"
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`pycoll-run` with words, and a script; `before` is what ssh does before the agent."""

    def run(
        *words: str,
        script: str = "",
        before: str = "",
        stdin: Any = subprocess.DEVNULL,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        ssh = tmp_path / "ssh"
        ssh.write_text(SSH.replace("BEFORE", before))
        ssh.chmod(0o755)
        program = tmp_path / "script.py"
        program.write_text(script)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "pycoll._launcher",
                *words,
                *([program] if script else []),
            ],
            env={**os.environ, "PATH": path, **variables},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    return run


Run = Callable[..., subprocess.CompletedProcess[str]]

SUM = """
import numpy as np, pycoll
comm = pycoll.init()
total = comm.all_reduce(np.full(100_000, comm.rank + 1.0))
assert (total == comm.size * (comm.size + 1) / 2).all()
print(comm.rank, comm.node, comm.local_rank, comm.local_size)
"""


def test_ranks_may_be_anywhere(run: Run) -> None:
    done = run("-H", "localhost:1,other:2,localhost,third:1", script=SUM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 0 2", "1 1 0 2", "2 1 1 2", "3 0 1 2", "4 2 0 1",
    ]  # fmt: skip


# The transport between hosts has the name of one that does not encrypt, if the job does not.
ENCRYPTION = """
import os, pycoll
comm = pycoll.init()
assert comm.all_reduce(1) == comm.size
names = {comm._group.engine.transport.link_name(rank) for rank in range(comm.size)}
names -= {"self", "shm"}
print(os.environ["PYCOLL_ENCRYPT"], *names)
"""


def test_it_is_said_once_that_connections_between_hosts_are_not_encrypted(run: Run) -> None:
    done = run("-H", "localhost:2,other:2", script=ENCRYPTION)
    assert (done.returncode, done.stderr) == (0, f"pycoll-run: {UNENCRYPTED}\n")
    assert set(done.stdout.splitlines()) == {"0 tcp"}


def test_the_ranks_of_all_hosts_encrypt_if_the_launcher_says_so(run: Run) -> None:
    done = run("--encrypt", "-H", "localhost:2,other:2", script=ENCRYPTION)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.splitlines()) == {"1 zmq"}


def test_the_first_rank_that_fails_gives_the_exit_status(run: Run) -> None:
    script = "import pycoll, sys\nif pycoll.init().rank == 2: sys.exit(9)\npycoll.init().barrier()"
    done = run("-H", "localhost:2,other:1", script=script)
    assert done.returncode == 9
    assert re.search(r"rank 2 failed after .*: exit status 9", done.stderr)


def test_output_comes_with_its_rank_and_whole(run: Run) -> None:
    script = "print('y' * 900_000); print('end', end='')"
    done = run("-l", "-H", "other:2", script=script)
    assert done.returncode == 0, done.stderr
    long = "y" * 900_000
    assert sorted(done.stdout.splitlines()) == [
        "[0] end", f"[0] {long}", "[1] end", f"[1] {long}",
    ]  # fmt: skip


def test_a_host_that_cannot_be_reached_is_named_with_the_words_of_ssh(run: Run) -> None:
    done = run("-H", "localhost,other", script=SUM, before="echo 'ssh: oh' >&2; exit 255")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "pycoll-run: other: the agent could not be started (exit status 255)",
        "    ssh: oh",
    ]


def test_a_host_without_pycoll_says_so(run: Run) -> None:
    before = "echo 'No module named pycoll' >&2; exit 1"
    done = run("-H", "localhost,other", script=SUM, before=before)
    assert done.returncode == 2
    assert "other: the agent could not be started (exit status 1)" in done.stderr
    assert "No module named pycoll" in done.stderr


def test_what_a_login_shell_prints_is_skipped(run: Run) -> None:
    done = run("-H", "localhost,other", script=SUM, before="echo hello; printf '\\0\\1\\2'")
    assert done.returncode == 0, done.stderr
    assert "hello" not in done.stdout


def test_a_login_shell_that_does_not_stop_printing_is_no_host(run: Run) -> None:
    done = run("-H", "localhost,other", script=SUM, before="exec yes")
    assert done.returncode == 2
    assert "other: what its login shell prints does not end" in done.stderr


def test_another_version_is_named(run: Run) -> None:
    hello = (
        "from pycoll._launcher import agent; real = agent.versions();"
        "agent.versions = lambda: real | {'pycoll': '9.9'}; agent.main('ssh')"
    )
    done = run("-H", "localhost,other", script=SUM, before=f'exec {sys.executable} -c "{hello}"')
    assert done.returncode == 2
    assert "other: its pycoll is 9.9, that of the launcher's host " in done.stderr
    assert "install the same on all hosts" in done.stderr


def test_each_host_has_its_own_home(run: Run) -> None:
    script = "import os, pycoll\nprint(pycoll.init().rank, os.environ['HOME'])"
    done = run("-H", "localhost,other", script=script, before="export HOME=/other", HOME="/here")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 /here", "1 /other"]


def test_the_job_can_be_interrupted_while_it_waits_for_a_host(run: Run) -> None:
    started = time.monotonic()
    done = run("--timeout", "1", "-H", "localhost,other", script=SUM, before="sleep 1000 &\nwait")
    assert done.returncode == 124
    assert time.monotonic() - started < LIMIT_S / 2


def test_how_hosts_reach_each_other_is_shown(run: Run) -> None:
    done = run("--check", "-H", "localhost,other")
    assert done.returncode == 0, done.stderr
    head, from_here, from_there = done.stdout.splitlines()[1:4]
    assert head.split() == ["from", "\\", "to", "localhost", "other"]
    assert re.fullmatch(r"localhost +- +127\.0\.0\.1 \d+ us [\d.]+ .B/s", from_here)
    assert re.fullmatch(r"other +127\.0\.0\.1 \d+ us [\d.]+ .B/s +-", from_there)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--check"], "--check needs hosts"),
        (["--check", "-H", "a,b", "script.py"], "--check starts no program"),
        (["-H", "a", "--hostfile", "f", __file__], "--hostfile does not go together with -H"),
        (["-H", "a,b", "--emulate-hosts", "2", __file__], "--emulate-hosts does not go together"),
        (["-H", "a:2,b", "-n", "4", __file__], "-n 4 needs as many slots, the hosts have 3"),
        (["-H", "a:0", __file__], "'a:0' is not HOST or HOST:RANKS, as node1:4"),
        (["-H", "fd77::2", __file__], "an IPv6 address is written in brackets"),
        (["--address", "here", "-H", "a,b", __file__], "--address must be an IP address"),
        (["--interface", "no0", "-H", "localhost,b", __file__], "it has told no address"),
    ],
)
def test_what_is_wrong_with_the_hosts_is_said(run: Run, words: list[str], told: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert told in done.stderr


# Names of hosts.


def test_hosts_as_on_the_command_line() -> None:
    assert parse_hosts("a:4, b,[fd77::2]:3,[::1]") == [
        Slots("a", 4), Slots("b", 1), Slots("fd77::2", 3), Slots("::1", 1),
    ]  # fmt: skip
    for wrong in ("", "a,,b", "a:", "a:x", ":4", "a:-1", "-oProxyCommand=x"):
        with pytest.raises(Error):
            parse_hosts(wrong)


def test_a_host_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# all\na slots=4\nb:2 # two\n\nc max_slots=9\n")
    assert read_hostfile(str(file)) == [Slots("a", 4), Slots("b", 2), Slots("c", 1)]
    for wrong in ("", "a b\n", "a slots=x\n", "a slots=1 slots=2\n"):
        file.write_text(wrong)
        with pytest.raises(Error, match=re.escape(str(file))):
            read_hostfile(str(file))
    with pytest.raises(Error, match="No such file"):
        read_hostfile(str(tmp_path / "none"))


def test_slots_are_filled_in_the_order_in_which_they_are_named() -> None:
    slots = [Slots("a", 2), Slots("b", 1), Slots("a", 1)]
    assert lay_out(slots, None) == (["a", "b"], [0, 0, 1, 0])
    assert lay_out(slots, 2) == (["a"], [0, 0])
    with pytest.raises(Error):
        lay_out(slots, 5)


# Frames.


class Ends:
    """Two connected ends, of which one is tested."""

    def __init__(self, **options: Any) -> None:
        ours, self.theirs = socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.heard: list[tuple[str, list[Any]]] = []
        self.lost: list[str] = []
        end = ours.detach()
        self.connection = Connection(
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


# Standard input of a rank 0 on another host.


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
        line = Connection(
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
    for second in range(1, int(connection.LOST_S)):
        assert not two.connection.is_silent(now + second)
    assert two.connection.is_silent(now + connection.LOST_S + 1)
    assert two.connection.beat_at() <= now + connection.BEAT_S


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


# How hosts reach each other.


KEY = bytes(range(32))


@pytest.fixture
def doorman() -> Any:
    one = Doorman(KEY, 7)
    yield one
    one.close()


def test_the_first_address_that_works_is_taken(doorman: Doorman) -> None:
    [found] = reach_all([Target(7, doorman.port, ["127.0.0.2", "127.0.0.1"])], KEY, measures=True)
    assert found.address == "127.0.0.2"
    assert found.failures == []
    assert found.latency_s > 0 < found.nbytes_per_s


def test_who_answers_must_be_the_host_that_was_meant(doorman: Doorman) -> None:
    [found] = reach_all([Target(6, doorman.port, ["127.0.0.1"])], KEY)
    assert found == Reach(6, "", [f"127.0.0.1 port {doorman.port}: another host answers there"])


def test_a_stranger_is_told_nothing_and_believed_nothing(doorman: Doorman) -> None:
    [found] = reach_all([Target(7, doorman.port, ["127.0.0.1"])], bytes(32))
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
        [found] = reach_all([Target(7, port, ["127.0.0.1"])], KEY)
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
            [Target(7, port, ["127.0.0.1"]), Target(8, silent, ["127.0.0.1"])], KEY
        )
    assert refused.failures == [f"127.0.0.1 port {port}: connection refused"]
    assert slow.failures == [f"127.0.0.1 port {silent}: no answer in 0.2 s (a firewall?)"]


def test_the_table_of_ways() -> None:
    ways = [
        Way("a", "b", Reach(1, "10.0.0.2", [], 12e-6, 2.5e9)),
        Way("b", "a", Reach(0, "", ["10.0.0.1 port 5: no answer in 5 s (a firewall?)"])),
    ]
    assert lines(["a", "b"], ways, {"b": -3.25}) == [
        "from \\ to  a       b",
        "a          -       10.0.0.2 12 us 2.5 GB/s",
        "b          no way  -",
        "b cannot reach a:",
        "    10.0.0.1 port 5: no answer in 5 s (a firewall?)",
        "the clock of b is 3.2 s behind this host's",
    ]
