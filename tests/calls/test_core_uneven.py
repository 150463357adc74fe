"""Collectives of blocks that differ in shape, of arrays in shared memory: in the core.

Ranks that take the way through Python say the same, so any rank may.
"""

from __future__ import annotations

import pytest
from pool_scripts import Scripts
from script_jobs import Jobs, all_well
from tiers import exhaustive, few

pytest.importorskip("pycoll._transports._core", exc_type=ImportError)

CALLS = """
SHAPES = [(), (0,), (1,), (3, 5), (0, 7), (200,), (70_000,), (2, 3, 4, 5), (300, 300)]
KINDS = ["f8", "f4", "i4", "u1", "?", "c16", "f2"]


def block(sender, receiver, turn, rows=None):
    "What `sender` has for `receiver`, or for all, in a turn."
    dtype = np.dtype(KINDS[turn % len(KINDS)])
    shape = SHAPES[(sender + 3 * receiver + turn) % len(SHAPES)]
    shape = (rows, 3) if rows is not None else shape
    count = int(np.prod(shape))
    values = (np.arange(count) + 7 * sender + 3 * receiver + turn) % 100
    return values.astype(dtype).reshape(shape)


def same(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, (one.shape, other.shape)
        assert (one == other).all()


def check(turn):
    "All four, with new arrays as results."
    everyone = range(size)
    mine = block(rank, 0, turn)
    gathered = [block(sender, 0, turn) for sender in everyone]
    same(comm.all_gatherv(mine), gathered)
    root = turn % size
    got = comm.gatherv(mine, root)
    same(got, gathered) if rank == root else None
    assert (got is None) == (rank != root)
    row = [block(rank, receiver, turn) for receiver in everyone]
    same(comm.all_to_allv(row), [block(sender, rank, turn) for sender in everyone])
    got = comm.scatterv(tuple(row) if rank == root else None, root=root)
    same([got], [block(root, rank, turn)])
    assert not any(np.shares_memory(got, each) for each in row)


def check_out(turn, scale):
    "All four, into memory of the caller's."
    everyone = range(size)

    def rows(sender, receiver):
        return scale * (1 + (sender + 2 * receiver + turn) % 4)

    def part(sender, receiver):
        return block(sender, receiver, turn, rows(sender, receiver))

    gathered = [part(sender, 0) for sender in everyone]
    whole = np.empty((sum(map(len, gathered)), 3), gathered[0].dtype)
    got = comm.all_gatherv(part(rank, 0), out=whole)
    same(got, gathered)
    assert all(each.base is whole for each in got)
    whole.fill(0)
    root = turn % size
    got = comm.gatherv(part(rank, 0), root, whole if rank == root else None)
    same(got, gathered) if rank == root else None
    row = [part(rank, receiver) for receiver in everyone]
    column = [part(sender, rank) for sender in everyone]

    def places(blocks):
        "Arrays for some of them, as a list or a tuple."
        made = [np.empty_like(each) for each in blocks]
        made[(turn + rank) % size] = None
        return tuple(made) if turn % 2 else made

    for blocks, call in (
        (gathered, lambda out: comm.all_gatherv(part(rank, 0), out)),
        (gathered, lambda out: comm.gatherv(part(rank, 0), root, out if rank == root else None)),
        (column, lambda out: comm.all_to_allv(row, out)),
    ):
        out = places(blocks)
        if (got := call(out)) is not None:
            same(got, blocks)
            assert all(each is mine for each, mine in zip(got, out) if mine is not None)
    whole = np.empty((sum(map(len, column)), 3), row[0].dtype)
    same(comm.all_to_allv(row, out=whole), column)
    assert (whole == np.concatenate(column)).all()
    mine = np.empty_like(part(root, rank))
    got = comm.scatterv(row if rank == root else None, root, mine)
    assert got is mine
    same([got], [part(root, rank)])
"""

IN_CORE = """
# What the core leaves to Python goes through these.
left = []
for name in ("gatherv", "all_gatherv", "scatterv", "all_to_allv"):
    def watched(self, *args, _name=name, _method=getattr(pycoll.Communicator, name), **kwargs):
        left.append(_name)
        return _method(self, *args, **kwargs)
    cleanup.callback(setattr, pycoll.Communicator, name, getattr(pycoll.Communicator, name))
    setattr(pycoll.Communicator, name, watched)
comm = comm.dup()
"""


