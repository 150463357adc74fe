"""Jobs on several hosts, which are pretended (`hosts_bed`): `pytest -m hosts`, as root."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hosts_bed
import pytest
from hosts_bed import PYCOLL_RUN, Bed
from hosts_jobs import EMPTY_S, LOOP, NAMED_S, ORACLE, job, run, until_empty
from patience import PATIENCE

from pycoll._launcher.outcome import CANNOT_START

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := hosts_bed.why_not():
        pytest.skip(why)
    with hosts_bed.bed(tmp_path_factory.mktemp("hosts"), 3, decoy=True) as bed:
        yield bed


@pytest.fixture(autouse=True)
def nothing_is_left(hosts: Bed) -> Iterator[None]:
    yield
    for name in hosts.names:
        until_empty(hosts, name, 5.0)


LAYOUTS = {
    "hosta:2,hostb:2": ["hosta", "hosta", "hostb", "hostb"],
    "hosta:3,hostb:1": ["hosta", "hosta", "hosta", "hostb"],
    "hosta,hostb,hosta,hostb": ["hosta", "hostb", "hosta", "hostb"],
    "hostb:2,hostc:1": ["hostb", "hostb", "hostc"],
    "hostc,hosta,hostb": ["hostc", "hosta", "hostb"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_right_in_any_layout(
    hosts: Bed, script: Callable[[str], str], layout: str
) -> None:
    done = run(hosts, "-H", layout, script(ORACLE))
    assert done.returncode == 0, done.stderr
    where = {int(line.split()[0]): line.split()[4] for line in done.stdout.splitlines()}
    assert [where[rank] for rank in sorted(where)] == LAYOUTS[layout]


def test_hosts_are_reached_by_ipv6(hosts: Bed, script: Callable[[str], str]) -> None:
    done = run(hosts, "-H", "hosta:2,[fd77::2]:2", script(ORACLE))
    assert done.returncode == 0, done.stderr


def test_ranks_have_the_same_environment_on_all_hosts(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    program = script("import os; print(*sorted(os.environ))")
    words = ["env", "ONLY_HERE=1", "OMP_SCHEDULE=static", *PYCOLL_RUN]
    done = hosts.run("hosta", *words, "-H", "hosta,hostb", "-x", "GIVEN=2", program)
    here, there = (set(line.split()) for line in done.stdout.splitlines())
    assert here == there
    assert {"GIVEN", "OMP_SCHEDULE", "PATH", "HOME"} <= here
    assert "ONLY_HERE" not in here


def test_a_program_that_is_not_on_another_host(hosts: Bed, tmp_path: Path) -> None:
    # Under /dev/shm, which each host has for itself.
    hosts.run(
        "hosta",
        "sh",
        "-c",
        "printf '#!/bin/sh\\nsleep 60\\n' > /dev/shm/own; chmod +x /dev/shm/own",
    )
    done = run(hosts, "-H", "hosta,hostb", "--", "/dev/shm/own")
    assert done.returncode == 127
    assert "hostb: cannot run /dev/shm/own: No such file or directory" in done.stderr


def test_a_host_that_is_not_there_is_named(hosts: Bed, script: Callable[[str], str]) -> None:
    done = run(hosts, "-H", "hosta:2,hostx:2,hosty", script(ORACLE))
    assert done.returncode == CANNOT_START
    for name in ("hostx", "hosty"):
        assert f"{name}: pycoll could not be started there (ssh: exit status 255)" in done.stderr
        assert f"ssh: Could not resolve hostname {name}" in done.stderr
        assert f"    try: ssh -o BatchMode=yes {name} true" in done.stderr


def test_names_and_addresses_of_one_machine_are_one_host(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    layout = "hosta,hostb,10.77.0.1,10.77.0.2,[fd77::2],root@hosta"
    done = run(hosts, "--verbose", "-H", layout, script(ORACLE))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 0 3 hosta", "1 1 0 3 hostb", "2 0 1 3 hosta", "3 1 1 3 hostb", "4 1 2 3 hostb",
        "5 0 2 3 hosta",
    ]  # fmt: skip
    for other in ("10.77.0.2", "fd77::2"):
        assert f"pycoll-run: {other} is hostb\n" in done.stderr


def test_a_check_shows_what_is_there_and_names_what_is_not(hosts: Bed) -> None:
    done = run(hosts, "--check", "-H", "hosta,hostx,hostb,hosty,10.77.0.2")
    assert done.returncode == CANNOT_START
    head, table, from_a, from_b, same = done.stdout.splitlines()
    assert head.startswith("2 hosts, ")
    assert table.split() == ["from", "\\", "to", "hosta", "hostb"]
    assert "10.77.0.2" in from_a
    assert "10.77.0.1" in from_b
    assert same == "10.77.0.2 is hostb, the same host"
    for name in ("hostx", "hosty"):
        assert f"pycoll-run: {name}: pycoll could not be started there" in done.stderr


def test_the_key_is_on_no_command_line_and_in_no_log(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    program = script("import os; print('key', os.environ['PYCOLL_KEY'])\n" + LOOP)
    with job(hosts, "--verbose", "-H", "hosta:2,hostb:2", program) as running:
        key = next(line.split()[-1] for line in running.lines if "key " in line)
        shown = [line for line in running.lines if not re.search(r"key [0-9a-f]{64}$", line)]
        lines = [*hosts.processes("hosta"), *hosts.processes("hostb"), *shown]
        assert len(lines) > 10
        assert not any(key in line for line in lines)


def test_the_launcher_opens_no_port(hosts: Bed, script: Callable[[str], str]) -> None:
    with job(hosts, "--transport", "tcp", "-H", "hosta:2,hostb:2", script(LOOP)):
        table = hosts.run("hosta", "ss", "-ltnpH").stdout.splitlines()
        open_to_all = [line for line in table if "127.0.0.1" not in line and "sshd" not in line]
        assert len(open_to_all) == 2, table  # of the two ranks


# What goes wrong.


def test_a_rank_that_is_killed_ends_the_job(hosts: Bed, script: Callable[[str], str]) -> None:
    program = script("import os; print('pid', os.environ['RANK'], os.getpid(), flush=True)" + LOOP)
    with job(hosts, "-H", "hosta:2,hostb:2", program) as running:
        pid = next(line.split()[-1] for line in running.lines if "pid 3 " in line)
        hosts.run("hostb", "kill", "-9", pid, check=True)
        assert running.end(10.0) == 128 + signal.SIGKILL
    assert "rank 3 failed after" in running.said
    assert running.said.count("PeerFailed: rank 3 failed: killed by signal 9") >= 3


def test_an_agent_that_is_killed_is_a_lost_host(hosts: Bed, script: Callable[[str], str]) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)) as running:
        hosts.signal("hostb", signal.SIGKILL, "pycoll._launcher.agent")
        assert running.until("lost with its host hostb: pycoll has ended there", NAMED_S) < NAMED_S
        until_empty(hosts, "hostb", 5.0)
        assert running.end(10.0) == 1


def test_a_launcher_that_is_killed_leaves_nothing(hosts: Bed, script: Callable[[str], str]) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)):
        hosts.signal("hosta", signal.SIGKILL, "pycoll._launcher -H")
        until_empty(hosts, "hosta", EMPTY_S)
        until_empty(hosts, "hostb", EMPTY_S)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_of_all_hosts(
    hosts: Bed, script: Callable[[str], str], signum: signal.Signals
) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)) as running:
        hosts.signal("hosta", signum, "pycoll._launcher -H")
        assert running.end(10.0) == 128 + signum
    assert f"ended by {signum.name} after" in running.said


def test_the_time_of_a_job_is_over_on_all_hosts(hosts: Bed, script: Callable[[str], str]) -> None:
    done = run(hosts, "--timeout", "4", "-H", "hosta:1,hostb:1", script(
        "import pycoll\ncomm = pycoll.init()\nif comm.rank: comm.recv(0)\nelse: comm.recv(1)"
    ))  # fmt: skip
    assert done.returncode == 124
    assert "rank 1: recv(source=0" in done.stderr


def test_a_cable_that_is_out_for_3_s_does_no_harm(hosts: Bed, script: Callable[[str], str]) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)) as running:
        hosts.cut("hostb")
        time.sleep(3.0)  # the length of the cut is what is tested
        hosts.heal("hostb")
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(9.0)  # longer than silence is borne
        assert "lost" not in running.said
        hosts.signal("hosta", signal.SIGINT, "pycoll._launcher -H")
        assert running.end(10.0) == 130


def test_a_message_to_a_host_whose_cable_is_out_for_5_s_arrives(
    hosts: Bed, script: Callable[[str], str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "now")
    text = """
