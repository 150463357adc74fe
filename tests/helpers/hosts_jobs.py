"""Jobs on pretended hosts (`hosts_bed`), for tests: programs, and what watches them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

from hosts_bed import PYCOLL_RUN, Bed
from patience import PATIENCE

# From the spec: a lost host is named within 10 s, and 5 s later nothing is left anywhere.
NAMED_S, EMPTY_S = 10.0, 15.0

ORACLE = """
import os
import numpy as np
import pycoll

comm = pycoll.init()
n, me = comm.size, comm.rank
for count in (1, 1000, 300_000):
    own = [np.arange(count) % 97 + 10.0 * rank for rank in range(n)]
    total = np.sum(own, axis=0)
    equal = np.testing.assert_array_equal
    equal(comm.all_reduce(own[me]), total)
    equal(np.ravel(comm.all_gather(own[me])), np.concatenate(own))
    got = comm.reduce(own[me], root=n - 1)
    assert (got is None) == (me != n - 1)
    equal(comm.broadcast(own[1] if me == 1 else None, root=1), own[1])
    blocks = np.arange(n * count, dtype=float).reshape(n, count) + 1000 * me
    theirs = [np.arange(n * count, dtype=float).reshape(n, count)[me] + 1000 * r for r in range(n)]
    equal(np.reshape(comm.all_to_all(blocks), (n, count)), theirs)
    after, before = (me + 1) % n, (me - 1) % n
    equal(comm.sendrecv(own[me], after, before), own[before])
local = comm.split_by_host()
assert local.size == comm.local_size and local.rank == comm.local_rank
where = f"{me} {comm.node} {comm.local_rank} {comm.local_size} {os.uname().nodename}\\n"
print(where, end="", flush=True)  # at once: others may write to the same pipe
"""

# Says "ready" and then calls for ever; what ends it is shown.
LOOP = """
import numpy as np, pycoll, time
comm = pycoll.init()
comm.barrier()
print("ready", flush=True)
try:
    while True:
        comm.all_reduce(np.ones(1000))
        time.sleep(0.02)
except pycoll.PeerFailed as error:
    print("PeerFailed:", str(error).splitlines()[0], flush=True)
    raise
"""


def until_empty(hosts: Bed, name: str, limit_s: float) -> None:
    deadline = time.monotonic() + PATIENCE * limit_s
    while left := hosts.processes(name):
        assert time.monotonic() < deadline, f"on {name} there is still {left}"
        time.sleep(0.1)


def run(hosts: Bed, *words: str, at: str = "hosta") -> subprocess.CompletedProcess[str]:
    return hosts.run(at, *PYCOLL_RUN, *words, timeout=PATIENCE * 60)


class Running:
    """A command on the first host whose output is read while it runs."""

    def __init__(self, hosts: Bed, *command: str) -> None:
        self.process = hosts.popen(
            "hosta", *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)

    def until(self, text: str, limit_s: float, count: int = 1) -> float:
        """Wait until so many lines have this in them; returns how long that took."""
        started = time.monotonic()
        while sum(text in line for line in self.lines) < count:
            assert time.monotonic() < started + PATIENCE * limit_s, "".join(self.lines)
            time.sleep(0.02)
        return time.monotonic() - started

    def end(self, limit_s: float) -> int:
        status = self.process.wait(PATIENCE * limit_s)
        self._thread.join()
        return status

    @property
    def said(self) -> str:
        return "".join(self.lines)


@contextlib.contextmanager
def job(hosts: Bed, *words: str, ready: int = 4, under: Sequence[str] = ()) -> Iterator[Running]:
    """Have a job of pycoll-run, which says "ready" so many times, `under` another command."""
    running = Running(hosts, *under, *PYCOLL_RUN, *words)
    try:
        running.until("ready", 30.0, ready)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            hosts.run("hosta", "pkill", "-9", "-f", "pycoll._launcher ")
        running.process.kill()
        running.end(10.0)
