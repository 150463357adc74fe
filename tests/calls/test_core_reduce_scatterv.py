"""reduce_scatterv of arrays in the core, in shared memory and by messages.

In shared memory a call or so may go through Python: one that comes while a thread of Python's
answers the launcher, as it is asked of a rank that has waited long.

Ranks whose call goes through Python say the same, so any rank may go either way.
"""

from __future__ import annotations

import re

import pytest
from core_counting import COUNTING
from pool_scripts import Scripts
from script_jobs import Jobs, all_well
from tiers import few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

WATCHED = """
# What the core leaves to Python goes through this.
left = []
in_python = pycoll.Communicator.reduce_scatterv
def watched(self, *args, **kwargs):
    left.append(args)
    return in_python(self, *args, **kwargs)
pycoll.Communicator.reduce_scatterv = watched
cleanup.callback(setattr, pycoll.Communicator, "reduce_scatterv", in_python)
comm = comm.dup()
comm.reduce_scatterv(np.ones(size), [1] * size)  # in the first the ranks meet
left.clear()
"""

NUMPY = """
from functools import reduce

FOLDS = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
}
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def values(peer, shape, dtype):
    "What a rank passes; averages, and products of halves, are exact."
    count = int(np.prod(shape))
    return (size * ((np.arange(count) * 5 + peer) % 4)).astype(dtype).reshape(shape)


def rows_of(counts, peer=None):
    begin = sum(counts[: rank if peer is None else peer])
    return slice(begin, begin + counts[rank if peer is None else peer])


def wanted(all_x, counts, op):
    "This rank's rows, by NumPy."
    dtype = all_x[0].dtype
    result = reduce(FOLDS[op], [x[rows_of(counts)] for x in all_x]).astype(dtype)
    return (result / dtype.type(size)).astype(dtype) if op == "avg" else result


def same(got, want):
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (got.dtype, got.shape, want.shape)
    assert got.tobytes() == want.tobytes()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_every_operator_and_dtype_is_as_in_numpy_and_in_the_core(
    scripts: Scripts, size: int
) -> None:
    text = f"""{NUMPY}
counts = [5, 0, 2][:size]
served, refused = 0, 0
for dtype in DTYPES:
    for op in FOLDS:
        all_x = [values(peer, (sum(counts), 3), dtype) for peer in range(size)]
        try:
            got = comm.reduce_scatterv(all_x[rank], counts, op)
        except TypeError:  # which Python says
            refused += 1
            continue
        same(got, wanted(all_x, counts, op))
        served += 1
assert served >= 100, served
assert refused <= len(left) <= refused + 1, left
ok()
"""
    scripts(size, WATCHED + text)


@pytest.mark.parametrize("size", few([3], [2, 5]))
@pytest.mark.parametrize("way", ["together", "direct", "stream"])
def test_counts_of_all_kinds_are_cut_where_they_are_to_be(
    scripts: Scripts, size: int, way: str
) -> None:
    text = f"""{NUMPY}
from pycoll._transports._core import KINDS
from pycoll._transports._core import set_direct_from

if "{way}" == "together":
    cleanup.enter_context(pycoll.share_arrays(4096))
else:
    set_direct_from(KINDS.index("reduce_scatter"), 1 if "{way}" == "direct" else 1 << 40)
    cleanup.callback(set_direct_from, KINDS.index("reduce_scatter"), 0)


for scale in (1, 300, 20_000):
    for counts in ([1] * size, [0] * (size - 1) + [3], [2] + [0] * (size - 1), [*range(size)],
                   [0] * size, [7, *[1] * (size - 1)]):
        counts = [count * scale for count in counts]
        for rest in ((), (3,), (0,)):
            all_x = [values(peer, (sum(counts), *rest), "f8") for peer in range(size)]
            x, want = all_x[rank].copy(), wanted(all_x, counts, "sum")
            same(comm.reduce_scatterv(x, counts), want)
            out = np.empty_like(want)
            assert comm.reduce_scatterv(x, tuple(counts), "sum", out) is out
            same(out, want)
            same(x, all_x[rank])
            mine = x[rows_of(counts)]
            assert comm.reduce_scatterv(x, counts=counts, out=mine) is mine
            same(mine, want)
            for peer in range(size):  # what is the others' stays
                if peer != rank:
                    same(x[rows_of(counts, peer)], all_x[rank][rows_of(counts, peer)])
# Of an array without elements NumPy says no address that one could compare.
assert len([args for args in left if args[0].size]) <= 1, left
ok()
"""
    scripts(size, WATCHED + text)


@pytest.mark.parametrize("size", [2, 3])
def test_no_python_runs_in_a_call(scripts: Scripts, size: int) -> None:
    text = """
