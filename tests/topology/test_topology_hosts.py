"""Links between pretended hosts, one of them narrow: `pytest -m hosts`, as root."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hosts_bed
import pytest
from hosts_bed import Bed
from hosts_jobs import ORACLE, run

from pycoll._topology import links

pytestmark = pytest.mark.hosts

RING = """
import pycoll
from pycoll.schedule import Send
comm = pycoll.init()
steps = comm._group.schedule("all_reduce", "ring").steps
print(comm.rank, *{step.peer for step in steps if isinstance(step, Send)})
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := hosts_bed.why_not():
        pytest.skip(why)
    with hosts_bed.bed(tmp_path_factory.mktemp("hosts"), 3) as bed:
        yield bed


def test_a_ring_goes_round_against_the_direction_in_which_a_link_is_narrow(
    hosts: Bed, script: Callable[[str], str], tmp_path: Path
) -> None:
    hosts.limit(200, {("hosta", "hostb"): 25})
    file = tmp_path / "links.toml"
    command = [sys.executable, "-P", "-m", "pycoll", "topology", "--measure", "-o", str(file)]
    done = hosts.run("hosta", *command, "-H", "hosta:1,hostb:2,hostc:1")
    assert done.returncode == 0, done.stderr
    found = links.read(str(file))
    assert found.ring == ("hosta", "hostc", "hostb")
    assert 2 < found.widths[0][1] < 4  # 25 Mbit/s are 3.1 MB/s
    assert found.widths[1][0] > 10
    job = ("-x", f"PYCOLL_TOPOLOGY={file}", "-H", "hosta,hostb,hostc,hosta,hostb")
    done = run(hosts, *job, script(RING))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 3", "1 4", "2 1", "3 2", "4 0"]
    done = run(hosts, *job, script(ORACLE))
    assert done.returncode == 0, done.stderr


def test_a_rank_whose_host_has_another_file_is_refused(
    hosts: Bed, script: Callable[[str], str]
) -> None:
    # /run is each host's own.
    for host, ring in (("hosta", '["hosta", "hostb"]'), ("hostb", '["hostb", "hosta"]')):
        done = hosts.run(host, "sh", "-c", f"echo 'ring = {ring}' > /run/ring.toml")
        assert done.returncode == 0, done.stderr
    job = ("-x", "PYCOLL_TOPOLOGY=/run/ring.toml", "-H", "hosta,hostb")
    done = run(hosts, *job, script(RING))
    assert done.returncode == 1
    assert (
        "/run/ring.toml of rank 1, on hostb, differs from /run/ring.toml of rank 0" in done.stderr
    )
    assert hosts.run("hostb", "rm", "/run/ring.toml").returncode == 0
    assert run(hosts, *job, script(RING)).returncode == 0  # rank 0's is told
