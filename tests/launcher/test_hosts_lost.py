"""Hosts that are lost while a job runs: it begins again, or goes on, on those that are left.

On pretended hosts (`hosts_bed`): `pytest -m hosts`, as root. The other tests of hosts are in
test_hosts.py, those with chance in scripts/soak_failures.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import hosts_bed
import pytest
from hosts_bed import Bed
from hosts_jobs import EMPTY_S, job, until_empty

pytestmark = pytest.mark.hosts

GONE_S = 20.0  # a lost host is named after 8 s, and its ranks have ended 2 s later


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := hosts_bed.why_not():
        pytest.skip(why)
    with hosts_bed.bed(tmp_path_factory.mktemp("hosts"), 3) as hosts:
        yield hosts


@pytest.fixture
def hosts(bed: Bed) -> Iterator[Bed]:
    yield bed
    for name in bed.names:
        bed.heal(name)
    for name in bed.names:
        until_empty(bed, name, EMPTY_S)


# Says "ready" in each attempt, with where it is. In the second one it ends.
AGAIN = """
import fcntl, os, time
import pycoll

attempt, rank = os.environ["PYCOLL_ATTEMPT"], os.environ["PYCOLL_RANK"]
place = open(f"{os.environ['TMPDIR']}/place.{rank}", "w")
fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else the rank of the attempt before lives
comm = pycoll.init()
assert comm.all_reduce(1) == comm.size
print("ready", attempt, comm.rank, comm.size, os.uname().nodename, flush=True)
while attempt == "0":
    comm.all_reduce(1)
    time.sleep(0.02)
comm.barrier()
"""

ALL, RESERVE = ("-H", "hosta:1,hostb:2,hostc:1"), ("-n", "4", "-H", "hosta:2,hostb:2,hostc:2")
CASES = {
    "without power": ("hostb", True, ALL, "hosta hostc", "without hostb: 2 ranks instead of 4"),
    "cut off": ("hostb", False, RESERVE, "hosta hosta hostc hostc", "without hostb: 4 ranks"),
    "alone": ("hosta", False, ALL, "hosta", "without hostb, hostc: 1 rank instead of 4"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_begins_again_on_the_hosts_that_are_left(
    hosts: Bed, script: Callable[[str], str], tmp_path: object, case: str
) -> None:
    host, has_no_power, places, left, told = CASES[case]
    words = ["--no-tag-output", "--restarts", "2", "-x", f"TMPDIR={tmp_path}", *places]
    with job(hosts, *words, script(AGAIN)) as running:
        hosts.cut(host)
        if has_no_power:
            hosts.end_all(host)
        there = left.split()
        running.until("ready 1", GONE_S + 10.0, len(there))
        assert running.end(20.0) == 0, running.said
    assert f"pycoll-run: {told}\n" in running.said
    assert "restart 1 of 2: rank " in running.said
    ready = [line.split()[2:] for line in running.lines if line.startswith("ready 1 ")]
    expected = [[str(r), str(len(there)), each] for r, each in enumerate(there)]
    assert sorted(ready) == expected


# Goes on without those that are lost, until SIGUSR1 comes.
ON = """
import os, signal, time
import pycoll

asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
while True:
    try:
        while not comm.all_reduce(bool(asked)):
            time.sleep(0.02)
        is_finished = True
    except pycoll.PeerFailed as error:
        is_finished = False
    if comm.agree(is_finished):
        break
    comm = comm.shrink()
    print("shrunk to", *comm.members, flush=True)
"""


@pytest.mark.parametrize("has_no_power", [True, False])
def test_a_job_goes_on_without_one_host_and_then_without_another(
    hosts: Bed, script: Callable[[str], str], has_no_power: bool
) -> None:
    with job(hosts, "--no-tag-output", "--survive", "-H", "hosta:1,hostb:2,hostc:2", script(ON),
             ready=5) as running:  # fmt: skip
        hosts.cut("hostb")
        if has_no_power:
            hosts.end_all("hostb")
        running.until("shrunk to 0 3 4", GONE_S, 3)
        hosts.signal("hostc", signal.SIGKILL, "pycoll._launcher.agent")
        running.until("shrunk to 0\n", GONE_S)
        hosts.signal("hosta", signal.SIGUSR1, "pycoll._launcher --no")
        assert running.end(20.0) == 0, running.said
    for rank, host in (1, "hostb"), (2, "hostb"), (3, "hostc"), (4, "hostc"):
        assert f"rank {rank} failed after" in running.said
        assert f"lost with its host {host}: " in running.said


def test_nothing_is_left_of_a_launcher_that_is_killed_when_a_host_has_been_cut_off(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    with job(hosts, "-H", "hosta:1,hostb:1,hostc:1", script(ON), ready=3):
        hosts.cut("hostb")
        hosts.signal("hosta", signal.SIGKILL, "pycoll._launcher -H")
        for name in hosts.names:  # ssh to hostb ends by itself
            until_empty(hosts, name, GONE_S)