counts, seen, quiet = [3, *range(size - 1)], [], 0
x, out = np.ones(sum(counts)), np.empty(counts[rank])

def note(frame, event, arg):
    if event == "call":
        seen.append(frame.f_code.co_name)

for _ in range(100):
    seen.clear()
    sys.setprofile(note)
    comm.reduce_scatterv(x, counts, out=out)
    comm.reduce_scatterv(x, counts, op="max")
    sys.setprofile(None)
    quiet += not seen
assert quiet, seen  # in some of them no rank waited so long that it slept
assert (out == size).all()
ok()
"""
    scripts(size, WATCHED + text)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", few([3], [2, 4]))
def test_any_algorithm_dtype_and_count_by_messages(
    scripts: Scripts, size: int, transport: str
) -> None:
    text = f"""{NUMPY}
named = [None, *pycoll.algorithms("reduce_scatter")[1:]]
turn = 0
for scale in (1, 300, 30_000):
    for counts in ([1] * size, [0] * (size - 1) + [3], [2] + [0] * (size - 1), [*range(size)],
                   [0] * size, [7, *[1] * (size - 1)]):
        counts = [count * scale for count in counts]
        for dtype, op in (("f8", "sum"), ("f2", "max"), ("f2", "avg"), ("i4", "avg"), ("g", "sum")):
            turn += 1
            algorithm, rest = named[turn % len(named)], [(), (3,), (0,), (1, 2)][turn % 4]
            all_x = [values(peer, (sum(counts), *rest), dtype) for peer in range(size)]
            x, begin, mine = all_x[rank].copy(), comm.ireduce_scatterv, all_x[rank][rows_of(counts)]
            try:
                got = begin(x, counts, op, algorithm=algorithm).wait()
            except TypeError as error:
                assert dtype == "g" or (op, dtype) == ("avg", "i4"), error
                continue
            same(got, want := wanted(all_x, counts, op))
            out = np.empty_like(want)
            assert begin(x, tuple(counts), op, out).wait() is out
            same(out, want)
            assert begin(x, counts=np.array(counts), op=op, algorithm=algorithm).wait() is not out
            got = comm.reduce_scatterv(x, counts, op, algorithm=algorithm or "linear", timeout=60)
            same(got, want)
            same(x, all_x[rank])
            mine = x[rows_of(counts)]
            assert begin(x, counts, op, mine).wait() is mine
            same(mine, want)
assert turn > 60
ok()
"""
    scripts(size, text, transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_by_messages_no_python_runs_and_counts_are_told_apart(
    scripts: Scripts, transport: str
) -> None:
    text = (
        COUNTING
        + """
import array
ALLOWED = set()
x, out, buffer = np.arange(8.0) + rank, np.empty(3), array.array("d", range(8))
total = np.arange(8.0) * 2 + 1
again = comm.persistent.reduce_scatterv(x, [2, 6])

def step():
    for first in (3, 0, 8, 5):
        counts = [first, 8 - first]
        mine = slice(0, first) if rank == 0 else slice(first, 8)
        assert comm.ireduce_scatterv(x, counts).wait().tolist() == total[mine].tolist()
        got = comm.reduce_scatterv(x, counts, algorithm="pairwise", timeout=None)
        assert got.tolist() == total[mine].tolist()
        assert comm.ireduce_scatterv(x.reshape(8, 1), counts).wait().shape == (counts[rank], 1)
    most = comm.ireduce_scatterv(x, [3, 5], "max", algorithm="ring").wait()
    assert most.tolist() == (np.arange(8.0) + 1)[slice(0, 3) if rank == 0 else slice(3, 8)].tolist()
    if rank == 0:
        assert comm.ireduce_scatterv(x, (3, 5), out=out).wait() is out
    else:
        comm.ireduce_scatterv(x, (3, 5)).wait()
    mine = slice(0, 2) if rank == 0 else slice(2, 8)
    assert again.start().wait().tolist() == total[mine].tolist()
    got = comm.ireduce_scatterv(buffer, [2, 6]).wait()
    assert type(got) is array.array and got.tolist() == [v * 2.0 for v in range(8)[mine]]

goes_without_python(step)
ok()
"""
    )
    scripts(2, text, transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_any_rank_may_go_through_python(scripts: Scripts, transport: str) -> None:
    text = f"""{NUMPY}
