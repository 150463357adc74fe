"""What ranks had called last: messages between programs, ranks of other hosts, and garbage."""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_jobs import LIMIT_S
from launcher_jobs import run as run_here
from tiers import few, smoke

from pycoll._launcher.calls_report import difference, lines
from pycoll._launcher.kept_calls import HostCalls, merged
from pycoll._transports.shm import NOTES_NBYTES

Run = Callable[..., subprocess.CompletedProcess[str]]

MESSAGES = """
import contextlib, os, sys
import numpy as np
import pycoll
comm = pycoll.init(transport=sys.argv[1])
if comm.rank == 0:
    comm.send(np.ones(4), 1, tag=7)
    waits = comm.issend(np.ones(100_000), 1, tag=8)
    comm.recv(1)
    os._exit(3)
comm.recv(0, out=np.empty(4))
waits = comm.irecv(0, tag=9, out=np.empty(5)), comm.irecv(tag=10)
with contextlib.suppress(pycoll.OperationTimeout):
    comm.recv(0, tag=11, timeout=0.01)
comm.send(b"", 0)
comm.recv(0, tag=12)
"""


def section(said: str, head: str) -> list[str]:
    """The lines below one of a report."""
    return said[said.index(head) :].split("\n\n")[0].splitlines()[1:]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_are_told_with_peer_tag_bytes_and_whether_they_have_finished(
    tmp_path: Path, transport: str
) -> None:
    program = tmp_path / "script.py"
    program.write_text(MESSAGES)
    done = run_here("-n", "2", "--log-dir", str(tmp_path / "logs"), str(program), transport)
    assert done.returncode == 3, done.stderr
    said = (tmp_path / "logs/calls.txt").read_text()
    first = section(said, "point to point, the last of rank 0:")
    assert first[:2] == [
        "    1  send to rank 1, tag 7, 32 bytes, on world",
        "    2  send to rank 1, tag 8, 800000 bytes, on world, not finished",
    ]
    assert first[2].startswith("    3  recv from rank 1, tag 0, ")
    assert first[2].endswith(" bytes, on world")
    assert len(first) == 3
    second = section(said, "point to point, the last of rank 1:")
    assert second[:4] == [
        "    1  recv from rank 0, tag 7, 32 bytes, on world",
        "    2  recv from rank 0, tag 9, at most 40 bytes, on world, not finished",
        "    3  recv from any rank, tag 10, of any length, on world, not finished",
        "    4  recv from rank 0, tag 11, of any length, on world, given up",
    ]
    under_way = section(said, "point to point, not finished:")
    assert under_way[:3] == [
        "    rank 0: send to rank 1, tag 8, 800000 bytes, on world, not finished",
        "    rank 1: recv from rank 0, tag 9, at most 40 bytes, on world, not finished",
        "    rank 1: recv from any rank, tag 10, of any length, on world, not finished",
    ]


HOSTS = """
import os
import numpy as np
import pycoll
comm = pycoll.init()
here = comm.split_by_host()
for step in range(3):
    here.all_reduce(np.ones(5))
    comm.all_reduce(np.ones(10))
if comm.rank == 2:
    for _ in range(3):
        comm.recv()
    os._exit(3)
request = comm.iall_reduce(np.ones(7))
comm.send(0, 2)
request.wait()
"""


def test_ranks_of_other_hosts_are_told_of_and_the_first_call_in_which_all_differ(
    run: Run, tmp_path: Path
) -> None:
    logs = str(tmp_path / "logs")
    done = run("-H", "localhost:2,other:2", "--log-dir", logs, script=HOSTS)
    assert done.returncode == 3, done.stderr
    said = (tmp_path / "logs/calls.txt").read_text()
    world = section(said, "by messages on world, ranks 0-3:")
    assert re.fullmatch(r"    the first in which they differ is call \d+:", world[0])
    assert world[1].startswith("        ranks 0-1, 3: iall_reduce(float64[7], op=sum")
    assert world[1].endswith(") at script.py:14")
    assert world[2] == "        rank 2: has not made it"
    assert [line for line in world if line.startswith("    the last calls of rank")] == [
        f"    the last calls of rank {rank}:" for rank in range(4)
    ]
    report = done.stderr[done.stderr.index("pycoll-run: the first call in which ranks differ") :]
    head, *made = report.splitlines()
    assert head.endswith(" differ, on world:")
    assert made == [line[4:] for line in world[1:3]]
    for host, ranks in (0, "0-1"), (1, "2-3"):
        of_host = section(said, f"in shared memory on host {host} of world, ranks {ranks}:")
        assert of_host[0].startswith("    all have made the same, up to call ")
        assert sum("all_reduce, 40 bytes of float64, op=sum" in line for line in of_host) == 6