@pytest.mark.parametrize("size", few([3], [1, 2, 5]))
def test_blocks_of_all_shapes_go_through_the_core(scripts: Scripts, size: int) -> None:
    text = f"""{CALLS}
comm.barrier()
for turn in range(30):
    check(turn)
    check_out(turn, 1)
    check_out(turn, 2000)
in_core = comm._group.shm is not None and comm._group.shm.core.direct
# The first of each kind may find that the ranks have not met yet.
assert len(left) <= 1 if in_core else left, left
ok()
"""
    scripts(size, IN_CORE + text)


@pytest.mark.parametrize("size", [2, 3])
def test_any_rank_may_go_through_python(scripts: Scripts, size: int) -> None:
    text = f"""{CALLS}
from types import SimpleNamespace

names, core = ("gatherv", "all_gatherv", "scatterv", "all_to_allv"), comm
python = SimpleNamespace(**{{name: core._in_python(name) for name in names}})
comm.barrier()
for turn in range(30):
    comm = python if (turn + rank) % 3 == 0 else core
    check(turn)
    check_out(turn, 1 if turn % 2 else 2000)
ok()
"""
    scripts(size, text)


def test_what_the_core_hears_and_cannot_use_python_goes_on_with(scripts: Scripts) -> None:
    text = f"""{CALLS}
import array

for turn in range(6):
    for count in (4, 50_000):
        # Another kind of array of one rank, which its receivers get: the second is Python's.
        for kind in (lambda x: array.array("l", x), lambda x: memoryview(x.astype("q"))):
            mine = np.full(count, rank)
            got = comm.all_gatherv(kind(mine) if rank == 1 else mine)
            assert [type(each) for each in got] == [np.ndarray, type(kind(mine)), np.ndarray], got
            assert all((np.asarray(each) == peer).all() for peer, each in enumerate(got))
        # Places that cannot be: the call has taken place, and the next one is right.
        wrong = np.empty(3 * count + 1)
        error_like(ValueError, "exactly as many", comm.all_gatherv,
                   np.full(count, float(rank)), out=wrong)
        got = comm.all_gatherv(np.full(count, float(rank)))
        same(got, [np.full(count, float(n)) for n in range(3)])
    # Places as a list, a strided one among them.
    places = [np.empty(8)[::2], None, np.empty(4)]
    got = comm.all_gatherv(np.full(4, float(rank)), out=places)
    assert got[0] is places[0] and got[2] is places[2]
    same(got, [np.full(4, float(n)) for n in range(3)])
ok()
"""
    scripts(3, text)


@exhaustive
def test_more_dimensions_than_a_row_has_room_for(scripts: Scripts) -> None:
    text = """
most = 60 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32  # what NumPy 1 has at most
deep = np.ones((1,) * most)
for turn in range(3):
    row = [deep if (rank + peer) % 2 else np.ones(3) for peer in range(size)]
    got = comm.all_to_allv(row)
    assert [each.ndim for each in got] == [most if (rank + peer) % 2 else 1 for peer in range(size)]
    row = [deep if peer % 2 else np.ones(2) for peer in range(size)]
    got = comm.scatterv(row if rank == 0 else None)
    assert got.ndim == (most if rank % 2 else 1)
    assert [each.ndim for each in comm.all_gatherv(deep if rank else np.ones(1))][:2] == [1, most]
ok()
"""
    scripts(16, text)


def test_more_ranks_than_rows_fit_into_a_slot(job: Jobs) -> None:
    text = f"{CALLS}\nSHAPES[6:] = []\nfor turn in range(2):\n    check(turn)\nok()\n"
    all_well(job(17, text), 17)  # as a pool they would push out the pools of other tests


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ("all_gatherv(np.ones(3))", "all_gatherv(np.ones(3, 'f4'))", "all_gatherv"),
        ("gatherv(np.ones(3), 0)", "gatherv(np.ones(3), 1)", "gatherv"),
        ("all_gatherv(np.ones(3))", "barrier()", "barrier"),
        ("all_to_allv([np.ones(3)] * 2)", "all_gatherv(np.ones(3))", "all_to_allv"),
        ("scatterv([np.ones(3)] * 2, 0)", "all_gather(np.ones(3))", "scatterv"),
    ],
)
def test_other_calls_of_other_ranks_are_a_mismatch(
    scripts: Scripts, mine: str, theirs: str, told: str
) -> None:
    text = f"""
for _ in range(2):  # the second is the core's
    comm.all_gatherv(np.ones(2))
call = (lambda: comm.{mine}) if rank == 0 else (lambda: comm.{theirs})
try:
    call()
    comm.barrier()
except pycoll.MismatchError as error:
    assert "{told}" in str(error), error
    ok()
except pycoll.PeerFailed as error:
    assert "MismatchError" in str(error) or "Mismatch" in error.reason, error
    ok()
"""
    scripts(2, text)