for turn in range(40):
    counts = [(turn * peer + 1) % 4 * (1 if turn % 2 else 5000) for peer in range(size)]
    all_x = [values(peer, (sum(counts), 2), "i4") for peer in range(size)]
    # What the core leaves to Python: an operator object, arrays with gaps, NumPy's ints.
    how = (turn + rank) % 5
    x = np.repeat(all_x[rank], 2, axis=1)[:, ::2] if how == 0 else all_x[rank]
    op = pycoll.MAX if how == 1 and hasattr(pycoll, "MAX") else "max"
    out = np.empty((counts[rank], 4), "i4")[:, ::2] if how == 2 else None
    given = np.array(counts) if how == 3 else counts
    for call in (comm.reduce_scatterv, lambda *args, **_: comm.ireduce_scatterv(*args).wait()):
        got = call(x, given, op, out, timeout=60.0 if turn % 2 else None)
        assert out is None or got is out
        same(np.ascontiguousarray(got), wanted(all_x, counts, "max"))
assert left
ok()
"""
    scripts(3, WATCHED + text, transport)


def test_operators_that_the_core_has_not_go_through_python(scripts: Scripts) -> None:
    text = f"""{NUMPY}
counts = [2, 0, 3]
all_x = [values(peer, (5,), "f8") for peer in range(size)]
for _ in range(2):
    got = comm.reduce_scatterv(all_x[rank], counts, lambda a, b: a + b)
    same(got, wanted(all_x, counts, "sum"))
    pairs = np.zeros(5, [("value", "f8"), ("index", "i8")])
    pairs["value"], pairs["index"] = all_x[rank], rank
    got = comm.reduce_scatterv(pairs, counts, "minloc")
    assert (got["value"] == wanted(all_x, counts, "min")).all()
    got = comm.reduce_scatterv(memoryview(all_x[rank]), counts)
    assert (np.asarray(got) == wanted(all_x, counts, "sum")).all()
ok()
"""
    scripts(3, text)


def test_wrong_arguments_are_told_as_by_python_and_nothing_is_sent(scripts: Scripts) -> None:
    text = """
x, counts = np.ones(4), [4, *[0] * (size - 1)]
read_only = np.empty(counts[rank])
read_only.flags.writeable = False
wrong = [
    (TypeError, "counts", (x,), {}),
    (TypeError, "an int, not a float", (x, [4.0, *counts[1:]]), {}),
    (TypeError, "not a bool", (x, [*counts[:-1], False]), {}),
    (TypeError, "sequence of 2 ints", (x, 4), {}),
    (TypeError, "takes an array", ([1.0] * 4, counts), {}),
    (TypeError, "root", (x, counts), {"root": 0}),
    (TypeError, "xs", (x, counts), {"xs": x}),
    (TypeError, "multiple values", (x, counts), {"counts": counts}),
    (TypeError, "op", (x, counts, None), {}),
    (TypeError, "avg", (x.astype("i4"), counts, "avg"), {}),
    (ValueError, "items", (x, [4]), {}),
    (ValueError, "-1", (x, [5, -1]), {}),
    (ValueError, "cut by counts", (x, [3, 0]), {}),
    (ValueError, "cut by counts", (np.ones(()), [0, 0]), {}),
    (ValueError, "cut by counts", (x, [1 << 70, 4]), {}),
    (ValueError, "cut by counts", (x, [(1 << 63) - 1, (1 << 63) - 1]), {}),
    (ValueError, "", (x, counts), {"out": np.empty(counts[rank] + 1)}),
    (ValueError, "", (x, counts), {"out": np.empty((counts[rank], 1))}),
    ((TypeError, ValueError), "float32", (x, counts), {"out": np.empty(counts[rank], "f4")}),
    ((TypeError, ValueError), "", (x, counts), {"out": read_only}),
    (ValueError, "nonsense", (x, counts), {"algorithm": "nonsense"}),
    (ValueError, "timeout", (x, counts), {"timeout": -1}),
]
for kinds, text, args, how in wrong:
    error = error_of(comm.reduce_scatterv, *args, **how)
    assert isinstance(error, kinds) and text in str(error), (args, how, error)
whole = np.ones(8)
if rank == 0:
    error_like(ValueError, "overlaps", comm.reduce_scatterv, whole[:4], counts, out=whole[1:5])
