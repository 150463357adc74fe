"""Arrays at whose memory Python looks for the core: subclasses, libraries with `__dlpack__` alone.

And those that have a copy of one of NumPy's dtypes, at which the core looks itself.
"""

from __future__ import annotations

import pytest
from pool_scripts import Scripts

TRANSPORTS = ["shm", "tcp"]

HEAD = """
import pickle, tempfile, types

def memmap(x):
    with tempfile.TemporaryFile() as file:
        made = np.memmap(file, x.dtype, "w+", shape=x.shape)
    made[...] = x
    return made

CALLS = (
    "all_reduce", "reduce", "scan", "reduce_scatter", "reduce_scatterv", "all_gather", "gather",
    "all_to_all", "all_gatherv", "broadcast", "scatter", "send", "recv",
)
mine, theirs, total = np.arange(4.0) + rank, np.arange(4.0) + 1 - rank, 2 * np.arange(4.0) + 1
both = [np.arange(4.0), np.arange(4.0) + 1]

def same(got, wanted):
    assert type(got) is np.ndarray and got.dtype == np.asarray(wanted).dtype
    assert got.tolist() == np.asarray(wanted).tolist()
"""

# Every call that may take such an array, and writes to `out`.
ALL = """
def all_calls(x, rows, out):
    same(comm.all_reduce(x), total)
    assert comm.all_reduce(x, out=out) is out
    same(np.asarray(out), total)
    got = comm.reduce(x, root=1)
    same(got, total) if rank == 1 else check(got is None)
    same(comm.scan(x), both[0] if rank == 0 else total)
    same(comm.reduce_scatter(rows), (1 + 4 * rank) * np.ones(2))
    same(comm.reduce_scatterv(x, [1, 3]), total[:1] if rank == 0 else total[1:])
    same(comm.all_gather(x), both)
    got = comm.gather(x, root=1)
    same(got, both) if rank == 1 else check(got is None)
    same(comm.all_to_all(rows), [[2.0 * rank] * 2, [2.0 * rank + 1] * 2])
    for got, wanted in zip(comm.all_gatherv(x), both):
        same(got, wanted)
    got = comm.broadcast(x if rank == 1 else None, root=1)
    check(got is x) if rank == 1 else same(got, both[1])
    same(comm.scatter(rows if rank == 1 else None, root=1), [2.0 * rank + 1] * 2)
    comm.send(x, 1 - rank)
    same(comm.recv(1 - rank), theirs)
    out[...] = -1
    comm.send(x[:3], 1 - rank)
    assert comm.recv(1 - rank, out=out) is out  # shorter than it
    assert np.asarray(out).tolist() == [*theirs[:3], -1]
    same(comm.iall_reduce(x).wait(), total)
    out[...] = x
    assert comm.all_reduce(out, out=out) is out
    same(np.asarray(out), total)

def check(true):
    assert true
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", ["again", "memmap"])
def test_numpys_arrays_of_other_forms(scripts: Scripts, make: str, transport: str) -> None:
    text = """
def again(x):
    made = pickle.loads(pickle.dumps(x))
    assert made.dtype is not x.dtype and made.dtype == x.dtype
    return made

rows = np.array([[0.0 + rank] * 2, [2.0 + rank] * 2])
x, rows, out = MAKE(mine), MAKE(rows), MAKE(np.zeros(4))
x_before = np.asarray(x).copy()
for _ in range(2):  # of the first array of its type the core asks Python
    all_calls(x, rows, out)
without_python(*CALLS)
for _ in range(2):
    all_calls(x, rows, out)
assert (x == x_before).all()
ok()
"""
    scripts(2, HEAD + ALL + text.replace("MAKE", make), transport)


def test_a_copy_of_a_dtype_is_taken_for_what_it_is(scripts: Scripts) -> None:
    text = """
for char in "?bhilqBHILQefdFD":
    x = pickle.loads(pickle.dumps(np.array([1, rank], char)))
    assert x.dtype is not np.dtype(char)
    total = comm.all_reduce(x, op="max") if char not in "FD" else comm.all_reduce(x)
    assert total.dtype is np.dtype(x.dtype.char), char
    assert total.tolist() == ([1, 1] if char not in "FD" else [2, 1]), char
swapped = np.array([1.0, 2.0], ">f8")
error_like(TypeError, "bytes are not in this machine's order", lambda: comm.all_reduce(swapped))
for x in comm.all_gather(swapped):
    assert x.tolist() == [1, 2]
# What a dtype says beside the type of its elements an object keeps.
told = np.ones(2, np.dtype("f8", metadata={"unit": "m"}))
assert comm.all_reduce(told).tolist() == [2, 2]
ok()
"""
    scripts(2, HEAD + text, "shm")


MADE_UP = """
module = types.ModuleType("madeup")
cleanup.callback(sys.modules.pop, "madeup")
sys.modules["madeup"] = module

class Array:
    "Of a library that has no more than DLPack."
    __module__ = "madeup"
    device = 1
    def __init__(self, array): self.array = array
    def __dlpack__(self, **options): return self.array.__dlpack__(**options)
    def __dlpack_device__(self): return self.device, 0
    def __getitem__(self, key): return Array(self.array[key])
    def __setitem__(self, key, value): self.array[key] = value
    def __array__(self, *args, **kwargs): return self.array

module.Array, module.from_dlpack = Array, lambda x: Array(np.from_dlpack(x))

