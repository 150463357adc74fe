"""Whole jobs over RDMA: how they start, fail and end, and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pycoll

RDMA = ("--transport", "rdma")
RUN = [sys.executable, "-m", "pycoll._launcher"]

FAILURE_S = 20.0
"""Within this everybody knows of a failure; 5 s, but the virtual machine is a slow one."""

RESOURCES = f"""
import json, subprocess

def own(kind):
    "How many queue pairs (qp) or registrations (mr) the kernel knows of this process."
    shown = ["rdma", "-j", "resource", "show", kind]
    said = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
    return sum(thing.get("pid") == os.getpid() for thing in json.loads(said or "[]"))

FAILURE_S = {FAILURE_S}
"""


def resources() -> dict[tuple[str, int], int]:
    """What processes hold, as the kernel counts it: {(kind, pid): number}."""
    found: dict[tuple[str, int], int] = {}
    for kind in ("qp", "mr", "cq", "pd"):
        said = subprocess.run(
            ["rdma", "-j", "resource", "show", kind], check=True, capture_output=True, text=True
        ).stdout
        for thing in json.loads(said or "[]"):
            if "pid" in thing:
                key = kind, thing["pid"]
                found[key] = found.get(key, 0) + 1
    return found


@pytest.fixture(autouse=True)
def no_resources_stay_behind() -> Iterator[None]:
    before = resources()
    yield
    new = {key: count for key, count in resources().items() if key not in before}
    assert not new, "the kernel keeps queue pairs or memory of this test's processes"


def run(*command: str, within: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )


# --- starting ----------------------------------------------------------------------------------


def test_a_job_may_have_one_rank() -> None:
    program = "import pycoll; print(pycoll.init().all_reduce(3))"
    done = run(*RUN, "-n", "1", *RDMA, "--", sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def ring(comm: Any, nbytes: int) -> tuple[str, bytes]:
    peer = (comm.rank + 1) % comm.size
    got = comm.sendrecv(bytes([comm.rank]) * nbytes, peer, comm.rank - 1 if comm.rank else peer)
    return comm._group.engine.transport.link_name(peer), got


def test_functions_are_run_with_it() -> None:
    nbytes = 200_000
    results = pycoll.run(ring, 2, nbytes, transport="rdma", timeout=100.0)
    assert results == [("rdma", b"\1" * nbytes), ("rdma", b"\0" * nbytes)]


def test_it_can_be_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ["-n", "2", *RDMA, "--sizes", "8,64K", "--rounds", "1", "--json", str(file)]
    done = run(*RUN[:2], "pycoll._tools.cli", "bench", "send", *options)
    assert done.returncode == 0, done.stderr
    said = json.loads(file.read_text())
    assert "rdma" in json.dumps(said)


# One rank of two has a device that does not exist.
WITHOUT = """
[ "$PYCOLL_RANK" = 0 ] || export PYCOLL_RDMA_DEVICE=nonsense
exec "$@"
"""


def with_one_without(options: list[str], text: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", text]
    command = ["--", "/bin/sh", "-c", WITHOUT, "sh", *program]
    return run(*RUN, "-n", "2", "--timeout", "100", *options, *command)


def test_a_host_without_a_device_means_tcp_and_one_warning() -> None:
    done = with_one_without(
        ["--emulate-hosts", "2"],
        """
import pycoll
with pycoll.init() as comm:
    names = {comm._group.engine.transport.link_name(rank) for rank in range(comm.size)}
    assert len(names) == 2 and "rdma" not in names, names
    assert comm.all_reduce(comm.rank) == 1
""",
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert len(warned) == 1, done.stderr
    assert "rdma: PYCOLL_RDMA_DEVICE=nonsense is no device or port here" in warned[0]
    assert "communicate by TCP" in warned[0]


def test_where_rdma_is_wanted_the_rank_without_it_is_named_with_the_reason() -> None:
    done = with_one_without([*RDMA], "import pycoll; pycoll.init()")
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("pycoll-run: rank ") :]
    assert last.startswith("pycoll-run: rank 1 failed after"), done.stderr
    assert "rdma: PYCOLL_RDMA_DEVICE=nonsense is no device or port here" in last


def test_memory_that_may_not_be_locked_is_copied_in_pieces_and_the_user_is_told_once() -> None:
    text = """
import re, resource, sys, warnings
import numpy as np
import pycoll
limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
assert limit == 8 << 20, limit
with pycoll.init() as comm, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    other = 1 - comm.rank
    for mebibytes in 1, 12, 2, 12:
        x = np.arange(mebibytes << 17) + comm.rank
        got = comm.sendrecv(x, other, other)
        assert got.size == x.size and (got - other == x - comm.rank).all(), mebibytes
        assert bool(caught) == (mebibytes == 12 or len(caught) > 0)
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    said = str(caught[0].message)
    assert re.search(rf"rank {comm.rank} cannot register 12582912 bytes", said), said
    assert "may lock 8192 KiB: raise `ulimit -l`" in said, said
