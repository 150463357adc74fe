"""all_reduce_many of short lists, which the core packs and unpacks itself."""

from __future__ import annotations

import pytest
from pool_scripts import Scripts

TRANSPORTS = ["shm", "tcp"]

BOTH = """
in_python = pycoll.Communicator.all_reduce_many.__get__(comm)
started_in_python = pycoll.Communicator.iall_reduce_many.__get__(comm)

def calls():
    "The core's ways, and Python's, which is another one on every rank."
    again = lambda *args, **how: comm.persistent.all_reduce_many(*args, **how).start().wait()
    started = [
        lambda *args, **how: comm.iall_reduce_many(*args, **how).wait(),
        again,
        lambda *args, **how: started_in_python(*args, **how).wait(),
    ]
    yield from zip((comm.all_reduce_many, in_python), (False, False))
    yield from zip(started[rank % 3 :] + started[: rank % 3], (True,) * 3)
    yield (in_python if rank == 1 else comm.all_reduce_many), False
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_way_gives_what_all_reduce_gives(scripts: Scripts, size: int, transport: str) -> None:
    text = """
import ml_dtypes

dtypes = "f8", "f4", "f2", ml_dtypes.bfloat16, "i4", "u1", "i8", "q", "?", "c8", "c16"
ops = "sum", "max", "avg", "prod", "bor", "lxor"
shapes = [(), (3,), (0,), (2, 1, 3), (500,), (1,) * 6]
rng = np.random.default_rng(rank)
for dtype in map(np.dtype, dtypes):
    xs = [np.asarray(rng.random(shape) * 3 + rank).astype(dtype) for shape in shapes]
    before = [x.copy() for x in xs]
    for op in ops:
        try:
            wanted = [comm.all_reduce(x, op) for x in xs]
        except TypeError:
            error_like(TypeError, op, comm.all_reduce_many, xs, op)
            continue
        like = {False: in_python(xs, op), True: started_in_python(xs, op).wait()}
        for one, result in zip(wanted * 2, like[False] + like[True], strict=True):
            most = 4e-2 if dtype.itemsize < 4 else 1e-5  # floats are added in another order
            np.testing.assert_allclose(result.astype("c16"), one.astype("c16"), most)
        for call, starts in calls():
            outs = [np.empty_like(x) if i % 2 else None for i, x in enumerate(xs)]
            inplace = [x.copy() for x in xs]
            for got in (call(xs, op), call(tuple(xs), op, outs), call(inplace, op, out=inplace)):
                assert type(got) is list and len(got) == len(xs)
                for one, result in zip(got, like[starts], strict=True):
                    assert type(one) is np.ndarray and one.dtype == dtype
                    assert one.shape == result.shape and one.flags.writeable
                    assert one.tobytes() == result.tobytes()
                assert not any(np.shares_memory(one, x) for one in got for x in xs if one.size)
            assert all(out is None or out is one for out, one in zip(
                outs, call(xs, op, out=outs), strict=True))
            assert all(a is b for a, b in zip(call(inplace, op, out=inplace), inplace, strict=True))
    for x, again in zip(xs, before, strict=True):
        np.testing.assert_array_equal(x, again)
ok()
"""
    scripts(size, BOTH + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_short_lists_go_through_no_python(scripts: Scripts, transport: str) -> None:
    text = """
import array

lists = [
    [np.ones(2)],
    [np.ones((2, 3), "f4"), np.ones((), "f4"), np.ones(0, "f4")],
    [np.ones(3) for _ in range(200)],
    [memoryview(np.ones(4)), array.array("d", [1, 1]), np.ones((2, 2))],
]
for turn in range(2):  # first calls are prepared in Python
    for xs in lists:
        for got in (comm.all_reduce_many(xs), comm.iall_reduce_many(xs, "sum").wait(),
                    comm.all_reduce_many(xs=tuple(xs), op="sum", out=[None] * len(xs), timeout=9)):
            assert [type(one) for one in got] == [type(x) for x in xs]
            for one, x in zip(got, xs, strict=True):
                assert np.shape(one) == np.shape(x) and (np.asarray(one) == 2).all()
        comm.all_reduce_many(xs, algorithm="ring")
    without_python("all_reduce_many", "iall_reduce_many")
# what is not in `out` when a request is done would be there too late
out = [np.zeros(2)]
request = comm.iall_reduce_many(lists[0], out=out)
while not request.done:
    pass
