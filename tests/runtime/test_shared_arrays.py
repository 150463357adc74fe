"""Arrays that the ranks of a host have mapped: where they lie, and that they stay right."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from pool_scripts import Scripts
from script_jobs import all_well
from shared_array_jobs import USE
from tiers import few

from pycoll._tools.bench_sides import Side

FORKS = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
"""


def test_alone_they_are_ordinary_arrays() -> None:
    text = """
import numpy as np, pycoll
from pycoll._runtime.shared_arrays import is_shared, use
x = pycoll.empty((2, 3), "f4")
assert x.shape == (2, 3) and x.dtype == np.float32 and x.flags.owndata and not is_shared(x)
assert (pycoll.zeros(5) == 0).all() and pycoll.empty_like([1, 2]).dtype == np.dtype(int)
with pycoll.share_arrays(0):
    y = np.ones(100_000)
assert not is_shared(y) and use().arrays == 0
comm = pycoll.init()
(z,) = comm.share(y)
assert z is y
"""
    subprocess.run([sys.executable, "-c", text], check=True)


def test_arrays_of_ranks_are_shared_before_init_too(job: Any) -> None:
    text = """
assert is_shared(early) and early.sum() == 0
made = [pycoll.empty(3), pycoll.zeros((2, 0)), pycoll.empty_like(early), pycoll.zeros(9, "f2")]
assert all(is_shared(x) and x.flags.owndata for x in made)
assert not is_shared(np.ones(100_000))
pycoll.share_arrays()
big, small = np.ones(8192), np.ones(8191)
assert is_shared(big) and not is_shared(small)
assert is_shared(comm.all_reduce(big)) and is_shared(big[::-2]) and is_shared(np.sin(big))
with pycoll.share_arrays(minimum=80):
    assert is_shared(np.arange(10)) and not is_shared(np.arange(9))
    with pycoll.share_arrays(1 << 20):
        assert not is_shared(np.ones(8192))
    assert is_shared(np.arange(10))
assert not is_shared(np.arange(10)) and is_shared(np.ones(8192))
found = []
thread = threading.Thread(target=lambda: found.append(np.ones(8192)))
thread.start()
thread.join()
assert is_shared(found[0])
for wrong in (-1, "many", 2.5, None):
    error = error_of(pycoll.share_arrays, wrong)
    assert isinstance(error, (TypeError, ValueError)) and "minimum" in str(error), error
ok()
"""
    init = """
early = pycoll.zeros(1000)
comm = pycoll.init()
rank, size = comm.rank, comm.size
"""
    all_well(job(2, USE + text, init=init), 2)


