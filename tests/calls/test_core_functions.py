"""Functions as operators, of short values: they are gathered by the core, and combined then."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts

TRANSPORTS = ["shm", "tcp"]

NAMES = """
REDUCTIONS = "reduce", "all_reduce", "reduce_scatter"
"""

ORDERED = """
from functools import reduce

def product(a, b):
    "Associative, not commutative, and not elementwise."
    assert type(a) is type(b) is np.ndarray and a.shape == b.shape == shape
    assert not a.flags.writeable and not b.flags.writeable
    return a @ b % 1000

def matrices(dtype):
    return [(np.arange(4).reshape(2, 2) + 2 * one + 1).astype(dtype) for one in range(size)]

def same(got, wanted):
    assert type(got) is np.ndarray and got.dtype == wanted.dtype and got.flags.c_contiguous
    assert got.flags.writeable and got.base is None
    assert got.tolist() == wanted.tolist(), (got, wanted)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_core_gathers_and_the_function_is_applied_in_rank_order(
    scripts: Scripts, size: int, transport: str
) -> None:
    text = """
shape = 2, 2
for dtype in ("f8", "i4", "i8", "f4"):
    every = matrices(dtype)
    x, rows = every[rank], np.stack([every[rank]] * size)
    fold = lambda count: reduce(lambda a, b: a @ b % 1000, every[:count])
    with contextlib.ExitStack() as cleanup:
        for turn in range(3):  # from the second on by what the core has kept
            for op in (product, pycoll.Op(product, commutative=False), lambda a, b: product(a, b)):
                same(comm.all_reduce(x, op), fold(size))
                if turn == 0:  # scans are Python's, which may have the next call go its way, too
                    same(comm.scan(x, op), fold(rank + 1))
                    got = comm.exscan(x, op)
                    same(got, fold(rank)) if rank else checked(got is None)
                    out = np.full_like(x, 7)
                    got = comm.exscan(x, op, out=out)
                    assert (got is out) == (rank > 0) and (rank > 0 or (out == 7).all())
                same(comm.reduce_scatter(rows, op), fold(size))
                for root in range(size):
                    got = comm.reduce(x, op, root)
                    same(got, fold(size)) if rank == root else checked(got is None)
                out = np.empty_like(x)
                assert comm.all_reduce(x, op, out=out, timeout=30) is out
                same(out, fold(size))
                out[...] = x
                assert comm.all_reduce(out, op, out) is out  # in place
                same(out, fold(size))
                mine = rows.copy()
                got = comm.reduce_scatter(mine, op, out=mine[rank])
                assert mine[rank].tolist() == fold(size).tolist()
            for _ in range(10):
                comm.all_reduce(x)
            if size > 1:
                without_python(*REDUCTIONS)
ok()
"""
    head = "import contextlib\ndef checked(true):\n    assert true\n"
    scripts(size, head + NAMES + ORDERED + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_stands_in_for_arrays_that_are_not_contiguous(
    scripts: Scripts, transport: str
) -> None:
    text = """
def add(a, b):
    assert type(a) is type(b) is np.ndarray and a.flags.c_contiguous
    return a + b

spread, fortran = np.arange(12.0).reshape(4, 3)[::2], np.asfortranarray(np.ones((3, 2)))
place = np.zeros((4, 3))
for turn in range(2):
    assert comm.all_reduce(spread, add).tolist() == (3 * spread).tolist()
    assert comm.all_reduce(fortran, add).tolist() == (3 * fortran).tolist()
    out = place[::2]
    assert comm.all_reduce(spread, add, out=out) is out
    assert (out == 3 * spread).all() and not place[1::2].any()
    got = comm.reduce_scatter([np.full(2, one) for one in range(size)], add)
    assert got.tolist() == [3 * rank] * 2
    got = comm.all_reduce(np.array(2.0), add)
    assert type(got) is np.ndarray and got.shape == () and got == 6
    for empty in (np.empty(0), np.empty((2, 0), "i4")):
        got = comm.all_reduce(empty, lambda a, b: 1 / 0)
        assert got.shape == empty.shape and got.dtype == empty.dtype
    without_python(*REDUCTIONS)
ok()
"""
    scripts(3, NAMES + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_need_not_pass_the_same_kind_of_array(scripts: Scripts, transport: str) -> None:
    text = """
from array import array

class Mine(np.ndarray):
    pass

x = np.arange(3.0) + rank
kinds = x, memoryview(x), array("d", x), x.view(Mine), np.stack([x, x], 1)[:, 0]
add = lambda a, b: a + b
for turn in range(len(kinds)):
    mine = kinds[(turn + rank) % len(kinds)]
    for op in (add, pycoll.Op(add, elementwise=True, commutative=rank == 0)):
        assert list(comm.all_reduce(mine, op)) == [3, 6, 9]
        assert list(comm.scan(mine, op)) == [[0, 1, 2], [1, 3, 5], [3, 6, 9]][rank]
        got = comm.reduce(mine, op, root=turn % 3)
        assert got is None if rank != turn % 3 else list(got) == [3, 6, 9]
        if turn == 0 and comm._group.shm is not None:
            assert list(comm.all_reduce(mine, op, algorithm="shared_memory")) == [3, 6, 9]
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_short_and_long_values_have_the_same_result(scripts: Scripts, transport: str) -> None:
    text = """
from pycoll._transports._core import GATHERED_NBYTES

add = lambda a, b: a + b
most = GATHERED_NBYTES // size // 8
for count in (most - 1, most, most + 1, 4 * most):
    x = np.arange(float(count)) + rank
    plan = comm._calls.all_reduce(x, add)
    assert (type(plan).__name__ == "GatheredReduction") == (count <= most)
    for op in (add, pycoll.Op(add, elementwise=True)):
        assert (comm.all_reduce(x, op) == size * np.arange(count) + 3).all()
        assert (comm.scan(x, op) == (rank + 1) * np.arange(count) + sum(range(rank + 1))).all()
        assert (comm.iall_reduce(x, op).wait() == size * np.arange(count) + 3).all()
    rows = np.arange(3.0 * (count // 3)).reshape(3, -1)
    assert (comm.reduce_scatter(rows, add) == 3 * rows[rank]).all()
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_function_that_raises_on_one_rank_breaks_nothing(
    scripts: Scripts, transport: str
) -> None:
    text = """
def bad(a, b):
    if rank == 1:
        raise ZeroDivisionError("of the user")
    return a + b

returned = {
    "returned float32 for float64": lambda a, b: (a + b).astype("f4"),
    "returned the shape (1,) for (4,)": lambda a, b: (a + b)[:1],
    "returned a value of type NoneType": lambda a, b: None,
}
x = np.ones(4)
for call in (comm.all_reduce, lambda x, op: comm.reduce(x, op, root=1)):
    for turn in range(2):
        kept = x.copy()
        if rank == 1:
            error = error_like(ZeroDivisionError, "of the user", call, x, bad)
            assert ["raised by the operator" in note for note in error.__notes__] == [True]
        else:
            call(x, bad)
        for why, op in returned.items():
            try:
                call(x, op)
            except TypeError as exc:
                assert why in str(exc)
            else:  # nothing is combined here
                assert call != comm.all_reduce and rank != 1
        assert comm.all_reduce(1) == 3 and (x == kept).all()
        assert comm.all_reduce(x, lambda a, b: a + b).tolist() == [3] * 4
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_function_keeps_or_returns_is_no_result(scripts: Scripts, transport: str) -> None:
    text = """
kept, place = [], np.empty(4)

def into_place(a, b):
    np.add(a, b, out=place)
    return place

def backwards(a, b):
    place[...] = b  # where its left operand would be, were that what it has returned
    place[...] += a
    return place

def keep(a, b):
    kept.append((a, b))
    return a + b

def writes(a, b):
    a += b
    return a

x = np.ones(4) + rank
for turn in range(2):
    for op in (into_place, backwards, keep):
        got = comm.all_reduce(x, op)
        assert got is not place and got.tolist() == [10] * 4
        got[...] = -1
        assert x.tolist() == [1 + rank] * 4
    first = comm.all_reduce(x, lambda a, b: a)
    last = comm.all_reduce(x, lambda a, b: b)
    assert first.tolist() == [1] * 4 and last.tolist() == [4] * 4
    first[...] = last[...] = 0
    error_like(ValueError, "read-only", comm.all_reduce, x, writes)
    assert comm.all_reduce(x, "sum").tolist() == [10] * 4
assert all(b.tolist() == [place] * 4 for place, (_, b) in enumerate(kept[:3], 2))
ok()
"""
    scripts(4, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_scan_waits_for_the_ranks_below_only(scripts: Scripts, transport: str) -> None:
    text = """
add = lambda a, b: a + b
for scan in (comm.scan, comm.exscan):
    if rank:
        comm.recv(rank - 1)
    got = scan(np.ones(2), add)
    if rank + 1 < size:
        comm.send(None, rank + 1)
    count = rank + (scan == comm.scan)
    assert got is None if not count else got.tolist() == [count] * 2
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_function_may_communicate_when_all_is_gathered(scripts: Scripts, transport: str) -> None:
    text = """
def add(a, b):
    assert comm.all_reduce(1) == 3
    return comm.all_reduce(a, lambda c, d: c) + b

for turn in range(3):
    assert comm.all_reduce(np.ones(2), add).tolist() == [3, 3]
ok()
"""
    scripts(3, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_functions_and_other_calls_are_mismatches(scripts: Scripts, transport: str) -> None:
    text = """
x, add, sub = np.ones(4), lambda a, b: a + b, lambda a, b: a - b
calls = (
    lambda group: group.all_reduce(x, add if rank else sub),
    lambda group: group.all_reduce(x, add) if rank else group.all_gather(x),
    lambda group: group.all_reduce(x, add) if rank else group.reduce(x, add),
    lambda group: group.all_reduce(x[:rank + 1], add),
    lambda group: group.all_reduce(x.astype("i4" if rank else "f4"), add),
    lambda group: group.reduce(x, add, rank),
    lambda group: group.reduce_scatter(np.ones((2, 2)), add if rank else sub),
    lambda group: group.all_reduce(x, add if rank else "sum"),
)
for call in calls:
    for warm in (False, True):
        group = comm.dup()
        if warm:
            group.all_reduce(x, add)
        try:
            call(group)
            group.barrier()
        except pycoll.MismatchError as exc:
            assert re.search(r"op=__main__\\.<lambda>@[0-9a-f]{8}, algorithm=", str(exc)), exc
        else:
            raise AssertionError("nobody has seen it")
        group.close()
ok()
"""
    scripts(2, text, transport)


def test_a_function_that_is_changed_is_another_one(scripts: Scripts) -> None:
    text = """
def op(a, b):
    return a + b

def other(a, b):
    return a - b

x = np.ones(2)
for turn in range(2):
    assert comm.all_reduce(x, op).tolist() == [2, 2]
    before = op.__code__
    op.__code__ = other.__code__
    assert comm.all_reduce(x, op).tolist() == [0, 0]
    op.__code__ = (lambda a: a).__code__
    error_like(TypeError, "function of two values", comm.all_reduce, x, op)
    op.__code__ = before
error_like(TypeError, 'write op="sum"', comm.all_reduce, x, sum)
error_like(TypeError, "compares whole arrays", comm.all_reduce, x, max)
assert comm.all_reduce(np.array(rank), max) == 1
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_function_that_raises_leaves_its_values(scripts: Scripts, transport: str) -> None:
    text = """
calls = []
def bad(a, b):
    calls.append(1)
    if len(calls) == 2:
        raise ZeroDivisionError("of the user")
    return a + b

for _ in range(2):
    calls.clear()
    x, out = np.arange(4.0), np.zeros(4)
    error_like(ZeroDivisionError, "of the user", comm.all_reduce, x, bad, out=x)
    assert x.tolist() == [0, 1, 2, 3]
    calls.clear()
    error_like(ZeroDivisionError, "of the user", comm.all_reduce, x, bad, out=out)
    assert not out.any()
    assert comm.all_reduce(x, bad, out=x) is x and x.tolist() == [0, 3, 6, 9]
ok()
"""
    scripts(3, text, transport)


def test_what_is_stored_as_another_dtype_is_not_that_dtype(scripts: Scripts) -> None:
    text = """
import ml_dtypes
x = np.ones(4, ml_dtypes.bfloat16)
for _ in range(2):
    error_like(TypeError, "returned uint16 for bfloat16", comm.all_reduce, x,
               lambda a, b: np.ones(4, "u2"))
    assert comm.all_reduce(x, lambda a, b: a + b).tolist() == [2] * 4
ok()
"""
    scripts(2, text, "shm")
