"""Broadcasts and scatters that the compiled core runs: what a program sees.

The root announces what will come. A rank expects what its array would be announced by, or, if it
passes none, what came last time; all else goes on in Python.
"""

from __future__ import annotations

import pytest
from pool_scripts import Scripts
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = few(["shm", "tcp"], ["zmq"])

IN_CORE = TRANSPORTS[:2]
"""Those that are in C themselves: nothing of Python is called, and the kernel has what was sent."""


@pytest.mark.parametrize("transport", IN_CORE)
def test_broadcasts_and_scatters_of_arrays_run_without_python(
    scripts: Scripts, transport: str
) -> None:
    text = """
import sys
size, root = comm.size, 1
small, large = np.arange(512.0), np.arange(1e5)
rows = np.arange(size * 300.0).reshape(size, 300)
mine = [x.copy() if rank == root else np.zeros_like(x) for x in (small, large)]
block = np.zeros(300)

def start():
    given = (small, large, rows) if rank == root else (None, None, None)
    return [
        comm.ibroadcast(mine[0], root),
        comm.ibroadcast(mine[1], root),
        comm.ibroadcast(given[1], root),
        comm.iscatter(given[2], root),
        comm.iscatter(given[2], root, block),
    ]

def check(results):
    assert results[0] is mine[0] and (mine[0] == small).all()
    assert results[1] is mine[1] and (mine[1] == large).all()
    assert (results[2] == large).all()
    assert (results[3] == rows[rank]).all()
    assert results[4] is block and (block == rows[rank]).all()

check([request.wait() for request in start()])  # what comes is known from now on
calls = []
def note(frame, event, arg):
    if event == "call":
        calls.append(frame.f_code.co_name)
sys.setprofile(note)
for _ in range(100):  # a wait of more than a moment is Python's
    calls.clear()
    block[:] = 0
    if rank != root:
        mine[0][:] = mine[1][:] = 0
    requests = start()
    results = [request.wait() for request in requests]
    again = [name for name in calls if name != "<listcomp>"] == ["start"]
    if comm.iall_reduce(np.array([again]), "land").wait()[0]:
        break
sys.setprofile(None)
check(results)
assert again, calls
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_comes_may_be_another_thing_each_time(scripts: Scripts, transport: str) -> None:
    text = """
import random
size, numbers = comm.size, random.Random(7)
for number in range(120):
    root = numbers.randrange(size)
    lengths = [0, 1, 3, 700, 40000]
    shape = tuple(numbers.choice(lengths) for _ in range(numbers.choice([0, 1, 1, 2])))
    shape = shape if np.prod(shape) < 1e5 else (512,)
    dtype = numbers.choice(["f8", "i4", "u1", "?", "c16"])
    kind = numbers.choice(["array", "again", "object", "list"])
    fills = [numbers.random() < 0.5 for _ in range(size)]
    scatters = numbers.random() < 0.5
    if kind in ("array", "again"):
        every = (np.arange(size * np.prod(shape)) % 100).reshape(size, *shape).astype(dtype)
    elif kind == "object":
        every = [{"number": number, "rank": r, "long": "x" * (number * 97)} for r in range(size)]
    else:
        every = [[number, r] for r in range(size)]
    is_array = kind in ("array", "again")
    for _ in range(3 if kind == "again" else 1):
        if scatters:
            place = np.zeros(shape, dtype) if is_array and fills[rank] else None
            got = comm.iscatter(every if rank == root else None, root, place).wait()
            assert place is None or got is place
        else:
            place = np.zeros(shape, dtype) if is_array and fills[rank] else None
            sent = every[root, ...] if is_array else every[root]
            got = comm.ibroadcast(sent if rank == root else place, root).wait()
            assert rank == root or place is None or got is place
        one = rank if scatters else root
        expected = every[one, ...] if is_array else every[one]
        if is_array:
            assert got.dtype == expected.dtype and got.shape == expected.shape
            assert (got == expected).all()
        else:
            assert got == expected, (got, expected)
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_event_loop_that_is_busy_hears_what_python_has_made_of_an_object(
    scripts: Scripts, transport: str
) -> None:
    text = """
import asyncio
async def main():
    if rank == 0:
        for peer in range(1, size):
            await comm.irecv(peer)
        assert await comm.ibroadcast("news", 0) == "news"
        return
    request = comm.ibroadcast(None, 0)
    async def compute():
        turns = 0
        while not request.done:
            await asyncio.sleep(0)
            turns += 1
            if turns == 100:
                await comm.isend(None, 0)
    _, value = await asyncio.gather(compute(), request)
    assert value == "news"

asyncio.run(asyncio.wait_for(main(), 20 * PATIENCE))
ok()
"""
    scripts(3, text, transport)