@pytest.mark.parametrize("form", ["--share-arrays", "PYCOLL_SHARE_ARRAYS"])
def test_the_launcher_can_say_it_for_all_ranks(
    job: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--share-arrays",)
    if form != "--share-arrays":
        monkeypatch.setenv("PYCOLL_SHARE_ARRAYS", "2K")
        options = ()
    least = 65536 if options else 2048
    text = f"""
assert is_shared(np.zeros({least}, "u1")) and not is_shared(np.zeros({least} - 1, "u1"))
ok()
"""
    all_well(job(2, USE + text, *options), 2)


def test_a_variable_that_makes_no_sense_is_an_error(job: Any) -> None:
    done = job(2, "", "-x", "PYCOLL_SHARE_ARRAYS=some")
    assert done.status == 1
    assert "PYCOLL_SHARE_ARRAYS is 'some', which is no length" in done.stderr


def test_where_no_memory_is_shared_they_are_ordinary_and_counted(job: Any) -> None:
    text = """
before = use().refused
x = np.ones(100_000)
assert not is_shared(x) and use().refused > before and use().refused_nbytes >= 800_000
assert (comm.all_reduce(x) == size).all()
assert type(error_of(comm.share, x)) is ValueError
ok()
"""
    done = job(2, USE + text, "--share-arrays", "--emulate-hosts", "2", "--verbose")
    assert done.content == [0, 1], done.stderr
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: \d+ arrays, \d+ bytes in all, found no", done.stderr)


def test_bench_measures_them_beside_ordinary_ones() -> None:
    plain, shared = Side("pycoll shm"), Side("pycoll shm, shared")
    assert plain.command(2, ["x"]) == shared.command(2, ["x"])
    assert "PYCOLL_SHARE_ARRAYS" in shared.variables()
    assert not shared.is_peer
    assert "PYCOLL_SHARE_ARRAYS" not in plain.variables()


def test_torch_tensors_keep_the_property(scripts: Scripts) -> None:
    pytest.importorskip("torch")
    text = """
import torch
x = torch.from_numpy(pycoll.zeros(50_000, "f4"))
x += rank + 1
assert is_shared(x.numpy())
y = torch.from_numpy(pycoll.empty(50_000, "f4"))
comm.all_reduce(x, out=y)
assert (y == 3).all()
views = comm.share(x)
comm.barrier()
assert (views[1 - rank] == 2 - rank).all() and torch.from_numpy(views[1 - rank]).sum() > 0
comm.barrier()
ok()
"""
    scripts(2, USE + text)


def test_memory_is_used_again_and_given_back(job: Any) -> None:
    text = """
pycoll.share_arrays(1)
rng = np.random.default_rng(rank)
comm.barrier()
begun, kept = use(), 256 << 20
base = pages()
living = []
for number in range(100_000):
    x = np.empty(int(rng.integers(1, 30_000)), "u1")
    x[0] = x[-1] = number % 251
    living.append((x, number % 251))
    if len(living) > 50:
        y, mark = living.pop(int(rng.integers(50)))
        assert y[0] == mark and y[-1] == mark
del x, y, living
assert use().arrays - begun.arrays < 5, (use(), begun)
comm.barrier()
if rank == 0:
    assert pages() - base < size * (50 * 40_000 + (8 << 20)), pages() - base
for nbytes in (1 << 29, 3 << 28):  # more than is kept: given back at once
    x = np.zeros(nbytes, "u1")
    x[:: 1 << 16] = 1
    del x
    assert use().kept_nbytes <= kept
x = np.zeros(1 << 35, "u1")  # 32 GiB: what is not touched takes none
x[-1] = 7
assert is_shared(x) and x[0] == 0
del x
comm.barrier()
assert pages() < 3 * kept, pages()
ok()
"""
    all_well(job(2, USE + text), 2)


def test_zeros_are_zeros_and_reshaped_arrays_keep_their_values(scripts: Scripts) -> None:
    text = """
cleanup.enter_context(pycoll.share_arrays(1))
rng = np.random.default_rng(rank)
for nbytes in (1, 4095, 4096, 4097, 65536, 300_000, 2 << 20, (2 << 20) + 1, 9_000_001):
    for _ in range(3):
        x = np.empty(nbytes, "u1")
        x[:] = 255
        del x
        x = np.zeros(nbytes, "u1")
        assert not x.any(), nbytes
        x[:] = 255
        del x
    shorter, longer = nbytes // 2 + 1, nbytes * 3
    x = rng.integers(0, 255, nbytes).astype("u1")
    want = x.copy()
    for to in (longer, shorter, nbytes, shorter // 3 + 1):
        keep = min(x.size, to)
        want = want[:keep].copy()
        x.resize(to, refcheck=False)
        assert is_shared(x) and (x[:keep] == want).all() and (x[keep:] == 0).all()
        want = x.copy()
ok()
"""
    scripts(2, USE + text)


def test_threads_make_and_free_each_others_arrays(scripts: Scripts) -> None:
    text = """
import queue
cleanup.enter_context(pycoll.share_arrays(1))
box, wrong, begun = queue.Queue(200), [], use().arrays

def make(seed):
    rng = np.random.default_rng(seed)
    for number in range(5000):
        n = int(rng.integers(1, 20_000))
        box.put((np.full(n, number, "i4"), number))
    box.put(None)

def take():
    while (item := box.get()) is not None:
        if not (item[0] == item[1]).all():
            wrong.append(item[1])

threads = [threading.Thread(target=make, args=(seed,)) for seed in range(3)]
threads += [threading.Thread(target=take) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong
assert use().arrays - begun < 20, (use(), begun)
ok()
"""
    scripts(2, USE + text)


def test_arrays_outlive_finalize_and_the_communicator(job: Any) -> None:
    text = """
pycoll.share_arrays(1)
x = np.full(100_000, rank + 1.0)
views = comm.share(x)
comm.barrier()
pycoll.finalize()
del comm
gc.collect()
y = np.full(100_000, 5.0)
assert (x == rank + 1).all() and (views[1 - rank] == 2 - rank).all() and (y == 5).all()
del x, views
gc.collect()
z = np.zeros(100_000)
assert is_shared(z) and not z.any()
ok()
"""
    all_well(job(2, USE + text), 2)


def test_a_forked_child_has_its_own_copy(scripts: Scripts) -> None:
    text = """
cleanup.enter_context(pycoll.share_arrays(1))
x, sparse = np.arange(1_000_000.0), np.zeros(1 << 32, "u1")
sparse[1 << 31] = 9
freed = np.ones(50_000)
del freed
views = comm.share(np.full(5000, rank + 1.0))
comm.barrier()
ready, go = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    os.close(go[1])
    os.write(ready[1], b"x")
    os.read(go[0], 1)  # the parent has written
    try:
        assert (x == np.arange(1_000_000.0)).all() and sparse[1 << 31] == 9 and sparse[0] == 0
        x[:] = -1.0
        views[1 - rank][:] = -1.0
        more = np.ones(200_000)
        assert not is_shared(more) and more.sum() == 200_000
        x.resize(2_000_000, refcheck=False)
        assert x[0] == -1 and x[-1] == 0
        del sparse, x, views
        gc.collect()
        inner = os.fork()
        if inner == 0:
            os._exit(0 if more.sum() == 200_000 else 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
    except BaseException as error:
        print("child:", repr(error), file=sys.stderr)
        os._exit(3)
os.close(ready[1])
os.read(ready[0], 1)
x += 1.0
sparse[1 << 31] = 8
os.write(go[1], b"x")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (x == np.arange(1_000_000.0) + 1).all()
comm.barrier()
assert (views[1 - rank] == 2 - rank).all()
assert is_shared(np.ones(10))
assert (comm.all_reduce(x) == 2 * x).all()
ok()
"""
    scripts(2, FORKS + USE + text)


def test_forks_beside_threads_that_make_arrays_and_calls(scripts: Scripts) -> None:
    text = """
cleanup.enter_context(pycoll.share_arrays(1))
stop, wrong = threading.Event(), []
other = comm.dup()

def make():
    while not stop.is_set():
        x = np.full(30_000, 7, "i4")
        if not (x == 7).all():
            wrong.append("made")

def call():
    x = np.ones(200_000)
    for number in range(150):
        x[:] = number
        if not (other.all_reduce(x) == number * size).all():
            wrong.append("reduced")

threads = [threading.Thread(target=make), threading.Thread(target=call)]
for thread in threads:
    thread.start()
kept = np.arange(100_000)
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if (kept == np.arange(100_000)).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
threads[1].join()
stop.set()
threads[0].join()
assert not wrong, wrong
ok()
"""
    scripts(2, FORKS + USE + text)


@pytest.mark.parametrize("method", few(["fork"], ["spawn", "forkserver"]))
def test_multiprocessing_works_on_shared_arrays(job: Any, method: str) -> None:
    text = f"""
if __name__ == "__main__":
    comm = pycoll.init()
    rank = comm.rank
    pycoll.share_arrays(1)
    x = np.arange(100_000.0) + rank
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        sums = pool.map(np.sum, [x, x[:10], x[::2]])
    assert sums == [x.sum(), x[:10].sum(), x[::2].sum()]
    assert (comm.all_reduce(x) == 2 * np.arange(100_000.0) + 1).all()
    ok()
"""
    init = 'import warnings\nwarnings.simplefilter("ignore", DeprecationWarning)\n'
    all_well(job(2, USE + text, init=init), 2)