import sys
import pycoll

comm = pycoll.init()
if comm.rank == 0:
    print("ready", flush=True)
    open(sys.argv[1]).read()
    comm.ssend("here I am", 1)  # the first message: the ranks have no connection yet
else:
    print("heard", comm.recv(0), flush=True)
"""
    words = ("-H", "hosta:1,hostb:1", script(text), str(tmp_path / "now"))
    with job(hosts, *words, ready=1) as running:
        hosts.cut("hostb")
        hosts.run("hosta", "ip", "neigh", "flush", "all")  # so the kernel asks for it, for 3 s
        (tmp_path / "now").write_text("send")
        time.sleep(5.0)  # the length of the cut is what is tested
        hosts.heal("hostb")
        running.until("heard here I am", NAMED_S)
        assert running.end(10.0) == 0, running.said


def test_a_cable_that_stays_out_is_a_lost_host_on_both_sides(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)) as running:
        try:
            hosts.cut("hostb")
            cut_at = time.monotonic()
            took = running.until("PeerFailed: rank 2 failed: lost with its host hostb", NAMED_S, 2)
            assert took < NAMED_S
            assert running.end(10.0) == 1
            until_empty(hosts, "hosta", EMPTY_S)
            until_empty(hosts, "hostb", EMPTY_S)
            assert time.monotonic() - cut_at < EMPTY_S
        finally:
            hosts.heal("hostb")
    assert "no sign of life for 8 s" in running.said


def test_a_stopped_agent_is_a_lost_host_and_a_stopped_rank_is_not(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)) as running:
        hosts.run("hostb", "pkill", "-STOP", "-n", "-f", "script.py")
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(10.0)
        hosts.run("hostb", "pkill", "-CONT", "-n", "-f", "script.py")
        hosts.signal("hostb", signal.SIGSTOP, "pycoll._launcher.agent")
        running.until("lost with its host hostb: no sign of life", NAMED_S)
        running.end(10.0)
        # The ranks are ended though nobody continues the agent.
        deadline = time.monotonic() + PATIENCE * EMPTY_S
        while any("script.py" in line for line in hosts.processes("hostb")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        hosts.signal("hostb", signal.SIGCONT, "pycoll._launcher.agent")


def test_a_host_without_power_is_lost(
    tmp_path: Path, script: Callable[[str], str], hosts: Bed
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    with hosts_bed.bed(folder, 2) as own, job(own, "-H", "hosta:2,hostb:2", script(LOOP)) as it:
        own.lose("hostb")
        assert it.until("PeerFailed: rank 2 failed: lost with its host hostb", NAMED_S, 2) < NAMED_S
        assert it.end(10.0) == 1


def test_eight_hosts_of_four_ranks(
    tmp_path: Path, script: Callable[[str], str], hosts: Bed
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    with hosts_bed.bed(folder, 8) as own:
        layout = ",".join(f"{name}:4" for name in own.names)
        done = run(own, "-H", layout, script("""