print("right")
"""
    # Not root, whom no limit holds; but one who may read the files of this test's interpreter.
    reading = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", *reading]
    limited = ["/bin/sh", "-c", 'ulimit -l 8192; exec "$@"', "sh"]
    job = [*RUN, "-n", "2", "--timeout", "100", *RDMA, "--", sys.executable, "-c", text]
    done = run(*limited, *(user if os.geteuid() == 0 else []), *job)
    assert (done.returncode, done.stdout) == (0, "right\n" * 2), done.stderr


# --- dying -------------------------------------------------------------------------------------


def test_an_idle_rank_that_is_killed_fails_who_waits_for_it(job: Any) -> None:
    done = job(
        2,
        RESOURCES
        + """
x = np.ones(100_000)
assert comm.sendrecv(x, 1 - rank, 1 - rank).sum() == x.size  # a link, and a lane
if rank == 1:
    await_table((0, "recv.source=1"))
    os.kill(os.getpid(), signal.SIGKILL)
peer_failed(1, SIGKILL, comm.recv, 1, within=FAILURE_S)
for call, *args in (comm.send, x, 1), (comm.recv, 1), (comm.barrier,):
    peer_failed(1, SIGKILL, call, *args, within=FAILURE_S)
pycoll.finalize()
assert own("qp") == own("mr") == 0
ok()
""",
        *RDMA,
    )
    assert done.status == 137
    assert done.content == [0], done.stderr


def test_a_rank_killed_in_the_middle_of_large_writes_fails_both_directions(job: Any) -> None:
    # Rank 3 writes to 0, and 1 to it, when 0 sees the first bytes.
    done = job(
        4,
        RESOURCES
        + """
nbytes = 32 << 20
survivors = comm.split(0 if rank < 3 else None)
pids = comm.all_gather(os.getpid())
x = np.full(nbytes, rank + 1, np.uint8)
if rank == 3:
    receive = comm.irecv(1, out=np.empty_like(x))
    for _ in range(8):
        comm.send(x, 0)
elif rank == 0:
    out = np.zeros_like(x)

    def kill():
        while not out[0]:
            pass
        os.kill(pids[3], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    peer_failed(3, SIGKILL, comm.recv, 3, out=out, within=FAILURE_S)
    killing.join()
    assert out[0] == 4 and out[-1] == 0
    before = out.copy()
elif rank == 1:
    peer_failed(3, SIGKILL, lambda: [comm.send(x, 3) for _ in range(8)], within=FAILURE_S)
else:
    peer_failed(3, SIGKILL, comm.barrier, within=FAILURE_S)
# The others still reach each other.
right, left = (rank + 1) % 3, (rank - 1) % 3
assert (survivors.sendrecv(x[:200_000], right, left) == left + 1).all()
if rank == 0:
    assert (out == before).all()
ok()
""",
        *RDMA,
    )
    assert done.status == 137
    assert done.content == [0, 1, 2], done.stderr
    assert "rank 3 failed after" in done.stderr


def test_a_fork_harms_nobody(job: Any) -> None:
    done = job(
        2,
        RESOURCES
        + """
import gc, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
x = np.arange(300_000.0)
comm.sendrecv(x, 1 - rank, 1 - rank)
registered = own("mr"), own("qp")
assert min(registered) > 0

def collect():
    global comm, x
    del comm, x
    gc.collect()
    os._exit(0)

def communicate():
    error_like(pycoll.Error, "was forked from a rank", comm.send, x, 1 - rank)
    os._exit(0)

def drop():
    pycoll.finalize()
    sys.exit(3)

for ends, status in (collect, 0), (communicate, 0), (drop, 3), (lambda: sys.exit(5), 5):
    request = comm.irecv(1 - rank, tag=1)  # something is under way
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        ends()
    x += 1  # in pages that the child has, too
    assert (comm.sendrecv(x, 1 - rank, 1 - rank, recvtag=0) == x).all()
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    os.close(reading)
    comm.send(x, 1 - rank, tag=1)
    assert (request.wait() == x).all()
    x += 1
    assert comm.all_reduce(x)[-1] == 2 * x[-1]
assert own("qp") == registered[1]
ok()
""",
        *RDMA,
    )
    assert done.status == 0, done.stderr
    assert not done.stderr, done.stderr
    assert done.content == [0, 1]


# --- ending ------------------------------------------------------------------------------------


def test_who_leaves_delivers_what_it_has_sent_and_gives_everything_back(job: Any) -> None:
    done = job(
        2,
        RESOURCES
        + """
large = np.ones(300_000)
comm.sendrecv(large, 1 - rank, 1 - rank)
assert own("qp") >= 2 and own("mr") > 0
peer = comm.sendrecv(os.getpid(), 1 - rank, 1 - rank)
if rank == 0:
    await_end(peer)
    assert [comm.recv(1) for _ in range(100)] == [*range(100)]
    assert comm.recv(1).size == 5000
else:
    for number in range(100):
        comm.send(number, 0)
    comm.send(large[:5000], 0)
pycoll.finalize()
assert own("qp") == own("mr") == own("cq") == own("pd") == 0
ok()
""",
        *RDMA,
    )
    assert done.status == 0, done.stderr
    assert not done.stderr, done.stderr
    assert done.content == [0, 1]
