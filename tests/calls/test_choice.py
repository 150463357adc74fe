"""How large values go in shared memory, through slots or directly: the ranks try, and agree."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

import pytest
from script_jobs import all_well
from tiers import few


def test_the_ranks_choose_together_how_large_values_go(job: Any) -> None:
    text = """
from pycoll._transports._core import KINDS as names
for nbytes, calls in ((65536, 100), (4 << 20, 30)):
    x, rows = np.ones(nbytes // 4, "f4"), np.ones((size, nbytes // 4), "f4")
    for number in range(calls):
        x[0] = rank + number
        assert comm.all_reduce(x)[0] == 1 + 2 * number
        assert (comm.all_gather(x)[:, 0] == [number, 1 + number]).all()
        assert comm.broadcast(x.copy(), 1)[0] == 1 + number  # it fills its argument
        rows[:, 0] = number
        assert comm.scatter(rows)[0] == number and (comm.all_to_all(rows)[:, 0] == number).all()
        assert comm.reduce_scatter(rows)[0] == 2 * number
        gathered, reduced = comm.gather(x, 1), comm.reduce(x, root=1)
        assert not rank or (gathered[:, 0] == [number, 1 + number]).all()
        assert not rank or reduced[0] == 1 + 2 * number
mine = comm._group.shm.core.choices
assert comm.all_gather(mine) == [mine, mine]
chosen = {(names[kind], k): direct for kind, k, direct in mine}
tried = set(names) - {"barrier", "scan", "exscan"}
assert set(chosen) == {(name, k) for name in tried for k in (16, 22)}, chosen
ok()
"""
    all_well(job(2, text), 2)


def has_secret_memory() -> bool:
    """Whether there is memory that the kernel reads for nobody else."""
    fd = int(ctypes.CDLL(None).syscall(447, 0)) if platform.machine() == "x86_64" else -1
    if fd >= 0:
        os.close(fd)
    return fd >= 0


@pytest.mark.skipif(not has_secret_memory(), reason="the kernel has no memfd_secret")
@pytest.mark.parametrize("size", few([3], [2]))
def test_arrays_that_others_may_not_read_are_streamed(job: Any, size: int) -> None:
    text = """
import ctypes, mmap, os
N = 1 << 18
fd = ctypes.CDLL(None).syscall(447, 0)  # memfd_secret
os.ftruncate(fd, 8 * N)
memory = np.frombuffer(mmap.mmap(fd, 8 * N), "f4")
for who in (0, 1, -1):
    secret = who in (rank, -1)
    x = memory[: N // 4] if secret else np.empty(N // 4, "f4")
    rows = memory[: size * N // 8] if secret else np.empty(size * N // 8, "f4")
    rows = rows.reshape(size, -1)
    for i in range(40):
        x[:] = rank + i
        assert (comm.all_reduce(x) == sum(r + i for r in range(size))).all()
        assert (comm.all_gather(x)[:, -1] == [r + i for r in range(size)]).all()
        gathered, reduced = comm.gather(x, root=1), comm.reduce(x, root=1)
        assert rank != 1 or (gathered[:, -1] == [r + i for r in range(size)]).all()
        assert rank != 1 or (reduced == sum(r + i for r in range(size))).all()
        assert (comm.broadcast(x if rank == 1 else np.empty_like(x), root=1) == 1 + i).all()
        rows[:] = np.arange(size)[:, None] + i
        assert (comm.scatter(rows, root=1) == rank + i).all()
        assert (comm.all_to_all(rows) == rank + i).all()
        assert (comm.reduce_scatter(rows) == size * (rank + i)).all()
        comm.all_reduce(x, out=x)
ok()
"""
    all_well(job(size, text), size)
