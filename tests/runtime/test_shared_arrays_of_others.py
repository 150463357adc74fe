"""Arrays of other ranks: what is exchanged, `comm.share`, and the day something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pool_scripts import Scripts
from script_jobs import all_well
from shared_array_jobs import USE
from shared_memory_jobs import NATIVE, REFUSE
from tiers import few

CALLS = """
def every_call(comm, rng, where, times):
    "Random calls; each rank's arrays lie where `where()` says. Compared bit for bit."
    n, me = comm.size, comm.rank
    for _ in range(times):
        common = np.random.default_rng(rng.integers(1 << 31))
        count = int(common.choice([1, 700, 1500, 5000, 20_000, 70_000, 300_000, 1_500_000]))
        dtype = np.dtype(str(common.choice(["f4", "f8", "i2", "i8", "u1"])))
        whole = common.integers(0, 100, (n, n, count)).astype(dtype)
        root, form = int(common.integers(n)), int(common.integers(5))

        def place(values):
            with pycoll.share_arrays(1 if where() else 1 << 60):
                if form == 1 and values.ndim:  # strides
                    x = np.empty((*values.shape[:-1], 2 * values.shape[-1]), dtype)[..., ::2]
                elif form == 2 and values.ndim:
                    x = np.empty(values.shape, dtype)[..., ::-1]
                else:
                    x = np.empty(values.shape, dtype)
            x[...] = values
            return x

        rows, one = whole[:, me], whole[:, 0]  # rows[r]: what r has for this rank
        x, out = place(one[me]), place(one[me] * 0)
        want = one[0].copy()
        for r in range(1, n):
            want = want + one[r]
        def same(got, want, what):
            assert np.array_equal(got, want), (what, count, dtype, root, form)
        same(comm.all_reduce(x, out=out), want, "all_reduce")
        same(x, one[me], "all_reduce has changed x")
        got = comm.reduce(x, root=root, out=out if me == root else None)
        if me == root:
            same(got, want, "reduce")
        got = comm.gather(x, root, out=place(one * 0) if me == root else None)
        if me == root:
            same(got, one, "gather")
        same(comm.all_gather(x, out=place(one * 0)), one, "all_gather")
        full = place(one * 0)
        full[me] = one[me]
        if full.flags.c_contiguous:
            same(comm.all_gather(full[me], out=full), one, "all_gather in place")
        mine = place(whole[me])
        same(comm.all_to_all(mine, out=place(rows * 0)), rows, "all_to_all")
        total = rows[0].copy()
        for r in range(1, n):
            total = total + rows[r]
        same(comm.reduce_scatter(mine, out=out), total, "reduce_scatter")
        got = comm.scatter(mine if me == root else None, root, out=out)
        same(got, whole[root, me], "scatter")
        y = place(one[me])
        same(comm.broadcast(y, root), one[root], "broadcast")
        same(comm.broadcast(x if me == root else None, root), one[root], "broadcast to None")
        y = place(one[me])
        same(comm.all_reduce(y, out=y), want, "all_reduce in place")
        right, left = (me + 1) % n, (me - 1) % n
        same(comm.sendrecv(x, right, left, out=out), one[left], "sendrecv")
        request = comm.isend(x, right)
        same(comm.recv(left, out=out), one[left], "recv")
        request.wait()
        got = comm.all_gatherv(x[: count // (me + 1)])
        assert all(np.array_equal(g, one[r][: count // (r + 1)]) for r, g in enumerate(got))
        same(comm.iall_reduce(x, out=out).wait(), want, "iall_reduce")
"""


@pytest.mark.parametrize("times", few([5], [15]))
@pytest.mark.parametrize("size", few([3], [2, 4]))
@pytest.mark.parametrize("single_copy", few(["1"], ["0"]))
def test_mixes_of_shared_and_ordinary_arrays_have_the_same_bits(
    scripts: Scripts, size: int, single_copy: str, times: int
) -> None:
    environment = {} if single_copy == "1" else {"PYCOLL_SINGLE_COPY": single_copy}
    text = f"""
mine = np.random.default_rng(1000 + rank)
for seed, chance in enumerate([1.0, 0.5, 0.9]):
    every_call(comm, np.random.default_rng(seed), lambda: mine.random() < chance, {times})
ok()
"""
    scripts(size, USE + CALLS + text, **environment)


def test_share_gives_every_ranks_array(scripts: Scripts) -> None:
    text = """
x = pycoll.zeros((4, 6 + rank), "f4" if rank else "i8")
x[:] = rank
part = x[::-1, 1::2]
views = comm.share(part)
assert views[rank] is part
assert all(v.shape == (4, (6 + r) // 2) and (v == r).all() for r, v in enumerate(views))
comm.barrier()
if rank == 0:
    for view in views:
        view[0] = 50
comm.barrier()
assert (x[3, 1::2] == 50).all() and (x[:3] == rank).all()
fixed = pycoll.zeros(3)
fixed.flags.writeable = False
views = comm.share(fixed)
assert not any(view.flags.writeable for view in views)
assert [view.shape for view in comm.share(pycoll.zeros((0, 3)))] == [(0, 3)] * size
for wrong in (np.ones(3), [1, 2], 7, pycoll.empty(3, object)):
    error_like(ValueError, "rank 1: share", comm.share, wrong if rank == 1 else pycoll.empty(3))
    comm.barrier()
ok()
"""
    scripts(3, USE + text)


def test_what_is_shared_lives_as_long_as_anybody_holds_it(scripts: Scripts) -> None:
    text = """
x = pycoll.zeros(1000)
x[:] = rank + 1
views = comm.share(x)
there = views[1 - rank][10:20]
del x, views
gc.collect()
comm.barrier()
more = [pycoll.zeros(1000) for _ in range(10)]
for y in more:
    y[:] = -5
comm.barrier()
assert (there == 2 - rank).all()
del there, more, y
gc.collect()
comm.barrier()
for _ in range(300):
    views = comm.share(pycoll.empty(1000))
del views
gc.collect()
comm.barrier()
comm.share(pycoll.empty(1))
assert use().arrays < 12, use()
ok()
"""
    scripts(2, USE + text)


def test_share_of_ranks_that_share_no_memory_says_what_does(scripts: Scripts) -> None:
    text = """
error_like(ValueError, "split_by_host", comm.share, pycoll.empty(3))
here = comm.split_by_host()
views = here.share(pycoll.zeros(3))
assert len(views) == 2
comm.barrier()
ok()
"""
    scripts(4, USE + text, "shm", "--emulate-hosts", "2")


def test_who_gives_up_has_its_arrays_for_itself(scripts: Scripts) -> None:
    # Rank 0 times out half-way, and at once changes its arrays: what others make of them must not
    # be believed, and nothing may be written to them any more.
    text = """
import itertools
cleanup.enter_context(pycoll.share_arrays(1))
x = np.full((2, 2 << 20), rank + 1.0)
all_x = np.array([x * 0 + 1, x * 0 + 2])
wanted = (
    ("all_gather", all_x), ("all_reduce", x * 0 + 3), ("all_to_all", all_x[:, 0]),
    ("reduce_scatter", x[0] * 0 + 3), ("broadcast", all_x[1]), ("reduce", x * 0 + 3),
)
seen = 0
for (name, want), seconds in itertools.product(wanted, (0.002, 0.01)):
    c = comm.dup()
    c.barrier()
    out = np.full(want.shape, 5.0)
    call = getattr(c, name)
    args, options = (x,), {"out": out}
    if name == "broadcast":
        args, options = (x if rank == 1 else out,), {"root": 1}
    if name == "reduce" and rank == 1:
        options = {"out": None}
    comm.barrier()
    try:
        call(*args, **options, timeout=seconds if rank == 0 else None)
    except pycoll.OperationTimeout:
        if rank == 0:
            out[...] = 77.0
            for _ in range(20):
                assert (out == 77.0).all(), "somebody has written"
            seen += 1
    else:
        got = out if not (name == "reduce" and rank == 1) else want
        if not (name == "broadcast" and rank == 1):
            assert (got == want).all(), (name, (got != want).sum())
    comm.barrier()
ok()
"""
    scripts(2, USE + text)


@pytest.mark.parametrize("name", few(["all_reduce"], ["broadcast", "gather", "all_gather", "send"]))
def test_a_rank_that_dies_in_the_middle_is_peer_failed(job: Any, name: str) -> None:
    text = f"""
pycoll.share_arrays(1)
name = {name!r}
x, many, out = np.ones(2_000_000), np.ones((size, 2_000_000)), np.ones(2_000_000)
calls = {{
    "all_reduce": lambda: comm.all_reduce(x, out=out),
    "broadcast": lambda: comm.broadcast(x, root=1),
    "gather": lambda: comm.gather(x, out=many if rank == 0 else None),
    "all_gather": lambda: comm.all_gather(x, out=many),
    "send": lambda: comm.sendrecv(x, (rank + 1) % size, (rank - 1) % size, out=out),
}}
calls[name]()
if rank == 1:
    threading.Timer(0.05 + 0.01 * (os.getpid() % 7), os.kill, (os.getpid(), signal.SIGKILL)).start()
def forever():
    while True:
        calls[name]()
error = error_of(forever, within=30)
assert isinstance(error, pycoll.PeerFailed) and error.rank == 1, repr(error)
assert (x == 1).all() or name == "broadcast"
ok()
"""
    done = job(3, USE + text)
    assert done.status == 137, done.stderr
    assert done.content == [0, 2], done.stderr


def test_what_a_peer_says_is_checked(job: Any) -> None:
    text = """
host = comm._group.engine.shared_memory.host
x = pycoll.empty(1000)
at = comm.all_gather(np.array([x.__array_interface__["data"][0]], "u8"))[:, 0]
assert host.window(1 - rank, int(at[1 - rank]), 8000) is not None
for address, nbytes in (
    (0, 8), (int(at[1 - rank]) - 1, 8), (2**64 - 1, 8), (2**63, 2**62), (int(at[1 - rank]), 2**62),
):
    assert host.window(1 - rank, address, nbytes) is None, (address, nbytes)
for local, nbytes in ((-1, 8), (2, 8), (0, -1)):
    error_like(ValueError, "no such rank", host.window, local, int(at[0]), nbytes)
fd = int(os.environ["PYCOLL_SHM"].split(":")[0])
error = error_of(os.ftruncate, fd, 4096)
assert isinstance(error, PermissionError), error
ok()
"""
    all_well(job(2, USE + text), 2)


def test_calls_through_python_and_the_core_agree_where_they_go(scripts: Scripts) -> None:
    # A deadline, or strides, take a call through Python; the others' go through the core alone.
    text = """
cleanup.enter_context(pycoll.share_arrays(1))
x, out, many = np.ones(20_000), np.empty(20_000), np.empty((size, 20_000))
for number in range(150):
    x[:] = number + rank
    late = {"timeout": 60} if (number + rank) % 3 == 0 else {}
    source = np.repeat(x, 2)[::2] if (number + rank) % 5 == 0 else x
    total = size * number + size * (size - 1) // 2
    assert (comm.all_reduce(source, out=out, **late) == total).all()
    comm.all_gather(source, out=many, **late)
    assert all((many[r] == number + r).all() for r in range(size))
    got = comm.reduce(source, out=out if rank == 1 else None, root=1, **late)
    assert got is None or (got == total).all()
    got = comm.gather(source, root=0, **late)
    assert got is None or all((got[r] == number + r).all() for r in range(size))
ok()
"""
    scripts(3, USE + text)


def test_a_sender_whose_kernel_copies_nothing_helps_no_ordinary_array(job: Any) -> None:
    init = """
if int(os.environ["PYCOLL_RANK"]) in (0, 1):
    refuse_single_copy()
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""
    text = """
for count in (1500, 9000, 20_000, 100_000, 3_000_000):
    shared, ordinary = pycoll.empty(count), np.empty(count)
    for source, target in ((shared, ordinary), (ordinary, shared), (shared, shared)):
        source[:] = rank + count
        for _ in range(20):
            comm.sendrecv(source, 1 - rank, 1 - rank, out=target)
            if source is not target:
                assert (target == 1 - rank + count).all()
            if rank == 0:
                comm.send(source, 1)
                comm.recv(1, out=target)
            else:
                comm.recv(0, out=target)
                comm.send(source, 0)
ok()
"""
    text = text.replace("(shared, shared)", "(shared, pycoll.empty(count))")
    all_well(job(2, NATIVE + text, init=REFUSE + init), 2)


def test_what_is_shared_outlives_its_owners_process(job: Any) -> None:
    text = """
from pycoll._runtime.shared_arrays import use
large = pycoll.zeros(40_000_000)  # more than is kept of freed arrays
large[:] = rank + 1
views = comm.share(large)
comm.barrier()
if rank == 0:
    pid = os.getpid()
    comm.send(pid, 1)
    ok()
    sys.exit(0)
await_end(comm.recv(0))
assert (views[0] == 1).all()
ok()
"""
    all_well(job(2, text), 2)


def test_only_the_first_process_of_a_rank_has_its_arena(job: Any) -> None:
    text = """
import subprocess
before = "import pycoll; from pycoll._runtime.shared_arrays import is_shared; "
before += "x = pycoll.zeros(100_000); "
before += "x[:] = 7; print(is_shared(x), pycoll.zeros(9).sum())"
fds = [int(n) for n in re.findall(r"\\d+", os.environ["PYCOLL_SHM"])]
out = subprocess.run([sys.executable, "-c", before], pass_fds=[fds[0], *fds[2:-1]],
                     capture_output=True, text=True, check=True).stdout
assert out == ("True 0.0\\n" if rank == 0 else "False 0.0\\n"), out
comm = pycoll.init()
x = pycoll.zeros(100_000)
assert is_shared(x) == (rank == 1) and not x.any()
assert (comm.all_reduce(x + rank) == 1).all()
ok()
"""
    init = """
rank = int(os.environ["PYCOLL_RANK"])
import pycoll
if rank == 1:
    pycoll.zeros(1)
"""
    all_well(job(2, USE + text, init=init), 2)


def test_a_rank_that_is_a_forks_child_shares_nothing_and_is_right(job: Any) -> None:
    text = """
pycoll.share_arrays(1)
x = np.full(100_000, rank + 1.0)
pid = os.fork()
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
comm = pycoll.init()
y = np.full(100_000, 10.0)
for _ in range(30):
    assert (comm.all_reduce(x) == 3).all() and (comm.all_reduce(y) == 20).all()
    assert (comm.sendrecv(x, 1 - rank, 1 - rank) == 2 - rank).all()
ok()
"""
    init = """
import pycoll
rank = int(os.environ["PYCOLL_RANK"])
"""
    all_well(job(2, USE + text, init=init), 2)