def same(got, wanted):
    assert type(got) is Array, type(got)
    assert got.array.dtype == np.asarray(wanted).dtype
    assert got.array.tolist() == np.asarray(wanted).tolist()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_arrays_of_a_library_without_a_table(scripts: Scripts, transport: str) -> None:
    text = """
rows = np.array([[0.0 + rank] * 2, [2.0 + rank] * 2])
x, rows, out = Array(mine), Array(rows), Array(np.zeros(4))
same_of_numpy = same
for _ in range(2):
    got = comm.all_reduce(x)
    same(got, total)
    comm.all_reduce(x, out=out)
    same(out, total)
comm.send(x, 1 - rank)
same(comm.recv(1 - rank), theirs)
comm.barrier()  # nothing of Python's is under way any more
without_python("all_reduce", "reduce", "scan", "reduce_scatter", "all_gather", "gather",
               "all_to_all", "send")
for _ in range(2):
    same(comm.all_reduce(x), total)
    same(comm.all_reduce(x, timeout=30), total)
    given = np.empty(4)
    assert comm.all_reduce(x, out=given) is given and given.tolist() == total.tolist()
    out[:] = 0
    assert comm.all_reduce(x, out=out) is out
    same(out, total)
    out[:] = mine
    assert comm.all_reduce(out, out=out) is out
    same(out, total)
    got = comm.reduce(x, root=1)
    same(got, total) if rank == 1 else check(got is None)
    same(comm.scan(x), both[0] if rank == 0 else total)
    same(comm.reduce_scatter(rows), (1 + 4 * rank) * np.ones(2))
    same(comm.all_gather(x), both)
    got = comm.gather(x, root=1)
    same(got, both) if rank == 1 else check(got is None)
    same(comm.all_to_all(rows), [[2.0 * rank] * 2, [2.0 * rank + 1] * 2])
    # Each rank gets what it has passed.
    mixed = comm.all_reduce(x if rank else mine)
    assert type(mixed) is (Array if rank else np.ndarray)
    out[:] = 0
    comm.send(x, 1 - rank)
    assert comm.recv(1 - rank, out=out) is out
    same(out, theirs)
# What one rank makes of another's, by the kind that is told, is Python's.
got = comm.broadcast(x if rank == 1 else None, root=1)
check(got is x) if rank == 1 else same(got, both[1])
same(comm.scatter(rows if rank == 1 else None, root=1), [2.0 * rank + 1] * 2)
for got, wanted in zip(comm.all_gatherv(x), both):
    same(got, wanted)
comm.send(x, 1 - rank)
same(comm.recv(1 - rank), theirs)
same(comm.iall_reduce(x).wait(), total)
ok()
"""
    scripts(2, HEAD + ALL + MADE_UP + text, transport)


def test_what_the_first_array_of_a_type_was_the_next_need_not_be(scripts: Scripts) -> None:
    text = """
class Named(np.ndarray): pass

class Array(Array):
    __module__ = "madeup"

module.Array = Array

for _ in range(3):
    plain = mine.view(Named)
    assert comm.all_reduce(plain).tolist() == total.tolist()
    named = mine.view(Named)
    named.name = "weights"
    error_like(TypeError, "Named", lambda: comm.all_reduce(named))
    got = comm.all_gather(named)
    assert [x.name for x in got] == ["weights"] * 2 and got[1 - rank].tolist() == theirs.tolist()
    same(comm.all_reduce(Array(mine)), total)
    elsewhere = Array(mine)
    elsewhere.device = 7  # where nobody can look
    error_like(TypeError, "DLPack device 7|madeup", lambda: comm.all_reduce(elsewhere))
    frozen = mine.view(Named)
    frozen.flags.writeable = False
    error_like(ValueError, "read-only", lambda: comm.all_reduce(mine, out=frozen))
    pieces = np.zeros((4, 2)).view(Named)
    out = pieces[:, 0]
    assert comm.all_reduce(mine, out=out) is out and out.tolist() == total.tolist()
    assert not pieces[:, 1].any()
    shared = np.zeros(5).view(Named)
    error_like(ValueError, "overlap", lambda: comm.all_reduce(shared[:4], out=shared[1:]))
ok()
"""
    scripts(2, HEAD + ALL + MADE_UP + text, "shm")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_result_is_its_callers_alone(scripts: Scripts, transport: str) -> None:
    text = """
import weakref

rows = np.ones((2, 2))
for _ in range(5):
    for x in (np.ones((4, 2))[:, 0], memmap(mine), np.ones((4, 4)).T):
        for name in ("all_reduce", "scan", "all_gather", "iall_reduce"):
            got = getattr(comm, name)(x)
            if name[0] == "i":
                got = got.wait()
            held = weakref.ref(got)
            del got
            assert held() is None, (name, x)
        out = np.empty_like(x)
        before = sys.getrefcount(out)
        assert comm.all_reduce(x, out=out) is out
        assert sys.getrefcount(out) == before
    held = weakref.ref(comm.reduce_scatter([np.ones(2), np.ones(2)]))
    assert held() is None
ok()
"""
    scripts(2, HEAD + text, transport)


def test_there_may_be_many_types(scripts: Scripts) -> None:
    text = """
kinds = [type(f"Array{number}", (np.ndarray,), {}) for number in range(60)]
for kind in kinds:
    comm.all_reduce(mine.view(kind))
without_python("all_reduce")
for kind in kinds:
    same(comm.all_reduce(mine.view(kind)), total)
ok()
"""
    scripts(2, HEAD + text, "shm")


def test_bytes_in_another_order_are_no_numbers_here(scripts: Scripts) -> None:
    text = """
import ml_dtypes
plain = np.ones(3, ml_dtypes.bfloat16)
swapped = plain.astype(plain.dtype.newbyteorder())
for _ in range(3):
    assert comm.all_reduce(plain).tolist() == [2, 2, 2]
    error_of(comm.all_reduce, swapped)
ok()
"""
    scripts(2, HEAD + text, "shm")