assert (comm.reduce_scatterv(x, counts) == size).all()
# No other method takes counts.
error_like(TypeError, "counts", comm.reduce_scatter, np.ones((size, 2)), counts=counts)
error_like(TypeError, "root", comm.all_reduce, x, root=1)
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ("reduce_scatterv(x, [2, 2])", "reduce_scatterv(x, [1, 3])", "counts=[2, 2], op=sum"),
        ("reduce_scatterv(x, [2, 2])", "reduce_scatterv(x, [2, 2], 'max')", "op=sum"),
        ("reduce_scatterv(x, [2, 2])", "reduce_scatterv(x.astype('f4'), [2, 2])", "float64[4]"),
        ("reduce_scatterv(x, [2, 2])", "reduce_scatterv(x[:, None], [2, 2])", "float64[4]"),
        ("reduce_scatterv(x, [2, 2])", "reduce_scatterv(np.ones(5), [2, 3])", "counts=[2, 2]"),
        ("reduce_scatterv(x, [2, 2])", "reduce_scatter(x.reshape(2, 2))", "counts=[2, 2]"),
        (
            "reduce_scatterv(x, [2, 2])",
            "reduce_scatterv(x, [2, 2], lambda a, b: a + b)",
            "counts=[2, 2]",
        ),
        ("reduce_scatterv(x, [2, 2])", "all_gatherv(x)", "counts=[2, 2]"),
        ("reduce_scatterv(x, [2, 2])", "barrier()", "counts=[2, 2]"),
        ("reduce_scatterv(np.ones(80_000), [80_000, 0])", "reduce_scatterv(x, [2, 2])", "80000, 0"),
    ],
)
@pytest.mark.parametrize(
    ("way", "transport"), [("core", "shm"), ("python", "shm"), ("core", "tcp")]
)
def test_other_calls_of_other_ranks_are_a_mismatch(
    scripts: Scripts, mine: str, theirs: str, told: str, way: str, transport: str
) -> None:
    if way == "python":  # whose ints are NumPy's
        mine = re.sub(r"(\[[\d_, ]+\])\)$", r"np.array(\1))", mine)
    text = f"""
x = np.ones(4)
for _ in range(2):
    comm.reduce_scatterv(np.ones(2), [1, 1])
call = (lambda: comm.{mine}) if rank == 0 else (lambda: comm.{theirs})
try:
    call()
    comm.barrier()
except pycoll.MismatchError as error:
    assert rank or "{told}" in str(error), error
    ok()
except pycoll.PeerFailed as error:
    assert "Mismatch" in str(error), error
    ok()
"""
    scripts(2, text, transport)


def test_counts_that_change_while_the_call_waits_are_those_of_its_begin(scripts: Scripts) -> None:
    text = """
pids = comm.all_gather(os.getpid())
counts = [3, 1]
shown = r"reduce_scatterv\\(float64\\[4\\], counts=\\[3, 1\\], op=sum, algorithm=shared_memory\\)"
if rank == 0:
    changed = threading.Event()
    def spoil(signum, frame):
        counts[:] = "ab"
        changed.set()
    def tell():
        changed.wait()
        comm.send("changed", 1, 7)
    before = signal.signal(signal.SIGUSR1, spoil)
    thread = threading.Thread(target=tell)
    thread.start()
    got = comm.reduce_scatterv(np.arange(4.0), counts)
    thread.join()
    signal.signal(signal.SIGUSR1, before)
else:
    await_table((0, shown))
    os.kill(pids[0], signal.SIGUSR1)
    comm.recv(0, 7)
    await_table((0, shown))
    got = comm.reduce_scatterv(np.arange(4.0), counts)
assert got.tolist() == ([0, 2, 4] if rank == 0 else [6])
ok()
"""
    scripts(2, text)


@pytest.mark.parametrize("count", [1, 200_000])
def test_ctrl_c_ends_a_call_that_waits(scripts: Scripts, count: int) -> None:
    text = f"""
counts = [{count}, 0]
comm.reduce_scatterv(np.ones({count}), counts)
part = comm.dup()
pid = comm.broadcast(os.getpid(), root=0)
if rank == 0:
    error_like(KeyboardInterrupt, "", part.reduce_scatterv, np.ones({count}), counts, within=30)
else:
    await_table((0, "reduce_scatterv"))
    os.kill(pid, signal.SIGINT)
    peer_failed(0, f"gave up reduce_scatterv #0 on {{part.name}} (KeyboardInterrupt)", part.barrier)
assert (comm.reduce_scatterv(np.ones(2), [1, 1]) == 2).all()
ok()
"""
    scripts(2, text)


def test_what_the_user_has_ruled_out_goes_by_messages(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_ALGORITHM", "reduce_scatter:^shared_memory")
    text = """
for number in range(4):
    assert comm.counters().sent_messages[1 - rank] == number
    assert (comm.reduce_scatterv(np.ones(3), [2, 1]) == 2).all()
ok()
"""
    all_well(job(2, text, "--transport", "shm"), 2)
