"""The memory that ranks of one host inherit: what the launcher puts into it, and reads from it."""

from __future__ import annotations

import errno
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from pycoll._launcher.host_memory import HostMemory, memory_by_rank
from pycoll._support.environment import HostPlacement, blocks, places

LIMIT_S = 30 * PATIENCE
EPOCH_OFFSET, SEQUENCE_OFFSET, LINE_OFFSET, RECORD = 64, 4096 + 508, 4096 + 512, 1024

# A rank that has its host's memory; the test's own lines follow.
RANK = """
import json, mmap, os, select, struct, sys, time
memfd, inode, eventfds, cores = os.environ["PYCOLL_SHM"].split(":")
memfd, eventfds = int(memfd), [int(text) for text in eventfds.split(",")]
local_rank = int(os.environ["PYCOLL_LOCAL_RANK"])

def epoch():
    return struct.unpack("I", os.pread(memfd, 4, 64))[0]
"""


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    one = HostMemory([0, 1], 4)
    yield one
    one.close()


def run(tmp_path: Path, n: int, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(RANK + text)
    return subprocess.run(
        [sys.executable, "-m", "pycoll._launcher", "-n", str(n), *options, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def write_line(memory: HostMemory, local_rank: int, line: bytes, sequence: int = 2) -> None:
    memfd = memory.descriptors[0]
    os.pwrite(memfd, line + b"\0", LINE_OFFSET + RECORD * local_rank)
    os.pwrite(memfd, struct.pack("I", sequence), SEQUENCE_OFFSET + RECORD * local_rank)


def epoch(memory: HostMemory) -> int:
    number: int = struct.unpack("I", os.pread(memory.descriptors[0], 4, EPOCH_OFFSET))[0]
    return number


def test_the_ranks_of_a_host_inherit_one_memory_and_an_eventfd_each(tmp_path: Path) -> None:
    text = """
assert os.fstat(memfd).st_ino == int(inode) and os.fstat(memfd).st_size >= 2 * 4096
with mmap.mmap(memfd, 4096) as page:
    assert page[:] == bytes(4096)
assert all("eventfd" in os.readlink(f"/proc/self/fd/{fd}") for fd in eventfds)
try:
    os.eventfd_read(eventfds[local_rank])
except BlockingIOError:
    print(os.environ["PYCOLL_NODE"], inode, len(set(eventfds)), int(cores) > 0)
"""
    done = run(tmp_path, 5, text, "--emulate-hosts", "2")
    assert done.returncode == 0
    assert re.fullmatch("pycoll-run: no rank called pycoll.init.*\n", done.stderr), done.stderr
    lines = [line.split() for line in sorted(done.stdout.splitlines())]
    assert [[node, *rest] for node, _, *rest in lines] == [["0", "3", "True"]] * 3 + [
        ["1", "2", "True"]
    ] * 2
    assert len({inode for _, inode, *_ in lines}) == 2


def test_a_failure_is_counted_in_every_memory_and_wakes_every_rank(tmp_path: Path) -> None:
    text = """
from pycoll._rendezvous.client import Client
key, rank = bytes.fromhex(os.environ["PYCOLL_KEY"]), int(os.environ["PYCOLL_RANK"])
client = Client(os.environ["PYCOLL_RENDEZVOUS"], key, rank, 3, link=os.environ["PYCOLL_LINK"])
assert epoch() == 0
client.join({}, 20.0)
if rank == 0:
    os._exit(3)
assert select.select([eventfds[local_rank]], [], [], 20.0)[0]
assert epoch() == 1
# It was told before the epoch grew, by a socket in which nothing overtakes.
print(rank, client.progress()[0].kind, flush=True)
client.close(5.0)
"""
    done = run(tmp_path, 3, text, "--emulate-hosts", "2")
    assert done.returncode == 3, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 failed", "2 failed"]


def test_the_table_has_what_ranks_wait_in_natively(tmp_path: Path) -> None:
    text = """
from pycoll._rendezvous.client import Client
key, rank = bytes.fromhex(os.environ["PYCOLL_KEY"]), int(os.environ["PYCOLL_RANK"])
client = Client(os.environ["PYCOLL_RENDEZVOUS"], key, rank, 3, link=os.environ["PYCOLL_LINK"])
if rank == 1:
    line = f"all_reduce(float32[4], op=sum) #12 at train.py:31, since {time.monotonic():.3f}"
    os.pwrite(memfd, line.encode() + bytes(1), 4096 + 1024 + 512)
client.join({}, 20.0)
if rank == 2:
    client.post("waiting", context=1, number=3, call="barrier()", where="", members=[])
    while "; asleep (" not in (table := client.ask_table(20.0))[0]:  # rank 0 is on its way there
        pass
    print(*table, sep="\\n", flush=True)
    client.post("abort", code=0)
select.select([], [], [], 20.0)
"""
    done = run(tmp_path, 3, text)
    rank_0, rank_1, rank_2 = done.stdout.splitlines()
    assert rank_0.startswith("rank 0: not waiting in pycoll, or for less than 0.2 s; asleep (")
    call = r"all_reduce\(float32\[4\], op=sum\) #12 at train\.py:31"
    assert re.fullmatch(rf"rank 1: {call}, for \d+\.\d s", rank_1)
    assert re.fullmatch(r"rank 2: barrier\(\) #3, for \d+\.\d s", rank_2)


def test_a_line_is_told_with_the_time_since_it_was_written(memory: HostMemory) -> None:
    write_line(memory, 1, f"recv(source=0), since {time.monotonic() - 65:.3f}".encode())
    assert re.fullmatch(r"recv\(source=0\), for 65\.\d s", memory.doing(1))
    assert memory.doing(0) == ""


def test_a_line_that_is_not_whole_or_not_there_is_none(memory: HostMemory) -> None:
    assert memory.doing(0) == memory.doing(1) == ""
    write_line(memory, 0, b"barrier(), since 1.0", sequence=3)
    assert memory.doing(0) == ""
    write_line(memory, 0, b"", sequence=4)
    assert memory.doing(0) == ""


def test_a_line_that_is_no_text_or_has_no_end_or_time_is_told_as_it_is(memory: HostMemory) -> None:
    write_line(memory, 0, b"\xff" * 511)
    assert memory.doing(0) == "\ufffd" * 500
    write_line(memory, 0, b"barrier(), since noon")
    assert memory.doing(0) == "barrier(), since noon"


def test_each_failure_counts_and_is_signalled_even_if_nobody_reads(memory: HostMemory) -> None:
    eventfd = memory.descriptors[1]
    assert not select.select([eventfd], [], [], 0)[0]
    os.eventfd_write(eventfd, (1 << 64) - 2)  # as many as it holds
    for number in (1, 2):
        memory.tell_failure()
        assert epoch(memory) == number
    assert all(select.select([fd], [], [], 0)[0] for fd in memory.descriptors[1:])
    os.pwrite(memory.descriptors[0], b"\xff" * 4, EPOCH_OFFSET)
    memory.tell_failure()
    assert epoch(memory) == 0


def on_hosts(size: int, hosts: int) -> dict[int, HostPlacement]:
    return dict(enumerate(places(blocks(size, hosts))))


def test_where_there_is_no_memory_the_variable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "not in this sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = memory_by_rank(on_hosts(3, 2), 4)[2]
    assert memory.variable == "-:[Errno 1] not in this sandbox"
    assert memory.descriptors == []
    memory.tell_failure()
    assert memory.doing(2) == ""
    memory.close()


def test_emulated_hosts_share_the_cores() -> None:
    for hosts, cores, share in ((1, 4, 4), (2, 4, 2), (4, 2, 1)):
        memory = memory_by_rank(on_hosts(4, hosts), cores)
        assert memory[0].variable.rpartition(":")[2] == str(share)
        assert len(set(memory.values())) == hosts
        for each in set(memory.values()):
            each.close()