def test_a_list_that_changes_while_its_call_waits_keeps_its_arrays(scripts: Scripts) -> None:
    text = """
comm.all_gatherv(np.ones(2))
row = [np.full(50_000, 10.0 * rank + peer) for peer in range(size)]
if rank == 0:
    def spoil():
        comm.send("now", 1, 5)  # while the main thread waits for rank 1
        comm.recv(1, 6)
        row.clear()
        comm.send("cleared", 1, 7)
    thread = threading.Thread(target=spoil)
    thread.start()
    got = comm.all_to_allv(row)
    thread.join()
else:
    comm.recv(0, 5)
    await_table((0, "all_to_allv"))
    comm.send("you wait", 0, 6)
    comm.recv(0, 7)
    got = comm.all_to_allv(row)
assert all((each == 10.0 * peer + rank).all() for peer, each in enumerate(got))
ok()
"""
    scripts(2, text)


def test_who_fails_between_the_rounds_has_given_up(scripts: Scripts) -> None:
    text = """
comm.all_gatherv(np.ones(2))
part = comm.dup()
part.all_gatherv(np.ones(2))
mine = np.ones(50_000, "l")
mine = memoryview(mine.astype("q")) if rank == 1 else mine
reason = f"gave up all_gatherv #1 on {part.name} (KeyboardInterrupt)"
if rank == 0:
    def interrupted(*args):
        raise KeyboardInterrupt
    cleanup.callback(setattr, pycoll.Communicator, "all_gatherv", pycoll.Communicator.all_gatherv)
    pycoll.Communicator.all_gatherv = interrupted
    error_like(KeyboardInterrupt, "", part.all_gatherv, mine)
    peer_failed(0, reason, part.barrier)
else:
    peer_failed(0, reason, part.all_gatherv, mine)
comm.barrier()
ok()
"""
    scripts(3, text)


def test_no_other_thread_comes_in_between_the_rounds(scripts: Scripts) -> None:
    text = """
comm.all_gatherv(np.ones(2))
go_on, errors, main = pycoll.Communicator.all_gatherv, [], threading.current_thread()

def other():
    errors.append(error_of(comm.all_gatherv, np.ones(5)))

def crowded(*args):
    if threading.current_thread() is main:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    return go_on(*args)

if rank == 0:
    cleanup.callback(setattr, pycoll.Communicator, "all_gatherv", go_on)
    pycoll.Communicator.all_gatherv = crowded
mine = np.ones(50_000, "l")
got = comm.all_gatherv(memoryview(mine.astype("q")) if rank == 1 else mine)
assert [len(each) for each in got] == [50_000, 50_000]
assert rank == 1 or "another thread" in str(errors[0]), errors
assert [len(each) for each in comm.all_gatherv(np.ones(rank))] == [0, 1]
ok()
"""
    scripts(2, text)


def test_arguments_are_named_as_in_python(scripts: Scripts) -> None:
    text = """
comm.barrier()
for _ in range(2):
    error_like(TypeError, "xs", comm.scatterv)
    error_like(TypeError, "x", comm.scatterv, x=[np.ones(1)])
    error_like(TypeError, "x", comm.all_to_allv, x=[np.ones(1)])
    error_like(TypeError, "algorithm", comm.all_gatherv, np.ones(1), algorithm=None)
    error_like(TypeError, "root", comm.all_gatherv, np.ones(1), root=0)
    error_like(TypeError, "root", comm.all_reduce, np.ones(1), root=0)
    error_like(TypeError, "x", comm.barrier, x=np.ones(1))
    assert comm.scatterv(xs=[np.ones(2)]).size == 2
    assert comm.all_to_allv(xs=[np.ones(2)])[0].size == 2
ok()
"""
    scripts(1, text)
