"""Other hosts as the launcher sees them, where ssh is a program that starts the agent right here.

What needs real hosts is in test_hosts.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_runs import LIMIT_S
from tiers import smoke

from pycoll._launcher.hostlist import Slots, lay_out, parse_hosts, read_hostfile
from pycoll._launcher.outcome import CANNOT_START
from pycoll._support.environment import UNENCRYPTED
from pycoll.errors import Error

Run = Callable[..., subprocess.CompletedProcess[str]]


SUM = """
import numpy as np, pycoll
comm = pycoll.init()
total = comm.all_reduce(np.full(100_000, comm.rank + 1.0))
assert (total == comm.size * (comm.size + 1) / 2).all()
print(comm.rank, comm.node, comm.local_rank, comm.local_size)
"""


# The same without NumPy, which takes a rank longer to import than all else.
MEET = """
import pycoll
comm = pycoll.init()
assert comm.all_gather(comm.rank) == list(range(comm.size))
print(comm.rank, comm.node, comm.local_rank, comm.local_size)
"""


def test_ranks_may_be_anywhere(run: Run) -> None:
    done = run("-H", "localhost:1,other:2,localhost,third:1", script=SUM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 0 2", "1 1 0 2", "2 1 1 2", "3 0 1 2", "4 2 0 1",
    ]  # fmt: skip


NEIGHBORS = """
import os, pycoll
from pycoll.schedule import Send
comm = pycoll.init()
assert comm.all_reduce(1, algorithm="ring") == comm.size
steps = comm._group.schedule("all_reduce", "ring").steps
print(os.environ["PYCOLL_HOST"], comm.rank, *{s.peer for s in steps if isinstance(s, Send)})
"""


def test_hosts_stand_in_the_order_of_a_file_by_the_names_they_were_given(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "ring.toml"
    file.write_text('ring = ["other", "localhost", "third"]')
    hosts = ("-H", "localhost:1,other:2,localhost,third:1")
    done = run("-x", f"PYCOLL_TOPOLOGY={file}", *hosts, script=NEIGHBORS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "localhost 0 3", "localhost 3 4", "other 1 2", "other 2 0", "third 4 1",
    ]  # fmt: skip
    file.write_text('ring = ["localhost"]')
    done = run("-x", f"PYCOLL_TOPOLOGY={file}", "-H", "localhost,third", script=NEIGHBORS)
    assert "host third of this job is not in" in done.stderr
    assert done.returncode == 1


# The transport between hosts has the name of one that does not encrypt, if the job does not.
ENCRYPTION = """
import os, pycoll
comm = pycoll.init()
assert comm.all_gather(1) == [1] * comm.size
names = {comm._group.engine.transport.link_name(rank) for rank in range(comm.size)}
names -= {"self", "shm"}
print(os.environ["PYCOLL_ENCRYPT"], *names)
"""


def test_it_is_said_once_that_connections_between_hosts_are_not_encrypted(run: Run) -> None:
    done = run("-H", "localhost,other", script=ENCRYPTION)
    assert (done.returncode, done.stderr) == (0, f"pycoll-run: {UNENCRYPTED}\n")
    assert set(done.stdout.splitlines()) == {"0 tcp"}


def test_the_ranks_of_all_hosts_encrypt_if_the_launcher_says_so(run: Run) -> None:
    done = run("--encrypt", "-H", "localhost,other", script=ENCRYPTION)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.splitlines()) == {"1 zmq"}


@smoke
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


def test_names_of_one_machine_are_one_host(run: Run) -> None:
    done = run("-H", "127.0.0.1,other,localhost,other.site", script=MEET)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0 0 2", "1 1 0 2", "2 0 1 2", "3 1 1 2"]


def test_a_name_of_the_launchers_host_may_only_be_known_by_its_agent(run: Run) -> None:
    here = """[ $name = alias ] && exec sh -c "$last\""""
    done = run("-H", "alias,other,localhost", script=MEET, before=here)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0 0 2", "1 1 0 1", "2 0 1 2"]


BAD = "case $name in bad*) echo 'ssh: oh' >&2; exit 255; esac"