FOREIGN = """
import os, signal
import pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.recv(1)
"""


def test_under_another_launcher_a_variable_says_where_the_last_calls_are_written(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOLL_", "SLURM_"))}
    job = {
        "PYCOLL_SIZE": "2",
        "PYCOLL_KEY": secrets.token_hex(32),
        "PYCOLL_RENDEZVOUS": f"tcp://127.0.0.1:{port}",
        "PYCOLL_LOG_DIR": str(tmp_path / "logs"),
    }
    command = [sys.executable, "-c", FOREIGN]
    first, second = (
        subprocess.Popen(command, env={**own, **job, "PYCOLL_RANK": rank}, stderr=subprocess.PIPE)
        for rank in "01"
    )
    _, said = first.communicate(timeout=LIMIT_S)  # its meeting has standard error until it is over
    second.communicate(timeout=LIMIT_S)
    assert (first.returncode, second.returncode) == (1, -9), said
    calls = (tmp_path / "logs/calls.txt").read_text()
    assert calls.startswith("Calls when rank 1 had failed, ")
    for rank in range(2):
        of_rank = calls.partition(f"    the last calls of rank {rank}:\n")[2]
        assert "  barrier, 0 bytes" in of_rank.partition("the last calls")[0]


LOST = """
import os, signal
import pycoll
comm = pycoll.init()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getppid(), signal.SIGKILL)
comm.recv()
"""


@pytest.mark.exhaustive
def test_of_a_host_that_is_lost_it_is_said_that_nothing_is_known(run: Run, tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    done = run("-H", "localhost:1,other:1", "--log-dir", logs, script=LOST)
    assert done.returncode == 1, done.stderr
    said = (tmp_path / "logs/calls.txt").read_text()
    assert "\nnothing is known of rank 1: the host has not answered\n" in said
    assert "    rank 0: recv from any rank, any tag, of any length, on world" in said


GARBAGE = """
import os, random, struct
import numpy as np
import pycoll
memfd = int(os.environ["PYCOLL_SHM"].partition(":")[0])
comm = pycoll.init()
comm.all_reduce(np.ones(10))
comm.barrier()
if comm.rank == 1:
    draw = random.Random(1)
    os.pwrite(memfd, draw.randbytes(300 << 10), 8192 + (300 << 10))
    at = written = 0
    while True:
        try:
            at = os.lseek(memfd, at, os.SEEK_DATA)
        except OSError:
            break
        until = os.lseek(memfd, at, os.SEEK_HOLE)
        data = os.pread(memfd, until - at, at)
        # What it keeps of its calls lies behind a mark.
        mine = data.find(struct.pack("@QII", 0x9C011EC7CA115EED, 1, 2))
        if mine >= 0:
            os.pwrite(memfd, draw.randbytes(16384), at + mine + 16)
            written += 1
        at = until
    assert written == 1
    os._exit(3)
comm.barrier()
"""


@smoke
def test_garbage_that_a_rank_has_written_to_its_memory_does_no_harm_to_the_launcher(
    tmp_path: Path,
) -> None:
    program = tmp_path / "script.py"
    program.write_text(GARBAGE)
    done = run_here("-n", "2", "--log-dir", str(tmp_path / "logs"), str(program))
    assert done.returncode == 3, done.stderr
    assert b"an error of pycoll-run itself" not in done.stderr
    said = (tmp_path / "logs/calls.txt").read_text()
    assert "    the last calls of rank 0:" in said


@pytest.mark.parametrize("seeds", few([range(20)], [range(20, 200)]))
def test_a_report_can_be_made_of_any_bytes(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        kept = [(1, [(rank, draw.getrandbits(64), draw.randbytes(160)) for rank in range(2)])]
        notes = [draw.randbytes(draw.choice([NOTES_NBYTES, 10_000, 3])) for _ in range(2)]
        host = HostCalls([0, 1], kept, notes, draw.getrandbits(62))
        calls = merged([HostCalls.unpacked(host.packed())])
        assert all(line.isprintable() for line in lines(calls, "it was a test"))
        assert difference(calls).startswith("the first call in which ranks differ, on ")


def test_calls_of_very_many_communicators_are_sent_in_short() -> None:
    last = bytes(16) * 1023 + b"\1" * 16
    kept = [(ident, [(0, 2000, last)]) for ident in range(1, 1501)]
    host = HostCalls([0], kept, [b""], 0)
    (_, ranks) = HostCalls.unpacked(host.packed()).kept[0]
    (found,) = ranks
    assert found[:2] == [0, 2000]
    assert len(found[2]) == 512 * 16
    assert found[2].endswith(b"\1" * 16)
