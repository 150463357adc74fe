"""What the core takes by a copy: arrays that are not contiguous, NumPy's scalars, lists."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts

TRANSPORTS = ["shm", "tcp"]

SPREAD = """
def spread(x):
    "Arrays with the elements of x that lie in other ways."
    rows = np.zeros((2 * len(x), *x.shape[1:]), x.dtype)
    rows[::2] = x
    last = np.zeros((*x.shape, 3), x.dtype)
    last[..., 1] = x
    odd = np.zeros(x.nbytes + 1, "u1")[1:].view(x.dtype).reshape(x.shape)  # not aligned
    odd[...] = x
    back = x[::-1].copy()[::-1]
    return [rows[::2], np.asfortranarray(x), last[..., 1], odd, back]

def same(got, wanted):
    assert type(got) is np.ndarray and got.flags.c_contiguous and got.flags.writeable
    assert got.dtype == wanted.dtype and got.tolist() == wanted.tolist()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_arrays_that_are_not_contiguous(scripts: Scripts, size: int, transport: str) -> None:
    text = """
for dtype in ("f8", "i2", "c8"):
    whole = (np.arange(6 * size * 5).reshape(6 * size, 5) % 7).astype(dtype)
    mine = spread(whole)
    for turn, x in enumerate(mine[rank:] + mine[:rank]):
        before, total = x.copy(), size * whole
        for i in ("", "i"):
            def call(name, *args, **kwargs):
                made = getattr(comm, i + name)(*args, **kwargs)
                return made.wait() if i else made

            same(call("all_reduce", x), total)
            out = np.empty_like(whole)
            assert call("all_reduce", x, out=out) is out
            same(out, total)
            got = call("reduce", x, root=1)
            same(got, total) if rank == 1 else check(got is None)
            got = call("gather", x, root=1)
            same(got, np.stack([whole] * size)) if rank == 1 else check(got is None)
            same(call("all_gather", x), np.stack([whole] * size))
            same(call("scan", x), (rank + 1) * whole)
            got = call("exscan", x)
            same(got, rank * whole) if rank else check(got is None)
            got = call("broadcast", x if rank == 1 else None, root=1)
            same(got, whole) if rank != 1 else check(got is x)
            rows = np.stack(np.split(whole, size))
            for y in (spread(rows)[turn % 5], rows):
                same(call("reduce_scatter", y), size * rows[rank])
                same(call("all_to_all", y), np.stack([rows[rank]] * size))
                same(call("scatter", y if rank == 1 else None, root=1), rows[rank])
            for got in call("all_gatherv", x):
                same(got, whole)
            same(call("sendrecv", x, (rank + 1) % size, (rank - 1) % size), whole)
        sent = comm.isend(x, (rank + 1) % size)
        same(comm.recv((rank - 1) % size), whole)
        sent.wait()
        same(comm.reduce_scatterv(x, [6] * size), total[6 * rank : 6 * rank + 6])
        assert (x == before).all()
ok()
"""
    scripts(size, SPREAD + "def check(true):\n    assert true\n" + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_go_to_arrays_that_are_not_contiguous(scripts: Scripts, transport: str) -> None:
    text = """
def filled(shape, call, wanted):
    for out in spread(np.full(shape, -1.0)):
        whole = out
        while whole.base is not None:
            whole = whole.base
        around = whole.copy()
        got = call(out)
        if wanted is None:
            assert got is None and (out == -1).all()
        else:
            assert got is out and out.tolist() == np.asarray(wanted).tolist()
        out[...] = -1
        assert (whole == around).all()  # nothing but its elements was written to

x = np.arange(8.0).reshape(4, 2)
alike = spread(x)
for turn in range(3):
    for y in alike[rank:] + alike[:rank]:
        filled((4, 2), lambda out: comm.all_reduce(y, out=out), 2 * x)
        filled((4, 2), lambda out: comm.scan(y, out=out), (rank + 1) * x)
        filled((4, 2), lambda out: comm.exscan(y, out=out), x if rank else None)
        if rank == 1:
            filled((4, 2), lambda out: comm.reduce(y, root=1, out=out), 2 * x)
            filled((2, 4, 2), lambda out: comm.gather(y, root=1, out=out), [x, x])
        else:
            for _ in range(5):
                assert comm.reduce(y, root=1, out=np.empty((4, 4))[:, :2]) is None
            for _ in range(5):
                assert comm.gather(y, root=1) is None
        filled((2, 4, 2), lambda out: comm.all_gather(y, out=out), [x, x])
        rows = spread(np.stack([x, x + 1]))[turn]
        filled((4, 2), lambda out: comm.reduce_scatter(rows, out=out), 2 * (x + rank))
        filled((2, 4, 2), lambda out: comm.all_to_all(rows, out=out), [x + rank] * 2)
        filled((2, 2), lambda out: comm.reduce_scatterv(y, [2, 2], out=out),
               2 * x[2 * rank : 2 * rank + 2])
        for root in (0, 1):
            given = rows if rank == root else None
            filled((4, 2), lambda out: comm.scatter(given, root, out=out), x + rank)
            if rank == root:
                for _ in range(5):
                    assert comm.broadcast(y, root) is y
            else:
                filled((4, 2), lambda out: comm.broadcast(out, root), x)
        for _ in range(5):
            comm.send(y, 1 - rank)
        filled((4, 2), lambda out: comm.recv(1 - rank, out=out), x)
        filled((4, 2), lambda out: comm.sendrecv(y, 1 - rank, out=out), x)
        filled((8, 2), lambda out: whole_of(comm.all_gatherv(y, out=out), out), [*x, *x])
ok()
"""
    whole_of = """
def whole_of(got, out):
    assert all(part.base is not None and np.shares_memory(part, out) for part in got)
    return out
"""
    scripts(2, SPREAD + whole_of + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_they_go_through_no_python(scripts: Scripts, transport: str) -> None:
    text = """
x = spread(np.arange(12.0).reshape(4, 3))
for turn in range(2):  # first calls are prepared in Python
    for y in x:
        same(comm.all_reduce(y), 2 * y)
        out = np.empty((4, 6))[:, ::2]
        assert comm.all_reduce(y, out=out) is out and (out == 2 * y).all()
        z = y.copy("F")
        assert comm.all_reduce(z, out=z) is z and (z == 2 * y).all()
        assert comm.broadcast(y if rank == 0 else out) is (y if rank == 0 else out)
        same(comm.iall_reduce(y).wait(), 2 * y)
        same(comm.all_gather(y), np.stack([y, y]))
        same(comm.broadcast(y if rank == 0 else None).copy("C"), y)
        same(comm.sendrecv(y, 1 - rank, 1 - rank), y)
        for wide in (None, np.empty((4, 6))[:, ::2]):
            comm.send(y, 1 - rank)
            got = comm.recv(1 - rank, out=wide)
            assert wide is None or got is wide
            same(got.copy(), y)
            got = comm.sendrecv(y, 1 - rank, 1 - rank, out=wide, status=pycoll.Status())
            assert wide is None or got is wide
            same(got.copy(), y)
    for z in (np.float64(1.5), np.float32(2.5), np.int64(7), np.int8(3), np.float16(0.5)):
        got = comm.all_reduce(z)
        assert type(got) is type(z) and got == 2 * z
    for z in (np.True_, np.complex64(1j)):
        assert comm.all_reduce(z, "sum" if z.imag else "lor") in (True, 2j)
    for z in (7 + rank, "text", [1, rank], {}, (), 1.5, True, np.float64(2)):
        assert comm.broadcast(z, 0) == comm.broadcast(z if rank == 0 else None)
    without_python("all_reduce", "iall_reduce", "all_gather", "broadcast")
    without_python("sendrecv", "send", "recv")
ok()
"""
    scripts(2, SPREAD + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_scalars_of_numpys(scripts: Scripts, transport: str) -> None:
    """They are reduced as arrays of no dimensions, and come back as what they were."""
    text = """
def like(got, kind, value):
    assert type(got) is kind and got == value, (got, type(got))

for turn in range(2):
    for kind in (np.float64, np.float32, np.int64, np.uint8, np.complex128):
        x = kind(rank + 1)
        like(comm.all_reduce(x), kind, 6)
        like(comm.all_reduce(x, "max" if kind != np.complex128 else "prod"), kind,
             3 if kind != np.complex128 else 6)
        like(comm.scan(x), kind, [1, 3, 6][rank])
        got = comm.exscan(x)
        like(got, kind, [0, 1, 3][rank]) if rank else ok_if(got is None)
        got = comm.reduce(x, root=2)
        like(got, kind, 6) if rank == 2 else ok_if(got is None)
        like(comm.iall_reduce(x).wait(), kind, 6)
        out = np.empty((), kind)
        assert comm.all_reduce(x, out=out) is out and out == 6
        assert comm.all_reduce(x if rank else np.array(x)) == 6  # an array is the same
        assert [type(got) for got in comm.all_gather(x)] == [kind] * 3
    like(comm.all_reduce(np.bool_(rank == 1), "lor"), np.bool_, True)
    like(comm.all_reduce(np.uint8(100)), np.uint8, 44)  # as an array, without a word
    error_like(TypeError, "float64", comm.all_reduce, np.float64(1), "bor")
ok()
"""
    ok_if = "def ok_if(true):\n    assert true\n"
    scripts(3, ok_if + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_overlaps_is_refused_as_ever(scripts: Scripts, transport: str) -> None:
    text = """
import threading

base = np.zeros((8, 4))
for turn in range(2):
    x, out = base[::2], base[1:5]
    assert not x.flags.c_contiguous and out.flags.c_contiguous and x.shape == out.shape
    error_like(ValueError, "overlaps", comm.all_reduce, x, out=out)
    error_like(ValueError, "overlaps", comm.all_reduce, x[::-1], out=out)
    error_like(ValueError, "overlaps", comm.sendrecv, x, 1 - rank, 1 - rank, out=out)
    error_like(ValueError, "overlaps", comm.sendrecv, out, 1 - rank, 1 - rank, out=x)
    error_like(ValueError, "overlaps", comm.sendrecv, x[::-1], 1 - rank, 1 - rank, out=x)
    base[...] = rank
    got = comm.all_reduce(base[:4, :2], out=base[4:6].reshape(4, 2))
    assert (got == 1).all() and (base[4:6] == 1).all() and (base[:4] == rank).all()
    error_like(ValueError, "overlaps", comm.all_reduce, base[4:6].reshape(4, 2), out=base[2:6, 1:3])
    frozen = np.zeros((4, 4))[:, :2]
    frozen.flags.writeable = False
    error_like(ValueError, "read-only", comm.all_reduce, base[:4, :2], out=frozen)
    error_like(ValueError, "float32", comm.all_reduce, x, out=np.empty((4, 8), "f4")[:, ::2])
    sent = np.arange(32.0).reshape(4, 8)[:, ::2]
    comm.send(sent, 1 - rank)
    error_like(ValueError, "read-only", comm.recv, 1 - rank, out=frozen)
    error_like(pycoll.MismatchError, "float32", comm.recv, out=np.zeros((4, 4), "f4")[:, :2])
    got = comm.recv(1 - rank, out=np.full((9, 9), -1.0)[:, ::2])  # which is longer
    assert got.ravel()[:17].tolist() == [*sent.ravel(), -1]
    status = pycoll.Status()
    got = comm.sendrecv(sent, 1 - rank, out=np.full((9, 9), -1.0)[:, ::2], status=status)
    assert got.ravel()[:17].tolist() == [*sent.ravel(), -1] and status.nbytes == sent.nbytes
    z = np.full((4, 8), float(rank))[:, ::2]
    assert comm.sendrecv(z, 1 - rank, out=z) is z and (z == 1 - rank).all()  # in place
    # what another thread writes behind the end of what comes stays
    wide = np.zeros((8, 4))
    if rank == 1:
        comm.recv(0)
        comm.send(np.ones(3), 0)
    else:
        def write():
            wide[5, 1] = 7
            comm.send(None, 1)
        thread = threading.Timer(0, write)
        thread.start()
        while turn == 0 and wide[5, 1] != 7:
            pass
        comm.recv(1, out=wide[:, 1])
        thread.join()
        assert wide[:, 1].tolist() == [1, 1, 1, 0, 0, 7, 0, 0]
    column = base[:, 0]
    assert comm.all_reduce(column, out=column) is column  # in place
    assert base[:, 0].tolist() == [1] * 4 + [2, 2] + [1, 1]
    filled = base[:, 1]
    filled[:] = 9 - rank
    got = comm.broadcast(filled)
    assert got is filled and (base[:, 1] == 9).all()
for wrong in (np.zeros((2, 6))[:, ::2], np.zeros((2, 2), "f4").T):
    x = wrong if rank == 0 else np.zeros((2, 4))[:, ::2]
    error_like(pycoll.MismatchError, "float64.2, 2.", comm.dup().all_reduce, x)
ok()
"""
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lists_of_arrays_go_through_no_python(scripts: Scripts, transport: str) -> None:
    text = """
import array as arrays

def like(got, wanted):
    assert type(got) is type(wanted)
    assert np.asarray(got).dtype == np.asarray(wanted).dtype
    assert np.asarray(got).tolist() == np.asarray(wanted).tolist()

rows = [np.arange(6.0).reshape(2, 3) + index for index in range(size)]
views = [memoryview(np.arange(4) + index) for index in range(size)]
numbers = [arrays.array("d", [index, 2.0]) for index in range(size)]
others = [np.ones(2), np.ones((2, 3), "f4"), {"a": np.ones(1)}]
for turn in range(2):  # first calls are prepared in Python
    for given in (rows, tuple(rows)):
        same(comm.reduce_scatter(given), size * rows[rank])
        same(comm.reduce_scatter(given, "max", out=np.empty((2, 3))), rows[rank])
        same(comm.ireduce_scatter(given).wait(), size * rows[rank])
        same(comm.scatter(given if rank == 1 else None, 1), rows[rank])
        for got in (comm.all_to_all(given), comm.iall_to_all(given).wait()):
            assert type(got) is list and len(got) == size
            for block in got:
                same(block, rows[rank])
    for places in ([np.empty((2, 3)) for _ in range(size)], tuple(np.empty((size, 2, 3)))):
        assert comm.all_gather(rows[rank], out=places) is places
        assert np.array_equal(places, rows)
        own = [*places[:rank], rows[rank], *places[rank + 1 :]]
        assert comm.all_gather(rows[rank], out=own) is own and np.array_equal(own, rows)
        got = comm.gather(rows[rank], 1, out=places if rank == 1 else None)
        assert got is (places if rank == 1 else None)
    points = [np.array(index + 1.0) for index in range(size)]  # of no axes
    same(comm.reduce_scatter(points), size * points[rank][()])
    same(comm.scatter(points if rank == 1 else None, 1), points[rank])
    got = comm.igatherv(points[rank], 1, out=[np.array(0.0) for _ in points]).wait()
    assert got == points if rank == 1 else got is None
    like(comm.reduce_scatter(views, "max"), views[rank])
    like(comm.scatter(views if rank == 1 else None, 1), views[rank])
    if turn == 0:
        like(comm.reduce_scatter(numbers, "max"), numbers[rank])
        like(comm.scatter(numbers if rank == 1 else None, 1), numbers[rank])
    for got in comm.all_to_all(others):
        assert str(got) == str(others[rank])
    if turn == 0:
        names = "all_to_all", "scatter", "all_gather"
        before = {name: getattr(pycoll.Communicator, name) for name in names}
        without_python("all_gather", "gather")
        without_python("reduce_scatter", "ireduce_scatter", "scatter", "all_to_all", "iall_to_all")
for name, method in before.items():
    setattr(pycoll.Communicator, name, method)
odd = [np.ones(index + 1) for index in range(size)]
assert len(comm.scatter(odd if rank == 1 else None, 1)) == rank + 1
assert [len(got) for got in comm.all_to_all(odd)] == [rank + 1] * size
places = [np.empty((2, 3)) for _ in range(size)]
error_like(ValueError, "it has 2", comm.all_gather, rows[0], out=places[:2])
for wrong in (np.empty((3, 2)), np.empty((2, 3), "f4"), np.broadcast_to(1.0, (2, 3)), rows[0]):
    error_like(ValueError, "out.1.", comm.all_gather, rows[0], out=[places[0], wrong, *places[2:]]
               ) if rank != 1 else None
long = np.full(20_000, float(rank))
places = [np.empty(20_000) for _ in range(size)]
assert comm.all_gather(long, out=places) is places and places[2][-1] == 2
assert comm.scatter(places if rank == 1 else None, 1)[0] == rank
error_like(ValueError, "leave it out", comm.all_to_all, rows, out=np.empty((size, 2, 3)))
ok()
"""
    scripts(3, SPREAD + text, transport)
