"""The machine a benchmark runs on: what it is, whether it is busy, and who may measure on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pycoll._support.environment import usable_cores

# Half a core of load on each core says that a rank will often find its core taken.
_BUSY_LOAD_PER_CORE = 0.5
# A tenth of a core is what a desktop at rest uses; more shows in the figures.
_BUSY_CORES = 0.1
# Over a shorter time the kernel's ticks of 10 ms are too coarse to tell a tenth of a core.
_SAMPLE_S = 0.5


class Machine(NamedTuple):
    """What a figure depends on besides the program.

    Attributes:
        cpu: model name.
        cores: usable by this process (affinity and quota), and `cores_online` all there are.
        memory_gib: of main memory.
        kernel: its version, and `platform` the architecture and C library.
    """

    cpu: str
    cores: int
    cores_online: int
    memory_gib: float
    kernel: str
    platform: str


def describe() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu(),
        cores=usable_cores(),
        cores_online=os.cpu_count() or 1,
        memory_gib=round(memory / 2**30, 1),
        kernel=platform.release(),
        platform=platform.platform(),
    )


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":  # on Arm there is none
                return value.strip()
    return platform.machine()


class CpuClock:
    """How many cores processes that are not ours have used since it was made.

    Ours are this process and its children that have been waited for.
    """

    def __init__(self) -> None:
        self._start = (time.monotonic(), _all_cpu_s(), _our_cpu_s())

    def others(self) -> float:
        """Cores used by others, on average; with what the hypervisor took away."""
        since, everyone, ours = self._start
        elapsed = max(time.monotonic() - since, 1e-9)
        used = (_all_cpu_s() - everyone) - (_our_cpu_s() - ours)
        return round(max(0.0, used / elapsed), 3)


def _all_cpu_s() -> float:
    """Seconds all cores have spent on something, steal included."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, file.readline().split()[1:9]
        )
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _our_cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def busy(cores: int) -> str | None:
    """Say why this machine is too busy to measure on; None if it is not. Takes half a second."""
    clock = CpuClock()
    time.sleep(_SAMPLE_S)
    others, load = clock.others(), os.getloadavg()[0]
    if others > _BUSY_CORES:
        return f"other processes use {others:.1f} cores now"
    if load > _BUSY_LOAD_PER_CORE * cores:
        return f"the load average is {load:.1f} on {cores} cores"
    return None


@contextlib.contextmanager
def alone(say: Callable[[str], None]) -> Iterator[None]:
    """Keep a second benchmark of this user from running at the same time: it waits its turn.

    Args:
        say: called with a line of text before waiting.
    """
    path = os.path.join(tempfile.gettempdir(), f"pycoll-bench-{os.getuid()}.lock")
    # The file stays: one that is deleted while somebody waits for it locks nothing any more.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another benchmark is running (it holds {path}): waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