assert out[0].tolist() == [2, 2] and request.wait() == out
request = comm.iall_reduce_many(lists[1])
lists[1][0][...] = 9  # they were read already
assert (request.wait()[0] == 2).all()
again = comm.persistent.all_reduce_many(lists[0], out=out)
lists[0][0][...] = 5  # and are read when it is started
assert again.start().wait()[0] is out[0] and out[0].tolist() == [10, 10]
lists[0][0][...] = 6
assert again.start().wait()[0] is out[0] and out[0].tolist() == [12, 12]
ok()
"""
    scripts(2, BOTH + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_lists_go_as_ever(scripts: Scripts, transport: str) -> None:
    text = """
lists = [
    [np.ones(2), 3, 1.5, np.float64(2), True, np.ones(3, "f4")],
    [np.ones((4, 3))[:, ::2], np.ones(2)],
    [np.asfortranarray(np.ones((3, 2)))],
    [np.ones(2), np.ones(2, "f4"), np.ones(2)],
    [np.ones((1,) * 7), np.ones(2)],
    [np.ones(20_000), np.ones(20_000)],
    [np.ones(1) for _ in range(600)],
    [],
]
for turn in range(2):
    for xs in lists:
        for call, _ in calls():
            for one, x in zip(call(xs), xs, strict=True):
                wanted = (np.asarray(x) * size) if x is not True else True
                assert np.shape(one) == np.shape(x) and (np.asarray(one) == wanted).all()
    xs = [np.ones(3), np.ones(3)]
    wrong = [
        (TypeError, "out is a list", dict(out=np.ones(3))),
        (ValueError, "1 items, xs has 2", dict(out=[None])),
        (ValueError, "out has shape", dict(out=[None, np.ones(2)])),
        (ValueError, "float32", dict(out=[None, np.ones(3, "f4")])),
        (ValueError, "read-only", dict(out=[None, np.broadcast_to(1.0, (3,))])),
        (ValueError, "overlaps", dict(out=[xs[0][::-1], None])),
        (ValueError, "nonsense", dict(algorithm="nonsense")),
        (ValueError, "nonsense", dict(op="nonsense")),
        (TypeError, "a number", dict(timeout="soon")),
    ]
    for kind, text, how in wrong:
        error_like(kind, text, comm.all_reduce_many, xs, **how)
    error_like(TypeError, "item 1 is None", comm.all_reduce_many, [xs[0], None])
    # results may go over what other results are made of: all was read before
    base = np.arange(6.0)
    xs = [base[:3], base[3:]]
    comm.all_reduce_many(xs, out=[base[3:], base[:3]])
    assert base.tolist() == [size * x for x in (3, 4, 5, 0, 1, 2)]
    both = np.zeros(3)
    got = comm.all_reduce_many(xs, out=[both, both])
    assert got[0] is both and got[1] is both and both.tolist() == [0, size**2, 2 * size**2]
ok()
"""
    scripts(2, BOTH + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lists_that_differ_are_shown_on_all_ranks(scripts: Scripts, transport: str) -> None:
    text = """
mine = [np.ones(2), np.ones(3)]
others = [
    [np.ones(3), np.ones(2)],
    [np.ones(5)],
    [np.ones((2, 1)), np.ones(3)],
    [np.ones(2, "i8"), np.ones(3, "i8")],
    [np.ones(2), np.ones(3), np.ones(0)],
    [np.ones(2), np.ones(3), 1],
    [np.ones(2), np.float64(1)],
]
for theirs in others:
    for odd in range(size):
        for name in ("all_reduce_many", "iall_reduce_many"):
            broken = comm.dup()
            xs = theirs if rank == odd else mine
            call = getattr(broken, name)
            run = (lambda: call(xs).wait()) if name[0] == "i" else (lambda: call(xs))
            text = str(error_of(run, within=60))
            shown = f"{name}\\\\(2 arrays, 40 bytes", f"{name}\\\\({len(theirs)} array"
            for each in shown:
                assert re.search(each, text), text
            broken.close()
ok()
"""
    scripts(3, BOTH + text, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_buffer_that_a_request_writes_to_is_held(scripts: Scripts, transport: str) -> None:
    text = """
import array
for _ in range(3):
    a = array.array("d", [1.0, 2.0])
    request = comm.iall_reduce_many([a], out=[a])
    error_of(a.extend, [0.0] * 10_000)
    request.wait()
    del request
    assert a.tolist() == [2, 4]
    a.extend([0.0] * 10_000)
ok()
"""
    scripts(2, text, transport)