def test_all_hosts_that_cannot_be_reached_are_named_with_the_words_of_ssh(run: Run) -> None:
    done = run("-H", "bad1,other,bad2", script=MEET, before=BAD)
    assert done.returncode == CANNOT_START
    assert done.stderr.splitlines() == [
        line
        for name in ("bad1", "bad2")
        for line in (
            f"pycoll-run: {name}: pycoll could not be started there (ssh: exit status 255)",
            "    ssh: oh",
            f"    try: ssh -o BatchMode=yes {name} true",
        )
    ]


def test_a_host_without_pycoll_says_so(run: Run) -> None:
    before = "echo \"Error while ... (ModuleNotFoundError: No module named 'pycoll')\" >&2; exit 1"
    done = run("-H", "localhost,other", script=MEET, before=before)
    assert done.returncode == CANNOT_START
    head, words = done.stderr.splitlines()
    assert head == f"pycoll-run: other: pycoll is not installed there, for {sys.executable}"
    assert words == "    Error while ... (ModuleNotFoundError: No module named 'pycoll')"


def test_a_login_shell_that_does_not_stop_printing_is_no_host(run: Run) -> None:
    done = run("-H", "localhost,other", script=MEET, before="exec yes")
    assert done.returncode == CANNOT_START
    assert "other: what its login shell prints does not end" in done.stderr


def test_another_version_is_named(run: Run) -> None:
    hello = (
        "from pycoll._launcher import agent; real = agent.versions();"
        "agent.versions = lambda: real | {'pycoll': '9.9'}; agent.main('ssh')"
    )
    done = run("-H", "localhost,other", script=MEET, before=f'exec {sys.executable} -c "{hello}"')
    assert done.returncode == CANNOT_START
    assert "other: its pycoll is 9.9, that of the launcher's host " in done.stderr
    assert "install the same on all hosts" in done.stderr


def test_each_host_has_its_own_home_and_what_its_login_shell_prints_is_skipped(run: Run) -> None:
    script = "import os, pycoll\nprint(pycoll.init().rank, os.environ['HOME'])"
    before = "export HOME=/other; echo hello; printf '\\0\\1\\2'"
    hosts = ("-H", "localhost,other")
    done = run(*hosts, script=script, before=before, HOME="/here", PYCOLL_ENCRYPT="0")
    # Nor is said that connections are not encrypted, to who has said that they need not be.
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["0 /here", "1 /other"]


def test_the_job_can_be_interrupted_while_it_waits_for_a_host(run: Run) -> None:
    started = time.monotonic()
    done = run("--timeout", "1", "-H", "localhost,other", script=MEET, before="sleep 1000 &\nwait")
    assert done.returncode == 124
    assert time.monotonic() - started < LIMIT_S / 2


def test_how_hosts_reach_each_other_is_shown(run: Run) -> None:
    done = run("--check", "-H", "localhost,other")
    assert done.returncode == 0, done.stderr
    head, from_here, from_there = done.stdout.splitlines()[1:4]
    assert head.split() == ["from", "\\", "to", "localhost", "other"]
    assert re.fullmatch(r"localhost +- +127\.0\.0\.1 \d+ us [\d.]+ .B/s", from_here)
    assert re.fullmatch(r"other +127\.0\.0\.1 \d+ us [\d.]+ .B/s +-", from_there)


def test_a_check_shows_the_hosts_that_are_there_and_names_the_others(run: Run) -> None:
    done = run("--check", "-H", "localhost,bad1,other,127.0.0.1,bad2", before=BAD)
    assert done.returncode == CANNOT_START
    head, columns, *_, same = done.stdout.splitlines()
    assert head.startswith("2 hosts, ")
    assert columns.split()[3:] == ["localhost", "other"]
    assert same == "127.0.0.1 is localhost, the same host"
    assert [line.split()[1] for line in done.stderr.splitlines()[::3]] == ["bad1:", "bad2:"]


def test_an_interface_that_hosts_do_not_have_is_named(run: Run) -> None:
    done = run("--interface", "no0", "-H", "localhost,b", __file__)
    assert done.returncode == CANNOT_START
    for line, name in zip(done.stderr.splitlines(), ("localhost", "b"), strict=True):
        assert re.fullmatch(rf"pycoll-run: {name} has no interface no0; it has .*\blo\b.*", line)


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
    ],
)
def test_what_is_wrong_with_the_hosts_is_said(run: Run, words: list[str], told: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert told in done.stderr


@smoke
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
