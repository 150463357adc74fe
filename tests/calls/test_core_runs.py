"""Schedules in calls that Python has begun, run by the compiled core: what a program sees."""

from __future__ import annotations

import itertools

import pytest
from pool_scripts import Scripts
from tiers import exhaustive

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        *((1, "shm"), (3, "shm"), (3, "tcp")),
        *(
            pytest.param(size, transport, marks=exhaustive)
            for size, transport in ((1, "tcp"), *itertools.product((2, 5), TRANSPORTS))
        ),
    ],
)
def test_composite_calls_give_what_numpy_gives(scripts: Scripts, size: int, transport: str) -> None:
    text = """
numbers = np.arange(size)
for turn in range(3):
    x = np.arange(2.0 * size) * (rank + 1)
    got = comm.ireduce_scatterv(x, [2] * size, "avg").wait()
    assert (got == np.arange(2.0 * size)[2 * rank :][:2] * (size + 1) / 2).all(), got
    got = comm.iall_reduce_many([np.full(3, rank), np.full((2, 2), rank, "f4")], "max").wait()
    assert (got[0] == size - 1).all() and (got[1] == size - 1).all() and got[1].shape == (2, 2)
    assert comm.iall_reduce(rank + 0.5, "avg").wait() == (numbers + 0.5).mean()
    assert comm.iall_reduce(np.float32(rank), "sum").wait() == numbers.sum()
    assert comm.iall_gather(("rank", rank)).wait() == [("rank", peer) for peer in range(size)]
    gathered = comm.igatherv(np.full(rank, rank), root=size - 1).wait()
    if rank == size - 1:
        assert all((got == peer).all() and len(got) == peer for peer, got in enumerate(gathered))
    for each in (3, 70_000):
        gathered = comm.iall_gatherv(np.full(each + rank, rank)).wait()
        assert [len(got) for got in gathered] == [each + peer for peer in range(size)]
        assert all((got == peer).all() for peer, got in enumerate(gathered))
        got = comm.iscatterv([np.full(each + n, n) for n in range(size)] if rank == 0 else None)
        assert (got.wait() == rank).all() and len(got.wait()) == each + rank
        got = comm.iall_to_allv([np.full(each + n, rank) for n in range(size)]).wait()
        assert all((one == peer).all() and len(one) == each + rank for peer, one in enumerate(got))
    large = comm.iall_reduce(np.full(300_001, rank)[::-1], algorithm="ring").wait()
    assert (large == numbers.sum()).all()
    with comm.split(rank % 2, -rank) as part:
        assert part.all_gather(comm.rank) == sorted(numbers[rank % 2 :: 2], reverse=True)
ok()
"""
    scripts(size, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_the_core_cannot_reduce_python_does(scripts: Scripts, transport: str) -> None:
    text = """
for _ in range(2):
    assert comm.iall_reduce(rank, lambda a, b: a + 2 * b).wait() == sum((0, 2, 4))
    for algorithm in ("ring", "tree", "recursive_doubling"):
        largest = pycoll.Op(np.maximum, elementwise=True)
        got = comm.iall_reduce(np.arange(200_000) * (rank + 1), largest, algorithm=algorithm).wait()
        assert (got == np.arange(200_000) * size).all()
last = pycoll.Op(lambda a, b: b, commutative=False, elementwise=True)
for call in comm.iall_reduce, comm.iscan, comm.ireduce_scatter:
    x = np.arange(6.0).reshape(3, 2) + 10 * rank
    wanted = np.arange(6.0).reshape(3, 2) + 10 * (rank if call == comm.iscan else size - 1)
    wanted = wanted[rank] if call == comm.ireduce_scatter else wanted
    assert (call(x, last).wait() == wanted).all()
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_that_is_not_aligned_is_reduced_by_a_copy(scripts: Scripts, transport: str) -> None:
    """C reads no element from where the processor might not."""
    text = """
def odd(shape, dtype, shift):
    count = int(np.prod(shape))
    memory = np.zeros(count * np.dtype(dtype).itemsize + 8, np.uint8)
    return memory[shift : shift - 8].view(dtype).reshape(shape)

def filled(shape, dtype, shift):
    x = odd(shape, dtype, shift)
    x[...] = np.arange(x.size).reshape(shape) + rank
    return x

total = size * np.arange(12) + sum(range(size))
below = [r * np.arange(12) + sum(range(r)) for r in range(size + 1)]
for dtype, shift in ("f8", 1), ("u2", 1), ("f4", 2), ("c8", 4), ("c16", 2), ("i8", 4):
    x, out = filled(12, dtype, shift), odd(12, dtype, shift)
    rows, row = x.reshape(3, 4), odd(4, dtype, shift)
    assert x.flags.aligned == (dtype == "c8")
    for prefix in "", "i":
        def call(name, *args, **kwargs):
            got = getattr(comm, prefix + name)(*args, **kwargs)
            return got if not prefix else got.wait()
        assert call("all_reduce", x, out=out) is out and (out == total).all()
        out[...] = 0
        got = call("reduce", x, "sum", 1, out=out if rank == 1 else None)
        assert got is None if rank != 1 else got is out and (out == total).all()
        assert (call("scan", x, out=out) == below[rank + 1]).all()
        before = call("exscan", x)
        assert before is None if rank == 0 else (before == below[rank]).all()
        assert (call("reduce_scatter", rows, out=row) == total.reshape(3, 4)[rank]).all()
        mine = call("reduce_scatterv", x, [12, 0, 0])
        assert (mine == total[: len(mine)]).all() and len(mine) == (12 if rank == 0 else 0)
        first, second = call("all_reduce_many", [x[:4], x[4:]])
        assert (np.concatenate([first, second]) == total).all()
        out[...] = x
        assert call("all_reduce", out, out=out) is out and (out == total).all()  # in place
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operands_may_be_kept(scripts: Scripts, transport: str) -> None:
    """An operator's arrays are views of the run's memory, which lives as long as they do."""
    text = """
kept = []

def keep(a, b):
    kept.append((a, b, a.copy(), b.copy()))
    return a + b

for algorithm in ("ring", "tree"):
    for _ in range(3):
        op = pycoll.Op(keep, elementwise=True)
        comm.iall_reduce(np.arange(100_000) + rank, op, algorithm=algorithm).wait()
before = [a.sum() + b.sum() for a, b, _, _ in kept]
for _ in range(20):
    comm.iall_reduce(np.ones(100_000)).wait()
assert [a.sum() + b.sum() for a, b, _, _ in kept] == before
ok()
"""
    scripts(3, text, transport)