import numpy as np, pycoll
comm = pycoll.init()
assert comm.all_reduce(np.ones(1))[0] == 32 == comm.size
assert comm.local_size == 4
"""))  # fmt: skip
        assert done.returncode == 0, done.stderr


SENT = """
import numpy as np
import pycoll

def sent():
    with open("/proc/self/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.startswith(("  eth0:", "eth0:")))

comm = pycoll.init()
x = np.ones(1 << 19)  # 4 MiB
for name in (None, "ring"):
    comm.all_reduce(x, algorithm=name)
    comm.barrier()
    before = sent()
    comm.barrier()  # else another rank of this host may have sent already
    comm.all_reduce(x, algorithm=name)
    comm.barrier()
    mine = sent() - before if comm.local_rank == 0 else 0
    total = comm.all_reduce(mine)
    if comm.rank == 0:
        print(name, comm.explain("all_reduce", x.nbytes).algorithm, total / x.nbytes, flush=True)
"""


def test_hosts_send_each_other_no_more_than_they_must(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    done = run(hosts, "--no-tag-output", "-H", "hosta:4,hostb:4", script(SENT))
    assert done.returncode == 0, done.stderr
    (_, name, chosen), (_, _, ring) = (line.split() for line in done.stdout.splitlines())
    assert name == "hierarchical"
    # Each of two hosts sends the other the half that this has to reduce, and the half that it has
    # reduced: two values in all. A ring of 8 sends 7/4 values over each of its two cables.
    assert 2.0 <= float(chosen) < 2.1
    assert 3.5 <= float(ring) < 3.7


def test_a_job_that_is_suspended_goes_on(hosts: Bed, script: Callable[[str], str]) -> None:
    with job(hosts, "-H", "hosta:2,hostb:2", script(LOOP)) as running:
        everything = "script.py|pycoll._launcher|guardian"
        for name in ("hosta", "hostb"):
            hosts.signal(name, signal.SIGSTOP, everything)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(15.0)  # longer than it takes to be taken for lost
        for name in ("hosta", "hostb"):
            hosts.signal(name, signal.SIGCONT, everything)
        running.process.send_signal(signal.SIGCONT)  # nsenter, which stops with its command
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(12.0)
        assert "failed" not in running.said
        hosts.signal("hosta", signal.SIGTERM, "pycoll._launcher -H")
        assert running.end(10.0) == 143


def test_a_firewall_is_named_with_the_port(hosts: Bed, script: Callable[[str], str]) -> None:
    # A route that drops what is for one host, as a firewall would: no answer comes.
    assert hosts.run("hostb", "ip", "route", "add", "blackhole", "10.77.0.3/32").returncode == 0
    assert hosts.run("hostb", "ip", "-6", "route", "add", "blackhole", "fd77::3").returncode == 0
    try:
        done = run(hosts, "-H", "hosta,hostb,hostc", script(ORACLE))
    finally:
        hosts.run("hostb", "ip", "route", "del", "blackhole", "10.77.0.3/32")
        hosts.run("hostb", "ip", "-6", "route", "del", "blackhole", "fd77::3")
    assert done.returncode == CANNOT_START
    assert re.search(r"hostb cannot reach hostc: .*10\.77\.0\.3 port \d+: ", done.stderr)
    assert "Traceback" not in done.stderr


def test_an_address_of_this_host_needs_no_ssh(hosts: Bed, script: Callable[[str], str]) -> None:
    done = run(hosts, "--verbose", "-H", "10.77.0.1:2,10.77.0.2:2", script(ORACLE))
    assert done.returncode == 0, done.stderr
    assert "10.77.0.2: its launcher is started by ssh" in done.stderr
    assert "10.77.0.1: its launcher" not in done.stderr


# Saves when it is told to end, as before a host is taken away; in a second attempt it is done.
SAVES = """
import os, signal, sys, pycoll
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
comm = pycoll.init()
comm.barrier()
print("ready", os.environ["PYCOLL_ATTEMPT"], comm.rank, comm.size, comm.node, flush=True)
while os.environ["PYCOLL_ATTEMPT"] == "0" and not comm.all_reduce(len(asked), op="min"):
    pass
print("saved" if asked else "done", flush=True)
"""


def test_ranks_save_before_a_host_is_taken_away_and_the_job_begins_again_without_it(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    options = ("--grace", "60", "--restarts", "1", "-H", "hosta:2,hostb:2")
    with job(hosts, *options, script(SAVES)) as running:
        hosts.signal("hostb", signal.SIGTERM, "pycoll._launcher.agent")
        assert running.end(30.0) == 0, running.said
    assert running.said.count("saved") == 4
    why = "lost with its host hostb: pycoll was ended there by SIGTERM"
    assert re.search(rf"pycoll-run: restart 1 of 1: rank 2 failed after .* s: {why}", running.said)
    assert "pycoll-run: without hostb: 2 ranks instead of 4\n" in running.said
    last = [line for line in running.lines if "ready 1 " in line]
    assert sorted(line.split("ready ")[1].split() for line in last) == [
        ["1", "0", "2", "0"],
        ["1", "1", "2", "0"],
    ]
    assert running.said.count("done") == 2
